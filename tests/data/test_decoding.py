"""Decoding images."""

from __future__ import annotations

import io

import numpy as np
import pytest

import small_images
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.data.encoded_images import ParquetImages


def test_an_image_larger_than_its_border_is_refused():
    with pytest.raises(ValueError, match="40 × 30, larger than 32 × 32"):
        ImageDecoder(32, fit="pad").decode(small_images.encode_image(np.zeros((30, 40), np.uint8)))


def test_grey_palette_and_transparent_images_become_colour():
    image = small_images.Image.fromarray(np.full((4, 4, 3), 204, np.uint8))
    for mode in ("L", "P", "RGBA"):
        file = io.BytesIO()
        image.convert(mode).save(file, format="PNG")
        pixels = ImageDecoder(4).decode(file.getvalue())
        assert pixels.shape == (3, 4, 4)
        assert (pixels == 204).all()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF"])
def test_all_usual_formats_are_decoded(format):
    pixels = ImageDecoder(4).decode(small_images.encode_image(np.full((4, 4, 3), 100, np.uint8), format))
    assert np.abs(pixels.astype(int) - 100).max() <= 3


@pytest.mark.parametrize("content", [b"", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x80\x04N.", b"\x89PNG and no more"])
def test_nothing_else_is_opened(content):
    with pytest.raises(OSError, match=r"cannot identify|broken|truncated"):
        ImageDecoder(4).decode(content)


def test_a_column_of_plain_bytes_is_decoded_too(data):
    table = small_images.make_table([0, 1])
    plain = table.set_column(0, "image", [[each["bytes"] for each in table.column("image").to_pylist()]])
    images = ParquetImages("own", (small_images.write_parquet(plain, data / "own.parquet"),))
    expected = small_images.make_pixels(1, 0).transpose(2, 0, 1)
    assert np.array_equal(decode_images(images, ImageDecoder(32))[1], expected)


def test_chosen_rows_come_in_their_order(data):
    table = small_images.make_table(range(9))
    images = ParquetImages("own", (small_images.write_parquet(table, data / "own.parquet"),))
    assert decode_images(images, ImageDecoder(32), np.array([7, 0, 3]))[:, 0, 0, 0].tolist() == [7, 0, 3]
