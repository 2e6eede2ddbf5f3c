"""How much of a network is taken by which task, and how many more tasks fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agscl.certificate import NEVER
from agscl.graph.nodes import NodeGraph
from agscl.methods._agscl.budget import Budget, count_kept, count_tasks_left

__all__ = ["Capacity", "LayerCapacity", "measure_capacity"]


@dataclass(frozen=True)
class LayerCapacity:
    """The nodes of one layer. Nodes that are only free or important together count as one, in the first such layer."""

    layer: str
    nodes: int
    taken: dict[str, int]
    """How many nodes each task made important."""
    free: int
    tasks_left: int | None
    """How many more tasks find a free node; None without a budget."""

    def count_above(self, budget: Budget) -> int:
        """How many nodes of the layer's capacity tasks have kept beyond their budget."""
        free, above = self.nodes, 0
        for learned, taken in enumerate(self.taken.values()):
            above += max(0, taken - count_kept(free, budget, learned))
            free -= taken
        return above


@dataclass(frozen=True)
class Capacity:
    """What each layer of a network has taken and free."""

    budget: Budget | None
    layers: list[LayerCapacity]

    @property
    def tasks_left(self) -> int | None:
        """For how many more tasks the capacity is enough: a free node in every layer; None without a budget."""
        left = [layer.tasks_left for layer in self.layers if layer.tasks_left is not None]
        return min(left, default=None)

    def summarise(self) -> dict[str, Any]:
        """The capacity as plain values, with what all tasks and what the last task has taken."""
        layers = [
            {**vars(layer), "taken": sum(taken), "taken_by_last": taken[-1] if taken else 0}
            for layer in self.layers
            for taken in [list(layer.taken.values())]
        ]
        return {"tasks_left": self.tasks_left, "layers": layers}

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.layer) for layer in self.layers))
        lines = [f"{'layer':<{width}}  nodes  taken   free  more tasks"]
        for layer in self.layers:
            left = "–" if layer.tasks_left is None else layer.tasks_left
            taken = sum(layer.taken.values())
            lines.append(f"{layer.layer:<{width}}  {layer.nodes:>5}  {taken:>5}  {layer.free:>5}  {left:>10}")
        if self.budget is not None and self.tasks_left is not None:
            plural = "" if self.tasks_left == 1 else "s"
            lines.append(
                f"{self.tasks_left} more task{plural} will find free nodes in every layer (budget {self.budget})"
            )
            narrowest = min(self.layers, key=lambda layer: layer.free)
            if narrowest.free:
                kept = count_kept(narrowest.free, self.budget, len(narrowest.taken))
                lines.append(f"the next may keep {kept} of the {narrowest.free} free nodes of {narrowest.layer}")
        return "\n".join(lines)


def measure_capacity(graph: NodeGraph, first_task: Tensor, tasks: Sequence[str], budget: Budget | None) -> Capacity:
    """The capacity of a network in which group g became important in task number `first_task[g]`, if ever."""
    first = first_task.cpu()
    layers = []
    for name, in_layer in zip(graph.layers, graph.groups_by_layer(), strict=True):
        own = first[in_layer]
        if not len(own):  # all its nodes are counted with another layer's
            continue
        free = int((own == NEVER).sum())
        counts = own[own != NEVER].bincount(minlength=len(tasks)).tolist()
        taken = dict(zip(tasks, counts, strict=True))
        left = None if budget is None else count_tasks_left(free, budget, len(tasks))
        layers.append(LayerCapacity(name, len(own), taken, free, left))
    return Capacity(budget, layers)


def count_nodes(free: Tensor, important_before: Tensor, changed: Tensor) -> dict[str, Any]:
    """What a task took of the capacity, from (groups,) masks: nodes free after it, important before, changed by it."""
    size, count = len(free), int(free.sum())
    unchanged, frozen = int((~changed).sum()), int((~changed & important_before.cpu()).sum())
    return {
        "nodes": size,
        "free": count,
        "sparsity": count / size,
        "unchanged": unchanged,
        "used_capacity": unchanged / size,
        "important_before": int(important_before.sum()),
        "frozen": frozen,
        "frozen_capacity": frozen / size,
    }
