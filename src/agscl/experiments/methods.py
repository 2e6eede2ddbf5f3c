"""What can be compared by name: every method of `agscl.methods`, and two bounds beside them."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass, fields
from typing import Any

from agscl.experiments.protocols import Joint, Separate
from agscl.methods import find_methods
from agscl.methods._parts.search_axis import SearchAxis

REFERENCE = "finetune"
"""What plasticity is measured against."""


@dataclass(frozen=True)
class MethodEntry:
    """What can be compared under one name."""

    title: str
    """Its name in tables."""
    method_class: type[Any]
    is_bound: bool = False
    """Whether it is a bound: it needs all data or several networks, so it is no method one could use."""

    @property
    def about(self) -> str:
        """One line for a person: the first of the class's docstring."""
        return (inspect.getdoc(self.method_class) or "").splitlines()[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The type of each setting, by name."""
        if self.is_bound:
            return {}
        hints = typing.get_type_hints(self.method_class.Config)
        return {field.name: hints[field.name] for field in fields(self.method_class.Config)}

    @property
    def search(self) -> tuple[SearchAxis, ...]:
        """What a search tries."""
        return () if self.is_bound else self.method_class.search


METHODS: dict[str, MethodEntry] = {
    **{name: MethodEntry(method.title, method) for name, method in find_methods().items()},
    "joint": MethodEntry("joint", Joint, is_bound=True),
    "separate": MethodEntry("separate", Separate, is_bound=True),
}


def get_entry(name: str) -> MethodEntry:
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}. There are: {', '.join(METHODS)}")
    return METHODS[name]
