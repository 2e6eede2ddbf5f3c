"""PackNet: one network for many tasks by pruning (Mallya, Lazebnik; CVPR 2018).

A task trains the weights that no earlier one owns. Part-way through, the smallest of them are set to zero and given
back; the task owns the rest, trains on with these, and from then on they keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.methods._parts.frozen_by_hand import refuse_frozen_by_hand
from agscl.methods._parts.frozen_parts import FixedWeightsPlan, FrozenPartsMethod
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.task_views import TaskViewMethod, WeightPlace
from agscl.methods._parts.trunk_buffers import TrunkBufferKnowledge, TrunkBufferMethod

__all__ = ["PackNet", "PackNetConfig"]

FREE = 0
"""The owner of a weight that no task owns; task number t owns those marked t + 1."""
MAX_TASKS = 255
"""Owners are stored in one byte."""


@dataclass(frozen=True, kw_only=True)
class PackNetConfig(Settings):
    """Settings of PackNet; the defaults are those of its paper."""

    share: float = 0.5
    """Share of each layer's weights that a task trains and gives back for later tasks."""
    prune_at: float = 2 / 3
    """Share of the task's epochs after which the smallest weights are pruned; the rest is for training on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "prune_at"):
            value = getattr(self, name)
            self.require(0 < value < 1, f"{name} must be above 0 and below 1, not {value}")


@dataclass
class PackNetKnowledge(TrunkBufferKnowledge):
    """What PackNet keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {"owner": "masks"}
    owner: dict[str, Tensor] = field(default_factory=dict)
    """Per packed weight, uint8 of its shape: FREE, or the task's number + 1."""


class PackedWeight(NamedTuple):
    """A place where a weight that PackNet packs is used; a tied one has several."""

    module: nn.Module
    key: str
    name: str
    parameter: nn.Parameter


class PackNetPlan(FixedWeightsPlan):
    """One task of PackNet: it trains free weights, then those it kept when it was pruned."""

    method: PackNet
    saved: ClassVar[tuple[str, ...]] = ("trained_names", "epoch", "pruned_at_step")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained_names: list[str] = []  # packed weights that get a gradient in this task
        self.epoch = 0
        self.pruned_at_step = -1

    @property
    def is_pruned(self) -> bool:
        return self.pruned_at_step >= 0

    def attach(self) -> None:
        self.method.find_packed_weights()
        super().attach()

    def build(self) -> None:
        """Copy what no step of PackNet may change: weights of other tasks and, once pruned, the free ones."""
        trained_owner = len(self.method.tasks) if self.is_pruned else FREE
        weights = self.method.packed_parameters()
        self._fixed = []
        for name, owner in self.method.knowledge.owner.items():
            fixed = owner != trained_owner
            if bool(fixed.any()) and (not self.is_pruned or name in self.trained_names):
                self._fixed.append((weights[name], fixed, weights[name].detach().clone()))

    def start(self) -> None:
        method = self.method
        refuse_frozen_by_hand(method)
        if len(method.tasks) > MAX_TASKS:
            raise ValueError(
                f"PackNet marks each weight with its task's number in one byte: at most {MAX_TASKS} tasks."
            )
        if not any(bool((owner == FREE).any()) for owner in method.knowledge.owner.values()):
            method.warn_once(
                "full",
                "No weight is free any more: this task trains its head alone. Use a larger share (it is "
                f"{method.config.share:g}) or a wider network.",
            )

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if not self.is_pruned:  # a layer may be left out of some steps
            noted = set(self.trained_names)
            weights = self.method.packed_parameters().items()
            self.trained_names += [name for name, p in weights if p.grad is not None and name not in noted]

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        self.restore_fixed()

    def end_epoch(self) -> None:
        self.epoch += 1
        assert self.epochs is not None
        last = min(max(1, round(self.method.config.prune_at * self.epochs)), self.epochs)
        if not self.is_pruned and self.epoch >= last:
            self.prune()

    @torch.no_grad()
    def prune(self) -> None:
        """PackNet's pruning: of the weights of a layer that this task trained, the smallest become 0 and free again."""
        weights, number = self.method.packed_parameters(), len(self.method.tasks)
        for name in self.trained_names:
            weight, owner = weights[name], self.method.knowledge.owner[name]
            trained = owner == FREE
            count = math.floor(int(trained.sum()) * self.method.config.share)
            smallest = weight.abs().masked_fill(~trained, math.inf).flatten().argsort(stable=True)[:count]
            is_kept = trained.flatten()  # a copy, in the order of the indices, however the weights lie in memory
            is_kept[smallest] = False
            owner[is_kept.view(trained.shape)] = number
            weight.masked_fill_(owner == FREE, 0.0)
        self.pruned_at_step = self.steps
        self.build()
        self.restart_lbfgs()
        self.version += 1


class PackNet(TaskViewMethod, TrunkBufferMethod, FrozenPartsMethod):
    """Every weight belongs to one task, and a task is seen through its own weights and those of earlier tasks.

    >>> method = PackNet(model, share=0.5, prune_at=2 / 3)
    >>> method.begin_task("birds", optimizer, epochs=30)

    What is packed: every weight of two or more dimensions outside the heads. All else (biases, BatchNorm) is trained by
    the first task and keeps its bits afterwards. `model(x, task)` of a `MultiHead` shows an old task its own weights;
    with other models use `viewing(task)`. Weights of later tasks are left out of that forward pass, not overwritten.
    """

    title = "PackNet"
    formula = (
        "a task trains the weights that no earlier task owns, and runs with its own and those of earlier ones",
        "after prune_at of its epochs: the share with the smallest |θ| is set to 0 and given back, the rest is owned",
    )
    search = (SearchAxis("share", values=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95)),)
    Config = PackNetConfig
    config: PackNetConfig
    Knowledge = PackNetKnowledge
    knowledge: PackNetKnowledge
    Plan = PackNetPlan
    plan: PackNetPlan | None
    needs = frozenset({"epochs", "end_epoch"})
    owns_weights = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._packed: list[PackedWeight] = []
        self.start_views()

    @property
    def end_epoch_capturable(self) -> bool:
        return False  # at one of them it prunes

    def is_frozen(self, name: str) -> bool:
        return name not in self.knowledge.owner

    def find_packed_weights(self) -> None:
        """Find which weights are packed, and which modules use them."""
        self._call_view.clear()  # left by an interrupted pass (Ctrl-C), after which torch calls no hook
        trunk, knowledge = self.find_trunk_parameters(), self.knowledge
        if not knowledge.owner:
            packed = {n: p for n, p in trunk.items() if p.requires_grad and p.dim() > 1 and n.endswith("weight")}
            knowledge.owner = {n: torch.full_like(p, FREE, dtype=torch.uint8) for n, p in packed.items()}
        knowledge.owner = {name: owner for name, owner in knowledge.owner.items() if name in trunk}
        names = {id(p): name for name, p in trunk.items() if name in knowledge.owner}
        self._packed = [
            PackedWeight(module, key, names[id(p)], p)
            for module in self.heads.list_trunk_modules(self.tasks).values()
            for key, p in module._parameters.items()
            if p is not None and id(p) in names
        ]

    def packed_parameters(self) -> dict[str, nn.Parameter]:
        return {weight.name: weight.parameter for weight in self._packed}

    @torch.no_grad()
    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan, owners = self.plan, self.knowledge.owner.values()
        assert plan is not None
        if not plan.is_pruned:
            plan.prune()
        if plan.pruned_at_step == plan.steps and plan.steps:
            self.warn_once(
                "pruning",
                f"The task was pruned at its very end ({plan.epoch} of {plan.epochs} epochs were told by "
                "end_epoch()), so it could not train on with the weights it kept. Call method.end_epoch() after each "
                "epoch, and train for two epochs or more.",
            )
        plan.restore_fixed()  # the loop may have gone back to weights from before the pruning
        total = sum(owner.numel() for owner in owners)
        free = sum(int((owner == FREE).sum()) for owner in owners)
        owned = sum(int((owner == len(self.tasks)).sum()) for owner in owners)
        self.knowledge.statistics = {
            "weights": total,
            "owned": owned,
            "free": free,
            "sparsity": free / total if total else 0.0,
        }

    # Looking at a task -----------------------------------------------------------------------------------------------

    def list_weight_places(self) -> Iterator[WeightPlace]:
        for module, key, _, parameter in self._packed:
            yield module, key, parameter

    def mask_later_weights(self, number: int) -> Iterator[WeightPlace]:
        masked = {}
        for name, weight in self.packed_parameters().items():
            owner = self.knowledge.owner[name]
            hidden = (owner == FREE) | (owner > number + 1)
            masked[name] = weight.masked_fill(hidden, 0.0)
        for module, key, name, _ in self._packed:
            yield module, key, masked[name]

    # What it reports, saving -----------------------------------------------------------------------------------------

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of PackNet: the task that owns each weight, in one byte."""
        return Memory.from_counts(masks=outline.packed, bytes=outline.packed)

    def statistics(self) -> dict[str, Any]:
        """Of PackNet's last task: `owned`, weights it keeps; `free`, those left for later tasks, and their share."""
        return super().statistics()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        super()._load_knowledge(state, task)
        if self.tasks:
            self.find_packed_weights()
