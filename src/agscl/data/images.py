"""Encoded pictures with their labels, in Parquet files or in a folder, and how they become arrays of bytes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agscl.data.cache import cached
from agscl.data.examples import Array, DataMissing
from agscl.data.progress import Bar

BATCH = 1024
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".jfif", ".jpe")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".tga", ".dng", ".svg")
"""Pictures too, but not read: where some are among others, half a class would be missing without a word."""
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
"""What datasets call the two; the first one present is taken."""


FORMATS = {
    b"\x89PNG": "PNG",
    b"\xff\xd8": "JPEG",
    b"RIFF": "WEBP",
    b"BM": "BMP",
    b"GIF8": "GIF",
    b"P5": "PPM",
    b"P6": "PPM",
}
"""How files of each format begin; of others only TIFF is tried."""


def opened(encoded: bytes) -> Any:
    """An encoded picture as Pillow opens it. Told the format, it is twice as fast, and never asks another program."""
    from PIL import Image

    kind = next((kind for start, kind in FORMATS.items() if encoded.startswith(start)), "TIFF")
    return Image.open(io.BytesIO(encoded), formats=[kind])


@dataclass(frozen=True)
class Form:
    """How a picture is kept: `channels` × `size` × `size` bytes."""

    size: int
    channels: Literal[1, 3] = 3
    fit: Literal["squeeze", "pad", "crop"] = "squeeze"
    """What happens to another shape: squeezed to the square; black around it; its middle is cut out."""
    short: int | None = None
    """With crop: what the shorter side becomes first, `size` if not given."""
    filter: Literal["bilinear", "lanczos", "box"] = "bilinear"

    def read(self, encoded: bytes) -> Array:
        """A picture as (channels, size, size) bytes."""
        from PIL import Image

        with opened(encoded) as picture:
            pixels = _in_bytes(picture).convert("L" if self.channels == 1 else "RGB")
        filter = Image.Resampling[self.filter.upper()]
        wide, high = pixels.size
        if self.fit == "pad":
            if max(wide, high) > self.size:
                raise ValueError(f"it is {wide} × {high}, larger than {self.size} × {self.size}")
            black = Image.new(pixels.mode, (self.size, self.size))
            black.paste(pixels, ((self.size - wide) // 2, (self.size - high) // 2))
            pixels = black
        elif self.fit == "crop":
            short = self.short or self.size
            wide, high = (short, short * high // wide) if wide <= high else (short * wide // high, short)
            left, top = round((wide - self.size) / 2), round((high - self.size) / 2)
            pixels = pixels.resize((wide, high), filter).crop((left, top, left + self.size, top + self.size))
        elif (wide, high) != (self.size, self.size):
            pixels = pixels.resize((self.size, self.size), filter)
        bytes_ = np.asarray(pixels)
        return bytes_[None] if self.channels == 1 else bytes_.transpose(2, 0, 1)


def _in_bytes(picture: Any) -> Any:
    """A picture of 16 bits with the upper 8 of them; Pillow would cut off what is above 255."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits, of a range that is not known: store it with 8 or 16 bits")
    return picture


class Source(ABC):
    """Encoded pictures, each with a value in every column. Nothing is read before it is asked for."""

    name: str
    """For messages, and for the names of files in the cache."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]: ...

    @property
    def identity(self) -> object:
        """What tells these pictures from others in the cache."""
        return str(self)

    @abstractmethod
    def column(self, name: str) -> Array: ...

    @abstractmethod
    def names(self, column: str) -> list[str]:
        """What the integers of a column stand for; empty where there is no telling."""

    @abstractmethod
    def where(self, row: int) -> str:
        """Where a picture is, for a person."""

    @abstractmethod
    def encoded(self) -> Iterator[list[bytes]]:
        """All pictures in order, some at a time."""

    def state(self) -> list[tuple[str, int, int]]:
        """What changes when a file does."""
        return [(str(path), info.st_size, info.st_mtime_ns) for path in self.files for info in [path.stat()]]


class Shards(Source):
    """Parquet files with one picture per row."""

    def __init__(self, name: str, files: tuple[Path, ...], image: str | None = None) -> None:
        require_readers()
        self.name = name
        self._files = files
        self._image = image

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def __str__(self) -> str:
        return str(self._files[0] if len(self._files) == 1 else self._files[0].parent)

    @property
    def identity(self) -> object:
        files = str(self) if len(self._files) == 1 else [str(path) for path in self._files]
        return files if self._image is None else (files, self._image)

    @cached_property
    def _opened(self) -> list[Any]:
        from pyarrow import parquet

        opened = []
        for path in self._files:
            with self._reading(path):
                opened.append(parquet.ParquetFile(path))
        return opened

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self._opened)

    @property
    def columns(self) -> list[str]:
        return list(self._opened[0].schema_arrow.names)

    @property
    def leaves(self) -> list[str]:
        """All columns, those inside others by their whole name: image.bytes, image.path, …"""
        schema = self._opened[0].schema
        return [schema.column(place).path for place in range(len(schema))]

    @cached_property
    def image(self) -> str:
        """The column that holds the pictures."""
        return self.which(self._image, IMAGE_COLUMNS, "pictures", "image")

    def which(self, given: str | None, usual: tuple[str, ...], what: str, option: str) -> str:
        """The column to take: `given`, or the first of the usual ones."""
        found = next((column for column in ([given] if given else usual) if column in self.columns), None)
        if found is None:
            raise DataMissing(
                f"{self} has no column {given or ' or '.join(usual)!r} for its {what}; it has: "
                f"{', '.join(self.columns)}. Name the right one: {option}=..."
            )
        return found

    def column(self, name: str) -> Array:
        import pyarrow

        parts = []
        for path, file in zip(self._files, self._opened, strict=True):
            if name not in {*file.schema_arrow.names, *self.leaves}:
                raise DataMissing(f"{path} has no column {name!r}; it has: {', '.join(file.schema_arrow.names)}")
            with self._reading(path):
                table = file.read(columns=[name])
            values = (table if name in table.column_names else table.flatten()).column(name)
            if pyarrow.types.is_nested(values.type):
                raise DataMissing(f"the column {name!r} of {path} holds {values.type} instead of single values")
            if values.null_count:
                raise DataMissing(f"the column {name!r} of {path} has no value in {values.null_count} of its rows")
            parts.append(values.to_numpy())
        if not sum(map(len, parts)):
            raise DataMissing(f"{self} has no rows")
        return np.concatenate(parts)

    def names(self, column: str) -> list[str]:
        stored = (self._opened[0].schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            feature = json.loads(stored)["info"]["features"][column]
        except (ValueError, KeyError, TypeError):
            return []
        names = feature.get("names", [])
        return list(names.values()) if isinstance(names, dict) else list(names)

    def where(self, row: int) -> str:
        for path, file in zip(self._files, self._opened, strict=True):
            if row < file.metadata.num_rows:
                return f"{path}, row {row},"
            row -= file.metadata.num_rows
        raise IndexError(row)

    def encoded(self) -> Iterator[list[bytes]]:
        import pyarrow

        for path, file in zip(self._files, self._opened, strict=True):
            with self._reading(path):
                for batch in file.iter_batches(BATCH, columns=[self.image]):
                    column = batch.column(0)
                    if pyarrow.types.is_struct(column.type) and "bytes" in column.type.names:
                        column = column.field("bytes")
                    if not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
                        raise DataMissing(
                            f"the column {self.image!r} of {path} holds {column.type}, not encoded pictures. Name the "
                            "right one: image=..."
                        )
                    if column.null_count:
                        raise DataMissing(f"the column {self.image!r} of {path} has rows without a picture")
                    yield column.to_pylist()

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise DataMissing(
                f"{path} cannot be read as a Parquet file: {error}. If it came with `agscl data get`, remove it and "
                "run that again"
            ) from error


class Folder(Source):
    """A folder of pictures, `class/picture` or `task/class/picture`. Columns: task, label (both names) and path."""

    def __init__(self, name: str, folder: Path) -> None:
        require_readers()
        self.name = name
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        folders: list[Path] = []
        found: list[Path] = []
        unread: list[Path] = []
        for folder in self._walked():
            inside = [each for each in folder.iterdir() if not each.name.startswith(".")]
            pictures = [each for each in inside if each.suffix.lower() in SUFFIXES and each.is_file()]
            if not pictures and not any(each.is_dir() for each in inside):
                folders.append(folder)
            found += pictures
            unread += [each for each in inside if each.suffix.lower() in UNREAD and each.is_file()]
        if unread:
            raise DataMissing(
                f"{len(unread)} pictures are of kinds that are not read, {min(unread)} among them. Convert them to one "
                f"of {', '.join(SUFFIXES)}, or move them away"
            )
        found.sort(key=lambda path: natural(path.relative_to(self.folder).as_posix()))
        if not found:
            raise DataMissing(f"{self.folder} holds no pictures ({', '.join(SUFFIXES)})")
        depths = {len(path.relative_to(self.folder).parts) for path in found}
        if len(depths) > 1 or not depths <= {2, 3}:
            raise DataMissing(
                f"{self.folder} holds pictures at different depths, or not in folders of classes. Expected are "
                "CLASS/picture.png for all of them, or TASK/CLASS/picture.png for all of them"
            )
        if folders:
            raise DataMissing(
                f"{folders[0]} holds no pictures that are read ({', '.join(SUFFIXES)}), so its class would be missing. "
                "Remove it, or convert what is in it"
            )
        return tuple(found)

    def _walked(self) -> Iterator[Path]:
        """The folder and all below it, also where a link leads to one; what begins with a dot is left out."""

        def fail(error: OSError) -> None:
            raise DataMissing(f"{error.filename} cannot be read: {error.strerror}") from error

        for path, names, _ in os.walk(self.folder, followlinks=True, onerror=fail):
            above = {Path(path).resolve(), *Path(path).resolve().parents}
            names[:] = sorted(n for n in names if not n.startswith(".") and Path(path, n).resolve() not in above)
            yield Path(path)

    def __len__(self) -> int:
        return len(self.files)

    def column(self, name: str) -> Array:
        parts = [path.relative_to(self.folder).parts for path in self.files]
        if name == "task" and len(parts[0]) == 2:
            raise DataMissing(f"{self.folder} has no folders of tasks: expected is TASK/CLASS/picture.png")
        place: dict[str, Callable[[tuple[str, ...]], str]] = {
            "task": lambda part: part[0],
            "label": lambda part: part[-2],
            "path": lambda part: "/".join(part),
        }
        if name not in place:
            raise DataMissing(f"pictures in a folder have no column {name!r}; they have: {', '.join(place)}")
        return np.array([place[name](part) for part in parts])

    def names(self, column: str) -> list[str]:
        return []

    def where(self, row: int) -> str:
        return str(self.files[row])

    def encoded(self) -> Iterator[list[bytes]]:
        for start in range(0, len(self.files), BATCH):
            yield [path.read_bytes() for path in self.files[start : start + BATCH]]


def find(name: str, folder: Path, split: str, image: str | None = None) -> Source | None:
    """The pictures of a split in `folder`: SPLIT.parquet, SPLIT-00000-of-00002.parquet … or a folder SPLIT."""
    one = folder / f"{split}.parquet"
    if one.is_file():
        return Shards(name, (one,), image)
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if shards:
        whole = int(shards[0].stem.rsplit("-of-", 1)[1].split("-")[0])
        if len(shards) != whole:
            raise DataMissing(
                f"{folder} holds {len(shards)} of the {whole} files {shards[0].name} … If they came with "
                "`agscl data get`, run that again"
            )
        return Shards(name, tuple(shards), image)
    return Folder(name, folder / split) if (folder / split).is_dir() else None


def decoded(source: Source, form: Form, rows: Array | None = None) -> Array:
    """(pictures, channels, size, size) bytes, of all pictures or of `rows` in this order; from the cache after the
    first time."""
    return _from_each(source, form, rows, (form.channels, form.size, form.size), np.uint8, form.read)


def shapes(source: Source, rows: Array | None = None) -> Array:
    """(pictures, 2) height and width of each picture as it is stored."""

    def shape(encoded: bytes) -> Array:
        with opened(encoded) as picture:
            return np.array(picture.size[::-1])

    return _from_each(source, "shapes", rows, (2,), np.int32, shape)


def unreadable(source: Source, form: Form) -> list[str]:
    """Which pictures cannot be decoded, and why."""
    broken = []

    def visit(row: int, encoded: bytes) -> None:
        try:
            form.read(encoded)
        except Exception as error:  # Pillow raises many kinds
            broken.append((row, _reason(error)))

    _each(source, visit, f"checking {source.name}")
    return [f"{source.where(row)} cannot be decoded: {reason}" for row, reason in sorted(broken)]


def _from_each(
    source: Source, how: object, rows: Array | None, shape: tuple[int, ...], kind: Any, read: Callable[[bytes], Array]
) -> Array:
    import PIL

    def make() -> Array:
        chosen = np.arange(len(source)) if rows is None else rows
        place = np.full(len(source), -1)
        place[chosen] = np.arange(len(chosen))
        array = np.empty((len(chosen), *shape), kind)

        def visit(row: int, encoded: bytes) -> None:
            if place[row] >= 0:
                try:
                    array[place[row]] = read(encoded)
                except Exception as error:  # Pillow raises many kinds
                    raise DataMissing(f"{source.where(row)} cannot be decoded: {_reason(error)}") from error

        _each(source, visit, f"decoding {source.name}, once")
        return array

    identity = (source.identity, how, None if rows is None else rows.tobytes(), PIL.__version__)
    return cached(source.name, identity, source.state(), make)


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # it would name a place in memory
        return "it is no picture, or of a kind that cannot be read"
    return str(error) or type(error).__name__


def _each(source: Source, visit: Callable[[int, bytes], None], what: str) -> None:
    """Call `visit` with the number and the bytes of every picture, from several threads: Pillow decodes in parallel."""

    def some(first: int, pictures: list[bytes]) -> None:
        for row, encoded in enumerate(pictures, first):
            visit(row, encoded)

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    start = 0
    with ThreadPoolExecutor(workers) as pool, Bar(what, len(source)) as bar:
        for batch in source.encoded():
            step = -(-len(batch) // workers)
            places = range(0, len(batch), step)
            list(pool.map(some, [start + at for at in places], [batch[at : at + step] for at in places]))
            start += len(batch)
            bar.advance(len(batch))


def in_order(values: Array) -> list[Any]:
    """The different values, as a person would sort them."""
    different = set(values.tolist())
    return sorted(different, key=None if values.dtype.kind in "biuf" else lambda value: natural(str(value)))


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts 2 before 10, and never leaves two names equal."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)], name


def require_readers() -> None:
    if not (find_spec("PIL") and find_spec("pyarrow")):
        raise DataMissing("reading pictures needs pyarrow and Pillow: pip install 'agscl[data]'")
