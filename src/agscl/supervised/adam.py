"""Torch's fused Adam and AdamW, bit for bit, quicker on networks of up to some million weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE = 8192
"""The fewest numbers handed to the fused kernel as one tensor."""
PIECES = 128
"""About so many pieces are made of all weights. The kernel gives 65 536 numbers of a tensor to one multiprocessor, of
which a GPU has over a hundred: the paper's network for CIFAR, left whole, would keep a sixth of them busy."""
WHOLE = 65_536
"""Pieces that large gain nothing."""
FOUR = 4
"""The kernel takes four numbers at a time where it can, and rounds a weight decay otherwise where it cannot: tensors
that are no multiple of four stay whole, and pieces are multiples of four."""


class _InPieces(torch.optim.Optimizer):
    """For steps without a GradScaler: the counters go up whatever it found."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Called by `step` to collect parameters, gradients, moments and, last, the counters of steps."""
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        *tensors, steps = [one for one in lists if isinstance(one, list) and one] or [[]]
        if group["fused"] and steps:
            size = max(PIECE, FOUR * -(-sum(parameter.numel() for parameter in tensors[0]) // (FOUR * PIECES)))
            cuts = [_cut(size, *of_one) for of_one in zip(*tensors, strict=True)]
            counts = [step for step, pieces in zip(steps, cuts, strict=True) for _ in pieces[0]]
            own = torch._foreach_add(counts, 0)  # the kernel counts each piece's step by itself
            torch._foreach_add_(steps, 1)
            steps[:] = own
            for place, one in enumerate(tensors):
                one[:] = [piece for pieces in cuts for piece in pieces[place]]
        return has_complex


class Adam(_InPieces, torch.optim.Adam):
    """See `torch.optim.Adam`."""


class AdamW(_InPieces, torch.optim.AdamW):
    """See `torch.optim.AdamW`."""


def _cut(size: int, parameter: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """A parameter, its gradient and its moments in pieces; whole where they are not laid out alike."""
    each = (parameter, *others)
    alike = all(other.stride() == parameter.stride() for other in others)
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    fours = parameter.numel() % FOUR == 0
    if alike and dense and fours and size < WHOLE and parameter.numel() > size:
        return [one.detach().as_strided((one.numel(),), (1,), one.storage_offset()).split(size) for one in each]
    return [(one,) for one in each]
