"""Zero or copy many tensors at once, exactly: their bits are viewed as integers and multiplied by 0 or 1.

Infinities and NaN become +0.0 like all other numbers. On a GPU one kernel serves all tensors instead of one each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agscl.system.tensor_pieces import FOREACH_PIECES, concat_pieces, split_pieces

__all__ = ["as_bits", "copy_where_", "mask_bits_", "uses_bits", "zero_where_"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory, viewed as integers of the same width."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def uses_bits(tensor: Tensor) -> bool:
    """Whether one kernel over all weights' bits is worth the memory of a mask for each: on a GPU."""
    return tensor.is_cuda


@torch.no_grad()
def zero_where_(tensors: Sequence[Tensor], condition: Tensor) -> None:
    """Set all bits of the tensors to 0, which is +0.0, if `condition` () is true."""
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
    """Copy `sources` into `targets` bit by bit if `condition` () is true; else leave the targets as they are."""
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
