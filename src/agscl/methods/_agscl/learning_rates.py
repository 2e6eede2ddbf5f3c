"""The learning rate in force for every node, whatever optimizer and parameter group its layer is in."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.graph.nodes import NodeGraph
from agscl.graph.rows import Rows
from agscl.system.sums import sum_dtype

__all__ = ["LayerRates", "select_rates"]


class LayerRates:
    """Per optimizer and param group, the mean rate of the steps since `restart` (until one comes, the mean before)."""

    saved: ClassVar[tuple[str, ...]] = ("means", "counts")

    def __init__(self, graph: NodeGraph, optimizers: tuple[Optimizer, ...]) -> None:
        self.graph, self.optimizers = graph, optimizers
        self.means: list[list[float | Tensor]] = [[] for _ in optimizers]
        self.counts = [0] * len(optimizers)  # steps in each mean
        position_of = {
            id(p): (number, group_number)
            for number, optimizer in enumerate(optimizers)
            for group_number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._group_positions = {name: position_of.get(id(layer.weight)) for name, layer in graph.layers.items()}
        main_number = next((position[0] for position in self._group_positions.values() if position), 0)
        self.main = optimizers[main_number]
        """The optimizer that trains the first layer: its steps are counted."""
        self.untrained = [name for name, position in self._group_positions.items() if position is None]
        """Layers whose weights no optimizer holds."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.graph.layers.values())).weight.device

    @property
    def is_capturing(self) -> bool:
        """Whether the step with these rates is captured as a CUDA graph: what it does now, each replay will do."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def record(self, optimizer: Optimizer) -> None:
        """Add the learning rates of a step to the means. A captured step, which counts nothing, replaces them."""
        number = self.optimizers.index(optimizer)
        rates = [_copy_rate(group["lr"]) for group in optimizer.param_groups]
        self.counts[number] += 1
        before = self.means[number]
        if self.counts[number] > 1 and len(before) == len(rates) and not self.is_capturing:
            rates = [mean + (rate - mean) / self.counts[number] for mean, rate in zip(before, rates, strict=True)]
        self.means[number] = rates

    def restart(self) -> None:
        """Let the next step begin a new mean of the learning rates."""
        self.counts[:] = [0] * len(self.counts)

    def per_group(self) -> float | Tensor:
        """The mean learning rates: one for all where the layers agree, else (groups,)."""
        by_layer: dict[str, float | Tensor] = {}
        for name, position in self._group_positions.items():
            means = self.means[position[0]] if position else []
            by_layer[name] = means[position[1]] if means and position else 0.0
        first_rate, *rest = by_layer.values()
        if all(rate is first_rate or (isinstance(rate, float) and rate == first_rate) for rate in rest):
            return first_rate
        alpha = torch.zeros(self.graph.size, device=self.device)
        for name, rate in by_layer.items():  # coupled layers with different rates: the largest
            groups = self.graph.layers[name].groups.to(alpha.device)
            alpha[groups] = torch.maximum(alpha[groups], torch.ones_like(alpha[groups]) * rate)
        return alpha


def select_rates(alpha: float | Tensor, rows: Rows) -> Tensor:
    """The rates of the rows' groups, (groups,), of one rate for all or of (all groups,)."""
    if isinstance(alpha, Tensor) and alpha.dim():
        return alpha[rows.groups]
    device = rows.groups.device
    return torch.ones(len(rows), device=device, dtype=sum_dtype(device)) * alpha


def _copy_rate(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate
