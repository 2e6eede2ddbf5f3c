"""What goes wrong with data."""

from __future__ import annotations


class DataError(Exception):
    """Data is missing or cannot be read; the message says where it was expected and what to do."""


class DownloadFailed(DataError):
    """A file could not be downloaded; the message says why and what to do."""
