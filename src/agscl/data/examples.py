"""Inputs and labels as they are read, before they are cut into tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Array", "DataMissing", "Examples"]

Array = np.ndarray[Any, np.dtype[Any]]


class DataMissing(Exception):
    """Data is not there or cannot be read; the message says where it was looked for and what to do."""


@dataclass(frozen=True)
class Examples:
    """Inputs and labels, memory-mapped or not, before they are cut into tasks."""

    x: Array | Tensor
    y: Array
    """(examples,) integers."""

    def rows_of(self, classes: Sequence[int]) -> Array:
        return np.flatnonzero(np.isin(self.y, classes))
