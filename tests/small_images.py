"""Small datasets of images, in the form of the real ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def encode_image(pixels: np.ndarray, format: str = "PNG") -> bytes:
    """(height, width) or (height, width, 3) bytes as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=format)
    return file.getvalue()


def make_pixels(label: int, number: int, size: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    """Random pixels; the first two say which image it is."""
    pixels = np.random.default_rng([label, number]).integers(0, 256, size, dtype=np.uint8)
    pixels[0, 0] = label
    pixels[0, 1] = number
    return pixels


def make_table(labels, size=(32, 32, 3), image="image", label="label", names=None, **columns):
    """One image for each label, numbered within its class; `columns` are further ones."""
    last_number: dict[int, int] = {}
    images = []
    for each in labels:
        number = last_number[each] = last_number.get(each, -1) + 1
        images.append({"bytes": encode_image(make_pixels(each, number, size)), "path": f"{each}_{number:03d}.png"})
    table = pyarrow.table({image: images, label: list(labels), **columns})
    return table if names is None else add_class_names(table, names, label)


def add_class_names(table, names, column="label"):
    features = {"info": {"features": {column: {"names": names, "_type": "ClassLabel"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(features)})


def write_parquet(table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)
    return path


def to_parquet_bytes(table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def write_dataset(folder: Path, name: str, classes: int, train: int, test: int, **options) -> None:
    """`train` and `test` images of each class."""
    for split, count in (("train", train), ("test", test)):
        labels = [label for _ in range(count) for label in range(classes)]
        write_parquet(make_table(labels, **options), folder / name / f"{split}.parquet")
