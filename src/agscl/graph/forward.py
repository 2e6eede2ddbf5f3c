"""Forward passes that restore the model's state afterwards, and watchers that report every ReLU and what runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agscl.heads import MultiHead

__all__ = ["ReLUWatcher", "preserve_model_state", "switch_mode", "watch_running"]

_RELUS = {F.relu, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_CLAMPS = {F.hardtanh, torch.clamp, torch.clamp_, torch.clamp_min, torch.clamp_min_}  # nn.ReLU6 calls F.hardtanh
_CLAMPS |= {Tensor.clamp, Tensor.clamp_, Tensor.clamp_min, Tensor.clamp_min_}


@contextmanager
def switch_mode(model: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Put `model` into eval (or train) mode; the modes of all modules are restored at the end.

    Linear heads, of which there may be hundreds, compute the same in both modes and are left as they are.
    """
    parts = _list_parts(model)
    modes = [(model, model.training), *((module, module.training) for part in parts for module in part.modules())]
    model.training = train
    for part in parts:
        part.train(train)
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.training = training


def _list_parts(model: nn.Module) -> list[nn.Module]:
    """The model, or its trunk and the heads that are no linear layers."""
    if type(model) is not MultiHead:
        return [model]
    return [model.trunk, *(head for head in model.heads.values() if type(head) is not nn.Linear)]


@contextmanager
def preserve_model_state(model: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Put `model` into eval (or train) mode; modes, buffers and random states are restored at the end.

    Within, what torch.compile compiled runs uncompiled: hooks and watchers see every layer and ReLU.
    """
    parts = _list_parts(model)
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.is_initialized()
    weights = (p for part in parts for p in part.parameters()) if cuda else ()
    devices = {p.device.index for p in weights if p.device.type == "cuda"}
    try:
        with (
            switch_mode(model, train=train),
            torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)),
            torch.no_grad(),
            _run_uncompiled(),
        ):
            yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _run_uncompiled() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


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
