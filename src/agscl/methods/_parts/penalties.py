"""What EWC, SI, RWALK, MAS and L2 share: an importance and an anchor per weight, and a quadratic penalty.

The penalty is `strength · Σ importance·(θ − anchor)²`; from the second task on, its gradient is added in closed form
before each step. Protected are all trained weights outside the heads, and a head that all tasks share. A task's own
head needs no protection: no earlier task gave it importance, and later ones do not move it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.heads import HeadPlace
from agscl.methods._parts.batchnorm import FrozenStatistics, TaskStatistics, norms_with_statistics
from agscl.methods._parts.lifecycle import Forward, Method

__all__ = ["PathMethod", "WeightConfig", "WeightMethod"]


@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """Settings of every weight-wise method."""

    batchnorm: Literal["freeze", "per_task", "shared"] = "freeze"
    """BatchNorm statistics: those of task 1 for good, in training too; each task its own; or updated by every task."""
    steady: bool = False
    """Whether the penalty's own step may go as far as the anchor and no further: for plain SGD, where a strong penalty
    overshoots more and more otherwise and training diverges. Importances then count up to the value at which a step,
    and what momentum makes of it, ends at the anchor: (1 − momentum) / (2 · strength · rate)."""

    def __post_init__(self) -> None:
        self._one_of("batchnorm", "freeze", "per_task", "shared")

    def _check(self, good: bool, rule: str) -> None:
        if not good:
            raise ValueError(f"{type(self).__name__.removesuffix('Config')}: {rule}.")

    def _one_of(self, name: str, *known: str) -> None:
        value = getattr(self, name)
        self._check(value in known, f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")

    def _at_least(self, name: str, least: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        good = math.isfinite(value) and (value > least if above else value >= least)
        rule = f"above {least:g}" if above else f"of at least {least:g}"
        self._check(good, f"{name} must be a finite number {rule}, not {value}")


class _Part:
    """The protected weights that one optimizer trains, side by side with what is known of each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *known: Mapping[str, Tensor] | None) -> None:
        self.parameters: list[Tensor] = list(parameters.values())
        self.known = [None if one is None else [one[name] for name in parameters] for one in known]
        self._absent: list[int] | None = None
        self._live: tuple[list[Tensor], list[list[Tensor] | None]] = ([], [])

    def live(self) -> tuple[list[Tensor], list[Tensor], list[list[Tensor] | None]]:
        """Gradients, weights, and what is known of them, without the weights that have no gradient in this step."""
        gradients = [p.grad for p in self.parameters]
        absent = [place for place, gradient in enumerate(gradients) if gradient is None]
        if absent != self._absent:
            gone = set(absent)

            def present(some: list[Any]) -> list[Any]:
                return [one for place, one in enumerate(some) if place not in gone]

            self._live = present(self.parameters), [None if one is None else present(one) for one in self.known]
            self._absent = absent
        return [gradient for gradient in gradients if gradient is not None], *self._live


class WeightMethod(Method):
    """A method with a quadratic penalty on every weight that earlier tasks need.

    `importances` and `anchors` hold a tensor per protected weight, by its name in the model.
    """

    Config: ClassVar[type[WeightConfig]] = WeightConfig
    config: WeightConfig
    paper: ClassVar[Mapping[str, Any]] = {}
    """Settings that give the form behind the AGS-CL paper's table: `Kind(model, lam=…, **Kind.paper)`."""

    _setting: ClassVar[str] = "lam"  # the setting that says how strong the penalty is
    _no_importance: ClassVar[str] = ""  # what is suspected when every importance is 0
    _from_the_start: ClassVar[bool] = False  # whether the hooks have something to do in the first task too

    def __init__(self, model: nn.Module, *, heads: HeadPlace | None = None, **settings: Any) -> None:
        super().__init__(model, heads=heads, **settings)
        self.importances: dict[str, Tensor] = {}
        self.anchors: dict[str, Tensor] = {}
        self._parts: dict[int, _Part] = {}  # per optimizer, during a task
        self._trained: list[int] = []  # how many weights it trained, group by group, when these were made
        self._frozen: FrozenStatistics | None = None
        self._own: TaskStatistics | None = None
        self._figures: dict[str, Any] = {}

    @property
    def strength(self) -> float:
        """The factor before Σ importance·(θ − anchor)²."""
        return float(getattr(self.config, self._setting))

    def protected(self) -> dict[str, nn.Parameter]:
        """The weights that the method holds, by name."""
        heads = set() if self.heads.shared else {id(p) for p in self.heads.parameters(self.tasks).values()}
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in heads}

    # A task begins ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._prepare()
        self._check_penalty()

    def _prepare(self) -> None:
        """Set up what the hooks need; also when a task is taken up again."""
        self._trained = self._count_trained()
        self._set_batchnorm()
        if len(self.tasks) == 1 and not self._from_the_start:
            return
        protected = self.protected()
        for name, parameter in protected.items():  # what was not trained before was not needed before
            if name not in self.anchors:
                self.anchors[name] = parameter.detach().clone()
                if self._known()[1] is not None:
                    self.importances[name] = torch.zeros_like(parameter)
        for optimizer in self._optimizers:
            if len(self.tasks) > 1 and any(group.get("maximize") for group in optimizer.param_groups):
                raise ValueError(
                    "An optimizer with maximize=True would climb the penalty: minimise the negative instead."
                )
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = {name: p for name, p in protected.items() if id(p) in held}
            self._parts[id(optimizer)] = _Part(mine, *self._known())

    def _count_trained(self) -> list[int]:
        """What every group of the optimizers trains: a loop may add weights, or unfreeze some, within a task."""
        return [sum(p.requires_grad for p in group["params"]) for o in self._optimizers for group in o.param_groups]

    def _follow(self) -> None:
        if self._count_trained() != self._trained:
            self._prepare()

    def _known(self) -> list[Mapping[str, Tensor] | None]:
        """What the hooks use of each weight: anchor, importance (None: 1), and more where a method needs it."""
        return [self.anchors, self.importances]

    def _set_batchnorm(self) -> None:
        norms = norms_with_statistics(self.model)
        if not self.heads.shared:
            heads = {id(m) for task in self.tasks for m in self.heads.of(task, self.tasks).modules()}
            norms = {name: norm for name, norm in norms.items() if id(norm) not in heads}
        if not norms:
            return
        if self.config.batchnorm == "freeze" and len(self.tasks) > 1 and self.task is not None:
            self._frozen = self._frozen or FrozenStatistics(norms)
        elif self.config.batchnorm == "per_task" and self._own is None:
            self._own = TaskStatistics(self.model, norms, self._task_of)

    # A step ----------------------------------------------------------------------------------------------------------

    def _observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self._follow()

    def _add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if len(self.tasks) < 2:
            return
        gradients, parameters, (anchors, importances, *_) = self._parts[id(optimizer)].live()
        if not gradients:
            return
        assert anchors is not None
        away = torch._foreach_sub(parameters, anchors)
        if scale is not None:
            torch._foreach_mul_(away, scale)
        if self.config.steady:
            torch._foreach_mul_(away, self._steady_curvatures(optimizer, parameters, importances))
            torch._foreach_add_(gradients, away)
        elif importances is None:
            torch._foreach_add_(gradients, away, alpha=2 * self.strength)
        else:
            torch._foreach_addcmul_(gradients, away, importances, value=2 * self.strength)

    def _steady_curvatures(
        self, optimizer: Optimizer, parameters: list[Tensor], importances: list[Tensor] | None
    ) -> list[Tensor]:
        """2 · strength · importance of each weight, at most (1 − momentum) / rate."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        limits = [
            (1 - groups[id(p)].get("momentum", 0.0))
            / torch.as_tensor(groups[id(p)]["lr"], dtype=p.dtype, device=p.device)
            for p in parameters
        ]
        if importances is None:
            return [limit.clamp(max=2 * self.strength) for limit in limits]
        curvatures = torch._foreach_mul(importances, 2 * self.strength)
        return [torch.minimum(curvature, limit) for curvature, limit in zip(curvatures, limits, strict=True)]

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """`strength · Σ importance·(θ − anchor)²` for the weights as they are now."""
        return self.strength * self._distance()

    def _distance(self) -> Tensor:
        """Σ importance·(θ − anchor)²"""
        anchors, importances, *_ = self._known()
        assert anchors is not None
        parameters = dict(self.model.named_parameters())
        total = next(self.model.parameters()).new_zeros((), dtype=torch.float64)
        if importances is not None and not importances:  # between tasks, where they are made of others
            return total
        for name, anchor in anchors.items():
            squares = (parameters[name].double() - anchor).square()
            total += (squares if importances is None else squares * importances[name]).sum()
        return total

    # A task ends -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        self._follow()
        protected = self.protected()
        self._check_finite(protected)
        new = self._measure(protected, batches, forward)
        self._check_finite(new)
        distance = self._distance() if len(self.tasks) > 1 else None
        if distance is not None and self._steps and self.strength and self._important() and not bool(distance):
            self._warn(
                "distance",
                "The penalty stayed 0 in this task, because no weight that earlier tasks need has moved. Is the "
                "learning rate 0, or does another optimizer train them? Give that one to begin_task too.",
            )
        self._accumulate(protected, new)
        if self._own is not None:
            assert self.task is not None
            self._own.keep(self.task)
        self._figures = {"penalty": 0.0 if distance is None else float(self.strength * distance), **self._sizes()}

    def _check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise FloatingPointError(
                f"Weights or importances of task {self.task!r} are not finite: training diverged. The task was not "
                "ended; go back to the last good weights, and lower the learning rate or "
                f"{self._setting} (under SGD a weight overshoots once rate × the penalty's curvature is above 2)."
            )

    def _measure(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> dict[str, Tensor]:
        """What this task adds to the importance of each protected weight. Must not change the method."""
        return {}

    def _accumulate(self, protected: dict[str, nn.Parameter], new: dict[str, Tensor]) -> None:
        """Merge a task's importances with those of earlier tasks, and take the anchors. Here: the sum."""
        for name, parameter in protected.items():
            before = self.importances.get(name)
            self.importances[name] = (new[name] if before is None else before + new[name]).to(parameter.dtype)
            self.anchors[name] = parameter.detach().clone()

    def _leave(self) -> None:
        super()._leave()
        self._parts = {}
        if self._frozen is not None:
            self._frozen.close()
            self._frozen = None

    def close(self) -> None:
        """As `Method.close`; the model keeps the BatchNorm statistics of its last task."""
        super().close()
        if self._own is not None:
            self._own.close()
            self._own = None

    # What it reports -------------------------------------------------------------------------------------------------

    def _important(self) -> bool:
        importances = self._known()[1]
        return importances is None or any(bool(one.any()) for one in importances.values())

    def _check_penalty(self) -> None:
        if len(self.tasks) < 2:
            return
        setting = self._setting
        if self.strength == 0:
            self._warn(
                "penalty", f"{setting} is 0, so the penalty is 0 and old tasks are forgotten. Use {setting} > 0."
            )
        elif not any(part.parameters for part in self._parts.values()):
            self._warn(
                "penalty",
                "No optimizer given to begin_task trains a weight that could be protected: the penalty does nothing. "
                "Are all layers but the heads frozen, or is another optimizer in use?",
            )
        elif not self._important():
            self._warn(
                "penalty",
                f"Every importance is 0, so the penalty is 0 and old tasks are forgotten. {self._no_importance}",
            )

    def _sizes(self) -> dict[str, Any]:
        importances = self._known()[1]
        if not importances:
            return {}
        count = sum(one.numel() for one in importances.values())
        return {
            "importance_mean": sum(float(one.sum(dtype=torch.float64)) for one in importances.values()) / count,
            "importance_max": max(float(one.max()) for one in importances.values()),
        }

    def statistics(self) -> dict[str, Any]:
        """Of the last task: the `penalty` at its end; mean and maximum of the importances after it."""
        return dict(self._figures)

    def _held(self) -> dict[str, list[Tensor]]:
        """The tensors held between tasks, by purpose."""
        return {"importances": list(self.importances.values()), "anchors": list(self.anchors.values()), "masks": []}

    def memory(self) -> dict[str, int]:
        """Held between tasks: floats of importances, anchors and per-task BatchNorm statistics, `bytes` in all."""
        held = self._held()
        if self._own is not None:
            held["statistics"] = [tensor for kept in self._own.kept.values() for tensor in kept.values()]
        counts = {purpose: sum(t.numel() for t in tensors) for purpose, tensors in held.items()}
        size = sum(t.numel() * t.element_size() for ts in held.values() for t in ts)
        return {**super().memory(), **counts, "bytes": size}

    # Saving ----------------------------------------------------------------------------------------------------------

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """What is saved: tables of tensors by the names of weights."""
        return {"importances": self.importances, "anchors": self.anchors}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for kind, table in self._tables().items():
            state[kind] = {name: tensor.clone() for name, tensor in table.items()}
        kept = {} if self._own is None else self._own.kept
        state["batchnorm"] = {task: {k: t.clone() for k, t in one.items()} for task, one in kept.items()}
        state["figures"] = dict(self._figures)
        return state

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        parameters = dict(self.model.named_parameters())
        tables = {kind: state.get(kind, {}) for kind in self._tables()}
        for table in tables.values():
            for name, tensor in table.items():
                if name not in parameters or parameters[name].shape != tensor.shape:
                    raise ValueError(
                        f"The state is of another network: this one has no {name} of {list(tensor.shape)}."
                    )
        super().load_state_dict(state, *optimizers)
        for kind, table in self._tables().items():
            table.clear()
            table.update({name: t.to(parameters[name].device, copy=True) for name, t in tables[kind].items()})
        self._figures = dict(state["figures"])
        if self.task is not None:
            self._prepare()
        elif self.tasks:
            self._set_batchnorm()
        if self._own is not None:
            place = next(iter(parameters.values())).device
            self._own.kept = {
                task: {key: tensor.to(place, copy=True) for key, tensor in kept.items()}
                for task, kept in state["batchnorm"].items()
            }


class PathMethod(WeightMethod):
    """A method that follows the path of the weights: at each step, the gradient there and the step that was taken."""

    _from_the_start = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._seen: dict[int, tuple[list[Tensor], list[Tensor], list[Tensor], list[list[Tensor]]]] = {}
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def _prepare(self) -> None:
        self._buffers = tuple({name: torch.empty_like(p) for name, p in self.protected().items()} for _ in range(2))  # type: ignore[assignment]
        super()._prepare()

    def _known(self) -> list[Mapping[str, Tensor] | None]:
        return [*super()._known(), *self._buffers, *self._paths()]

    def _paths(self) -> list[Mapping[str, Tensor]]:
        """What is integrated along the path, by the names of weights."""
        return []

    def _observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        super()._observe_gradients(optimizer, scale)
        if self.config.gradient == "task":  # type: ignore[attr-defined]
            self._see(optimizer, scale)

    def _observe_total(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.config.gradient == "total":  # type: ignore[attr-defined]
            self._see(optimizer, scale)

    def _see(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Remember where the weights are, and the gradient there."""
        gradients, parameters, (_, _, before, kept, *paths) = self._parts[id(optimizer)].live()
        self._seen.pop(id(optimizer), None)
        if not gradients:
            return
        assert before is not None
        assert kept is not None
        torch._foreach_copy_(before, parameters)
        torch._foreach_copy_(kept, gradients)
        if scale is not None:
            torch._foreach_div_(kept, scale)
        self._seen[id(optimizer)] = parameters, before, kept, [path for path in paths if path is not None]

    def _observe_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        seen = self._seen.pop(id(optimizer), None)
        if seen is None:
            return
        parameters, back, gradients, paths = seen
        if skipped is not None:  # on overflow nothing moved, and the gradients are not finite
            skipped = skipped.reshape(()) > 0
            for gradient in gradients:
                gradient.masked_fill_(skipped, 0.0)
        torch._foreach_sub_(back, parameters)
        self._integrate(gradients, back, skipped, *paths)

    def _integrate(self, gradients: list[Tensor], back: list[Tensor], skipped: Tensor | None, *paths: Any) -> None:
        """Add one step to the path: `back` is −Δθ, `skipped` whether the optimizer left it out."""
        raise NotImplementedError

    def _leave(self) -> None:
        super()._leave()
        self._seen, self._buffers = {}, ({}, {})
