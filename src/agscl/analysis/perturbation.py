"""Whether importances tell which nodes matter: accuracy while nodes are taken away, in the order of importance.

A node is taken away by setting its incoming weights to 0, with its bias and all that BatchNorm adds to it, so that it
gives 0 to all who read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from agscl.graph.nodes import NodeGraph

STEPS = 50
"""In how many steps all nodes are taken away."""


@dataclass(frozen=True)
class Perturbation:
    """What was left of a score after so many nodes had been taken away; the first is the score with all of them."""

    pruned: list[int]
    scores: list[float]

    @property
    def aopc(self) -> list[float]:
        """The area over the curve up to each of its points: the mean of all that was lost, up to there."""
        lost = [self.scores[0] - score for score in self.scores]
        return [sum(lost[: end + 1]) / (end + 1) for end in range(len(lost))]


def layer_by_layer(graph: NodeGraph, importances: Tensor) -> Tensor:
    """An order of the nodes, least important first, in which all layers lose the same share of theirs at any moment.

    Importances of different layers need not be alike in scale: by value alone, a layer of small ones goes first as a
    whole, and with it all that the network computes.
    """
    places = torch.zeros(graph.size, dtype=torch.double)
    for here in graph.in_first_layer():
        mine = here.nonzero().flatten()
        ascending = importances.cpu()[mine].argsort(stable=True)
        places[mine[ascending]] = (torch.arange(len(mine), dtype=torch.double) + 0.5) / max(len(mine), 1)
    return places.argsort(stable=True)


def perturb(
    graph: NodeGraph, order: Sequence[int] | Tensor, score: Callable[[], float], steps: int = STEPS
) -> Perturbation:
    """Take the nodes away in this order, in so many steps; the model is then as before.

    >>> highest_first = method.omega.argsort(descending=True)
    >>> perturb(method.graph, highest_first, lambda: accuracy(model)).aopc[-1]
    """
    groups = torch.as_tensor(order).cpu()
    if sorted(groups.tolist()) != list(range(graph.size)):
        raise ValueError(f"the order must name each of the {graph.size} nodes once")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    ends = sorted({round(graph.size * step / steps) for step in range(1, steps + 1)} - {0})
    pruned, scores = [0], [score()]
    with _kept(graph):
        for end in ends:
            _silence(graph, groups[pruned[-1] : end])
            pruned.append(end)
            scores.append(score())
    return Perturbation(pruned, scores)


def _held(graph: NodeGraph) -> Iterator[tuple[Tensor, Tensor]]:
    """All that must be 0 for a node to give 0, each tensor with the group of each of its rows."""
    for _, parameter, of_rows in graph.parameters():
        yield parameter.data, of_rows
    for norm in graph.norms.values():
        if norm.module.running_mean is not None:
            yield norm.module.running_mean, norm.groups


def _silence(graph: NodeGraph, groups: Tensor) -> None:
    for tensor, of_rows in _held(graph):
        tensor[torch.isin(of_rows.cpu(), groups).to(tensor.device)] = 0


@contextmanager
def _kept(graph: NodeGraph) -> Iterator[None]:
    before = [(tensor, tensor.clone()) for tensor, _ in _held(graph)]
    try:
        yield
    finally:
        for tensor, value in before:
            tensor.copy_(value)
