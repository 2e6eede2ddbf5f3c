"""Soft masks: weights of which a step may move only a share (HAT, SPG)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["SoftMask", "mask_gradients_", "mask_updates_"]


class SoftMask(NamedTuple):
    """The soft mask of one weight."""

    parameter: nn.Parameter
    factor: Tensor
    """Share of a step that each entry takes: 1 all of it, 0 none. Has the parameter's shape, or is broadcast to it."""
    before: Tensor
    """The parameter after the last step."""


def mask_gradients_(masks: Iterable[SoftMask], optimizer: Optimizer) -> None:
    """Multiply the gradients of what `optimizer` trains by the factors of the soft masks."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for mask in masks:
        if mask.parameter.grad is not None and id(mask.parameter) in trained:
            mask.parameter.grad.mul_(mask.factor)


def mask_updates_(masks: Iterable[SoftMask], *, soft: bool) -> None:
    """Take back a step: where the factor is 0 to the bit, and elsewhere (if `soft`) all but that share of it."""
    for parameter, factor, before in masks:
        moved = _interpolate(before, parameter, factor) if soft else parameter
        before.copy_(torch.where(factor == 0, before, moved))  # interpolation alone would let a NaN through
        parameter.copy_(before)


def _interpolate(before: Tensor, after: Tensor, factor: Tensor) -> Tensor:
    """before + factor · (after − before), exactly `after` where the factor is 1."""
    dtype = torch.promote_types(after.dtype, factor.dtype)
    return torch.lerp(before.to(dtype), after.to(dtype), factor.to(dtype))
