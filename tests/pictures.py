"""Small datasets of pictures, in the form of the real ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image")


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """(height, width) or (height, width, 3) bytes as a file."""
    file = io.BytesIO()
    image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def pixels(label: int, number: int, size: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    """A picture that tells which one it is."""
    made = np.random.default_rng([label, number]).integers(0, 256, size, dtype=np.uint8)
    made[0, 0] = label
    made[0, 1] = number
    return made


def table(labels, size=(32, 32, 3), image="image", label="label", names=None, **columns):
    """One picture for each label, numbered within its class; `columns` are further ones."""
    seen: dict[int, int] = {}
    pictures = []
    for each in labels:
        seen[each] = seen.get(each, -1) + 1
        pictures.append({"bytes": encoded(pixels(each, seen[each], size)), "path": f"{each}_{seen[each]:03d}.png"})
    made = pyarrow.table({image: pictures, label: list(labels), **columns})
    if names is None:
        return made
    features = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
    return made.replace_schema_metadata({"huggingface": json.dumps(features)})


def stored(made, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(made, path)
    return path


def as_bytes(made) -> bytes:
    file = io.BytesIO()
    parquet.write_table(made, file)
    return file.getvalue()


def dataset(folder: Path, name: str, classes: int, train: int, test: int, **options) -> None:
    """`train` and `test` pictures of each class."""
    for split, count in (("train", train), ("test", test)):
        labels = [label for _ in range(count) for label in range(classes)]
        stored(table(labels, **options), folder / name / f"{split}.parquet")
