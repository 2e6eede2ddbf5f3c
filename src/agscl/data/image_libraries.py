"""The libraries that read images: pyarrow for Parquet files, Pillow to decode."""

from __future__ import annotations

from importlib.util import find_spec

from agscl.data.errors import DataError


def require_image_libraries() -> None:
    """Raise where a library that reads images, pyarrow or Pillow, is not installed."""
    if not (find_spec("PIL") and find_spec("pyarrow")):
        raise DataError("reading images needs pyarrow and Pillow: pip install 'agscl[data]'")
