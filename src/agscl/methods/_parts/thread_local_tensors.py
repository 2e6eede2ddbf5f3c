"""Tensors that one thread reads in place of a module's own, as `module.weight`.

Other threads, `parameters()`, `state_dict()` and optimizers see the module's own all the while.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

__all__ = ["Key", "PerThread", "View", "make_replaceable", "restore_plain_dicts"]

Key = tuple[int, str]
"""The number of a `LocalTensors`, and the name of a tensor in it."""

_numbers = itertools.count()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}  # by number of the `PerThread`
        self.views: dict[int, dict[Key, Tensor]] = {}  # by number of the `View`; the last shown counts most


_thread = _Thread()


class PerThread:
    """A value of its own for each thread, None at first; a copy has none."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    def get(self) -> Any:
        return _thread.values.get(self.number)

    def set(self, value: Any) -> None:
        _thread.values[self.number] = value

    def clear(self) -> None:
        _thread.values.pop(self.number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, ()


class LocalTensors(dict[str, Any]):
    """A module's `_parameters` or `_buffers`, of which a `View` may replace some for the threads that show it."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.number = next(_numbers)

    def __getitem__(self, name: str) -> Any:
        for view in reversed(_thread.views.values()):
            if (self.number, name) in view:
                return view[self.number, name]
        return super().__getitem__(name)

    def __setitem__(self, name: str, tensor: Any) -> None:
        """What is replaced in this thread is set in this thread alone, as by a `functional_call`."""
        for view in reversed(_thread.views.values()):
            if (self.number, name) in view:
                view[self.number, name] = tensor
                return
        super().__setitem__(name, tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalTensors, (dict(self),)  # a copy has a number of its own


class View:
    """What the current thread reads in place of some tensors; every thread shows and clears it for itself."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    def show(self, tensors: dict[Key, Tensor]) -> None:
        """Let this thread read these tensors, and none that it was shown before."""
        self.clear()
        if tensors:
            _thread.views[self.number] = tensors

    def clear(self) -> None:
        _thread.views.pop(self.number, None)

    @property
    def is_shown(self) -> bool:
        return self.number in _thread.views

    def __reduce__(self) -> tuple[Any, ...]:
        return View, ()


def make_replaceable(module: nn.Module, kind: Literal["_parameters", "_buffers"], name: str) -> Key:
    """Let a `View` replace a parameter or buffer of the module, under the key that is returned."""
    tensors = getattr(module, kind)
    if not isinstance(tensors, LocalTensors):
        tensors = LocalTensors(tensors)
        setattr(module, kind, tensors)
    return tensors.number, name


def restore_plain_dicts(modules: Iterable[nn.Module]) -> None:
    """Undo what `make_replaceable` did to the modules."""
    for module in modules:
        module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
