"""What GPM and TRGP share: a basis per layer of the directions of old inputs, and changes orthogonal to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from agscl.graph.model_state import preserve_model_state
from agscl.graph.probing import LAYERS
from agscl.methods._parts.frozen_parts import FrozenPartsMethod, FrozenPartsPlan
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.settings import Settings
from agscl.system.distributed import copy_from_first_rank_, is_distributed
from agscl.system.sums import to_sum_dtype

__all__ = [
    "SubspaceConfig",
    "SubspaceKnowledge",
    "SubspaceMethod",
    "SubspacePlan",
    "count_inputs_drawn",
    "extend_basis",
    "extract_inputs",
    "project",
]

CHUNK_SIZE = 32  # samples in one forward pass while a layer's inputs are collected
MAX_INPUTS = 4096  # most inputs of one layer in a decomposition; a convolution has one at every position


@dataclass(frozen=True, kw_only=True)
class SubspaceConfig(Settings):
    """Settings of the methods with subspaces; the defaults are those of the papers for CIFAR-100."""

    threshold: float = 0.97
    """ε: share of the inputs' energy that a layer's basis must hold after the first task; more forgets less."""
    increase: float = 0.003
    """What is added to the threshold with every further task, up to 1."""
    samples: int = 125
    """Inputs drawn at random from each task's data to find its directions."""
    seed: int = 0
    """Seed of that draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.threshold <= 1, f"threshold must be above 0 and at most 1, not {self.threshold}")
        self.require(0 <= self.increase < 1, f"increase must be at least 0 and below 1, not {self.increase}")
        self.require(self.samples >= 1, f"samples must be at least 1, not {self.samples}")

    def find_unused(self) -> dict[str, str]:
        return {"increase": "threshold is 1 from the start"} if self.threshold == 1 else {}


@dataclass
class SubspaceKnowledge(Knowledge):
    """What a method with subspaces keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {"bases": "bases"}
    bases: dict[str, Tensor] = field(default_factory=dict)
    """Per weight, (groups of a convolution, columns, directions): orthonormal, or zero where a group has fewer."""


class SubspacePlan(FrozenPartsPlan):
    """One task: gradients and steps are projected away from the subspaces of old inputs."""

    method: SubspaceMethod
    saved: ClassVar[tuple[str, ...]] = ("anchors",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.anchors: dict[str, Tensor] = {}  # weights as the task began
        self.weights: dict[str, nn.Parameter] = {}
        self._full_weights: set[str] = set()  # weights with no direction left

    def build(self) -> None:
        bases, trunk = self.method.knowledge.bases, self.method.find_trunk_parameters()
        self.weights = {name: trunk[name] for name in bases}
        self._full_weights = {
            n for n, basis in bases.items() if _count_directions(basis) == [basis.shape[1]] * len(basis)
        }
        if not self.anchors:
            self.anchors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def start(self) -> None:
        bases = self.method.knowledge.bases
        if len(self.method.tasks) > 1 and not any(basis.shape[2] for basis in bases.values()):
            self.method.warn_once(
                "empty",
                "The bases of earlier tasks are empty, so nothing prevents forgetting. Were the inputs given to "
                "end_task all zero?",
            )

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                weight.grad.copy_(project(weight.grad, self.method.knowledge.bases[name]))

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        for name, weight in self.weights.items():
            anchor, basis = self.anchors[name], self.method.knowledge.bases[name]
            if name in self._full_weights:  # no direction is left: restore the exact bits
                weight.copy_(anchor)
            elif basis.shape[2]:
                allowed = anchor + project(weight - anchor, basis)
                # a fused optimizer's step that was skipped on overflow changes no bit
                weight.copy_(allowed if skipped is None else torch.where(skipped.reshape(()) > 0, weight, allowed))

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return {"anchors": list(self.anchors.values())}


class SubspaceMethod(FrozenPartsMethod):
    """A method whose later tasks change weights only orthogonally to the inputs of the old ones."""

    Config = SubspaceConfig
    config: SubspaceConfig
    Knowledge = SubspaceKnowledge
    knowledge: SubspaceKnowledge
    Plan = SubspacePlan

    def is_frozen(self, name: str) -> bool:
        return name not in self.knowledge.bases

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        threshold = min(1.0, self.config.threshold + self.config.increase * (len(self.tasks) - 1))
        collected = self._collect_inputs(batches, forward)
        for name, inputs in collected.items():
            if not bool(inputs.isfinite().all()):
                raise FloatingPointError(
                    f"Inputs of the layer with {name} are not finite: training diverged. The task was not ended; go "
                    "back to the last good weights, or lower the learning rate."
                )
        for name, inputs in collected.items():
            if name in self.knowledge.bases or len(self.tasks) == 1:
                self.knowledge.bases[name] = _broadcast_first_rank(self._extend_basis(name, inputs, threshold))
        ranks = {name: _count_directions(basis) for name, basis in self.knowledge.bases.items()}
        capacity = sum(len(basis) * basis.shape[1] for basis in self.knowledge.bases.values())
        full = [name for name, counts in ranks.items() if min(counts) == self.knowledge.bases[name].shape[1]]
        self.knowledge.statistics = {
            "threshold": threshold,
            "directions": {name: sum(counts) for name, counts in ranks.items()},
            "used_capacity": sum(map(sum, ranks.values())) / max(1, capacity),
        }
        if full:
            self.warn_once(
                "full",
                f"No direction is left for later tasks in {', '.join(full)}. Use a lower threshold (it is "
                f"{threshold:g}) or wider layers.",
            )

    def _extend_basis(self, name: str, inputs: Tensor, threshold: float) -> Tensor:
        """The basis of a weight with what the inputs of the task that ends add to it."""
        raise NotImplementedError

    def _default_forward(self, batch: Any) -> Any:
        """Inputs of layers are all that is collected: no labels are needed."""
        assert self.task is not None
        return self.call_model(batch[0] if isinstance(batch, tuple | list) else batch, self.task)

    def _collect_inputs(self, batches: Iterable[Any], forward: Forward) -> dict[str, Tensor]:
        """Per weight, inputs of its layer on a random sample of the task's data: (groups, columns, inputs)."""
        generator = torch.Generator().manual_seed(self.config.seed * 1009 + len(self.tasks))
        sample, count = sample_rows(batches, self.config.samples, generator)
        names = {id(p): name for name, p in self.find_trunk_parameters().items()}
        layer_inputs: dict[str, list[Tensor]] = {}
        with preserve_model_state(self.model), ExitStack() as stack:
            for module in self.heads.list_trunk_modules(self.tasks).values():
                weight = module._parameters.get("weight")
                if isinstance(module, LAYERS) and id(weight) in names:
                    name = names[id(weight)]

                    def hook(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                        layer_input = args[0] if args else kwargs["input"]
                        limit = math.ceil(MAX_INPUTS * min(CHUNK_SIZE, count) / count)
                        layer_inputs.setdefault(name, []).append(extract_inputs(layer, layer_input, limit, generator))

                    stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            for start in range(0, count, CHUNK_SIZE):
                forward(_select_rows(sample, torch.arange(start, min(start + CHUNK_SIZE, count))))
        if not layer_inputs:
            raise RuntimeError(
                f"No layer whose weight {self.title} can project ran while end_task collected inputs: does `forward` "
                "run the model, or are its weights computed from others (weight_norm)?"
            )
        return {name: torch.cat(parts, 2) for name, parts in _gather_ranks(layer_inputs).items()}

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of each layer's subspace: at most as many directions as columns, or as inputs drawn over all tasks."""
        samples = settings.get("samples", SubspaceConfig.samples)
        numbers = size = 0
        for layer in outline.layers:
            directions = min(layer.columns, tasks * count_inputs_drawn(layer.positions, samples))
            count = layer.groups * layer.columns * directions
            numbers, size = numbers + count, size + count * layer.bytes_per_number
        return Memory.from_counts(["bases", "bytes"], bases=numbers, bytes=size)

    def statistics(self) -> dict[str, Any]:
        """Of the subspaces after the last task: `directions` per weight, `used_capacity`, their share, threshold."""
        return super().statistics()


def project(change: Tensor, basis: Tensor) -> Tensor:
    """The part of `change`, shaped as the weight (rows, columns, …), that is orthogonal to the basis' subspace."""
    if not basis.shape[2]:
        return change
    rows = change.reshape(len(basis), -1, basis.shape[1]).to(basis.dtype)
    projected = rows - (rows @ basis) @ basis.mT
    return projected.view(change.shape).to(change.dtype)


def _count_directions(basis: Tensor) -> list[int]:
    """Directions of each group."""
    counts: list[int] = (basis != 0).any(1).sum(1).tolist()
    return counts


def extract_inputs(layer: nn.Module, layer_input: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """A layer's inputs to find their subspace, at most `limit`: (groups, columns, inputs), as its rows read them."""
    if isinstance(layer, nn.Linear):
        rows = layer_input.flatten(0, -2)
        return rows[_draw_indices(len(rows), limit, generator).to(rows.device)].T[None]
    kernel_sizes, strides, dilations, groups = layer.kernel_size, layer.stride, layer.dilation, layer.groups
    assert isinstance(kernel_sizes, tuple)
    if layer_input.dim() == len(kernel_sizes) + 1:
        layer_input = layer_input[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    layer_input = F.pad(layer_input, layer._reversed_padding_repeated_twice, mode=mode)  # type: ignore[arg-type]
    for dim, (kernel_size, stride, dilation) in enumerate(zip(kernel_sizes, strides, dilations, strict=True), start=2):  # type: ignore[arg-type]
        layer_input = layer_input.unfold(dim, dilation * (kernel_size - 1) + 1, stride)[..., ::dilation]
    windows = layer_input.movedim(1, 1 + len(kernel_sizes))  # a view (batch, positions…, channels, kernel…)
    positions = windows.shape[: 1 + len(kernel_sizes)]
    chosen = torch.unravel_index(_draw_indices(math.prod(positions), limit, generator), positions)
    inputs = windows[tuple(index.to(layer_input.device) for index in chosen)]
    return inputs.reshape(len(inputs), int(groups), -1).permute(1, 2, 0)  # type: ignore[arg-type]


def sample_rows(batches: Iterable[Any], count: int, generator: torch.Generator) -> tuple[Any, int]:
    """Inputs to find a subspace with: at most `count` random rows of all batches, as one batch, and their number."""
    sample: Any = None
    keys = torch.empty(0)
    for batch in batches:
        size = next((len(leaf) for leaf in tree_flatten(batch)[0] if _has_rows(leaf)), None)
        if size == 0:
            continue
        if size is None:
            raise TypeError(f"Batches with a tensor of samples are needed; got a {type(batch).__name__} without one.")
        keys = torch.cat([keys, torch.rand(size, generator=generator)])
        sample = batch if sample is None else _concat_rows(sample, batch)
        if len(keys) > count:
            rows = keys.topk(count).indices.sort().values
            sample, keys = _select_rows(sample, rows), keys[rows]
    if sample is None:
        raise RuntimeError("`batches` was empty: the directions of a task cannot be found without its data.")
    return sample, len(keys)


def _gather_ranks(layer_inputs: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Gather the inputs of all ranks, which see different data, so that all find the same directions."""
    if not is_distributed():
        return layer_inputs
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: [part.cpu() for part in parts] for name, parts in layer_inputs.items()})
    return {
        name: [part.to(parts[0].device) for rank in ranks for part in rank[name]]
        for name, parts in layer_inputs.items()
    }


def _broadcast_first_rank(basis: Tensor) -> Tensor:
    copy_from_first_rank_(basis)
    return basis


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _select_rows(batch: Any, rows: Tensor) -> Any:
    leaves, shape = tree_flatten(batch)
    return tree_unflatten([leaf[rows.to(leaf.device)] if _has_rows(leaf) else leaf for leaf in leaves], shape)


def _concat_rows(batch: Any, more: Any) -> Any:
    leaves, shape = tree_flatten(batch)
    pairs = zip(leaves, tree_flatten(more)[0], strict=True)
    return tree_unflatten([torch.cat([a, b]) if _has_rows(a) else a for a, b in pairs], shape)


def _draw_indices(size: int, limit: int, generator: torch.Generator) -> Tensor:
    return torch.arange(size) if size <= limit else torch.randperm(size, generator=generator)[:limit].sort().values


def count_inputs_drawn(positions: tuple[int, ...], samples: int) -> int:
    """The most inputs drawn from one task for a layer's subspace; a task may have fewer than `samples` examples."""

    def inputs_drawn(count: int) -> int:
        limit = math.ceil(MAX_INPUTS * min(CHUNK_SIZE, count) / count)
        chunks = [min(CHUNK_SIZE, count - start) for start in range(0, count, CHUNK_SIZE)]
        return sum(min(chunk * position_count, limit) for chunk in chunks for position_count in positions)

    return max(inputs_drawn(count) for count in range(1, samples + 1))


def extend_basis(old_basis: Tensor | None, inputs: Tensor, threshold: float) -> Tensor:
    """Extend a subspace's basis until it explains `threshold` of the energy of `inputs` (groups, columns, inputs)."""
    bases = []
    for number, group_inputs in enumerate(to_sum_dtype(inputs)):
        basis = group_inputs.new_empty(len(group_inputs), 0) if old_basis is None else to_sum_dtype(old_basis[number])
        basis = basis[:, (basis != 0).any(0)]
        remainder = group_inputs - basis @ (basis.T @ group_inputs)
        directions, singular_values, _ = torch.linalg.svd(remainder, full_matrices=False)
        total, energy = group_inputs.square().sum(), singular_values.square()
        explained = (total - energy.sum()).clamp(min=0) + energy.cumsum(0)  # with 1, 2, … more directions
        needed = int((explained < threshold * total).sum()) + 1 if explained[0] - energy[0] < threshold * total else 0
        numerical_rank = int(
            (singular_values > group_inputs.abs().max() * max(group_inputs.shape) * torch.finfo(inputs.dtype).eps).sum()
        )
        count = min(needed, numerical_rank, len(group_inputs) - basis.shape[1])
        extended = torch.linalg.qr(torch.cat([basis, directions[:, :count]], 1))[0]
        bases.append(extended.to(inputs.dtype))
    widest = max(basis.shape[1] for basis in bases)
    return torch.stack([F.pad(basis, (0, widest - basis.shape[1])) for basis in bases])
