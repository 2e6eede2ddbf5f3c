"""L2 to the previous weights: every weight is held alike, whether earlier tasks need it or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.weight_method import Tensors, WeightConfig, WeightMethod, WeightPlan

__all__ = ["L2", "L2Config"]


@dataclass(frozen=True, kw_only=True)
class L2Config(WeightConfig):
    """Settings of L2."""

    lam: float = 1.0
    """λ: the penalty is λ/2 Σ (θ − θ*)²."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("lam", 0)


class L2Plan(WeightPlan):
    """One task of L2."""

    @property
    def importances(self) -> None:
        """L2's importances: all are 1."""


class L2(WeightMethod):
    """Pull every weight back to where the previous task left it; the yardstick for what importances are worth.

    >>> method = L2(model, lam=1.0)
    """

    title = "L2"
    formula = ("loss + λ/2 Σ (θ − θ*)²",)
    search = (SearchAxis("lam", FACTORS),)
    Config = L2Config
    config: L2Config
    Plan = L2Plan
    importances_per_weight = 0

    @property
    def strength(self) -> float:
        return self.config.lam / 2

    def _current_importances(self) -> None:
        """L2's importances: all are 1."""

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        self.knowledge.anchors.update({name: parameter.detach().clone() for name, parameter in protected.items()})
