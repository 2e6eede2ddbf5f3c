"""Watchers of a forward pass: they report every ReLU, and which modules run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["ReLUWatcher", "watch_running"]

_RELUS = {F.relu, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_CLAMPS = {F.hardtanh, torch.clamp, torch.clamp_, torch.clamp_min, torch.clamp_min_}  # nn.ReLU6 calls F.hardtanh
_CLAMPS |= {Tensor.clamp, Tensor.clamp_, Tensor.clamp_min, Tensor.clamp_min_}


@contextmanager
def watch_running(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield a list that always holds those of `modules` that run at the moment."""
    running: list[nn.Module] = []

    def record_entry(module: nn.Module, args: Any) -> None:
        running.append(module)

    def record_exit(module: nn.Module, args: Any, output: Any) -> None:
        del running[-1:]

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(record_entry))
            stack.enter_context(module.register_forward_hook(record_exit, always_call=True))
        yield running


class ReLUWatcher(TorchFunctionMode):
    """Calls `on_input(input)` before and `on_output(output)` after every ReLU, a module or a function."""

    def __init__(
        self,
        *,
        on_input: Callable[[Tensor], None] = lambda relu_input: None,
        on_output: Callable[[Tensor], None] = lambda relu_output: None,
    ) -> None:
        super().__init__()
        self.on_input, self.on_output = on_input, on_output

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_relu(func, args, kwargs):
            return func(*args, **kwargs)
        self.on_input(args[0] if args else kwargs["input"])
        result = func(*args, **kwargs)
        self.on_output(result)
        return result


def _is_relu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _RELUS:
        return True
    if func not in _CLAMPS:
        return False
    low = kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else None))
    high = kwargs.get("max", kwargs.get("max_val", args[2] if len(args) > 2 else 1 if func is F.hardtanh else None))
    is_numbers = isinstance(low, int | float) and isinstance(high, int | float | None)
    return is_numbers and low == 0 and (high is None or high >= 1)  # the graph is probed with values below 1
