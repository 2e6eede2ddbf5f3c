"""Tensors split into pieces, so that a kernel over many tensors keeps a whole GPU busy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["FOREACH_PIECES", "SplitTensors", "concat_pieces", "split_pieces"]

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

SplitTensors = list[tuple[Tensor, ...]]
"""One tuple of pieces for each of several tensors of equal size, all split at the same places."""


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
