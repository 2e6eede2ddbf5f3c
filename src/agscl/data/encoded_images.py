"""Encoded images on disk with their labels: Parquet files, or a folder per class."""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.data.ordering import natural_key

BATCH_SIZE = 1024
SUPPORTED_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".webp",
    ".bmp",
    ".gif",
    ".ppm",
    ".pgm",
    ".tif",
    ".tiff",
    ".jfif",
    ".jpe",
)
UNSUPPORTED_SUFFIXES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".tga", ".dng", ".svg")
"""Images too: to skip them silently could lose half a class, so they are an error."""
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
"""The usual column names; the first one present is used."""
TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing", "validation", "valid", "val")
"""The usual names of splits; the first one present is used."""


class EncodedImages(ABC):
    """Encoded images in a fixed order, one per row, with a value in every column. Files are read when needed."""

    name: str
    """For messages, and for the names of files in the cache."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __str__(self) -> str:
        """The file or folder."""

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]: ...

    @property
    def identity(self) -> object:
        """Distinguishes these images from all others in the cache."""
        return str(self)

    @abstractmethod
    def read_column(self, name: str) -> Array:
        """(images,) values."""

    @abstractmethod
    def read_value_names(self, column: str) -> list[str]:
        """The names behind the integers of a column; empty where the files do not say."""

    @abstractmethod
    def describe_row(self, row: int) -> str:
        """Where an image is, for messages."""

    @abstractmethod
    def iterate_encoded(self) -> Iterator[list[bytes]]:
        """All images in order, a batch at a time."""

    def read_file_state(self) -> list[tuple[str, int, int]]:
        """(path, size, time of change) of each file."""
        return [(str(path), info.st_size, info.st_mtime_ns) for path in self.files for info in [path.stat()]]


class ParquetImages(EncodedImages):
    """Parquet files with one image per row."""

    def __init__(self, name: str, files: tuple[Path, ...], image: str | None = None) -> None:
        require_image_libraries()
        self.name = name
        self._files = files
        self._requested_image_column = image

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def __str__(self) -> str:
        return str(self._files[0] if len(self._files) == 1 else self._files[0].parent)

    @property
    def identity(self) -> object:
        files = str(self) if len(self._files) == 1 else [str(path) for path in self._files]
        return files if self._requested_image_column is None else (files, self._requested_image_column)

    @cached_property
    def _parquet_files(self) -> list[Any]:
        from pyarrow import parquet

        opened = []
        for path in self._files:
            with self._explain_read_errors(path):
                opened.append(parquet.ParquetFile(path))
        return opened

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self._parquet_files)

    @property
    def columns(self) -> list[str]:
        return list(self._parquet_files[0].schema_arrow.names)

    @property
    def nested_columns(self) -> list[str]:
        """All columns, those inside a struct by their full name: image.bytes, image.path, ..."""
        schema = self._parquet_files[0].schema
        return [schema.column(number).path for number in range(len(schema))]

    @cached_property
    def image_column(self) -> str:
        return self.choose_column(self._requested_image_column, IMAGE_COLUMNS, "images", "image")

    def choose_column(self, requested: str | None, usual: tuple[str, ...], content: str, option: str) -> str:
        """The requested column, or the first of the usual ones; `content` and `option` are for the error message."""
        candidates = [requested] if requested else usual
        chosen = next((column for column in candidates if column in self.columns), None)
        if chosen is None:
            raise DataError(
                f"{self} has no column {' or '.join(candidates)!r} for its {content}; its columns are: "
                f"{', '.join(self.columns)}. Name the right one with {option}=..."
            )
        return chosen

    def read_column(self, name: str) -> Array:
        import pyarrow

        parts = []
        for path, file in zip(self._files, self._parquet_files, strict=True):
            if name not in {*file.schema_arrow.names, *self.nested_columns}:
                raise DataError(f"{path} has no column {name!r}; its columns are: {', '.join(file.schema_arrow.names)}")
            with self._explain_read_errors(path):
                table = file.read(columns=[name])
            values = (table if name in table.column_names else table.flatten()).column(name)
            if pyarrow.types.is_nested(values.type):
                raise DataError(f"the column {name!r} of {path} holds {values.type} instead of single values")
            if values.null_count:
                raise DataError(f"the column {name!r} of {path} has no value in {values.null_count} of its rows")
            parts.append(values.to_numpy())
        if not sum(map(len, parts)):
            raise DataError(f"{self} has no rows")
        return np.concatenate(parts)

    def read_value_names(self, column: str) -> list[str]:
        metadata = (self._parquet_files[0].schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            feature = json.loads(metadata)["info"]["features"][column]
        except (ValueError, KeyError, TypeError):
            return []
        names = feature.get("names", [])
        return list(names.values()) if isinstance(names, dict) else list(names)

    def describe_row(self, row: int) -> str:
        for path, file in zip(self._files, self._parquet_files, strict=True):
            if row < file.metadata.num_rows:
                return f"{path}, row {row},"
            row -= file.metadata.num_rows
        raise IndexError(row)

    def iterate_encoded(self) -> Iterator[list[bytes]]:
        import pyarrow

        for path, file in zip(self._files, self._parquet_files, strict=True):
            with self._explain_read_errors(path):
                for batch in file.iter_batches(BATCH_SIZE, columns=[self.image_column]):
                    column = batch.column(0)
                    if pyarrow.types.is_struct(column.type) and "bytes" in column.type.names:
                        column = column.field("bytes")
                    if not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
                        raise DataError(
                            f"the column {self.image_column!r} of {path} holds {column.type}, not encoded images. Name "
                            "the right one with image=..."
                        )
                    if column.null_count:
                        raise DataError(
                            f"the column {self.image_column!r} of {path} has no image in {column.null_count} rows"
                        )
                    yield column.to_pylist()

    @contextlib.contextmanager
    def _explain_read_errors(self, path: Path) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as a Parquet file: {error}. If `agscl data get` downloaded it, delete it and "
                "run that command again"
            ) from error


class FolderImages(EncodedImages):
    """A folder of images, CLASS/image or TASK/CLASS/image. Columns: task, label (names of folders) and path."""

    def __init__(self, name: str, folder: Path) -> None:
        require_image_libraries()
        self.name = name
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        images: list[Path] = []
        empty_folders: list[Path] = []
        unsupported: list[Path] = []
        for folder in self._walk_folders():
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
            inside = [entry for entry in entries if entry.suffix.lower() in SUPPORTED_SUFFIXES and entry.is_file()]
            if not inside and not any(entry.is_dir() for entry in entries):
                empty_folders.append(folder)
            images += inside
            unsupported += [
                entry for entry in entries if entry.suffix.lower() in UNSUPPORTED_SUFFIXES and entry.is_file()
            ]
        formats = ", ".join(SUPPORTED_SUFFIXES)
        if unsupported:
            raise DataError(
                f"{len(unsupported)} images have a format that is not supported, for example {min(unsupported)}. "
                f"Convert them to one of {formats}, or move them elsewhere"
            )
        if not images:
            raise DataError(f"{self.folder} contains no images ({formats})")
        depths = {len(path.relative_to(self.folder).parts) for path in images}
        if len(depths) > 1 or not depths <= {2, 3}:
            raise DataError(
                f"{self.folder} contains images at different depths, or outside class folders. Expected "
                "CLASS/image.png for all of them, or TASK/CLASS/image.png for all of them"
            )
        if empty_folders:
            raise DataError(
                f"{empty_folders[0]} contains no images ({formats}), so its class would be missing. Delete the folder, "
                "or convert what is in it"
            )
        return tuple(sorted(images, key=lambda path: natural_key(path.relative_to(self.folder).as_posix())))

    def _walk_folders(self) -> Iterator[Path]:
        """The folder and all below it; links are followed, except back up, and hidden folders skipped."""

        def fail(error: OSError) -> None:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

        for path, names, _ in os.walk(self.folder, followlinks=True, onerror=fail):
            ancestors = {Path(path).resolve(), *Path(path).resolve().parents}
            names[:] = sorted(n for n in names if not n.startswith(".") and Path(path, n).resolve() not in ancestors)
            yield Path(path)

    def __len__(self) -> int:
        return len(self.files)

    def read_column(self, name: str) -> Array:
        paths = [path.relative_to(self.folder).parts for path in self.files]
        if name == "task" and len(paths[0]) == 2:
            raise DataError(f"{self.folder} has no task folders: expected TASK/CLASS/image.png")
        columns: dict[str, Callable[[tuple[str, ...]], str]] = {
            "task": lambda parts: parts[0],
            "label": lambda parts: parts[-2],
            "path": lambda parts: "/".join(parts),
        }
        if name not in columns:
            raise DataError(f"images in a folder have no column {name!r}; their columns are: {', '.join(columns)}")
        return np.array([columns[name](parts) for parts in paths])

    def read_value_names(self, column: str) -> list[str]:
        return []

    def describe_row(self, row: int) -> str:
        return str(self.files[row])

    def iterate_encoded(self) -> Iterator[list[bytes]]:
        for start in range(0, len(self.files), BATCH_SIZE):
            yield [path.read_bytes() for path in self.files[start : start + BATCH_SIZE]]


def find_split(name: str, folder: Path, split: str, image: str | None = None) -> EncodedImages | None:
    """The images of a split in `folder`: SPLIT.parquet, SPLIT-00000-of-00002.parquet ..., or a folder SPLIT."""
    single = folder / f"{split}.parquet"
    if single.is_file():
        return ParquetImages(name, (single,), image)
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if shards:
        count = int(shards[0].stem.rsplit("-of-", 1)[1].split("-")[0])
        if len(shards) != count:
            raise DataError(
                f"{folder} contains {len(shards)} of the {count} files {shards[0].name} ... If `agscl data get` "
                "downloaded them, run that command again"
            )
        return ParquetImages(name, tuple(shards), image)
    return FolderImages(name, folder / split) if (folder / split).is_dir() else None


def require_image_libraries() -> None:
    """Raise where pyarrow or Pillow is not installed."""
    if not (find_spec("PIL") and find_spec("pyarrow")):
        raise DataError("reading images needs pyarrow and Pillow: pip install 'agscl[data]'")
