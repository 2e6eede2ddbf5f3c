"""The images and labels of a dataset in memory, before they are divided into tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Array", "Examples"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Examples:
    """Inputs (examples, ...), memory-mapped or not, and their labels."""

    x: Array | Tensor
    y: Array
    """(examples,) integers."""

    def find_rows(self, classes: Sequence[int]) -> Array:
        """The rows of the examples whose label is one of `classes`, in order."""
        return np.flatnonzero(np.isin(self.y, classes))
