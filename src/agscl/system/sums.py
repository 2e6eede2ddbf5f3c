"""In which precision sums are taken."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""


def sum_dtype(device: torch.device) -> torch.dtype:
    """In which sums are taken: float64, where the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_sum_dtype(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor in the precision of sums on its device."""
    return tensor.to(sum_dtype(tensor.device), copy=copy)
