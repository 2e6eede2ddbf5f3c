"""The order in which an epoch visits the training examples."""

from __future__ import annotations

import torch
from torch import Tensor

from agscl.training.seeds import derive_seed


def order_epoch(examples: int, *, seed: int, task: int, epoch: int, pin_memory: bool = False) -> Tensor:
    """(examples,) the training rows in the order of an epoch: a function of seed, task and epoch, so never saved."""
    generator = torch.Generator().manual_seed(derive_seed(seed, task, epoch))
    return torch.randperm(examples, generator=generator, pin_memory=pin_memory)
