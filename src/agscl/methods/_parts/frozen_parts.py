"""Methods whose first task trains parts of the trunk that later tasks keep frozen."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from agscl.methods._parts.batchnorm import StatisticsFreezer, find_trunk_batchnorms
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.task_plan import Plan

__all__ = [
    "FixedWeightsPlan",
    "FrozenPartsMethod",
    "FrozenPartsPlan",
]


class FrozenPartsPlan(Plan):
    """From the second task on, freezes what the method says and all BatchNorms outside the heads."""

    method: FrozenPartsMethod

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._frozen_norms: StatisticsFreezer | None = None

    def attach(self) -> None:
        super().attach()
        method = self.method
        if len(method.tasks) == 1:
            return
        self.freeze(p for name, p in method.find_trunk_parameters().items() if method.is_frozen(name))
        self._frozen_norms = StatisticsFreezer(find_trunk_batchnorms(method.heads, method.tasks))

    def detach(self) -> None:
        super().detach()
        if self._frozen_norms is not None:
            self._frozen_norms.close()
            self._frozen_norms = None


class FixedWeightsPlan(FrozenPartsPlan):
    """Puts some entries of weights back after every step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fixed: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # weight, where it is fixed, its values

    @torch.no_grad()
    def restore_fixed(self) -> None:
        for weight, fixed, values in self._fixed:
            weight.copy_(torch.where(fixed, values, weight))

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "anchors": [values for _, _, values in self._fixed],
            "masks": [fixed for _, fixed, _ in self._fixed],
        }


class FrozenPartsMethod(Method):
    """A method under which some parameters, and all BatchNorms, keep their bits from the second task on."""

    Plan: ClassVar[type[FrozenPartsPlan]] = FrozenPartsPlan

    def is_frozen(self, name: str) -> bool:
        """Whether this parameter of the trunk is one of the frozen parts."""
        raise NotImplementedError

    def find_trunk_parameters(self) -> dict[str, nn.Parameter]:
        """What parts of the trunk may be frozen: every parameter outside the heads, by its name in the model."""
        return self.heads.list_outside_parameters(self.tasks)
