"""What can be compared by name, an entry each: every method of `agscl.methods`, and two bounds beside them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agscl.experiments.bounds import Joint, Separate
from agscl.methods import find_methods
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.search_axis import SearchAxis

REFERENCE = "finetune"
"""What plasticity is measured against."""
WEIGHT_WISE = ("ewc", "si", "rwalk", "mas")
"""The methods that the paper compares its memory with: importances for every weight."""


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
        """One line about the method for a person: the first of its class's docstring."""
        return (inspect.getdoc(self.method_class) or "").splitlines()[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The type of each of the method's settings, by name."""
        if self.is_bound:
            return {}
        hints = typing.get_type_hints(self.method_class.Config)
        return {field.name: hints[field.name] for field in fields(self.method_class.Config)}

    @property
    def search(self) -> tuple[SearchAxis, ...]:
        """What a search tries for the method."""
        return () if self.is_bound else self.method_class.search

    def forecast_memory(self, outline: Outline, tasks: int, settings: Mapping[str, Any] | None = None) -> Memory:
        """What the method of this entry stores after so many tasks with these settings.

        Exact, except for counts that depend on training, where it is an upper bound: AGS-CL stores the anchors of
        important nodes only, and GPM and TRGP as many directions as the data has.
        """
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1, not {tasks}")
        if self.is_bound:
            raise ValueError(f"no memory forecast for method {self.title!r}. Available: {', '.join(find_methods())}")
        forecast: Memory = self.method_class.forecast_memory(outline, tasks, settings or {})
        return forecast


METHODS: dict[str, MethodEntry] = {
    **{name: MethodEntry(method.title, method) for name, method in find_methods().items()},
    "joint": MethodEntry("joint", Joint, is_bound=True),
    "separate": MethodEntry("separate", Separate, is_bound=True),
}


def get_entry(name: str) -> MethodEntry:
    """The entry of a method or bound; raises ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}. There are: {', '.join(METHODS)}")
    return METHODS[name]
