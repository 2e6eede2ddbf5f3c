"""Forward passes that leave no trace in the model, and that tell of every ReLU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["WatchReLUs", "preserve_model_state"]

_RELUS = {F.relu, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_CLAMPS = {torch.clamp, torch.clamp_, torch.clamp_min, torch.clamp_min_}
_CLAMPS |= {Tensor.clamp, Tensor.clamp_, Tensor.clamp_min, Tensor.clamp_min_}


@contextmanager
def preserve_model_state(model: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Run `model` in eval (or train) mode without leaving a trace: modes, buffers and random states come back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    model.train(train)
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002


class WatchReLUs(TorchFunctionMode):
    """Calls `seen(input, output)` at every ReLU, be it a module or a function, in call order."""

    def __init__(self, seen: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_relu(func, args, kwargs):
            return func(*args, **kwargs)
        given = (args[0] if args else kwargs["input"]).clone()  # a ReLU in place overwrites it
        result = func(*args, **kwargs)
        self.seen(given, result)
        return result


def _is_relu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _RELUS:
        return True
    if func not in _CLAMPS:
        return False
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    return isinstance(low, int | float) and low == 0 and high is None
