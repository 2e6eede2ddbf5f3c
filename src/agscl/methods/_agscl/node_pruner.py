"""Prunes the free nodes of a task down to its budget: the k nodes of a layer with the highest scores stay.

The others become exactly 0, a few at a time while the task is learned, so that the nodes that stay make up for those
that go. Where little of the task is left for that, what the next layer and the head read of them is scaled up, so that
the sums are of nearly the same size as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.graph.nodes import NodeGraph
from agscl.graph.rows import Rows
from agscl.methods._agscl.budget import Budget, count_kept
from agscl.methods._agscl.pruning_schedule import Due, PruningSchedule
from agscl.system.bitwise import as_bits, mask_bits_, uses_bits
from agscl.system.sums import sum_dtype

if TYPE_CHECKING:
    from agscl.methods.agscl import AGSCLPlan

__all__ = ["NodePruner", "measure_sizes"]

KEPT_AT_END = 0.75
"""When a task ends before all its prunings, a layer keeps at least this share of the nodes it then has: nothing can
make up for those that go."""
REVIVED_SHARE = 0.1
"""Pruned groups count as revived where their sizes add up to more than this share of those of the kept ones."""
RECOVERY_STEPS = 500
"""With so many steps left in a task, the nodes that stay make up for the others by themselves, and end better if they
are not scaled."""


class NodePruner:
    """Prunes free groups while a task is learned, until each layer keeps its budget, and holds them at 0.

    Without a budget it does nothing.
    """

    saved: ClassVar[tuple[str, ...]] = ("pruned", "saliency", "epoch", "pruned_share")

    def __init__(self, plan: AGSCLPlan, budget: Budget | None) -> None:
        self.plan = plan
        knowledge, learned = plan.method.knowledge, len(plan.method.tasks) - 1
        free = knowledge.free
        self.schedule = PruningSchedule(plan.epochs, knowledge.last_task_share, knowledge.last_task_steps)
        self.quotas: list[tuple[Tensor, int]] = []  # per layer, its free groups, and how many of them the task may keep
        if budget is not None:
            for in_layer in plan.graph.groups_by_layer():
                candidates = (in_layer.to(free.device) & free).nonzero().flatten()
                self.quotas.append((candidates, count_kept(len(candidates), budget, learned)))
        self.pruned = torch.zeros_like(free)  # (groups,) held at 0 until the task ends
        self.saliency = torch.zeros_like(free, dtype=torch.float32)  # (groups,) since the last pruning
        self.epoch = 0
        self.pruned_share = 0.0  # of what must go, how much is gone
        self.pruned_at_end = self.above_budget = 0  # groups pruned when the task ended, and left above the budget
        self.revived = 0  # pruned groups that had weights again when the task ended
        self._is_held: list[list[bool]] = []  # per optimizer, whether it holds each parameter of the free rows
        self._kept_bits: list[Tensor] = []  # on a GPU, for each such parameter: 0 where a weight is held at 0, else 1
        self._pruned_rows: Rows | None = None  # elsewhere

    def build(self) -> None:
        """Make what steps need, for a task that was resumed too."""
        self._kept_bits = []
        if self.quotas and uses_bits(self.pruned):
            self._kept_bits = [torch.ones_like(as_bits(p)) for p in self.plan.free_rows.parameters]
        self._update()

    def _update(self) -> None:
        """Let steps hold at 0 what is pruned by now. On a GPU in place: captured steps read the same tensors."""
        rows = self.plan.free_rows
        owners = {id(p): groups for _, p, groups in self.plan.graph.incoming_parameters()}
        if not all(id(p) in owners for p in rows.parameters):  # the loop has replaced some
            self.plan.build()
            return
        held = [{id(p) for group in o.param_groups for p in group["params"]} for o in self.plan.optimizers]
        self._is_held = [[id(p) in ids for p in rows.parameters] for ids in held]
        for parameter, bits in zip(rows.parameters, self._kept_bits, strict=False):
            kept = ~self.pruned[owners[id(parameter)].to(self.pruned.device)]
            bits.copy_(kept.view(-1, *[1] * (bits.dim() - 1)).expand_as(bits))
        if not self._kept_bits and bool(self.pruned.any()):
            self._pruned_rows = Rows(self.plan.graph, self.pruned)

    def zero_pruned_(self) -> None:
        """Set pruned groups to exactly 0, but where the user has frozen them: momentum would wake them."""
        if self._kept_bits:
            trained = [p.requires_grad for p in self.plan.free_rows.parameters]
            mask_bits_(*(list(compress(each, trained)) for each in (self.plan.free_rows.parameters, self._kept_bits)))
        elif self._pruned_rows is not None:
            self._pruned_rows.zero_()

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Add |⟨θ, ∂L/∂θ⟩| of each group: to first order, what the loss of this batch would change by without it.

        A ReLU that never fires has no gradient, and its node a saliency of exactly 0.
        """
        rows, is_held = self.plan.free_rows, self._is_held[self.plan.optimizers.index(optimizer)]
        if not self.quotas or self.pruned_share == 1 or not len(rows):
            return
        gradients = [
            p.grad if held and p.grad is not None else torch.zeros_like(p)
            for p, held in zip(rows.parameters, is_held, strict=True)
        ]
        changes = rows.sum_by_group(torch._foreach_mul(gradients, [p.detach() for p in rows.parameters]))
        changes = changes if scale is None else changes / scale
        # a gradient that overflowed makes no step
        self.saliency.index_add_(0, rows.groups, changes.abs().nan_to_num(0.0, 0.0, 0.0))

    def prune_after_step(self) -> None:
        """Prune after a step, if it is time. What a captured step runs cannot differ from step to step."""
        schedule = self.plan.schedule
        if self.quotas and not schedule.captured:
            self._prune_if_due(self.schedule.find_due_after_step(self.plan.steps, schedule.steps_per_epoch))

    def prune_after_epoch(self) -> None:
        """Prune after an epoch, if it is time."""
        self.epoch += 1
        schedule = self.plan.schedule
        self._prune_if_due(
            self.schedule.find_due_after_epoch(self.epoch, schedule.steps_per_epoch, captured=schedule.captured)
        )

    def _prune_if_due(self, due: Due | None) -> None:
        if due is not None:
            self.prune_(due.share, due.steps_left)

    def prune_rest(self) -> None:
        """Prune what is left to prune, as far as may be. The loop may have gone back to weights before a pruning."""
        plan, knowledge = self.plan, self.plan.method.knowledge
        self.revived = self._count_revived()
        if self.quotas and self.pruned_share < 1:
            self.pruned_share = 1.0
            counts = [int((~self.pruned[candidates]).sum()) for candidates, _ in self.quotas]
            kept = [max(kept, math.ceil(KEPT_AT_END * n)) for n, (_, kept) in zip(counts, self.quotas, strict=True)]
            self.pruned_at_end = sum(counts) - sum(kept)
            self.above_budget = sum(kept) - sum(kept for _, kept in self.quotas)
            self._prune_lowest_(kept)
        self.zero_pruned_()
        epochs = self.epoch or plan.steps / (plan.schedule.steps_per_epoch or math.inf)
        knowledge.last_task_share = min(1.0, epochs / plan.epochs) if epochs and plan.epochs else 1.0
        knowledge.last_task_steps = plan.steps

    def _count_revived(self) -> int:
        """How many pruned groups have weights that matter: no step gives them any, but the loop may."""
        if not bool(self.pruned.any()):
            return 0
        head = self.plan.method.heads.get_head(self.plan.task, self.plan.method.tasks)
        sizes, free = measure_sizes(self.plan.graph, head), self.plan.method.knowledge.free
        kept = sizes[free & ~self.pruned]
        return int((sizes[self.pruned] > 0).sum()) if sizes[self.pruned].sum() > REVIVED_SHARE * kept.sum() else 0

    def prune_(self, share: float, steps_left: float = 0) -> None:
        """Prune groups until this share of what each layer has above its budget is gone; the largest share asked for
        counts, so steps and ends of epochs may both ask."""
        if self.quotas and share > self.pruned_share:
            self.pruned_share = share
            counts = [len(groups) - round((len(groups) - kept) * share) for groups, kept in self.quotas]
            self._prune_lowest_(counts, scale=steps_left < RECOVERY_STEPS)

    def _score_groups(self, sizes: Tensor) -> Tensor:
        """(groups,) The lowest are pruned first. A score of 0 or less: the group does nothing now."""
        return sizes * self.saliency if bool(self.saliency.any()) else sizes

    @torch.no_grad()
    def _prune_lowest_(self, counts: Sequence[int], *, scale: bool = True) -> None:
        """Keep so many groups of each layer: set those with the lowest scores to 0, and perhaps scale the others up."""
        head = self.plan.method.heads.get_head(self.plan.task, self.plan.method.tasks)
        sizes = measure_sizes(self.plan.graph, head)
        scores = self._score_groups(sizes)
        sizes = torch.where(scores > 0, sizes, 0.0)
        self.saliency.zero_()
        factors = torch.ones_like(sizes)
        for (candidates, _), count in zip(self.quotas, counts, strict=True):
            order = torch.where(self.pruned[candidates], -math.inf, scores[candidates]).argsort(stable=True)
            gone, kept = candidates[order].tensor_split([len(candidates) - count])
            self.pruned[gone] = True
            factors[kept] = (sizes[candidates].sum() / sizes[kept].sum()).nan_to_num(1.0, posinf=1.0).sqrt()
        if scale:
            _scale_outgoing_(self.plan.graph, head, factors)
        self._update()
        self.zero_pruned_()
        self.plan.restart_lbfgs()
        self.plan.version += 1


def _scale_outgoing_(graph: NodeGraph, head: nn.Module, factors: Tensor) -> None:
    """Scale what later layers and the head read of each group, but where a BatchNorm sets the size of its values.

    A depthwise filter, which reads its own group alone, is left: what reads the filter is scaled.
    """
    factors = F.pad(factors, (0, 1), value=1.0)  # the last: no node
    for norm in graph.norms.values():
        factors[norm.groups.to(factors.device)] = 1.0
    in_head = {id(module) for module in head.modules()}
    for name, reader in graph.readers.items():
        if reader.is_head and id(reader.module) not in in_head:
            continue
        sources = reader.source_groups()
        own = graph.layers[name].groups.view(-1, *[1] * (sources.dim() - 1)) if name in graph.layers else None
        is_depthwise = own is not None and bool((sources == own).all())
        if not is_depthwise and reader.weight.requires_grad:
            reader.weight.mul_(factors[sources.to(factors.device)].to(reader.weight))


@torch.no_grad()
def measure_sizes(graph: NodeGraph, head: nn.Module) -> Tensor:
    """(groups,) ‖incoming weights‖ · ‖outgoing weights‖, of which the heads of other tasks are no part.

    Where a BatchNorm follows, its scale and shift are taken as the incoming weights: it undoes the scale of others.
    """
    device = next(parameter.device for _, parameter, _ in graph.incoming_parameters())
    dtype = sum_dtype(device)
    incoming, scales, outgoing = (torch.zeros(graph.size + 1, dtype=dtype, device=device) for _ in range(3))
    norm_names = {f"{norm.name}.{key}" for norm in graph.norms.values() for key in ("weight", "bias")}
    for name, parameter, groups in graph.incoming_parameters():
        total = scales if name in norm_names else incoming
        total.index_add_(0, groups.to(device), _square(parameter).reshape(len(groups), -1).sum(1))
    in_head = {id(module) for module in head.modules()}
    for reader in graph.readers.values():
        if not reader.is_head or id(reader.module) in in_head:
            squares = _square(reader.weight).reshape(*reader.weight.shape[:2], -1).sum(2)
            sources = reader.source_groups().to(device).flatten(1) % (graph.size + 1)  # the last: no node
            outgoing.index_add_(0, sources.flatten(), squares.view(-1, *sources.shape).sum(0).flatten())
    normed = torch.zeros(graph.size + 1, dtype=torch.bool, device=device)
    for norm in graph.norms.values():
        normed[norm.groups.to(device)] = norm.module.affine
    return (torch.where(normed, scales, incoming) * outgoing)[:-1].sqrt()


def _square(weight: Tensor) -> Tensor:
    return weight.detach().to(sum_dtype(weight.device)).square()
