"""Torch's fused Adam and AdamW, bit for bit, quicker on networks of up to some million weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from agscl.system.bitwise import concat_pieces, split_pieces

PIECES = 128
"""About so many pieces are made of all weights."""
LAUNCH = 36
"""Torch launches the kernel for so many tensors at a time, one launch after the other; here they run side by side."""


class _InPieces(torch.optim.Optimizer):
    """To be made with `fused=True`, of parameters of one kind on one device."""

    # Torch's own, before which torch imports its compiler: two seconds, for what is never compiled.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

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
        cuts = split_pieces(PIECES, *parts)
        pieces = concat_pieces(cuts)
        pieces += [[] for _ in range(len(tensors) - len(parts))]
        pieces.append([step for step, of_one in zip(steps, cuts, strict=True) for _ in of_one[0]])
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
