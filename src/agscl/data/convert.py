"""Convert downloaded files to tables with one image per row, for datasets that are not used as they come."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

from agscl.data.decoding import open_image
from agscl.data.encoded_images import ParquetImages
from agscl.data.errors import DataError

TINY_IMAGENET_CLASSES = """
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
"""WordNet's numbers of the 100 classes in tinyimagenet32, in the order of their labels."""


MAX_UNPACKED_BYTES = 256 << 20
"""Of all files in an archive of Omniglot; the official ones have 20 MB."""


def convert_omniglot(folder: Path) -> dict[str, Any]:
    """From the official archives images_background.zip and images_evaluation.zip."""
    try:
        return _convert_omniglot(folder)
    except (ValueError, RuntimeError, zlib.error, EOFError) as error:  # other names inside, encrypted, damaged
        raise DataError(f"the archives in {folder} are not those of Omniglot: {error}") from error


def _convert_omniglot(folder: Path) -> dict[str, Any]:
    import pyarrow

    rows: dict[str, list[Any]] = {"image": [], "alphabet": [], "character": [], "evaluation": []}
    alphabets: list[str] = []
    for part in ("background", "evaluation"):
        with zipfile.ZipFile(folder / f"images_{part}.zip") as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise ValueError(f"images_{part}.zip takes more than {MAX_UNPACKED_BYTES >> 20} MB when it is unpacked")
            for name in sorted(name for name in archive.namelist() if name.endswith(".png")):
                top, alphabet, character, file = name.split("/")
                if f"{top}/{alphabet}" not in alphabets:
                    alphabets.append(f"{top}/{alphabet}")
                rows["image"].append({"bytes": archive.read(name), "path": file})
                rows["alphabet"].append(alphabets.index(f"{top}/{alphabet}"))
                rows["character"].append(int(character.removeprefix("character")))
                rows["evaluation"].append(part == "evaluation")
    return {"all": _store_value_names(pyarrow.table(rows), "alphabet", alphabets)}


def convert_tinyimagenet32(folder: Path) -> dict[str, Any]:
    """From Tiny ImageNet: 100 of its 200 classes, 64 × 64 reduced to 32 × 32 by the mean of 2 × 2 pixels."""
    import pyarrow

    wanted = [f"n{number}" for number in TINY_IMAGENET_CLASSES.split()]
    tables = {}
    for split in ("train", "test"):
        images = ParquetImages("tinyimagenet32", (folder / f"{split}.parquet",))
        names, labels = images.read_value_names("label"), images.read_column("label")
        if missing := set(wanted) - set(names):
            raise DataError(f"{images} has no class {missing.pop()!r}, so it is not the Tiny ImageNet that is expected")
        new_label = {names.index(name): label for label, name in enumerate(wanted)}
        rows: dict[str, list[Any]] = {"image": [], "label": []}
        row = 0
        for batch in images.iterate_encoded():
            for encoded in batch:
                if labels[row] in new_label:
                    try:
                        with open_image(encoded) as image:
                            small = image.convert("RGB").reduce(2)
                        file = io.BytesIO()
                        small.save(file, format="WEBP", quality=82)
                    except Exception as error:  # Pillow raises many kinds
                        raise DataError(f"{images.describe_row(row)} cannot be decoded: {error}") from error
                    rows["image"].append({"bytes": file.getvalue(), "path": None})
                    rows["label"].append(new_label[labels[row]])
                row += 1
        tables[split] = _store_value_names(pyarrow.table(rows), "label", wanted)
    return tables


def _store_value_names(table: Any, column: str, names: list[str]) -> Any:
    """Add the names of a column's values to the metadata, where the `datasets` library looks for them."""
    features: dict[str, Any] = {
        each.name: {"dtype": str(each.type), "_type": "Value"} for each in table.schema if each.name != "image"
    }
    features |= {"image": {"_type": "Image"}, column: {"names": names, "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
