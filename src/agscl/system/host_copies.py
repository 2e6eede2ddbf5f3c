"""Copies of a device's tensors in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopy", "copy_to_host"]


class HostCopy:
    """A copy of a tensor as it is now, in the host's memory once `wait` was called."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor.to("cpu", copy=True)
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # waiting for it leaves the core to others
        self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory. Waiting for a GPU leaves the core to others, such as the threads of a game."""
    return HostCopy(tensor).wait()
