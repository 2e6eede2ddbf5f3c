"""Sort class and file names as a person would: 2 before 10."""

from __future__ import annotations

import re
from typing import Any

from agscl.data.examples import Array


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """A sort key that puts 2 before 10 and never makes two different names equal."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)], name


def sort_unique(values: Array) -> list[Any]:
    """The different values: numbers by size, all else in natural order."""
    unique = set(values.tolist())
    return sorted(unique, key=None if values.dtype.kind in "biuf" else lambda value: natural_key(str(value)))
