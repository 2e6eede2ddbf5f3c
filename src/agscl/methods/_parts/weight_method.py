"""What EWC, SI, RWALK, MAS and L2 share: an importance and an anchor per weight, and a quadratic penalty.

The penalty is `strength · Σ importance·(θ − anchor)²`; from the second task on, its gradient is added in closed form
before each step. Protected are all trained weights outside the heads, and a head that all tasks share. A task's own
head needs no penalty: earlier tasks do not use it, and later ones do not train it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.heads import HeadPlace, list_parameters
from agscl.methods._parts.batchnorm import (
    StatisticsFreezer,
    TaskStatisticsSwitcher,
    find_batchnorms,
    find_trunk_batchnorms,
)
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods._parts.memory_forecast import ZERO, Memory, Outline
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.task_plan import Plan
from agscl.system.sums import sum_dtype, to_sum_dtype

__all__ = ["Tensors", "WeightConfig", "WeightKnowledge", "WeightMethod", "WeightPlan", "find_protected"]

Tensors = dict[str, Tensor]
"""A tensor for each weight, by its name in the model."""


@dataclass(frozen=True, kw_only=True)
class WeightConfig(Settings):
    """Settings of every weight-wise method."""

    batchnorm: Literal["freeze", "per_task", "shared"] = "freeze"
    """BatchNorm statistics: frozen after task 1, in training too; one set per task; or updated by every task."""
    clip_penalty_step: bool = False
    """Whether a step of the penalty never goes past the anchor: for plain SGD, where a strong penalty overshoots and
    training diverges. Importances are clipped at the value at which a step, with its momentum, ends at the anchor:
    (1 − momentum) / (2 · strength · rate)."""


@dataclass
class WeightKnowledge(Knowledge):
    """What a weight-wise method keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {
        "importances": "importances",
        "anchors": "anchors",
        "norm_statistics": "statistics",
    }
    importances: Tensors = field(default_factory=dict)
    anchors: Tensors = field(default_factory=dict)
    norm_statistics: dict[str, Tensors] = field(default_factory=dict)  # of each task, with batchnorm="per_task"


class ProtectedWeights:
    """The protected weights that one optimizer trains, and their tensors from each table, in the same order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *tables: Mapping[str, Tensor] | None) -> None:
        self.parameters: list[Tensor] = list(parameters.values())
        self.columns = [None if table is None else [table[name] for name in parameters] for table in tables]
        self._without_gradient: list[int] | None = None
        self._selected: tuple[list[Tensor], list[list[Tensor] | None]] = ([], [])

    def select_with_gradient(self) -> tuple[list[Tensor], list[Tensor], list[list[Tensor] | None]]:
        """Gradients, weights and columns of the tables, without the weights that have no gradient in this step."""
        gradients = [p.grad for p in self.parameters]
        missing = [position for position, gradient in enumerate(gradients) if gradient is None]
        if missing != self._without_gradient:
            missing_positions = set(missing)

            def select(column: list[Any]) -> list[Any]:
                return [entry for position, entry in enumerate(column) if position not in missing_positions]

            columns = [None if column is None else select(column) for column in self.columns]
            self._selected, self._without_gradient = (select(self.parameters), columns), missing
        return [gradient for gradient in gradients if gradient is not None], *self._selected


class WeightPlan(Plan):
    """One task of a weight-wise method: per optimizer, the weights it trains with their anchors and importances."""

    method: WeightMethod
    acts_in_first_task: ClassVar[bool] = False  # whether the hooks have something to do in the first task too

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights: list[ProtectedWeights] = []  # per optimizer
        self._trained: tuple[list[int], list[bool]] | None = None
        self._watched: list[nn.Parameter] = []  # all that the method would protect, trained or not
        self._frozen_norms: StatisticsFreezer | None = None

    def build(self) -> None:
        method = self.method
        self._watched = list(list_protectable(method).values())
        self._trained = self._list_trained()
        norms = method.find_trunk_norms()
        if norms and method.config.batchnorm == "freeze" and len(method.tasks) > 1 and self._frozen_norms is None:
            self._frozen_norms = StatisticsFreezer(norms)
        method.switch_statistics_by_task()
        if len(method.tasks) == 1 and not self.acts_in_first_task:
            return
        protected = method.find_protected()
        self.add_weights(protected)
        self.weights = []
        for optimizer in self.optimizers:
            if len(method.tasks) > 1 and any(group.get("maximize") for group in optimizer.param_groups):
                raise ValueError(
                    "An optimizer with maximize=True would maximise the penalty: minimise the negative loss instead."
                )
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained_weights = {name: p for name, p in protected.items() if id(p) in trained}
            self.weights.append(ProtectedWeights(trained_weights, *self.tables()))

    def add_weights(self, protected: Mapping[str, nn.Parameter]) -> None:
        """Give weights that no earlier task trained an anchor (their value now) and importance 0."""
        knowledge = self.method.knowledge
        for name, parameter in protected.items():
            if name not in knowledge.anchors:
                knowledge.anchors[name] = parameter.detach().clone()
                if (importances := self.importances) is not None:
                    importances[name] = torch.zeros_like(parameter)

    def start(self) -> None:
        self.method.check_penalty(self)

    def detach(self) -> None:
        super().detach()
        if self._frozen_norms is not None:
            self._frozen_norms.close()

    @property
    def importances(self) -> Tensors | None:
        """The importances of the weights that are in force; None: all are 1."""
        return self.method.knowledge.importances

    def tables(self) -> list[Mapping[str, Tensor] | None]:
        """Per weight, the tensors that the hooks need: anchor, importance, and more where a method adds some."""
        return [self.method.knowledge.anchors, self.importances]

    def _list_trained(self) -> tuple[list[int], list[bool]]:
        """How many weights each param group holds, and which are trained: a loop may add or unfreeze some in a task."""
        sizes = [len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        return sizes, [p.requires_grad for p in self._watched]

    def rebuild_if_changed(self) -> None:
        """Build the penalties' tensors again if the loop has changed which weights the optimizers train."""
        if self._list_trained() != self._trained:
            self.build()

    def protected_by(self, optimizer: Optimizer) -> ProtectedWeights:
        return self.weights[self.optimizers.index(optimizer)]

    # A step ----------------------------------------------------------------------------------------------------------

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self.rebuild_if_changed()

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if len(self.method.tasks) < 2:
            return
        gradients, parameters, (anchors, importances, *_) = self.protected_by(optimizer).select_with_gradient()
        if not gradients:
            return
        assert anchors is not None
        curvature = 2 * self.method.strength
        differences = torch._foreach_sub(parameters, anchors)
        if scale is not None:
            torch._foreach_mul_(differences, scale)
        if self.method.config.clip_penalty_step:
            torch._foreach_mul_(differences, _clip_curvatures(curvature, optimizer, parameters, importances))
            torch._foreach_add_(gradients, differences)
        elif importances is None:
            torch._foreach_add_(gradients, differences, alpha=curvature)
        else:
            torch._foreach_addcmul_(gradients, differences, importances, value=curvature)


def _clip_curvatures(
    curvature: float, optimizer: Optimizer, parameters: list[Tensor], importances: list[Tensor] | None
) -> list[Tensor]:
    """`curvature` · importance of each weight, at most (1 − momentum) / rate."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    limits = [
        (1 - groups[id(p)].get("momentum", 0.0)) / torch.as_tensor(groups[id(p)]["lr"], dtype=p.dtype, device=p.device)
        for p in parameters
    ]
    if importances is None:
        return [limit.clamp(max=curvature) for limit in limits]
    curvatures = torch._foreach_mul(importances, curvature)
    return [torch.minimum(weight_curvature, limit) for weight_curvature, limit in zip(curvatures, limits, strict=True)]


def list_protectable(method: Method) -> dict[str, nn.Parameter]:
    """All weights outside the heads, and a head that all tasks share, by name."""
    heads = method.heads
    return list_parameters(method.model) if heads.is_shared else heads.list_outside_parameters(method.tasks)


def find_protected(method: Method) -> dict[str, nn.Parameter]:
    """Those of the protectable weights that are trained, by name."""
    return {name: p for name, p in list_protectable(method).items() if p.requires_grad}


class WeightMethod(Method):
    """A method with a quadratic penalty on every weight that earlier tasks need."""

    Config: ClassVar[type[WeightConfig]] = WeightConfig
    config: WeightConfig
    Knowledge: ClassVar[type[WeightKnowledge]] = WeightKnowledge
    knowledge: WeightKnowledge
    Plan: ClassVar[type[WeightPlan]] = WeightPlan
    plan: WeightPlan | None

    importances_per_weight: ClassVar[int] = 1
    strength_setting: ClassVar[str] = "lam"  # the setting that says how strong the penalty is
    no_importance_advice: ClassVar[str] = ""  # the likely cause when every importance is 0

    def __init__(self, model: nn.Module, *, heads: HeadPlace | None = None, **settings: Any) -> None:
        super().__init__(model, heads=heads, **settings)
        self._statistics_switcher: TaskStatisticsSwitcher | None = None

    @property
    def strength(self) -> float:
        """The strength of a weight-wise penalty: the factor before Σ importance·(θ − anchor)²."""
        return float(getattr(self.config, self.strength_setting))

    def find_protected(self) -> dict[str, nn.Parameter]:
        """The weights that the method protects, by name."""
        return find_protected(self)

    def find_trunk_norms(self) -> dict[str, Any]:
        """The BatchNorms that weight-wise methods hold: those outside the heads, or all where tasks share a head."""
        return find_batchnorms(self.model) if self.heads.is_shared else find_trunk_batchnorms(self.heads, self.tasks)

    def _prepare_task(self, task: str) -> None:
        """Let what is kept for each weight follow its dtype and device, which may have changed between tasks."""
        parameters = self.heads.list_task_parameters(task, self.tasks)
        for table in (getattr(self.knowledge, key) for key in self.knowledge.purposes):
            for name, tensor in table.items():
                if name in parameters and isinstance(tensor, Tensor):
                    table[name] = tensor.to(parameters[name])

    def switch_statistics_by_task(self) -> None:
        """With batchnorm="per_task", a weight-wise method runs each task with its own statistics from now on."""
        if (
            self.config.batchnorm == "per_task"
            and self._statistics_switcher is None
            and (norms := self.find_trunk_norms())
        ):
            self._statistics_switcher = TaskStatisticsSwitcher(self.model, norms, self.task_of_call)
            self._statistics_switcher.statistics = self.knowledge.norm_statistics

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """The weight-wise penalty, `strength · Σ importance·(θ − anchor)²`, for the weights as they are now."""
        return self.strength * self._sum_weighted_distances()

    def _sum_weighted_distances(self) -> Tensor:
        """Σ importance·(θ − anchor)²"""
        importances = self._current_importances()
        parameters = self.heads.list_task_parameters(self.tasks[-1], self.tasks) if self.tasks else {}
        parameter = next(self.model.parameters())
        total = parameter.new_zeros((), dtype=sum_dtype(parameter.device))
        if importances is not None and not importances:
            return total
        for name, anchor in self.knowledge.anchors.items():
            squares = (to_sum_dtype(parameters[name]) - anchor).square()
            total += (squares if importances is None else squares * importances[name]).sum()
        return total

    def _current_importances(self) -> Tensors | None:
        """The importances in force; None: all are 1; empty: none are set between tasks."""
        return self.knowledge.importances

    # A task ends -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan = self.plan
        assert plan is not None
        plan.rebuild_if_changed()
        protected = self.find_protected()
        new = self._measure_importances(protected, batches, forward)
        self._check_importances(new)
        distance = self._sum_weighted_distances() if len(self.tasks) > 1 else None
        if distance is not None and plan.steps and self.strength and self._has_importance() and not bool(distance):
            self.warn_once(
                "distance",
                "The penalty stayed 0 in this task, because no weight that earlier tasks need has changed. Is the "
                "learning rate 0, or does another optimizer train them? Give that optimizer to begin_task too.",
            )
        self._accumulate(protected, new)
        if self._statistics_switcher is not None:
            self._statistics_switcher.store(plan.task)
        self.knowledge.statistics = {
            "penalty": 0.0 if distance is None else float(self.strength * distance),
            **self._describe_importances(),
        }

    @property
    def _divergence_advice(self) -> str:
        return (
            f"lower the learning rate or {self.strength_setting} (under SGD a weight overshoots once rate × the "
            "penalty's curvature is above 2)"
        )

    def _check_importances(self, importances: Tensors) -> None:
        if not all(bool(importance.isfinite().all()) for importance in importances.values()):
            raise FloatingPointError(
                f"Importances of task {self.task!r} are not finite, though the weights are. The task was not ended. "
                "Where examples are run one by one, does the model compute something over a batch, such as a "
                "deviation? Then measure by mini-batches (EWC: fisher='batched'; MAS: batch=20). Else "
                f"{self._divergence_advice}."
            )

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        """What this task adds to the importance of each protected weight. Must not change the method."""
        return {}

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        """Add a task's importances to those of earlier tasks, and set the anchors."""
        knowledge = self.knowledge
        for name, parameter in protected.items():
            before = knowledge.importances.get(name)
            knowledge.importances[name] = (new[name] if before is None else before + new[name]).to(parameter.dtype)
            knowledge.anchors[name] = parameter.detach().clone()

    def close(self) -> None:
        """As `Method.close`; under a weight-wise method the model keeps the BatchNorm statistics of its last task."""
        super().close()
        if self._statistics_switcher is not None:
            self._statistics_switcher.close()
            self._statistics_switcher = None

    # What it reports -------------------------------------------------------------------------------------------------

    def _has_importance(self) -> bool:
        importances = self._current_importances()
        return importances is None or any(bool(importance.any()) for importance in importances.values())

    def check_penalty(self, plan: WeightPlan) -> None:
        """Warn where the penalty of a new task is 0."""
        if len(self.tasks) < 2:
            return
        setting = self.strength_setting
        if self.strength == 0:
            self.warn_once(
                "penalty", f"{setting} is 0, so the penalty is 0 and old tasks are forgotten. Use {setting} > 0."
            )
        elif not any(weights.parameters for weights in plan.weights):
            self.warn_once(
                "penalty",
                "No optimizer given to begin_task trains a weight that could be protected: the penalty does nothing. "
                "Are all layers but the heads frozen, or is another optimizer in use?",
            )
        elif not self._has_importance():
            self.warn_once(
                "penalty",
                f"Every importance is 0, so the penalty is 0 and old tasks are forgotten. {self.no_importance_advice}",
            )

    def _describe_importances(self) -> dict[str, Any]:
        importances = self._current_importances()
        if not importances:
            return {}
        count = sum(importance.numel() for importance in importances.values())
        return {
            "importance_mean": sum(float(to_sum_dtype(importance).sum()) for importance in importances.values())
            / count,
            "importance_max": max(float(importance.max()) for importance in importances.values()),
        }

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of a weight-wise method: importances and anchors; with batchnorm="per_task" also each task's statistics."""
        statistics = outline.statistics.times(tasks) if settings.get("batchnorm") == "per_task" else ZERO
        return Memory.from_counts(
            importances=cls.importances_per_weight * outline.weights.numbers,
            anchors=outline.weights.numbers,
            bytes=(cls.importances_per_weight + 1) * outline.weights.bytes + statistics.bytes,
            **({"statistics": statistics.numbers} if statistics.numbers else {}),
        )

    def statistics(self) -> dict[str, Any]:
        """Of a weight-wise method's last task: the `penalty` at its end, mean and maximum of importances after it."""
        return super().statistics()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        parameters = list_parameters(self.model)
        for table in (value for key, value in state.items() if key in ("importances", "anchors", "fisher", "score")):
            for name, tensor in table.items():
                if name not in parameters or parameters[name].shape != tensor.shape:
                    raise ValueError(
                        f"The state is of another network: this one has no parameter {name} of {list(tensor.shape)}."
                    )
        super()._load_knowledge(state, task)
        if self.tasks:
            self.switch_statistics_by_task()
        if self._statistics_switcher is not None:
            self._statistics_switcher.statistics = self.knowledge.norm_statistics
