"""What methods store between tasks: as a method reports it itself (`memory()`), or forecast for a model and any method.

A forecast is exact, except for counts that depend on training, where it is an upper bound: AGS-CL stores the anchors of
important nodes only, and GPM as many directions as the data has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from agscl.graph.forward import preserve_model_state
from agscl.graph.nodes import NodeGraph
from agscl.graph.probing import LAYERS
from agscl.methods._parts.batchnorm import find_batchnorms
from agscl.methods.gpm import CHUNK, COLUMNS, GPMConfig

__all__ = ["COMMON_PURPOSES", "FORECASTS", "WEIGHT_WISE", "Memory", "Outline", "forecast_memory"]

COMMON_PURPOSES = ("importances", "anchors", "masks", "embeddings")
"""What every method's `memory()` counts. A method counts anything else under another name."""
WEIGHT_WISE = ("ewc", "si", "rwalk", "mas")
"""The methods that the paper compares its memory with: importances for every weight."""
BYTE_ENTRIES = ("digests", "bytes")
"""Entries of `memory()` that count bytes, not numbers."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Memory:
    """What a method stores between tasks, counted as by its `memory()`; an entry of a mask counts as one number."""

    counts: Mapping[str, int]
    upper_bounds: frozenset[str] = frozenset()
    """The counts that depend on training; here they are upper bounds."""

    @property
    def importances(self) -> int:
        """What the paper counts."""
        return self.counts.get("importances", 0)

    @property
    def total(self) -> int:
        """All numbers, for whatever purpose."""
        return sum(count for purpose, count in self.counts.items() if purpose not in BYTE_ENTRIES)

    @property
    def other_counts(self) -> dict[str, int]:
        """Numbers stored for purposes that not every method has."""
        common = (*COMMON_PURPOSES, *BYTE_ENTRIES)
        return {purpose: count for purpose, count in self.counts.items() if count and purpose not in common}

    @property
    def bytes(self) -> int:
        return self.counts["bytes"]


class Amount(NamedTuple):
    """How many numbers, and how many bytes they take."""

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
    """The inputs of a trunk layer, from which GPM takes its directions."""

    groups: int
    """Groups of a grouped convolution; 1 elsewhere."""
    columns: int
    """Columns of its weight matrix."""
    positions: tuple[int, ...]
    """For each call in a forward pass, how many input rows one sample gives."""
    bytes_per_number: int


@dataclass(frozen=True)
class Outline:
    """Everything about a model that decides how much a method stores for it."""

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
        """The outline of the graph's model. Runs the model once, on `arguments`."""
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


# The forecasts -------------------------------------------------------------------------------------------------------


def forecast_memory(method: str, outline: Outline, tasks: int, settings: Mapping[str, Any] | None = None) -> Memory:
    """What `method`, given by its name, stores after so many tasks with these settings."""
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, not {tasks}")
    if method not in FORECASTS:
        raise ValueError(f"no memory forecast for method {method!r}. Available: {', '.join(FORECASTS)}")
    return FORECASTS[method](outline, tasks, settings or {})


def _make_memory(upper_bounds: Iterable[str] = (), /, **counts: int) -> Memory:
    return Memory({**dict.fromkeys((*COMMON_PURPOSES, "bytes"), 0), **counts}, frozenset(upper_bounds))


def _agscl(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """For each group Ω and, in 32 bits, the first task it was important in; anchors of the important groups."""
    start = outline.incoming if settings.get("reinit_from") == "start" else ZERO
    digests = DIGEST_BYTES * outline.digests * outline.groups
    return _make_memory(
        ["anchors", "bytes"],
        importances=outline.groups,
        anchors=outline.incoming.numbers,
        masks=outline.groups,
        **({"start": start.numbers} if start.numbers else {}),
        digests=digests,
        bytes=outline.groups * (outline.default_bytes + 4) + outline.incoming.bytes + start.bytes + digests,
    )


def _per_weight(importances: int) -> Callable[[Outline, int, Mapping[str, Any]], Memory]:
    """So many importances and one anchor for each weight; BatchNorm statistics of each task with batchnorm=per_task."""

    def forecast(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        statistics = outline.statistics.times(tasks) if settings.get("batchnorm") == "per_task" else ZERO
        return _make_memory(
            importances=importances * outline.weights.numbers,
            anchors=outline.weights.numbers,
            bytes=(importances + 1) * outline.weights.bytes + statistics.bytes,
            **({"statistics": statistics.numbers} if statistics.numbers else {}),
        )

    return forecast


def _hat(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """An embedding of each group for each task, and the elementwise maximum of all tasks' masks."""
    numbers = (tasks + 1) * outline.groups
    return _make_memory(
        masks=outline.groups,
        embeddings=tasks * outline.groups,
        bytes=numbers * outline.default_bytes,
    )


def _packnet(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """The task that owns each weight, in one byte."""
    return _make_memory(masks=outline.packed, bytes=outline.packed)


def _gpm(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    """For each layer at most as many directions as it has columns, or as inputs were drawn over all tasks."""
    samples = settings.get("samples", GPMConfig.samples)
    numbers = size = 0
    for layer in outline.layers:
        directions = min(layer.columns, tasks * _max_inputs_drawn(layer.positions, samples))
        count = layer.groups * layer.columns * directions
        numbers, size = numbers + count, size + count * layer.bytes_per_number
    return _make_memory(["bases", "bytes"], bases=numbers, bytes=size)


def _max_inputs_drawn(positions: tuple[int, ...], samples: int) -> int:
    """The most inputs of a layer that GPM draws from one task; a task may have fewer than `samples` examples."""

    def inputs_drawn(count: int) -> int:
        limit = math.ceil(COLUMNS * min(CHUNK, count) / count)
        chunks = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
        return sum(min(chunk * each, limit) for chunk in chunks for each in positions)

    return max(inputs_drawn(count) for count in range(1, samples + 1))


def _nothing(outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
    return _make_memory()


FORECASTS: dict[str, Callable[[Outline, int, Mapping[str, Any]], Memory]] = {
    "agscl": _agscl,
    "ewc": _per_weight(1),  # Fisher
    "si": _per_weight(1),  # Ω
    "rwalk": _per_weight(2),  # Fisher and score
    "mas": _per_weight(1),  # Ω
    "hat": _hat,
    "packnet": _packnet,
    "lwf": _nothing,  # its copy of the trunk lives only while a task is trained
    "l2": _per_weight(0),
    "gpm": _gpm,
    "frozen": _nothing,
    "finetune": _nothing,
}
