"""Adam and AdamW in pieces: torch's fused kernel and its bits, faster for networks of up to some million weights.

Torch's kernel gives 65,536 elements of a tensor to one multiprocessor, and is launched for 36 tensors at a time, one
launch after the other. Here parameters are split into about 128 pieces, and all launches run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from agscl.fast._torch_internals import fused_adam_kernel, without_dynamo
from agscl.system.tensor_pieces import concat_pieces, split_pieces

ADAM_PIECES = 128
"""About how many pieces all parameters together are split into."""
TENSORS_PER_LAUNCH = 36
"""How many tensors torch's fused kernel updates in one launch."""


class _SplitOptimizer(torch.optim.Optimizer):
    """Must be created with `fused=True`, with all parameters of one dtype and on one device."""

    add_param_group = without_dynamo(torch.optim.Optimizer.add_param_group)
    zero_grad = without_dynamo(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        # Never super().step: torch wraps each class's step in the optimizer's hooks, which would then run twice.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._get_state(parameter, group["amsgrad"]) for parameter in parameters]
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        tensors = [parameters, gradients, *([state[name] for state in states] for name in names)]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)

        split = split_pieces(ADAM_PIECES, *tensors)
        pieces = concat_pieces(split)
        if not group["amsgrad"]:
            pieces.append([])
        pieces.append([step for step, parts in zip(steps, split, strict=True) for _ in parts[0]])
        beta1, beta2 = group["betas"]
        kernel = partial(
            fused_adam_kernel(isinstance(self, torch.optim.AdamW)),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=getattr(self, "grad_scale", None),  # set by a GradScaler
            found_inf=(overflow := getattr(self, "found_inf", None)),
        )
        starts = range(0, len(pieces[0]), TENSORS_PER_LAUNCH)
        launches = [[column[start : start + TENSORS_PER_LAUNCH] for column in pieces] for start in starts]
        _run_concurrently([partial(kernel, *launch) for launch in launches], parameters[0].device)
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))

    def _get_state(self, parameter: Tensor, amsgrad: bool) -> dict[str, Tensor]:
        """The parameter's state, initialised at its first step as torch does."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class SplitAdam(_SplitOptimizer, torch.optim.Adam):
    """See `torch.optim.Adam`."""


class SplitAdamW(_SplitOptimizer, torch.optim.AdamW):
    """See `torch.optim.AdamW`."""


def _run_concurrently(launches: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Launch each on its own stream: after all work launched before, and before all launched later."""
    if device.type != "cuda" or len(launches) == 1:
        for launch in launches:
            launch()
        return
    current = torch.cuda.current_stream(device)
    streams = _side_streams(device, len(launches))
    for launch, stream in zip(launches, streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()
    for stream in streams:
        current.wait_stream(stream)


@cache
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))
