"""Encoded images on disk with their labels: Parquet files, or a folder per class."""

from __future__ import annotations

import contextlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.data.image_libraries import require_image_libraries
from agscl.data.natural_order import natural_key, sort_unique
from agscl.system.files import read_limited

BATCH_SIZE = 1024
BATCH_BYTES = 64 << 20
"""A batch of encoded images ends with the one that reaches this size."""
READ_BYTES = 64 << 20
"""Parquet files are decoded in steps of so many rows that, at the worst, this much memory is taken."""
MAX_FREE_BYTES, MAX_EXPANSION = 256 << 20, 20
"""A column may be decoded to this many bytes, or to this multiple of the file's size, whichever is more."""
MAX_FREE_ROWS = 1_000_000
"""A Parquet file may have this many rows, or one for each of its bytes, whichever is more."""
MAX_ENCODED_BYTES = 256 << 20
"""Largest file of one image."""
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
        """(images,) the values of a column that the encoded images have."""

    @abstractmethod
    def read_value_names(self, column: str) -> list[str]:
        """The names behind the integers of a column of encoded images; empty where the files do not say."""

    @abstractmethod
    def describe_row(self, row: int) -> str:
        """Where an encoded image is, for messages."""

    @abstractmethod
    def iterate_encoded(self) -> Iterator[list[bytes]]:
        """All images in order, a batch at a time."""

    def describe_image_files(self) -> list[tuple[str, int, int]]:
        """(path, size, time of change) of each file that holds these images: a cache is outdated when it differs."""
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
                file = parquet.ParquetFile(path)
                rows, size = file.metadata.num_rows, path.stat().st_size
                if not 0 <= rows <= max(MAX_FREE_ROWS, size):
                    raise DataError(f"{path} claims to have {rows} rows in {size} bytes, so it is damaged")
                opened.append(file)
        return opened

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self._parquet_files)

    @property
    def columns(self) -> list[str]:
        return list(self._parquet_files[0].schema_arrow.names)

    @property
    def nested_columns(self) -> list[str]:
        """All columns of the Parquet files, those inside a struct by their full name: image.bytes, image.path, ..."""
        schema = self._parquet_files[0].schema
        return [schema.column(number).path for number in range(len(schema))]

    @cached_property
    def image_column(self) -> str:
        return self.choose_column(self._requested_image_column, IMAGE_COLUMNS, "images", "image")

    def choose_column(self, requested: str | None, usual: tuple[str, ...], content: str, option: str) -> str:
        """The requested column of Parquet files, or the first usual one; `content` and `option` are for the error."""
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
            decoded, nulls = 0, 0
            limit = max(MAX_FREE_BYTES, MAX_EXPANSION * path.stat().st_size)
            for batch in self._read_batches(path, file, name):
                table = pyarrow.Table.from_batches([batch])
                values = (table if name in table.column_names else table.flatten()).column(name)
                if pyarrow.types.is_nested(values.type):
                    raise DataError(f"the column {name!r} of {path} holds {values.type} instead of single values")
                nulls += values.null_count
                decoded += values.nbytes
                if decoded > limit:
                    raise DataError(f"the column {name!r} of {path} takes more than {limit >> 20} MB when it is read")
                parts.append(values.to_numpy())
            if nulls:
                raise DataError(f"the column {name!r} of {path} has no value in {nulls} of its rows")
        if not sum(map(len, parts)):
            raise DataError(f"{self} has no rows")
        return np.concatenate(parts)

    def read_value_names(self, column: str) -> list[str]:
        metadata = (self._parquet_files[0].schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            feature = json.loads(metadata)["info"]["features"][column]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        names = feature.get("names", []) if isinstance(feature, dict) else []
        names = list(names.values()) if isinstance(names, dict) else names
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []

    def describe_row(self, row: int) -> str:
        for path, file in zip(self._files, self._parquet_files, strict=True):
            if row < file.metadata.num_rows:
                return f"{path}, row {row},"
            row -= file.metadata.num_rows
        raise IndexError(row)

    def iterate_encoded(self) -> Iterator[list[bytes]]:
        import pyarrow

        def read_all() -> Iterator[bytes]:
            for path, file in zip(self._files, self._parquet_files, strict=True):
                for batch in self._read_batches(path, file, self.image_column):
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
                    for value in column:
                        yield value.as_py()

        return _group(read_all())

    def _read_batches(self, path: Path, file: Any, column: str) -> Iterator[Any]:
        """The record batches of a column, each of so few rows that a small file cannot fill the memory."""
        with self._explain_read_errors(path):
            limit = max(MAX_FREE_BYTES, MAX_EXPANSION * path.stat().st_size)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                chunks = [group.column(index) for index in range(group.num_columns)]
                sizes = [
                    chunk.total_uncompressed_size
                    for chunk in chunks
                    if chunk.path_in_schema == column or chunk.path_in_schema.startswith(column + ".")
                ]
                if any(size < 0 for size in sizes) or sum(sizes) > limit:
                    raise DataError(
                        f"the column {column!r} of {path} takes {sum(sizes) >> 20} MB when it is read, more than the "
                        f"{limit >> 20} MB allowed for a file of {path.stat().st_size} bytes"
                    )
                # A value may be as long as all pages together, and be repeated in every row at no cost.
                rows = max(1, min(BATCH_SIZE, READ_BYTES // max(1, sum(sizes))))
                yield from file.iter_batches(rows, row_groups=[number], columns=[column], use_threads=False)

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
        return _group(self._read_file(path) for path in self.files)

    @staticmethod
    def _read_file(path: Path) -> bytes:
        try:
            return read_limited(path, MAX_ENCODED_BYTES)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _group(images: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lists of at most `BATCH_SIZE` images and about `BATCH_BYTES` bytes."""
    batch: list[bytes] = []
    size = 0
    for image in images:
        batch.append(image)
        size += len(image)
        if len(batch) == BATCH_SIZE or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def find_split(name: str, folder: Path, split: str, image: str | None = None) -> EncodedImages | None:
    """The encoded images of a split in `folder`: SPLIT.parquet, SPLIT-00000-of-00002.parquet ..., or a folder SPLIT."""
    single = folder / f"{split}.parquet"
    if single.is_file():
        return ParquetImages(name, (single,), image)
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if shards:
        number = re.fullmatch(r".*-of-([0-9]{1,6})(-.*)?", shards[0].stem)
        if number is None:
            raise DataError(
                f"{shards[0]} is not named {split}-00000-of-00002.parquet, as one of several files should be"
            )
        count = int(number[1])
        if len(shards) != count:
            raise DataError(
                f"{folder} contains {len(shards)} of the {count} files {shards[0].name} ... If `agscl data get` "
                "downloaded them, run that command again"
            )
        return ParquetImages(name, tuple(shards), image)
    return FolderImages(name, folder / split) if (folder / split).is_dir() else None


def read_labels(images: EncodedImages, classes: int) -> Array:
    """(images,) integers below `classes`; names of classes are numbered in natural order."""
    column = "label"
    if isinstance(images, ParquetImages):
        column = images.choose_column(None, LABEL_COLUMNS, "labels", "label")
    values = images.read_column(column)
    if values.dtype.kind not in "iu":
        names = sort_unique(values)
        if len(names) != classes:  # else the numbers could differ from split to split
            raise DataError(f"{images} has {len(names)} classes, but {images.name} should have {classes}")
        number = {name: number for number, name in enumerate(names)}
        values = np.array([number[value] for value in values.tolist()])
    if len(values) and not 0 <= values.min() <= values.max() < classes:
        raise DataError(
            f"{images} has labels from {values.min()} to {values.max()}, but those of {images.name} should be 0 to "
            f"{classes - 1}"
        )
    return values.astype(np.int64)
