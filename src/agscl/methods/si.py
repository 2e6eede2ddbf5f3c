"""SI: synaptic intelligence (Zenke, Poole, Ganguli; ICML 2017).

While a task is learned, W sums up how much each weight's own movement lowered the loss: −gradient·Δθ, step by step.
Divided by how far the weight went, it is its importance for the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.path_integral import PathMethod, PathPlan
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.weight_method import Tensors, WeightConfig

__all__ = ["SI", "SIConfig"]


@dataclass(frozen=True, kw_only=True)
class SIConfig(WeightConfig):
    """Settings of SI. The defaults are those of its own paper; c must be searched for other data."""

    c: float = 1.0
    """c: the penalty is c Σ Ω (θ − θ*)²."""
    xi: float = 1e-3
    """ξ: damping, Ω += W / ((θ − θ_start)² + ξ)."""
    gradient: Literal["task", "total"] = "task"
    """The gradient that is integrated: of the task's loss alone, or with the penalties' as the optimizer gets it."""
    clip: bool = True
    """Whether Ω is kept at 0 or more; a negative one would push weights away from their anchors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("c", 0)
        self.require_at_least("xi", 0, above=True)


class SIPlan(PathPlan):
    """One task of SI: its path is W."""

    def integrate(
        self, gradients: list[Tensor], negative_step: list[Tensor], skipped: Tensor | None, *tables: Any
    ) -> None:
        torch._foreach_addcmul_(tables[0], gradients, negative_step)


class SI(PathMethod):
    """Hold every weight by how much its path lowered the losses of earlier tasks.

    >>> method = SI(model, c=1.0)
    >>> method = SI(model, c=1.0, **SI.paper)  # as in the AGS-CL paper's table

    Importances cost no pass over the data: `end_task` does not look at its batches.
    """

    title = "SI"
    formula = (
        "loss + c Σ Ω (θ − θ*)²",
        "W = Σ over steps of −g·Δθ; after a task: Ω ← Ω + W / ((θ − θ_start)² + ξ)",
    )
    search = (SearchAxis("c", FACTORS),)
    Config = SIConfig
    config: SIConfig
    Plan = SIPlan
    paper: ClassVar[Mapping[str, Any]] = {"gradient": "total", "clip": False, "xi": 0.01}

    strength_setting = "c"
    no_importance_advice = (
        "No step that the hooks saw lowered the loss of an earlier task: did its optimizer ever step?"
    )

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        """W / ((θ − θ_start)² + ξ); a task starts where the previous one ended."""
        assert self.plan is not None
        path, start = self.plan.path, self.knowledge.anchors
        return {name: path[name] / ((p - start[name]).square() + self.config.xi) for name, p in protected.items()}

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        super()._accumulate(protected, new)
        if self.config.clip:
            torch._foreach_clamp_min_(list(self.knowledge.importances.values()), 0.0)
