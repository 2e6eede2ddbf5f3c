"""Several processes (ranks) that train one network together, as `torchrun` starts them.

Each takes its share of every batch. After the backward pass the network's gradients, BatchNorm statistics and the loss
are averaged in one message, so all ranks hold the same bits after every step. The first one writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agscl.system.distributed import is_distributed
from agscl.system.torchrun import find_torchrun_rank

STOP_EVERY = 16
"""Ranks agree on whether to stop once in so many steps."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those that train together; one alone by default."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the process group that this process is in."""
        if not is_distributed():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def take_share(self, rows: Tensor) -> tuple[Tensor, float]:
        """The rows of a batch that this rank computes, and the weight of their mean loss in the average over ranks."""
        share = rows[self.rank :: self.size]
        weight = len(share) * self.size / len(rows)
        return (share, weight) if len(share) else (rows[:1], 0.0)  # fewer rows than ranks: weight 0

    @torch.no_grad()
    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of the same shapes on all ranks, by their means over ranks."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def broadcast(self, value: Any = None) -> Any:
        """The `value` of the first rank, on all of them."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def agree_to_stop(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """`should_stop`, with the same answer on all ranks, which call it equally often."""
        if self.size == 1:
            return should_stop
        calls = 0

        def should_all_stop() -> bool:
            nonlocal calls
            calls += 1
            asked = should_stop()
            if calls % STOP_EVERY:
                return False
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, asked)
            return any(answers)

        return should_all_stop


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Within the block this process is one of the ranks that `torchrun` started; without `torchrun` it is alone."""
    if find_torchrun_rank() is None:
        yield Ranks()
        return
    backend, local_rank = "gloo", int(os.environ["LOCAL_RANK"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)  # what "cuda" means from here on
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        yield Ranks.current()
        dist.barrier()
    finally:
        dist.destroy_process_group()
