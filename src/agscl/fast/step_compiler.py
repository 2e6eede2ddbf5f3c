"""Compiling a trunk, and functions around it, for steps that another loop than the supervised one makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import nn

from agscl.fast._torch_internals import is_torch_compile_error
from agscl.fast.fast_trunk import FastTrunk
from agscl.fast.torch_compiled_trunk import compile_failure
from agscl.system.process import gc_paused
from agscl.training.engine import StepCompiler


class TorchStepCompiler(StepCompiler):
    """Compiles the trunk as `FastTrunk` does, and functions by torch's compiler, when they are first called."""

    def __init__(self, trunk: nn.Module, device: torch.device, *, bf16_channels_last: bool) -> None:
        on_gpu = device.type == "cuda"
        self.trunk = FastTrunk(trunk, device, rewrite_layers=on_gpu, bf16_channels_last=bf16_channels_last)
        self.trunk.wait_for_warm_up()

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.trunk.version

    def trunk_context(self) -> AbstractContextManager[Any]:
        return self.trunk.use_fast_forward()

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            try:
                with gc_paused():
                    return compiled(*args)
            except Exception as error:
                if not is_torch_compile_error(error):
                    raise
                raise compile_failure(error) from error

        return call
