"""Omniglot: every alphabet is one task, every character one class (20 drawings each)."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agscl.tasks import DataMissing, Task, TaskSequence


def load(*, seed: int, alphabets: int = 50, size: int = 28) -> TaskSequence:
    """The first `alphabets` alphabets in the set's own order, (examples, 1, size, size), strokes 1 on 0.

    Each task is split at random, by the seed, into 80 % training, 10 % validation and 10 % test.
    """
    if not 1 <= alphabets <= 50:
        raise ValueError(f"Omniglot has 50 alphabets; asked for {alphabets}")
    table = _read(_find())
    of_row = np.asarray(table.column("alphabet"))
    names = _alphabet_names(table)

    tasks = []
    for alphabet in range(alphabets):
        rows = table.take(np.flatnonzero(of_row == alphabet))
        x = torch.stack([_picture(image["bytes"], size) for image in rows.column("image").to_pylist()])
        characters, labels = np.unique(np.asarray(rows.column("character")), return_inverse=True)
        y = torch.from_numpy(labels.astype(np.int64))
        order = torch.from_numpy(np.random.default_rng([seed, alphabet]).permutation(len(y)))
        tenth = len(y) // 10
        test, valid, train = order[:tenth], order[tenth : 2 * tenth], order[2 * tenth :]
        name = names[alphabet] if names else f"alphabet-{alphabet}"
        tasks.append(Task(name, len(characters), x[train], y[train], x[valid], y[valid], x[test], y[test]))
    return tuple(tasks)


def _find() -> Path:
    folder = os.environ.get("AGSCL_DATA")
    if not folder:
        raise DataMissing(
            "Omniglot is not downloaded for you yet. Set AGSCL_DATA to a folder that holds omniglot/all.parquet "
            "(columns image.bytes, alphabet, character)."
        )
    path = Path(folder) / "omniglot" / "all.parquet"
    if not path.is_file():
        raise DataMissing(f"Omniglot was looked for at {path} (AGSCL_DATA={folder}) and is not there.")
    return path


def _read(path: Path) -> Any:
    try:
        import PIL.Image  # noqa: F401
        import pyarrow.parquet
    except ImportError as error:
        raise DataMissing("Reading Omniglot needs pyarrow and Pillow: pip install 'agscl[data]'") from error
    try:
        return pyarrow.parquet.read_table(path, columns=["image", "alphabet", "character"])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataMissing(f"{path} could not be read as Omniglot's Parquet file: {error}") from error


def _alphabet_names(table: Any) -> list[str]:
    metadata = (table.schema.metadata or {}).get(b"huggingface")
    if metadata is None:
        return []
    names = json.loads(metadata)["info"]["features"]["alphabet"].get("names", [])
    return [name.rsplit("/", 1)[-1].replace(".", "_") for name in names]


def _picture(encoded: bytes, size: int) -> torch.Tensor:
    """A drawing (black ink on white) as (1, size, size) with strokes 1 on 0, grey where a stroke's edge falls."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("L").resize((size, size), Image.Resampling.BOX)
    return 1 - torch.from_numpy(np.array(small, dtype=np.float32) / 255)[None]
