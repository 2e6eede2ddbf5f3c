"""RWALK: Riemannian walk (Chaudhry, Dokania, Ajanthan, Torr; ECCV 2018).

Two importances are added: a running Fisher diagonal, and a score that sums up, step by step, how much a weight's
movement lowered the loss for the distance it went, measured by that Fisher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.path_integral import PathMethod, PathPlan
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.weight_method import Tensors, WeightConfig, WeightKnowledge

__all__ = ["RWalk", "RWalkConfig"]


@dataclass(frozen=True, kw_only=True)
class RWalkConfig(WeightConfig):
    """Settings of RWALK. The defaults are the definitions of its own paper, with its Δt of one step."""

    lam: float = 1.0
    """λ: the penalty is λ Σ (F + s)(θ − θ*)²."""
    alpha: float = 0.9
    """α: the running Fisher is F ← α·g² + (1 − α)·F, at each step."""
    eps: float = 1e-3
    """ε: damping of the score, s += −g·Δθ / (½F·Δθ² + ε)."""
    gradient: Literal["task", "total"] = "task"
    """The gradient g: of the task's loss alone, or with the penalties' as the optimizer gets it."""
    clip: bool = True
    """Whether a step adds 0 at the least to a score."""
    normalise: bool = True
    """Whether F and s are each brought to [0, 1], over all weights, before they are added."""
    halve_first: bool = False
    """Scores are averaged, s ← (s_before + s_task)/2; whether the first task's, with none before it, is halved too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("lam", 0)
        self.require_at_least("eps", 0, above=True)
        self.require(0 < self.alpha <= 1, f"alpha must be above 0 and at most 1, not {self.alpha}")


@dataclass
class RWalkKnowledge(WeightKnowledge):
    """What RWALK keeps from task to task: importances are made of Fisher and score when a task begins."""

    purposes: ClassVar[Mapping[str, str]] = {
        "fisher": "importances",
        "score": "importances",
        "anchors": "anchors",
        "norm_statistics": "statistics",
    }
    fisher: Tensors = field(default_factory=dict)  # F, running
    score: Tensors = field(default_factory=dict)  # s over the tasks learned


class RWalkPlan(PathPlan):
    """One task of RWALK: its path is s of this task."""

    method: RWalk
    saved: ClassVar[tuple[str, ...]] = ("current",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.current: Tensors = {}  # the importances in force, F + s as the task began

    @property
    def importances(self) -> Tensors:
        return self.current

    def add_weights(self, protected: Mapping[str, nn.Parameter]) -> None:
        knowledge = self.method.knowledge
        if not self.current:
            self.current = self.method.add_up_importances()
        for name, parameter in protected.items():
            for table in (knowledge.fisher, knowledge.score):
                if name not in table:
                    table[name] = torch.zeros_like(parameter)
        super().add_weights(protected)

    def path_tables(self) -> list[Mapping[str, Tensor]]:
        return [self.method.knowledge.fisher, self.path]

    def integrate(
        self, gradients: list[Tensor], negative_step: list[Tensor], skipped: Tensor | None, *tables: Any
    ) -> None:
        (fisher, path), config = tables, self.method.config
        squares = torch._foreach_mul(gradients, gradients)
        if skipped is None:
            torch._foreach_lerp_(fisher, squares, config.alpha)
        else:
            torch._foreach_sub_(squares, fisher)
            torch._foreach_mul_(squares, torch.where(skipped, 0.0, config.alpha))
            torch._foreach_add_(fisher, squares)
        gains = torch._foreach_mul(gradients, negative_step)
        if config.clip:
            torch._foreach_clamp_min_(gains, 0.0)
        torch._foreach_mul_(negative_step, negative_step)
        torch._foreach_mul_(negative_step, fisher)
        torch._foreach_mul_(negative_step, 0.5)
        torch._foreach_add_(negative_step, config.eps)
        torch._foreach_addcdiv_(path, gains, negative_step)


class RWalk(PathMethod):
    """Hold every weight by its Fisher information and by how much its path lowered the losses of earlier tasks.

    >>> method = RWalk(model, lam=1.0)
    >>> method = RWalk(model, lam=8.0, **RWalk.paper)  # as in the AGS-CL paper's table

    Importances cost no pass over the data: `end_task` does not look at its batches.
    """

    title = "RWALK"
    formula = (
        "loss + λ Σ (F + s)(θ − θ*)²",
        "each step: F ← αg² + (1 − α)F and s_task ← s_task − g·Δθ / (½F·Δθ² + ε)",
        "after a task: s ← (s + s_task) / 2",
    )
    search = (SearchAxis("lam", FACTORS),)
    Config = RWalkConfig
    config: RWalkConfig
    Knowledge = RWalkKnowledge
    knowledge: RWalkKnowledge
    Plan = RWalkPlan
    plan: RWalkPlan | None
    importances_per_weight = 2  # Fisher and score
    paper: ClassVar[Mapping[str, Any]] = {
        "gradient": "total",
        "clip": False,
        "normalise": False,
        "halve_first": True,
        "eps": 0.01,
    }

    no_importance_advice = "The hooks saw no gradient in an earlier task: did its optimizer ever step?"

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        """The new s."""
        assert self.plan is not None
        path, score = self.plan.path, self.knowledge.score
        if len(self.tasks) == 1 and not self.config.halve_first:
            return {name: path[name].clone() for name in protected}
        return {name: (score[name] + path[name]) / 2 for name in protected}

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        self.knowledge.score.update(new)
        for name, parameter in protected.items():
            self.knowledge.anchors[name] = parameter.detach().clone()
        assert self.plan is not None
        self.plan.current = self.add_up_importances()  # for the figures on this task

    def add_up_importances(self) -> Tensors:
        """RWALK's importances F + s as they are now."""
        fisher, score = self.knowledge.fisher, self.knowledge.score
        if self.config.normalise and fisher:
            fisher, score = _normalise(fisher), _normalise(score)
        return {name: fisher[name] + score[name] for name in fisher}

    def _current_importances(self) -> Tensors:
        return {} if self.plan is None else self.plan.current


def _normalise(table: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values brought to [0, 1] together; all 0 where they do not differ."""
    low = torch.stack([tensor.min() for tensor in table.values()]).min()
    width = torch.stack([tensor.max() for tensor in table.values()]).max() - low
    return {name: torch.where(width > 0, (tensor - low) / width, 0.0) for name, tensor in table.items()}
