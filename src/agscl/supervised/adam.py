"""Torch's fused Adam and AdamW, bit for bit, quicker on networks of up to some million weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
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
LAUNCH = 36
"""Torch launches the kernel for so many tensors at a time, one launch after the other; here they run side by side."""


class _InPieces(torch.optim.Optimizer):
    """To be made with `fused=True`, of parameters of one kind on one device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        # Never super().step: torch wraps both in the hooks of an optimizer, which would then be called twice.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[attr-defined]
            if lists[0]:
                self._step_of(group, *lists)
        return loss

    def _step_of(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """A step of parameters, given with their gradients, moments, largest moments (if so set) and step counters."""
        *tensors, steps = lists
        torch._foreach_add_(steps, 1)
        parts = [one for one in tensors if one]
        size = max(PIECE, FOUR * -(-sum(parameter.numel() for parameter in parts[0]) // (FOUR * PIECES)))
        cuts = [_cut(size, *of_one) for of_one in zip(*parts, strict=True)]
        pieces = [[piece for cut in cuts for piece in cut[place]] for place in range(len(parts))]
        pieces += [[] for _ in range(len(tensors) - len(parts))]
        pieces.append([step for step, cut in zip(steps, cuts, strict=True) for _ in cut[0]])
        beta1, beta2 = group["betas"]
        kernel = partial(
            torch._fused_adamw_ if isinstance(self, torch.optim.AdamW) else torch._fused_adam_,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=getattr(self, "grad_scale", None),  # a GradScaler's
            found_inf=(overflow := getattr(self, "found_inf", None)),
        )
        launches = [[one[at : at + LAUNCH] for one in pieces] for at in range(0, len(pieces[0]), LAUNCH)]
        _side_by_side([partial(kernel, *launch) for launch in launches], parts[0][0].device)
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))


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


def _side_by_side(works: Sequence[partial[Any]], device: torch.device) -> None:
    """Do them all, on a GPU each on a stream of its own, between what came before and what comes after."""
    if device.type != "cuda" or len(works) == 1:
        for work in works:
            work()
        return
    here = torch.cuda.current_stream(device)
    streams = _streams(device, len(works))
    for work, stream in zip(works, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work()
    for stream in streams:
        here.wait_stream(stream)


@cache
def _streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))
