"""A budget of nodes per task: how many of each layer's free nodes it may keep, how many tasks fit. Beyond the paper.

The paper's penalty μ Σ‖θ‖ on free nodes becomes a constraint: at most k free nodes of a layer differ from 0. Its
proximal operator is a projection, which `node_pruner` runs in a few steps while a task is learned.
"""

from __future__ import annotations

import math
from typing import Any

from agscl.graph.nodes import NodeGraph

__all__ = [
    "BUDGET_FORMULA",
    "BUDGET_RULE",
    "Budget",
    "check_budget",
    "count_kept",
    "count_tasks_left",
    "is_budget",
]

Budget = int | float
BUDGET_FORMULA: tuple[str, ...] = (
    "within a task: at most k free nodes of a layer differ from 0, and important nodes equal their anchors",
    "k = ⌈budget · free nodes⌉, or ⌈free nodes / tasks left⌉ where budget is a number of tasks",
    "after it: Ω ← ηΩ + mean ReLU activation; a node with Ω > 0 is important",
)
BUDGET_RULE = "a share of each layer's free nodes (above 0, at most 1.0) or a whole number of tasks (1 or more)"


def is_budget(value: Any) -> bool:
    """Whether a value follows `BUDGET_RULE`."""
    if isinstance(value, int):
        return value >= 1 and not isinstance(value, bool)
    return isinstance(value, float) and 0 < value <= 1


def count_kept(free: int, budget: Budget, learned: int) -> int:
    """How many of a layer's `free` groups a task may keep, when so many tasks are `learned`."""
    if isinstance(budget, int):  # the tasks that are left share alike
        return math.ceil(free / max(1, budget - learned))
    return math.ceil(round(free * budget, 9))


def count_tasks_left(free: int, budget: Budget, learned: int) -> int:
    """For how many more tasks a layer with so many `free` groups has one left."""
    tasks = 0
    while free:
        free -= count_kept(free, budget, learned + tasks)
        tasks += 1
    return tasks


def check_budget(graph: NodeGraph, budget: Budget | None) -> None:
    """Refuse a budget with which a task would get less than one node even in the widest layer."""
    if budget is None:
        return
    sizes = dict(zip(graph.layers, (int(in_layer.sum()) for in_layer in graph.groups_by_layer()), strict=True))
    widest = max(sizes, key=sizes.__getitem__)
    share = 1 / budget if isinstance(budget, int) else budget
    if share * sizes[widest] < 1:
        limit = sizes[widest] if isinstance(budget, int) else math.ceil(1e4 / sizes[widest]) / 1e4
        raise ValueError(
            f"budget={budget} leaves a task less than one node: the widest layer, {widest}, has {sizes[widest]}. "
            f"Use {'at most' if isinstance(budget, int) else 'at least'} {limit}, or a wider network."
        )
