"""Task sequences: what is learned, one task after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class DataMissing(Exception):
    """The data of a task sequence is not there; the message says where it was looked for and what to do."""


@dataclass(frozen=True)
class Task:
    """One task's data. Inputs are (examples, ...) floats, labels (examples,) integers below `classes`."""

    name: str
    classes: int
    train_x: Tensor
    train_y: Tensor
    valid_x: Tensor | None
    valid_y: Tensor | None
    test_x: Tensor
    test_y: Tensor

    def to(self, device: torch.device | str) -> Task:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


TaskSequence = tuple[Task, ...]

_LOADERS = ("digits", "omniglot")


def load(name: str, *, seed: int, **options: object) -> TaskSequence:
    """The task sequence called `name`; `options` are those of its own `load` function."""
    if name not in _LOADERS:
        raise ValueError(f"no task sequence is called {name!r}; there are: {', '.join(_LOADERS)}")
    loader: Callable[..., TaskSequence] = import_module(f"agscl.tasks.{name}").load
    return loader(seed=seed, **options)
