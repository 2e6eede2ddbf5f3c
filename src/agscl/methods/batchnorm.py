"""BatchNorm while some of its channels must stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

__all__ = ["KeptStatistics"]


class KeptStatistics:
    """Normalises the kept channels of a BatchNorm by their kept statistics in training too.

    The other channels use and update batch statistics as ever. (Only putting statistics back after each step would
    train on batch statistics what is later evaluated on kept ones: the old task survives, the new one is ruined.)
    """

    def __init__(self, module: _BatchNorm, keep: Tensor) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self.module = module
        self.keep = keep.to(module.running_mean.device)
        self.mean, self.var = module.running_mean.clone(), module.running_var.clone()
        self._own: tuple[Tensor, Tensor] | None = None
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the forward pass update copies: autograd holds on to the statistics that it saw."""
        if module.training:
            self._own = module._buffers["running_mean"], module._buffers["running_var"]  # type: ignore[assignment]
            module._buffers.update(running_mean=self._own[0].clone(), running_var=self._own[1].clone())  # type: ignore[index]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        if self._own is None:
            return None
        (mean, var), self._own = self._own, None
        with torch.no_grad():
            mean.copy_(torch.where(self.keep, self.mean, module._buffers["running_mean"]))  # type: ignore[arg-type]
            var.copy_(torch.where(self.keep, self.var, module._buffers["running_var"]))  # type: ignore[arg-type]
        module._buffers.update(running_mean=mean, running_var=var)
        if output is None:  # the forward pass failed
            return None
        given = args[0]
        channels = (1, -1, *[1] * (given.dim() - 2))
        scale = torch.rsqrt(self.var + self.module.eps)
        normalised = (given - self.mean.view(channels)) * scale.view(channels)
        if self.module.affine:
            normalised = normalised * self.module.weight.view(channels) + self.module.bias.view(channels)
        return torch.where(self.keep.view(channels), normalised.to(output.dtype), output)
