"""Do importances tell which nodes matter? Accuracy while nodes are pruned in the order of their importance.

A node is pruned by setting its incoming weights to 0, with its bias and everything BatchNorm adds to it, so that its
output is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from agscl.graph.nodes import NodeGraph

STEPS = 50
"""In how many steps all nodes are pruned."""


@dataclass(frozen=True)
class PerturbationCurve:
    """A score after so many nodes were pruned; the first entry is the score of the intact model."""

    pruned: list[int]
    scores: list[float]

    @property
    def aopc(self) -> list[float]:
        """The area over the perturbation curve up to each point: the mean loss of score so far."""
        lost = [self.scores[0] - score for score in self.scores]
        return [sum(lost[: end + 1]) / (end + 1) for end in range(len(lost))]


def order_layer_by_layer(graph: NodeGraph, importances: Tensor) -> Tensor:
    """An order of the nodes, least important first, in which all layers lose the same share of nodes at any moment.

    Importances of different layers may differ in scale: ordered by value alone, a layer with small ones would be pruned
    completely before the others, and the network would compute nothing.
    """
    ranks = torch.zeros(graph.size, dtype=torch.double)
    for in_layer in graph.groups_by_layer():
        groups = in_layer.nonzero().flatten()
        ascending = importances.cpu()[groups].argsort(stable=True)
        ranks[groups[ascending]] = (torch.arange(len(groups), dtype=torch.double) + 0.5) / max(len(groups), 1)
    return ranks.argsort(stable=True)


def prune_in_order(
    graph: NodeGraph, order: Sequence[int] | Tensor, score: Callable[[], float], steps: int = STEPS
) -> PerturbationCurve:
    """Prune all nodes in this order, in so many steps, and record the score after each; then restore the model.

    >>> highest_first = method.knowledge.omega.argsort(descending=True)
    >>> prune_in_order(method.graph, highest_first, lambda: accuracy(model)).aopc[-1]
    """
    groups = torch.as_tensor(order).cpu()
    if sorted(groups.tolist()) != list(range(graph.size)):
        raise ValueError(f"the order must name each of the {graph.size} nodes once")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    ends = sorted({round(graph.size * step / steps) for step in range(1, steps + 1)} - {0})
    pruned, scores = [0], [score()]
    with _restored_afterwards(graph):
        for end in ends:
            _prune(graph, groups[pruned[-1] : end])
            pruned.append(end)
            scores.append(score())
    return PerturbationCurve(pruned, scores)


def _list_incoming(graph: NodeGraph) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor that must be 0 for a node's output to be 0, with the group of each of its rows."""
    for _, parameter, row_groups in graph.incoming_parameters():
        yield parameter.data, row_groups
    for norm in graph.norms.values():
        if norm.module.running_mean is not None:
            yield norm.module.running_mean, norm.groups


def _prune(graph: NodeGraph, groups: Tensor) -> None:
    for tensor, row_groups in _list_incoming(graph):
        tensor[torch.isin(row_groups.cpu(), groups).to(tensor.device)] = 0


@contextmanager
def _restored_afterwards(graph: NodeGraph) -> Iterator[None]:
    before = [(tensor, tensor.clone()) for tensor, _ in _list_incoming(graph)]
    try:
        yield
    finally:
        for tensor, value in before:
            tensor.copy_(value)
