"""Contexts that restore a model's state afterwards: train or eval mode, buffers, random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from agscl.heads import MultiHead

__all__ = ["preserve_model_state", "switch_mode"]


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
