"""Datasets that are not used as they come: what was downloaded becomes Parquet files, one picture per row."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from agscl.data.examples import DataMissing
from agscl.data.images import Shards, opened

TINY_IMAGENET = """
    01641577 01698640 01742172 01770393 01774384 01784675 01882714 01917289 01945685 01983481 01984695
    02058221 02085620 02099601 02099712 02123045 02125311 02190166 02231487 02268443 02279972 02281406
    02321529 02415577 02480495 02481823 02486410 02666196 02669723 02699494 02730930 02769748 02793495
    02814860 02823428 02837789 02841315 02909870 02948072 02977058 03014705 03026506 03085013 03089624
    03160309 03179701 03201208 03355925 03424325 03444034 03447447 03544143 03599486 03617480 03637318
    03733131 03804744 03814639 03837869 03838899 03854065 03930313 03937543 03970156 03980874 03992509
    04008634 04023962 04067472 04074963 04118538 04133789 04146614 04149813 04254777 04259630 04275548
    04285008 04311004 04376876 04398044 04456115 04507155 04532670 04597913 07579787 07583066 07614500
    07615774 07695742 07711569 07715103 07720875 07734744 07749582 07768694 09193705 09246464 09256479
    09332890
"""
"""The 100 classes of Tiny ImageNet in tinyimagenet32, in the order of their labels; WordNet's numbers."""


def omniglot(folder: Path) -> dict[str, Any]:
    """From the official archives images_background.zip and images_evaluation.zip."""
    import pyarrow

    rows: dict[str, list[Any]] = {"image": [], "alphabet": [], "character": [], "evaluation": []}
    alphabets: list[str] = []
    for kind in ("background", "evaluation"):
        with zipfile.ZipFile(folder / f"images_{kind}.zip") as opened:
            for name in sorted(name for name in opened.namelist() if name.endswith(".png")):
                above, alphabet, character, file = name.split("/")
                if f"{above}/{alphabet}" not in alphabets:
                    alphabets.append(f"{above}/{alphabet}")
                rows["image"].append({"bytes": opened.read(name), "path": file})
                rows["alphabet"].append(alphabets.index(f"{above}/{alphabet}"))
                rows["character"].append(int(character.removeprefix("character")))
                rows["evaluation"].append(kind == "evaluation")
    return {"all": _described(pyarrow.table(rows), "alphabet", alphabets)}


def tinyimagenet32(folder: Path) -> dict[str, Any]:
    """From Tiny ImageNet: 100 of its 200 classes, 64 × 64 reduced to 32 × 32 by the mean of 2 × 2 pixels."""
    import pyarrow

    wanted = [f"n{number}" for number in TINY_IMAGENET.split()]
    tables = {}
    for split in ("train", "test"):
        whole = Shards("tinyimagenet32", (folder / f"{split}.parquet",))
        names, labels = whole.names("label"), whole.column("label")
        if missing := set(wanted) - set(names):
            raise DataMissing(f"{whole} has no class {missing.pop()!r}: it is not Tiny ImageNet as it was")
        label_of = {names.index(name): label for label, name in enumerate(wanted)}
        rows: dict[str, list[Any]] = {"image": [], "label": []}
        place = 0
        for batch in whole.encoded():
            for encoded in batch:
                if labels[place] in label_of:
                    with opened(encoded) as picture:
                        small = picture.convert("RGB").reduce(2)
                    file = io.BytesIO()
                    small.save(file, format="WEBP", quality=82)
                    rows["image"].append({"bytes": file.getvalue(), "path": None})
                    rows["label"].append(label_of[labels[place]])
                place += 1
        tables[split] = _described(pyarrow.table(rows), "label", wanted)
    return tables


def _described(table: Any, column: str, names: list[str]) -> Any:
    """With the names of a column's values, where the datasets library looks for them."""
    features: dict[str, Any] = {
        each.name: {"dtype": str(each.type), "_type": "Value"} for each in table.schema if each.name != "image"
    }
    features |= {"image": {"_type": "Image"}, column: {"names": names, "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
