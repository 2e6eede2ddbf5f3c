"""Many tensors changed at once, as the whole numbers that their bits are: kept, set to zero or replaced.

Multiplied by 1 or 0 these are exact, whatever they stand for: infinite numbers and NaN too become +0.0. On a GPU it is
one kernel for all tensors instead of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bits", "cut", "joined", "keep", "replace"]

PIECE = 8192
"""The fewest numbers in a piece of a tensor."""
PIECES = 48
"""About so many pieces are made of all tensors, as torch launches them in one kernel. It gives 65 536 numbers of a
tensor to one multiprocessor, of which a GPU has over a hundred: the paper's network for CIFAR, left whole, would keep
a sixth of them busy."""
LARGE = 65_536
"""Pieces that large gain nothing."""
FOUR = 4
"""Kernels take four numbers at a time where they can, and torch's Adam rounds a weight decay otherwise where it cannot:
tensors that are no multiple of four stay whole, and pieces are multiples of four."""
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return tensor.detach().view(_WHOLE[tensor.element_size()])


@torch.no_grad()
def keep(tensors: Sequence[Tensor], kept: Tensor | Sequence[Tensor]) -> None:
    """Set to +0.0 all numbers for which `kept` is 0, not 1: one tensor (), or one like each, as whole as `as_bits`."""
    if not isinstance(kept, Tensor):
        if tensors or kept:
            torch._foreach_mul_(*joined(cut(PIECES, [as_bits(tensor) for tensor in tensors], kept)))
        return
    for alike in _by_size(tensors):
        torch._foreach_mul_(joined(cut(PIECES, alike))[0], kept.to(alike[0].dtype))


@torch.no_grad()
def replace(tensors: Sequence[Tensor], others: Sequence[Tensor], when: Tensor) -> None:
    """Let `tensors` hold what `others` do where `when` () is true; else they stay as they are."""
    for each in zip(_by_size(tensors), _by_size(others), strict=True):
        mine, theirs = joined(cut(PIECES, *each))
        torch._foreach_mul_(mine, (~when).to(mine[0].dtype))
        torch._foreach_add_(mine, torch._foreach_mul(theirs, when.to(mine[0].dtype)))


def _by_size(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = as_bits(tensor)
        found.setdefault(bits.dtype, []).append(bits)
    return [found[kind] for kind in _WHOLE.values() if kind in found]


def cut(pieces: int, *lists: Sequence[Tensor]) -> list[list[tuple[Tensor, ...]]]:
    """Of each place in the lists, its tensors in pieces; whole where they are not laid out alike."""
    size = max(PIECE, FOUR * -(-sum(tensor.numel() for tensor in lists[0]) // (FOUR * pieces)))
    return [_cut(size, *of_one) for of_one in zip(*lists, strict=True)]


def joined(cuts: Sequence[Sequence[Sequence[Tensor]]]) -> list[list[Tensor]]:
    """What was cut as lists again, of pieces."""
    return [[piece for of_one in each for piece in of_one] for each in zip(*cuts, strict=True)]


def _cut(size: int, first: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    each = (first, *others)
    alike = all(other.shape == first.shape and other.stride() == first.stride() for other in others)
    dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    fours = first.numel() % FOUR == 0
    if alike and dense and fours and size < LARGE and first.numel() > size:
        return [one.detach().as_strided((one.numel(),), (1,), one.storage_offset()).split(size) for one in each]
    return [(one,) for one in each]
