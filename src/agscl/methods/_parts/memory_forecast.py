"""How much a method stores between tasks: as it reports itself, or as it is forecast from an outline of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from agscl.graph.model_state import preserve_model_state
from agscl.graph.nodes import NodeGraph
from agscl.graph.probing import LAYERS
from agscl.methods._parts.batchnorm import find_batchnorms

__all__ = [
    "BYTE_ENTRIES",
    "COMMON_PURPOSES",
    "ZERO",
    "Amount",
    "LayerInputs",
    "Memory",
    "Outline",
    "forecast_node_memory",
]

COMMON_PURPOSES = ("importances", "anchors", "masks", "embeddings")
"""What every method's `memory()` counts. A method counts anything else under another name."""
BYTE_ENTRIES = ("digests", "bytes")
"""Entries of `memory()` that count bytes, not numbers."""


@dataclass(frozen=True)
class Memory:
    """What a method stores between tasks, counted as by its `memory()`; an entry of a mask counts as one number."""

    counts: Mapping[str, int]
    upper_bounds: frozenset[str] = frozenset()
    """The counts that depend on training; here they are upper bounds."""

    @classmethod
    def from_counts(cls, upper_bounds: Iterable[str] = (), /, **counts: int) -> Self:
        """A memory of these counts, and 0 for what every method counts."""
        return cls({**dict.fromkeys((*COMMON_PURPOSES, "bytes"), 0), **counts}, frozenset(upper_bounds))

    @property
    def importances(self) -> int:
        """What the paper counts as memory."""
        return self.counts.get("importances", 0)

    @property
    def total(self) -> int:
        """All numbers in memory, for whatever purpose."""
        return sum(count for purpose, count in self.counts.items() if purpose not in BYTE_ENTRIES)

    @property
    def other_counts(self) -> dict[str, int]:
        """Numbers in memory for purposes that not every method has."""
        common = (*COMMON_PURPOSES, *BYTE_ENTRIES)
        return {purpose: count for purpose, count in self.counts.items() if count and purpose not in common}

    @property
    def bytes(self) -> int:
        return self.counts["bytes"]


class Amount(NamedTuple):
    """How many numbers are held in memory, and how many bytes they take."""

    numbers: int = 0
    bytes: int = 0

    @classmethod
    def from_tensors(cls, tensors: Iterable[Tensor]) -> Self:
        sizes = [(tensor.numel(), tensor.numel() * tensor.element_size()) for tensor in tensors]
        return cls(sum(numbers for numbers, _ in sizes), sum(size for _, size in sizes))

    def times(self, count: int) -> Amount:
        return Amount(count * self.numbers, count * self.bytes)


ZERO = Amount()


class LayerInputs(NamedTuple):
    """The inputs of a trunk layer, on which the memory of GPM and TRGP depends: they store directions of them."""

    groups: int
    """Groups of a grouped convolution; 1 elsewhere."""
    columns: int
    """Columns of its weight matrix."""
    positions: tuple[int, ...]
    """For each call in a forward pass, how many input rows one sample gives."""
    bytes_per_number: int


@dataclass(frozen=True)
class Outline:
    """Everything about a model that decides how much memory a method needs for it."""

    weights: Amount = ZERO
    """Trained weights outside the heads, plus a head shared by all tasks: what weight-wise methods store."""
    packed: int = 0
    """Weights that PackNet assigns to tasks."""
    groups: int = 0
    """Nodes, or groups of nodes."""
    incoming: Amount = ZERO
    """All nodes' incoming weights."""
    digests: int = 0
    """Digests per group."""
    statistics: Amount = ZERO
    """BatchNorm statistics of one task."""
    layers: tuple[LayerInputs, ...] = ()
    default_bytes: int = field(default_factory=lambda: torch.get_default_dtype().itemsize)
    """Bytes of a number that belongs to no weight."""

    @classmethod
    def from_graph(cls, graph: NodeGraph, arguments: tuple[Any, ...]) -> Self:
        """What decides how much memory methods need for the graph's model, which runs once, on `arguments`."""
        model, heads = graph.model, graph.heads
        if heads is None:
            raise ValueError("the model has no head: wrap it in a MultiHead, or name its heads with heads=")
        head_ids = {id(p) for p in heads.parameters(graph._tasks).values()}
        trunk = {name: p for name, p in model.named_parameters() if id(p) not in head_ids}
        weights = [p for p in model.parameters() if p.requires_grad and (heads.is_shared or id(p) not in head_ids)]
        packed = [p for name, p in trunk.items() if p.requires_grad and p.dim() > 1 and name.endswith("weight")]
        return cls(
            weights=Amount.from_tensors(weights),
            packed=sum(p.numel() for p in packed),
            groups=graph.size,
            incoming=Amount.from_tensors(p for _, p, _ in graph.incoming_parameters()),
            digests=2 if graph.norms else 1,
            statistics=Amount.from_tensors(_list_statistics(model, () if heads.is_shared else graph._head_names)),
            layers=tuple(_measure_layers(model, arguments, {id(p) for p in trunk.values()})),
        )


def _list_statistics(model: nn.Module, heads: Iterable[str]) -> list[Tensor]:
    """The BatchNorm statistics outside the heads."""
    norms = find_batchnorms(model).items()
    outside = [norm for name, norm in norms if not any(name == head or name.startswith(f"{head}.") for head in heads)]
    return [buffer for norm in outside for buffer in norm.buffers(recurse=False)]


def _measure_layers(model: nn.Module, arguments: tuple[Any, ...], trunk: set[int]) -> Iterable[LayerInputs]:
    """Run the model and record the inputs of each layer whose weight is in `trunk` (a set of ids)."""
    calls: dict[nn.Module, list[int]] = {}
    samples = len(next(argument for argument in arguments if isinstance(argument, Tensor)))

    def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
        calls.setdefault(layer, []).append(output.numel() // (samples * len(layer.get_parameter("weight"))))

    layers = [m for m in model.modules() if isinstance(m, LAYERS) and id(m._parameters.get("weight")) in trunk]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        with preserve_model_state(model):
            model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    for layer, positions in calls.items():
        weight, groups = layer.get_parameter("weight"), int(getattr(layer, "groups", 1))
        yield LayerInputs(groups, weight[0].numel(), tuple(positions), weight.element_size())


def forecast_node_memory(outline: Outline, digest_bytes: int, *, keeps_initial_weights: bool) -> Memory:
    """The memory of Ω for each group and its first task in 32 bits; anchors of the important groups, at most of all."""
    initial_weights = outline.incoming if keeps_initial_weights else ZERO
    digests = digest_bytes * outline.digests * outline.groups
    return Memory.from_counts(
        ["anchors", "bytes"],
        importances=outline.groups,
        anchors=outline.incoming.numbers,
        masks=outline.groups,
        digests=digests,
        bytes=outline.groups * (outline.default_bytes + 4) + outline.incoming.bytes + initial_weights.bytes + digests,
        **({"start": initial_weights.numbers} if initial_weights.numbers else {}),
    )
