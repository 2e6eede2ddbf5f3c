"""Digests of groups of nodes: which of them a task changed or left as they were; and how far groups moved."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agscl.certificate import NEVER, Layout
from agscl.digests import digest_groups
from agscl.graph.nodes import NodeGraph
from agscl.graph.rows import Rows
from agscl.methods._agscl.proximal import group_norms

__all__ = ["DIGEST_BYTES", "GroupDigests", "find_moved_groups"]

DIGEST_BYTES = 16


class GroupDigests:
    """A digest of 16 bytes per group, taken when a task ends: replaces a copy of the weights to compare with."""

    saved: ClassVar[tuple[str, ...]] = ("weights", "rows", "unmoved", "moved", "zero_rule")

    def __init__(self, graph: NodeGraph, zero_rule: str) -> None:
        self.model, self.zero_rule = graph.model, zero_rule
        self.layout = Layout(
            size=graph.size,
            parameters={name: groups.tolist() for name, _, groups in graph.incoming_parameters()},
            statistics={
                f"{norm.name}.{key}": norm.groups.tolist()
                for norm in graph.norms.values()
                for key in ("running_mean", "running_var")
            },
            readers={
                f"{name}.weight": graph.readers[name].source_groups().flatten(1).tolist()
                for name in graph.layers
                if name in graph.readers
            },
        )
        self.unmoved: list[int] = []  # groups important before the last task that it left unchanged
        self.moved: list[int] = []  # and those that it changed
        self.update(torch.full((graph.size,), NEVER))

    def update(self, first_task: Tensor) -> None:
        """Digest each group, without and with BatchNorm statistics, to compare with when the next task ends."""
        self.weights, self.rows = self._compute(first_task)

    def compare(self, first_task: Tensor) -> Tensor:
        """(groups,) whether a group's digest changed since `update`; also sets `moved` and `unmoved`."""
        weights, rows = self._compute(first_task)
        important = (first_task != NEVER).cpu()
        same = torch.tensor([old == new for old, new in zip(self.rows, rows, strict=True)])
        self.unmoved = (important & same).nonzero().flatten().tolist()
        self.moved = (important & ~same).nonzero().flatten().tolist()
        return torch.tensor([old != new for old, new in zip(self.weights, weights, strict=True)])

    def _compute(self, first_task: Tensor) -> tuple[list[str], list[str]]:
        layout = self.layout
        later = layout.find_later_inputs(first_task.tolist(), self.zero_rule)
        modules = dict.fromkeys(name.rpartition(".")[0] for name in layout.rows)
        states = {name: self.model.get_submodule(name).state_dict() for name in modules}
        tensors = {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.items()}
        weights = digest_groups(tensors, layout.parameters, layout.size, later)
        return weights, digest_groups(tensors, layout.rows, layout.size, later) if layout.statistics else weights

    @property
    def bytes(self) -> int:
        return DIGEST_BYTES * self.layout.size * (2 if self.layout.statistics else 1)

    def find_changed(self, first_task: Tensor) -> list[int]:
        """The important groups whose live weights do not have the digests that the last task ended with."""
        _, live = self._compute(first_task)
        return [g for g, task in enumerate(first_task.tolist()) if task != NEVER and live[g] != self.rows[g]]


def find_moved_groups(graph: NodeGraph, start_rows: list[Tensor], distance: float) -> Tensor:
    """(groups,) which groups moved: whose incoming weights are `distance` or more away from their `start_rows`."""
    rows = Rows(graph, torch.ones(graph.size, dtype=torch.bool))
    return (group_norms(torch._foreach_sub(rows.gather(), start_rows), rows.members) >= distance).cpu()
