"""What changed during a task, told by digests: the source of figures on capacity and of certificates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agscl.certificate import NEVER, Layout, group_digests
from agscl.graph.nodes import NodeGraph

__all__ = ["Ledger"]


class Ledger:
    """Digests of every group of nodes as the task began: sixteen bytes per group instead of a copy of the weights."""

    def __init__(self, graph: NodeGraph) -> None:
        self.model = graph.model
        self.layout = Layout(
            size=graph.size,
            parameters={name: groups.tolist() for name, _, groups in graph.parameters()},
            statistics={
                f"{norm.name}.{key}": norm.groups.tolist()
                for norm in graph.norms.values()
                for key in ("running_mean", "running_var")
            },
            readers={
                f"{name}.weight": graph.readers[name].columns().flatten(1).tolist()
                for name in graph.layers
                if name in graph.readers
            },
        )
        self.held: list[int] = []  # groups important before the last task that it left alone
        self.moved: list[int] = []  # and those that it changed
        self.restart()

    def restart(self) -> None:
        """Take the digests with which the next task's end is compared."""
        self.weights, self.whole = self._digest()

    def compare(self, important: Tensor) -> Tensor:
        """(groups,) whether a group's weights changed since `restart`; notes which important groups held."""
        weights, whole = self._digest()
        held = [old == new for old, new in zip(self.whole, whole, strict=True)]
        groups = important.nonzero().flatten().tolist()
        self.held, self.moved = [g for g in groups if held[g]], [g for g in groups if not held[g]]
        return torch.tensor([old != new for old, new in zip(self.weights, weights, strict=True)])

    def _digest(self) -> tuple[list[str], list[str]]:
        """Per group, of its weights, and of these with its BatchNorm statistics."""
        tensors, layout = self.model.state_dict(), self.layout
        weights = group_digests(tensors, layout.parameters, layout.size)
        return weights, group_digests(tensors, layout.rows, layout.size) if layout.statistics else weights

    def claims(self, first: Tensor) -> dict[str, Any]:
        """What a certificate says of the groups; `first` is the task each became important in."""
        tasks = first.tolist()
        return {
            "layout": self.layout,
            "first": tasks,
            "digests": [None if task == NEVER else d for d, task in zip(self.whole, tasks, strict=True)],
            "held": self.held,
            "moved": self.moved,
        }

    @property
    def bytes(self) -> int:
        return 16 * self.layout.size * (2 if self.layout.statistics else 1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "whole": self.whole, "held": self.held, "moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.whole = list(state["weights"]), list(state["whole"])
        self.held, self.moved = list(state["held"]), list(state["moved"])
