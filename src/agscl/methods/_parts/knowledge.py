"""`Knowledge`: what a method keeps from task to task; and how it, and a plan, are saved and loaded.

A saved state consists of dicts, lists, tensors and plain values, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Knowledge", "load_attributes", "save_attributes"]


@dataclass
class Knowledge:
    """What lasts between tasks. A method adds fields, and says in `purposes` what `memory()` counts their tensors as.

    Every field is saved.
    """

    purposes: ClassVar[Mapping[str, str]] = {}

    tasks: list[str] = field(default_factory=list)  # in the order in which they began
    head_digests: dict[str, str] = field(default_factory=dict)  # of each task's head, when the task ended
    output_digests: dict[str, dict[str, str]] = field(default_factory=dict)  # see `recorded_outputs`
    given_output_digests: dict[str, dict[str, str]] = field(default_factory=dict)  # the same on probes of the user
    weight_dtypes: list[str] = field(default_factory=list)  # of the model, when the last task ended
    warned: list[str] = field(default_factory=list)  # keys of the warnings that were given
    statistics: dict[str, Any] = field(default_factory=dict)  # of the last task
    parameter_order: list[list[list[str]]] = field(default_factory=list)  # per optimizer and group, when a task began

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that the knowledge holds between tasks, by purpose."""
        by_purpose: dict[str, list[Tensor]] = {}
        for name, purpose in self.purposes.items():
            by_purpose.setdefault(purpose, []).extend(_find_tensors(getattr(self, name)))
        return by_purpose

    def state_dict(self) -> dict[str, Any]:
        return save_attributes(self, [entry.name for entry in fields(self)])

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        load_attributes(self, state, device)


def save_attributes(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """Copies of the named attributes of knowledge or a plan, as plain values and tensors."""
    return {name: _copy(getattr(owner, name)) for name in names}


def load_attributes(owner: Any, state: Mapping[str, Any], device: torch.device) -> None:
    """Set the attributes of knowledge or a plan that `save_attributes` returned, with their tensors on `device`."""
    for name, value in state.items():
        current = getattr(owner, name)
        if isinstance(current, torch.Generator):
            current.set_state(value["generator"].cpu())
        elif hasattr(current, "saved"):
            load_attributes(current, value, device)
        else:
            setattr(owner, name, _move(value, device))


def _copy(value: Any) -> Any:
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if hasattr(value, "saved"):  # an object that names its attributes to save, as a plan does
        return save_attributes(value, value.saved)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    return [_move(item, device) for item in value] if isinstance(value, list | tuple) else value


def _find_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _find_tensors(part)]
