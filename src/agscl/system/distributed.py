"""Several processes (ranks) that train together: each call does nothing where there is only one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average_over_ranks_", "copy_from_first_rank_", "is_distributed", "sum_over_ranks_", "synchronise_generator"]


def is_distributed() -> bool:
    """Whether torch's process group is up."""
    return dist.is_available() and dist.is_initialized()


def sum_over_ranks_(*tensors: Tensor) -> None:
    """In distributed training replace each tensor by its sum over all ranks."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def average_over_ranks_(*tensors: Tensor) -> None:
    """In distributed training replace each tensor by its mean over all ranks."""
    if is_distributed():
        sum_over_ranks_(*tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()


def copy_from_first_rank_(tensor: Tensor) -> None:
    """In distributed training let all ranks have the tensor of the first."""
    if is_distributed():
        dist.broadcast(tensor, 0)


def synchronise_generator(generator: torch.Generator, device: torch.device) -> None:
    """In distributed training let all ranks draw the random numbers that the first draws."""
    if is_distributed():
        state = generator.get_state().to(device)
        copy_from_first_rank_(state)
        generator.set_state(state.cpu())
