"""What methods keep between tasks: told by a method itself (`memory()`), or foretold for a model, for every method.

A forecast is exact but for what depends on training, where it is the most that can be: AGS-CL keeps the anchors of
important nodes only, and GPM as many directions as the data has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from agscl.graph.nodes import NodeGraph
from agscl.graph.probing import LAYERS, undisturbed
from agscl.methods._parts.batchnorm import norms_with_statistics
from agscl.methods.gpm import CHUNK, COLUMNS, GPMConfig

__all__ = ["COMMON", "FORECASTS", "WEIGHT_WISE", "Memory", "Outline", "forecast"]

COMMON = ("importances", "anchors", "masks", "embeddings")
"""What every method's `memory()` counts; what else one has, it counts under a name of its own."""
WEIGHT_WISE = ("ewc", "si", "rwalk", "mas")
"""The methods that the paper compares its memory with: importances for every weight."""
IN_BYTES = ("digests", "bytes")
"""Entries of `memory()` that are no count of numbers."""
DIGEST = 16  # bytes


@dataclass(frozen=True)
class Memory:
    """What a method keeps between tasks, counted as by its `memory()`; an entry of a mask counts as one number."""

    counts: Mapping[str, int]
    at_most: frozenset[str] = frozenset()
    """The counts that depend on training and are upper bounds here."""

    @property
    def importances(self) -> int:
        """What the paper counts."""
        return self.counts.get("importances", 0)

    @property
    def everything(self) -> int:
        """All numbers: importances, anchors, masks, embeddings and what else there is."""
        return sum(count for purpose, count in self.counts.items() if purpose not in IN_BYTES)

    @property
    def others(self) -> dict[str, int]:
        """Numbers kept for purposes that not every method has."""
        return {p: count for p, count in self.counts.items() if count and p not in (*COMMON, *IN_BYTES)}

    @property
    def bytes(self) -> int:
        return self.counts["bytes"]


class Amount(NamedTuple):
    """Numbers, and the bytes that they take."""

    numbers: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        sizes = [(t.numel(), t.numel() * t.element_size()) for t in tensors]
        return cls(sum(numbers for numbers, _ in sizes), sum(size for _, size in sizes))

    def times(self, count: int) -> Amount:
        return Amount(count * self.numbers, count * self.bytes)


NONE = Amount()


class Layer(NamedTuple):
    """A layer of the trunk, as GPM sees it."""

    groups: int
    columns: int
    positions: tuple[int, ...]
    """Of each call in a forward pass, how many inputs one sample gives it."""
    size: int
    """Bytes of a number."""


@dataclass(frozen=True)
class Outline:
    """All of a model that decides how much a method keeps for it."""

    weights: Amount = NONE
    """Trained weights outside the heads, or with the head that all tasks share: what weight-wise methods hold."""
    packed: int = 0
    """Weights that PackNet gives to tasks."""
    groups: int = 0
    """Nodes, or groups of them."""
    incoming: Amount = NONE
    """All nodes' incoming weights."""
    digests: int = 0
    """Digests per group."""
    statistics: Amount = NONE
    """BatchNorm statistics of one task."""
    layers: tuple[Layer, ...] = ()
    real: int = field(default_factory=lambda: torch.get_default_dtype().itemsize)
    """Bytes of a number that belongs to no weight."""

    @classmethod
    def of(cls, graph: NodeGraph, arguments: tuple[Any, ...]) -> Self:
        """The outline of the graph's model, whose forward pass takes `arguments`; it runs once."""
        model, heads = graph.model, graph.heads
        if heads is None:
            raise ValueError("the model has no head: put it into a MultiHead, or say where its heads are")
        own = {id(p) for p in heads.parameters(graph._tasks).values()}
        trunk = {name: p for name, p in model.named_parameters() if id(p) not in own}
        held = [p for p in model.parameters() if p.requires_grad and (heads.shared or id(p) not in own)]
        packed = [p for name, p in trunk.items() if p.requires_grad and p.dim() > 1 and name.endswith("weight")]
        return cls(
            weights=Amount.of(held),
            packed=sum(p.numel() for p in packed),
            groups=graph.size,
            incoming=Amount.of(p for _, p, _ in graph.parameters()),
            digests=2 if graph.norms else 1,
            statistics=Amount.of(_statistics(model, () if heads.shared else graph._head_names)),
            layers=tuple(_layers(model, arguments, {id(p) for p in trunk.values()})),
        )


def _statistics(model: nn.Module, heads: Iterable[str]) -> list[Tensor]:
    norms = norms_with_statistics(model).items()
    outside = [norm for name, norm in norms if not any(name == head or name.startswith(f"{head}.") for head in heads)]
    return [buffer for norm in outside for buffer in norm.buffers(recurse=False)]


def _layers(model: nn.Module, arguments: tuple[Any, ...], trunk: set[int]) -> Iterable[Layer]:
    calls: dict[nn.Module, list[int]] = {}
    samples = len(next(given for given in arguments if isinstance(given, Tensor)))

    def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
        calls.setdefault(layer, []).append(output.numel() // (samples * len(layer.get_parameter("weight"))))

    layers = [m for m in model.modules() if isinstance(m, LAYERS) and id(m._parameters.get("weight")) in trunk]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        with undisturbed(model):
            model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    for layer, positions in calls.items():
        weight, groups = layer.get_parameter("weight"), int(getattr(layer, "groups", 1))
        yield Layer(groups, weight[0].numel(), tuple(positions), weight.element_size())


# The forecasts -------------------------------------------------------------------------------------------------------


def forecast(method: str, outline: Outline, tasks: int, settings: Mapping[str, Any] | None = None) -> Memory:
    """What `method`, by its name, keeps after so many tasks with these of its settings."""
    if tasks < 1:
        raise ValueError(f"a method keeps something after its first task, not after {tasks}")
    if method not in FORECASTS:
        raise ValueError(f"nothing is known of the memory of {method!r}; of: {', '.join(FORECASTS)}")
    return FORECASTS[method](outline, tasks, settings or {})


def _memory(at_most: Iterable[str] = (), /, **counts: int) -> Memory:
    return Memory({**dict.fromkeys((*COMMON, "bytes"), 0), **counts}, frozenset(at_most))


def _agscl(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """Ω, and the first task it was important in as 32 bits, of each group; anchors of the important ones."""
    start = outline.incoming if settings.get("fresh") == "start" else NONE
    digests = DIGEST * outline.digests * outline.groups
    return _memory(
        ["anchors", "bytes"],
        importances=outline.groups,
        anchors=outline.incoming.numbers,
        masks=outline.groups,
        start=start.numbers,
        digests=digests,
        bytes=outline.groups * (outline.real + 4) + outline.incoming.bytes + start.bytes + digests,
    )


def _per_weight(importances: int) -> Callable[[Outline, int, Mapping[str, Any]], Memory]:
    """So many importances, and an anchor, of each weight; BatchNorm statistics of each task where it has its own."""

    def kept(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        own = outline.statistics.times(tasks) if settings.get("batchnorm") == "per_task" else NONE
        return _memory(
            importances=importances * outline.weights.numbers,
            anchors=outline.weights.numbers,
            bytes=(importances + 1) * outline.weights.bytes + own.bytes,
            **({"statistics": own.numbers} if own.numbers else {}),
        )

    return kept


def _hat(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """An embedding of each group for each task, and the largest mask of all tasks."""
    numbers = (tasks + 1) * outline.groups
    return _memory(masks=outline.groups, embeddings=tasks * outline.groups, statistics=0, bytes=numbers * outline.real)


def _packnet(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """The owner of each weight, in one byte."""
    return _memory(masks=outline.packed, bytes=outline.packed)


def _gpm(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """Of each layer, at most as many directions as it has columns, or as inputs were drawn from all tasks."""
    samples = settings.get("samples", GPMConfig.samples)
    numbers = size = 0
    for layer in outline.layers:
        count = layer.groups * layer.columns * min(layer.columns, tasks * _drawn(layer.positions, samples))
        numbers, size = numbers + count, size + count * layer.size
    return _memory(["bases", "bytes"], bases=numbers, bytes=size)


def _drawn(positions: tuple[int, ...], samples: int) -> int:
    """Inputs of a layer that GPM draws from a task at the most, whose data may be fewer than `samples`."""

    def of(count: int) -> int:
        limit = math.ceil(COLUMNS * min(CHUNK, count) / count)
        chunks = [min(CHUNK, count - at) for at in range(0, count, CHUNK)]
        return sum(min(chunk * each, limit) for chunk in chunks for each in positions)

    return max(of(count) for count in range(1, samples + 1))


def _nothing(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    return _memory()


FORECASTS: dict[str, Callable[[Outline, int, Mapping[str, Any]], Memory]] = {
    "agscl": _agscl,
    "ewc": _per_weight(1),  # Fisher
    "si": _per_weight(1),  # Ω
    "rwalk": _per_weight(2),  # Fisher and score
    "mas": _per_weight(1),  # Ω
    "hat": _hat,
    "packnet": _packnet,
    "lwf": _nothing,  # its copy of the trunk is there while a task is learned
    "l2": _per_weight(0),
    "gpm": _gpm,
    "frozen": _nothing,
    "finetune": _nothing,
}
