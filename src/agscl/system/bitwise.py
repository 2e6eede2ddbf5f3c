"""Zero or copy many tensors at once, exactly: their bits are viewed as integers and multiplied by 0 or 1.

Infinities and NaN become +0.0 like all other numbers. On a GPU one kernel serves all tensors instead of one each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bits", "concat_pieces", "copy_where_", "mask_bits_", "split_pieces", "uses_bits", "zero_where_"]

MIN_PIECE = 8192
"""The smallest piece a tensor is split into, in elements."""
MAX_PIECE = 65_536
"""Torch's foreach kernels give so many elements of a tensor to one multiprocessor: larger pieces gain nothing."""
FOREACH_PIECES = 48
"""About how many pieces all tensors together are split into, as many as torch launches in one kernel. A GPU has over a
hundred multiprocessors; the paper's network for CIFAR, not split, would keep a sixth of them busy."""
ALIGNMENT = 4
"""Kernels read four elements at a time where they can, and torch's Adam rounds weight decay differently where they
cannot: tensors whose size is no multiple of four are not split, and pieces are multiples of four."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SplitTensors = list[tuple[Tensor, ...]]
"""One tuple of pieces for each of several tensors of equal size, all split at the same places."""


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory, viewed as integers of the same width."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def uses_bits(tensor: Tensor) -> bool:
    """Whether one kernel over all weights' bits is worth the memory of a mask for each: on a GPU."""
    return tensor.is_cuda


@torch.no_grad()
def zero_where_(tensors: Sequence[Tensor], condition: Tensor) -> None:
    """Set all tensors to +0.0 if `condition` () is true."""
    for bits in _group_by_width(tensors):
        torch._foreach_mul_(concat_pieces(split_pieces(FOREACH_PIECES, bits))[0], (~condition).to(bits[0].dtype))


@torch.no_grad()
def mask_bits_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Set each element to +0.0 where its mask is 0; masks hold 1 or 0, in the dtype of `as_bits(tensor)`."""
    if tensors or masks:
        torch._foreach_mul_(
            *concat_pieces(split_pieces(FOREACH_PIECES, [as_bits(tensor) for tensor in tensors], masks))
        )


@torch.no_grad()
def copy_where_(targets: Sequence[Tensor], sources: Sequence[Tensor], condition: Tensor) -> None:
    """Copy `sources` into `targets` if `condition` () is true; else leave the targets as they are."""
    for alike in zip(_group_by_width(targets), _group_by_width(sources), strict=True):
        target, source = concat_pieces(split_pieces(FOREACH_PIECES, *alike))
        torch._foreach_mul_(target, (~condition).to(target[0].dtype))
        torch._foreach_add_(target, torch._foreach_mul(source, condition.to(target[0].dtype)))


def _group_by_width(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors' bits, one list for each integer width that occurs."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = as_bits(tensor)
        groups.setdefault(bits.dtype, []).append(bits)
    return [groups[dtype] for dtype in _INTEGERS.values() if dtype in groups]


def split_pieces(pieces: int, *lists: Sequence[Tensor]) -> list[SplitTensors]:
    """Split tensors into about so many pieces in all.

    The lists are parallel: tensors at the same place of each list are split alike, or left whole where they do not
    lie in memory alike. Returns one entry for each place.
    """
    size = max(MIN_PIECE, ALIGNMENT * -(-sum(tensor.numel() for tensor in lists[0]) // (ALIGNMENT * pieces)))
    return [_split(size, *tensors) for tensors in zip(*lists, strict=True)]


def concat_pieces(split: Sequence[SplitTensors]) -> list[list[Tensor]]:
    """The pieces of each list given to `split_pieces`, one after the other."""
    return [[piece for pieces in pieces_of_list for piece in pieces] for pieces_of_list in zip(*split, strict=True)]


def _split(size: int, first: Tensor, *others: Tensor) -> SplitTensors:
    tensors = (first, *others)
    same_layout = all(other.shape == first.shape and other.stride() == first.stride() for other in others)
    dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    aligned = first.numel() % ALIGNMENT == 0
    if same_layout and dense and aligned and size < MAX_PIECE and first.numel() > size:
        return [one.detach().as_strided((one.numel(),), (1,), one.storage_offset()).split(size) for one in tensors]
    return [(one,) for one in tensors]
