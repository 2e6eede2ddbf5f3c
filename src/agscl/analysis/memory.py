"""What methods store between tasks, by their names: forecast for a model, after so many tasks.

A forecast is exact, except for counts that depend on training, where it is an upper bound: AGS-CL stores the anchors of
important nodes only, and GPM and TRGP as many directions as the data has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agscl.methods import find_methods
from agscl.methods._parts.memory import COMMON_PURPOSES, Amount, LayerInputs, Memory, Outline

__all__ = ["COMMON_PURPOSES", "WEIGHT_WISE", "Amount", "LayerInputs", "Memory", "Outline", "forecast_memory"]

WEIGHT_WISE = ("ewc", "si", "rwalk", "mas")
"""The methods that the paper compares its memory with: importances for every weight."""


def forecast_memory(method: str, outline: Outline, tasks: int, settings: Mapping[str, Any] | None = None) -> Memory:
    """What `method`, given by its name, stores after so many tasks with these settings."""
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, not {tasks}")
    methods = find_methods()
    if method not in methods:
        raise ValueError(f"no memory forecast for method {method!r}. Available: {', '.join(methods)}")
    return methods[method].forecast_memory(outline, tasks, settings or {})
