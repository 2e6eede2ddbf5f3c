"""AGS-CL: node-importance based adaptive group sparse regularisation (Jung, Ahn, Cha, Moon; NeurIPS 2020).

Nodes are free (never yet useful) or important. While a task is learned, free nodes are pruned down to a budget, or, in
the paper's form, shrunk towards zero; important ones are frozen, or pulled back to their anchors, exactly. In the end
active nodes become important, and free ones get fresh weights. Earlier tasks see nothing of later nodes.

The file follows section 3 of the paper; numbers in brackets are its equations. Pruning is in `_agscl.node_pruner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.certificate import NEVER
from agscl.graph.rows import Rows, make_rows
from agscl.methods._agscl import checks
from agscl.methods._agscl.activations import find_less_active, measure_activations
from agscl.methods._agscl.budget import BUDGET_FORMULA, check_budget
from agscl.methods._agscl.capacity import Capacity, count_nodes, measure_capacity
from agscl.methods._agscl.group_digests import DIGEST_BYTES, GroupDigests, find_moved_groups
from agscl.methods._agscl.layer_scaling import ByLayer, scale_penalties
from agscl.methods._agscl.learning_rates import LayerRates, select_rates
from agscl.methods._agscl.node_certificate import certify_nodes
from agscl.methods._agscl.node_pruner import NodePruner
from agscl.methods._agscl.node_views import NodeViewMethod
from agscl.methods._agscl.proximal import norm_gradients, pull, shrink
from agscl.methods._agscl.proximal_schedule import Every, ProximalSchedule
from agscl.methods._agscl.pruning_schedule import MIN_EPOCHS
from agscl.methods._agscl.reinit import choose_groups, reinitialise_
from agscl.methods._agscl.zero_init import ZeroMasks, ZeroRule, zero_outgoing_
from agscl.methods._parts.batches import make_repeatable
from agscl.methods._parts.batchnorm import NodeNormFreezer, StatisticsFreezer, recompute_statistics
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline, forecast_node_memory
from agscl.methods._parts.node_method import NodePlan
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.trunk_buffers import TrunkBufferKnowledge

__all__ = ["AGSCL", "AGSCLConfig"]


@dataclass(frozen=True, kw_only=True)
class AGSCLConfig(Settings):
    """Settings of AGS-CL. The defaults need no tuning: a budget of nodes per task, and frozen nodes."""

    budget: int | float | None = 0.25
    """Share of each layer's free nodes a task may keep, or the number of tasks to make room for; none: no limit."""
    mu: float = 0.0
    """μ: how strongly free nodes are shrunk; with the rate α, each epoch takes αμ off a node's norm."""
    lam: float = math.inf
    """λ: how strongly important nodes are pulled back, times their importance; inf freezes them for good."""
    rho: float = 1.0
    """ρ: share of each layer's free nodes that get fresh weights after a task."""
    eta: float = 0.9
    """η: what a node's importance is multiplied by from task to task; below 1 it fades, above 1 it grows."""
    prox_every: Every = "step"
    """When the proximal step runs: each epoch, each step or every so many; thresholds are scaled to match."""
    zero_init: ZeroRule | Literal["auto"] = "auto"
    """(I.1) Weights from a later node into an earlier one: 0 for good (paper) or while_free, hidden from earlier_tasks,
    or left (off). auto: earlier_tasks where a call of the model names its task and λ is inf, else paper."""
    by_layer: ByLayer = "none"
    """Whether each layer has its own μ (by the root of a node's number of weights), λ (importances of one mean)."""
    rand_init: bool | Literal["needed"] = True
    """(I.2) Whether free nodes get fresh weights after a task; needed: no more than became important in the layer."""
    min_activity: float = 0.0
    """Nodes less active in a task than this share of their layer's mean stay free."""
    reinit_from: Literal["default", "start"] = "default"
    """Fresh weights: the layer's own initialiser, or those the model started with (a pre-trained network)."""
    prox: bool = True
    """False: no proximal steps, the penalty's gradient is added instead (the paper's ablation)."""
    tau: float = 1e-4
    """τ: without proximal steps, below this an importance counts as 0 and a change as none."""
    importance_mode: Literal["eval", "train"] = "eval"
    """Mode in which activations are measured; train keeps dropout on, as the authors' code did."""
    seed: int = 0
    """Seed of the random choices."""
    find_unused = checks.find_unused_settings

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_settings(self)

    @property
    def freezes(self) -> bool:
        """Whether AGS-CL freezes important nodes: they never move again."""
        return self.prox and math.isinf(self.lam)


@dataclass
class AGSCLKnowledge(TrunkBufferKnowledge):
    """What AGS-CL keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {
        "omega": "importances",
        "first_task": "masks",
        "anchors": "anchors",
        "initial_weights": "start",
    }
    omega: Tensor = field(default_factory=lambda: torch.empty(0))  # Ω (groups,)
    first_task: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))  # to use each, or NEVER
    anchors: list[Tensor] = field(default_factory=list)  # rows of the important groups, in the order of `Rows`
    initial_weights: list[Tensor] = field(default_factory=list)  # with reinit_from="start"
    fresh_groups: str = ""  # the groups that got fresh weights in the last end_task, packed: for the report
    last_task_steps: int = 0  # steps of the last task: a forecast for the next one, if its length is not told
    last_task_share: float = 1.0  # of the last task's told length, how much it ran: below 1 if it stopped early
    generator: torch.Generator = field(default_factory=torch.Generator)
    digests: GroupDigests | None = None
    zero_rule: str = ""  # what `zero_init` meant when the method was made

    @property
    def free(self) -> Tensor:
        """(1) (groups,) the unimportant nodes: those that were never important."""
        return self.first_task == NEVER


class AGSCLPlan(NodePlan):
    """One task of AGS-CL: which rows are free and important, how strongly each is penalised, what steps do to them."""

    method: AGSCL
    saved: ClassVar[tuple[str, ...]] = ("schedule", "norms", "start_norm", "start_rows", "pruner")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rates = LayerRates(self.graph, self.optimizers)
        self.main_optimizer = rates.main
        self.schedule = ProximalSchedule(rates, self.method.config.prox_every, self.steps_per_epoch)
        self.norms = NodeNormFreezer(self.graph, ~self.method.knowledge.free)  # of important nodes' BatchNorm
        self.start_norm = 0.0  # the smallest norm of a free group as the task began, for the checks
        self.start_rows: list[Tensor] = []  # with prox=False, all rows as the task began
        self.pruner = NodePruner(self, self.method.config.budget)

    def build(self) -> None:
        config, knowledge, free = self.method.config, self.method.knowledge, self.method.free
        row_kind = make_rows if config.prox else Rows  # `add_penalty` needs a tensor for each parameter
        self.free_rows, self.important_rows = row_kind(self.graph, free), row_kind(self.graph, ~free)
        if self.method.zero_rule == "earlier_tasks":  # what important rows read of free nodes is trained
            self.important_rows.skip_inputs_from(self.graph, free)
        self.anchors = self.important_rows.flatten_rows(knowledge.anchors)
        mu_factors, omega = scale_penalties(self.graph, knowledge.omega, free, config.by_layer)
        self.mu_factors, self.omega = mu_factors[self.free_rows.groups], omega[self.important_rows.groups]
        self.zero_masks = ZeroMasks(self.graph, knowledge.first_task, self.method.zero_rule)
        self.pruner.build()

    def start(self) -> None:
        if not self.method.config.prox:
            self.start_rows = Rows(self.graph, torch.ones_like(self.method.knowledge.free)).gather()
        checks.check_before_task(self)

    def detach(self) -> None:
        super().detach()
        self.norms.close()

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self.pruner.observe_gradients(optimizer, scale)

    # Loss function (2): the task's own loss; its penalties act through the proximal step below -----------------------

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """AGS-CL's penalty, only without proximal steps: the gradient of μ‖θ‖ and λΩ‖θ − anchor‖ as (2) has them."""
        config, trained = self.method.config, {id(p) for group in optimizer.param_groups for p in group["params"]}
        for rows, anchors in ((self.free_rows, None), (self.important_rows, self.anchors)):
            if config.prox or not len(rows):
                continue
            differences = rows.gather() if anchors is None else torch._foreach_sub(rows.gather(), anchors)
            strengths = config.mu * self.mu_factors if anchors is None else config.lam * self.omega
            gradients = norm_gradients(differences, strengths * (1.0 if scale is None else scale), rows.members)
            for parameter, index, gradient in zip(rows.parameters, rows.index, gradients, strict=True):
                if parameter.grad is not None and id(parameter) in trained:
                    parameter.grad.index_add_(0, index, gradient)

    # Learning with proximal gradient descent (3) to (7) --------------------------------------------------------------

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        """After AGS-CL's steps (4): weights from a later node into an earlier one are 0 (I.1), if that is the rule."""
        self.zero_masks.apply_()

    def proximal_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        share = self.schedule.count_step(optimizer, skipped)
        if share is not None:
            self._run_proximal_step(share)
        elif self.method.config.prox_every != "epoch":  # not due yet, or another optimizer stepped
            self._restore_frozen()
        self.pruner.zero_pruned_()
        self.pruner.prune_after_step()

    def end_epoch(self) -> None:
        checks.check_epoch(self)
        if (share := self.schedule.end_epoch()) is not None:
            self._run_proximal_step(share)
        self._restore_frozen()
        self.pruner.prune_after_epoch()

    def end_steps(self) -> None:
        """AGS-CL's end of a task: the proximal step for the steps since the last one, and what is left to prune."""
        self.build()  # the loop may have replaced parameters, e.g. by load_state_dict(…, assign=True)
        if (share := self.schedule.end_task()) is not None:
            self._run_proximal_step(share)
        self._restore_frozen()
        self.pruner.prune_rest()

    @torch.no_grad()
    def _run_proximal_step(self, share: float | Tensor) -> None:
        """(5) in the closed form of (7), with `share` of an epoch's thresholds."""
        config, free, important = self.method.config, self.free_rows, self.important_rows
        alpha = self.schedule.begin_proximal_step(share)
        if len(free) and config.mu and config.prox:  # (7), first line: exactly 0 where ‖θ‖ ≤ αμ
            thresholds = select_rates(alpha, free) * self.mu_factors * (config.mu * share)
            free.scatter_(shrink(free.gather(), thresholds, free.members))
        if len(important) and config.freezes:
            important.scatter_(self.anchors)  # also at rate 0
        elif len(important) and config.lam and config.prox:  # second line: exactly the anchor where ‖θ − anchor‖ ≤ αλΩ
            thresholds = self.omega * select_rates(alpha, important) * (config.lam * share)
            important.scatter_(pull(important.gather(), self.anchors, thresholds, important.members))

    @torch.no_grad()
    def _restore_frozen(self) -> None:
        """With λ = ∞ nothing may move important rows, whoever stepped: put them back, and the zeros."""
        if self.method.config.freezes and len(self.important_rows):
            self.important_rows.scatter_(self.anchors)
            self.zero_masks.apply_()
            self.schedule.others_stepped = False


class AGSCL(NodeViewMethod):
    """Learn task after task without forgetting, in one network of ReLU nodes.

    >>> method = AGSCL(model, example_input)

    No setting is needed; `AGSCL.Config` lists them. `example_input`: a batch of inputs; `heads`: where your own are.
    """

    title = "AGS-CL"
    formula = BUDGET_FORMULA
    search: ClassVar[tuple[SearchAxis, ...]] = (SearchAxis("budget", values=(0.1, 0.15, 0.2, 0.25, 0.35, 0.5)),)
    Config = AGSCLConfig
    config: AGSCLConfig
    Knowledge = AGSCLKnowledge
    knowledge: AGSCLKnowledge
    Plan = AGSCLPlan
    plan: AGSCLPlan | None
    needs = frozenset({"end_epoch"})
    prunes_in_place, min_captured_epochs = True, MIN_EPOCHS
    paper: ClassVar[Mapping[str, Any]] = {  # as the authors' code for the paper's tables, with λ, μ and ρ from these
        "budget": None,
        "prox_every": "epoch",
        "zero_init": "while_free",
        "importance_mode": "train",
    }

    @property
    def free(self) -> Tensor:
        """(groups,) AGS-CL's free nodes: those that were never important."""
        return self.knowledge.free

    @property
    def capturable(self) -> bool:
        return self.config.prox_every in ("epoch", "step", 1)

    @property
    def end_epoch_capturable(self) -> bool:
        return self.config.budget is None  # at some of them it prunes

    @property
    def depends_on_batch_size(self) -> bool:
        """AGS-CL's mean activation does not depend on it; statistics of BatchNorm and what dropout draws do."""
        return self._graph is None or bool(self.graph.norms) or self.config.importance_mode == "train"

    def _init_nodes(self) -> None:
        super()._init_nodes()
        knowledge = self.knowledge
        check_budget(self.graph, self.config.budget)
        knowledge.omega = torch.zeros(self.graph.size, device=self._node_device, dtype=self._node_dtype)  # Ω is 0
        knowledge.first_task = torch.full_like(knowledge.omega, NEVER, dtype=torch.int32)
        knowledge.generator.manual_seed(self.config.seed)
        knowledge.digests = GroupDigests(self.graph, self.zero_rule)
        if self.config.reinit_from == "start":
            knowledge.initial_weights = [p.detach().clone() for _, p, _ in self.graph.incoming_parameters()]
        self._frozen_norms = StatisticsFreezer(self.graph.frozen_norms)

    # Updating Ω (8) and re-initialisation of unimportant nodes -------------------------------------------------------

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan, knowledge, config = self.plan, self.knowledge, self.config
        assert plan is not None
        assert knowledge.digests is not None
        plan.end_steps()
        if norms := plan.norms.find_trained():
            recompute_statistics(norms, self.model, batches := make_repeatable(batches), forward)
        activations = measure_activations(self.graph, batches, forward, config.importance_mode)
        checks.check_activations(plan, activations)
        before = ~knowledge.free
        changed = knowledge.digests.compare(knowledge.first_task)
        if not config.prox:
            changed = find_moved_groups(self.graph, plan.start_rows, config.tau)
        omega = (config.eta * knowledge.omega + activations).to(knowledge.omega.dtype)  # (8)
        knowledge.omega = torch.where(before, omega.clamp(min=torch.finfo(omega.dtype).tiny), omega)  # never free again
        new = (knowledge.omega > 0 if config.prox else knowledge.omega >= config.tau) & ~before
        if config.min_activity:
            inactive = find_less_active(self.graph, activations, config.min_activity) & new
            knowledge.omega[inactive], new = 0.0, new & ~inactive
        knowledge.first_task[new] = len(self.tasks) - 1
        if self.zero_rule != "off":  # (I.1), always before (I.2)
            zero_outgoing_(self.graph, knowledge.free, self.heads.get_head(plan.task, self.tasks))
        if config.rand_init:
            self._reinitialise_free(plan, new)  # (I.2)
        knowledge.anchors = Rows(self.graph, ~knowledge.free).gather()
        knowledge.digests.update(knowledge.first_task)
        knowledge.statistics = count_nodes(knowledge.free, before, changed) | {"capacity": self.capacity().summarise()}
        checks.check_after_task(plan, activations > 0, int(before.sum()), len(knowledge.digests.unmoved))

    def _reinitialise_free(self, plan: AGSCLPlan, new: Tensor) -> None:
        """(I.2) A share ρ of each layer's free nodes get fresh incoming weights; `new` just became important."""
        knowledge, generator, config = self.knowledge, self.knowledge.generator, self.config
        needed = new.cpu() if config.rand_init == "needed" else None
        fresh = choose_groups(self.graph, knowledge.free.cpu(), config.rho, generator, needed)
        knowledge.fresh_groups = reinitialise_(self.graph, fresh, generator, plan.optimizers, knowledge.initial_weights)

    # What it reports -------------------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """AGS-CL's capacity per layer: the nodes each task has taken, how many are free, how many more tasks fit."""
        return measure_capacity(self.graph, self.knowledge.first_task, self.tasks, self.config.budget)

    def memory(self) -> dict[str, int]:
        """AGS-CL's memory as `Method.memory` has it, with the certificate's `digests` in bytes."""
        counts, size = super().memory(), 0 if self.knowledge.digests is None else self.knowledge.digests.bytes
        return {**counts, "digests": size, "bytes": counts["bytes"] + size}

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        return forecast_node_memory(outline, DIGEST_BYTES, keeps_initial_weights=settings.get("reinit_from") == "start")

    def _certified_claims(self) -> dict[str, Any]:
        return certify_nodes(self)

    def _check_group_count(self, state: Mapping[str, Any]) -> None:
        self._require_group_count(len(state["omega"]))

    def close(self) -> None:
        super().close()
        if self._graph is not None:
            self._frozen_norms.close()
