"""Copies of a device's tensors in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["copy_to_host"]


def copy_to_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory. Waiting for a GPU leaves the core to others, such as the threads of a game."""
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return copy
