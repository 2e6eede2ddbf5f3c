"""Replacing the forward of modules within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from agscl.fast._torch_internals import has_backward_hooks


def can_replace_forward(module: nn.Module) -> bool:
    """Whether the module runs the forward of its class, and has no backward hook, which another forward would skip."""
    return "forward" not in vars(module) and not has_backward_hooks(module)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let calls of these modules run other functions; their parameters, hooks and names stay as they are."""
    previous = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward_before in previous.items():
            if forward_before is None:
                del module.forward
            else:
                module.forward = forward_before
