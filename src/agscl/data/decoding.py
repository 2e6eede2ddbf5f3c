"""Decode images: from encoded bytes (PNG, JPEG, ...) to arrays of one size."""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agscl.data.cache import cached_array
from agscl.data.encoded_images import EncodedImages
from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.data.progress_line import ProgressLine

SIGNATURES = {
    b"\x89PNG": "PNG",
    b"\xff\xd8": "JPEG",
    b"RIFF": "WEBP",
    b"BM": "BMP",
    b"GIF8": "GIF",
    b"P5": "PPM",
    b"P6": "PPM",
}
"""The first bytes of each file format. Anything else is tried as TIFF only."""

MAX_PIXELS = 1 << 26
"""Largest image, as it is stored or while it is resized."""
LARGE_PIXELS = 1 << 23
"""Images larger than this are decoded one at a time, not one by each thread."""
_large_image_lock = threading.Lock()


def open_image(encoded: bytes) -> Any:
    """Open an encoded image with Pillow.

    Naming the format makes Pillow twice as fast, and keeps it from formats that start another program.
    """
    from PIL import Image

    format = next((format for signature, format in SIGNATURES.items() if encoded.startswith(signature)), "TIFF")
    image = Image.open(io.BytesIO(encoded), formats=[format])
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} × {image.height} pixels, more than {MAX_PIXELS}")
    return image


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes an image to `channels` × `size` × `size` bytes."""

    size: int
    channels: Literal[1, 3] = 3
    fit: Literal["squeeze", "pad", "crop"] = "squeeze"
    """How an image of another shape becomes a square: resized regardless of its shape, with a black border, or its
    centre cropped."""
    short: int | None = None
    """With "crop": the length to which the shorter side is resized first; default `size`."""
    filter: Literal["bilinear", "lanczos", "box"] = "bilinear"

    def decode(self, encoded: bytes) -> Array:
        """(channels, size, size) bytes."""
        with open_image(encoded) as image:
            is_large = max(image.width * image.height, self._count_resized_pixels(*image.size)) > LARGE_PIXELS
            with _large_image_lock if is_large else contextlib.nullcontext():
                return self._decode(image)

    def _count_resized_pixels(self, width: int, height: int) -> int:
        """Of the whole image resized, before its centre is cropped. Raises ValueError where they are too many."""
        if self.fit != "crop":
            return self.size * self.size
        short = self.short or self.size
        pixels = short * (short * max(width, height) // min(width, height))
        if pixels > max(MAX_PIXELS, 16 * short * short):
            raise ValueError(
                f"it is {width} × {height}: too narrow to be resized to {short} pixels on its shorter side"
            )
        return pixels

    def _decode(self, image: Any) -> Array:
        from PIL import Image

        with image:
            pixels = _reduce_to_8_bits(image).convert("L" if self.channels == 1 else "RGB")
        filter = Image.Resampling[self.filter.upper()]
        width, height = pixels.size
        if self.fit == "pad":
            if max(width, height) > self.size:
                raise ValueError(f"it is {width} × {height}, larger than {self.size} × {self.size}")
            black = Image.new(pixels.mode, (self.size, self.size))
            black.paste(pixels, ((self.size - width) // 2, (self.size - height) // 2))
            pixels = black
        elif self.fit == "crop":
            short = self.short or self.size
            width, height = (short, short * height // width) if width <= height else (short * width // height, short)
            left, top = round((width - self.size) / 2), round((height - self.size) / 2)
            pixels = pixels.resize((width, height), filter).crop((left, top, left + self.size, top + self.size))
        elif (width, height) != (self.size, self.size):
            pixels = pixels.resize((self.size, self.size), filter)
        array = np.asarray(pixels)
        return array[None] if self.channels == 1 else array.transpose(2, 0, 1)


def _reduce_to_8_bits(image: Any) -> Any:
    """Keep the upper 8 bits of a 16-bit image; Pillow would clip all values above 255."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range: store it with 8 or 16 bits per channel")
    return image


def decode_images(images: EncodedImages, decoder: ImageDecoder, rows: Array | None = None) -> Array:
    """(images, channels, size, size) bytes: all images, or `rows` in this order. Stored in the cache."""
    shape = (decoder.channels, decoder.size, decoder.size)
    return _map_images(images, decoder.decode, decoder, rows, shape, np.uint8)


def read_image_shapes(images: EncodedImages, rows: Array | None = None) -> Array:
    """(images, 2) height and width of each image as it is stored."""

    def read_shape(encoded: bytes) -> Array:
        with open_image(encoded) as image:
            return np.array(image.size[::-1])

    return _map_images(images, read_shape, "shapes", rows, (2,), np.int32)


def find_undecodable(images: EncodedImages, decoder: ImageDecoder) -> list[str]:
    """A message for each image that cannot be decoded: where it is, and why."""
    failures = []

    def try_to_decode(row: int, encoded: bytes) -> None:
        try:
            decoder.decode(encoded)
        except Exception as error:  # Pillow raises many kinds
            failures.append((row, _describe_error(error)))

    _visit_images(images, try_to_decode, f"checking {images.name}")
    return [f"{images.describe_row(row)} cannot be decoded: {reason}" for row, reason in sorted(failures)]


def _map_images(
    images: EncodedImages,
    function: Callable[[bytes], Array],
    identity: object,
    rows: Array | None,
    shape: tuple[int, ...],
    dtype: Any,
) -> Array:
    """(images, *shape) results of `function` for each image, from the cache where `identity` names the function."""
    import PIL

    def compute() -> Array:
        chosen = np.arange(len(images)) if rows is None else rows
        position = np.full(len(images), -1)
        position[chosen] = np.arange(len(chosen))
        _require_memory(len(chosen) * math.prod(shape) * np.dtype(dtype).itemsize, str(images))
        results = np.empty((len(chosen), *shape), dtype)

        def apply(row: int, encoded: bytes) -> None:
            if position[row] >= 0:
                try:
                    results[position[row]] = function(encoded)
                except Exception as error:  # Pillow raises many kinds
                    raise DataError(
                        f"{images.describe_row(row)} cannot be decoded: {_describe_error(error)}"
                    ) from error

        _visit_images(images, apply, f"decoding {images.name} (only once)")
        return results

    key = (images.identity, identity, None if rows is None else rows.tobytes(), PIL.__version__)
    return cached_array(images.name, key, images.describe_image_files(), compute)


def _require_memory(needed: int, images: str) -> None:
    """Raise DataError where decoded images take more memory than the machine has."""
    if hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > available > 0:
            raise DataError(
                f"the images in {images} take {needed / 1e9:.1f} GB when they are decoded, but this machine has "
                f"{available / 1e9:.1f} GB of memory. Choose a smaller size=..."
            )


def _describe_error(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its own message is an address in memory
        return "it is not an image, or of a format that is not supported"
    return str(error) or type(error).__name__


def _visit_images(images: EncodedImages, visit: Callable[[int, bytes], None], description: str) -> None:
    """Call `visit(row, encoded)` for every image, in several threads: Pillow decodes in parallel."""

    def visit_chunk(first_row: int, chunk: list[bytes]) -> None:
        for row, encoded in enumerate(chunk, first_row):
            visit(row, encoded)

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    batch_start = 0
    with ThreadPoolExecutor(workers) as pool, ProgressLine(description, len(images)) as progress:
        for batch in images.iterate_encoded():
            step = -(-len(batch) // workers)
            starts = range(0, len(batch), step)
            list(pool.map(visit_chunk, [batch_start + at for at in starts], [batch[at : at + step] for at in starts]))
            batch_start += len(batch)
            progress.advance(len(batch))
