"""Many tensors changed at once, as the whole numbers that their bits are: kept, set to zero or replaced.

Multiplied by 1 or 0 these are exact, whatever they stand for: infinite numbers and NaN too become +0.0. On a GPU it is
one kernel for all tensors instead of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bits", "keep", "replace"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return tensor.detach().view(_WHOLE[tensor.element_size()])


@torch.no_grad()
def keep(tensors: Sequence[Tensor], kept: Tensor | Sequence[Tensor]) -> None:
    """Set to +0.0 all numbers for which `kept` is 0, not 1: one tensor (), or one like each, as whole as `as_bits`."""
    if not isinstance(kept, Tensor):
        torch._foreach_mul_([as_bits(tensor) for tensor in tensors], list(kept))
        return
    for alike in _by_size(tensors):
        torch._foreach_mul_(alike, kept.to(alike[0].dtype))


@torch.no_grad()
def replace(tensors: Sequence[Tensor], others: Sequence[Tensor], when: Tensor) -> None:
    """Let `tensors` hold what `others` do where `when` () is true; else they stay as they are."""
    for mine, theirs in zip(_by_size(tensors), _by_size(others), strict=True):
        torch._foreach_mul_(mine, (~when).to(mine[0].dtype))
        torch._foreach_add_(mine, torch._foreach_mul(theirs, when.to(mine[0].dtype)))


def _by_size(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = as_bits(tensor)
        found.setdefault(bits.dtype, []).append(bits)
    return [found[kind] for kind in _WHOLE.values() if kind in found]
