"""RWALK: Riemannian walk (Chaudhry, Dokania, Ajanthan, Torr; ECCV 2018).

Two importances are added: a running Fisher diagonal, and a score that sums up, step by step, how much a weight's
movement lowered the loss for the distance it went, measured by that Fisher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.penalties import PathMethod, WeightConfig

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
        self._at_least("lam", 0)
        self._at_least("eps", 0, above=True)
        self._check(0 < self.alpha <= 1, f"alpha must be above 0 and at most 1, not {self.alpha}")
        self._one_of("gradient", "task", "total")


class RWalk(PathMethod):
    """Hold every weight by its Fisher information and by how much its path lowered the losses of earlier tasks.

    >>> method = RWalk(model, lam=1.0)
    >>> method = RWalk(model, lam=8.0, **RWalk.paper)  # as in the AGS-CL paper's table

    Importances cost no pass over the data: `end_task` does not look at its batches.
    """

    Config = RWalkConfig
    config: RWalkConfig
    paper: ClassVar[Mapping[str, Any]] = {
        "gradient": "total",
        "clip": False,
        "normalise": False,
        "halve_first": True,
        "eps": 0.01,
    }

    _no_importance = "The hooks saw no gradient in an earlier task: did its optimizer ever step?"

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.fisher: dict[str, Tensor] = {}  # F, running
        self.score: dict[str, Tensor] = {}  # s over the tasks learned
        self.path: dict[str, Tensor] = {}  # s of the task under way; `importances` too are there in a task only

    def _begin(self) -> None:
        self.path.clear()
        self._add_up()
        super()._begin()

    def _prepare(self) -> None:
        for name, parameter in self.protected().items():
            for table in (self.fisher, self.score, self.path):
                if name not in table:
                    table[name] = torch.zeros_like(parameter)
        super()._prepare()

    def _paths(self) -> list[Mapping[str, Tensor]]:
        return [self.fisher, self.path]

    def _integrate(self, gradients: list[Tensor], back: list[Tensor], skipped: Tensor | None, *paths: Any) -> None:
        fisher, path = paths
        squares = torch._foreach_mul(gradients, gradients)
        if skipped is None:
            torch._foreach_lerp_(fisher, squares, self.config.alpha)
        else:
            torch._foreach_sub_(squares, fisher)
            torch._foreach_mul_(squares, torch.where(skipped, 0.0, self.config.alpha))
            torch._foreach_add_(fisher, squares)
        gains = torch._foreach_mul(gradients, back)
        if self.config.clip:
            torch._foreach_clamp_min_(gains, 0.0)
        torch._foreach_mul_(back, back)
        torch._foreach_mul_(back, fisher)
        torch._foreach_mul_(back, 0.5)
        torch._foreach_add_(back, self.config.eps)
        torch._foreach_addcdiv_(path, gains, back)

    def _measure(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> dict[str, Tensor]:
        """The new s."""
        if len(self.tasks) == 1 and not self.config.halve_first:
            return {name: self.path[name].clone() for name in protected}
        return {name: (self.score[name] + self.path[name]) / 2 for name in protected}

    def _accumulate(self, protected: dict[str, nn.Parameter], new: dict[str, Tensor]) -> None:
        self.score.update(new)
        self.path.clear()
        for name, parameter in protected.items():
            self.anchors[name] = parameter.detach().clone()
        self._add_up()

    def _add_up(self) -> None:
        """The importances: F + s as they are now."""
        fisher, score = self.fisher, self.score
        if self.config.normalise and fisher:
            fisher, score = _normalised(fisher), _normalised(score)
        self.importances.clear()
        self.importances.update({name: fisher[name] + score[name] for name in self.fisher})

    def _leave(self) -> None:
        super()._leave()
        self.importances.clear()

    def _held(self) -> dict[str, list[Tensor]]:
        return {**super()._held(), "importances": [*self.fisher.values(), *self.score.values()]}

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        return {**super()._tables(), "fisher": self.fisher, "score": self.score, "path": self.path}


def _normalised(table: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values brought to [0, 1] together; all 0 where they do not differ."""
    low = torch.stack([one.min() for one in table.values()]).min()
    width = torch.stack([one.max() for one in table.values()]).max() - low
    return {name: torch.where(width > 0, (one - low) / width, 0.0) for name, one in table.items()}
