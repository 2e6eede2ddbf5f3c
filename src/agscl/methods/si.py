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
from agscl.methods._parts.penalties import PathMethod, WeightConfig

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
        self._at_least("c", 0)
        self._at_least("xi", 0, above=True)
        self._one_of("gradient", "task", "total")


class SI(PathMethod):
    """Hold every weight by how much its path lowered the losses of earlier tasks.

    >>> method = SI(model, c=1.0)
    >>> method = SI(model, c=1.0, **SI.paper)  # as in the AGS-CL paper's table

    Importances cost no pass over the data: `end_task` does not look at its batches.
    """

    Config = SIConfig
    config: SIConfig
    paper: ClassVar[Mapping[str, Any]] = {"gradient": "total", "clip": False, "xi": 0.01}

    _setting = "c"
    _no_importance = "No step that the hooks saw lowered the loss of an earlier task: did its optimizer ever step?"

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.path: dict[str, Tensor] = {}  # W, during a task

    def _begin(self) -> None:
        self.path.clear()
        super()._begin()

    def _prepare(self) -> None:
        for name, parameter in self.protected().items():
            if name not in self.path:
                self.path[name] = torch.zeros_like(parameter)
        super()._prepare()

    def _paths(self) -> list[Mapping[str, Tensor]]:
        return [self.path]

    def _integrate(self, gradients: list[Tensor], back: list[Tensor], skipped: Tensor | None, *paths: Any) -> None:
        torch._foreach_addcmul_(paths[0], gradients, back)

    def _measure(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> dict[str, Tensor]:
        """W / ((θ − θ_start)² + ξ); a task starts where the previous one ended."""
        return {
            name: self.path[name] / ((p - self.anchors[name]).square() + self.config.xi)
            for name, p in protected.items()
        }

    def _accumulate(self, protected: dict[str, nn.Parameter], new: dict[str, Tensor]) -> None:
        super()._accumulate(protected, new)
        if self.config.clip:
            torch._foreach_clamp_min_(list(self.importances.values()), 0.0)
        self.path.clear()

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        return {**super()._tables(), "path": self.path}
