"""Methods whose first task trains parts of the trunk that later tasks keep frozen."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from agscl.heads import list_parameters
from agscl.methods._parts.batchnorm import StatisticsFreezer, find_batchnorms
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.plan import Plan

__all__ = ["FrozenPartsMethod", "FrozenPartsPlan"]


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
        norms = find_batchnorms(method.model)
        heads = method.heads.modules(method.tasks) if norms else set()
        self._frozen_norms = StatisticsFreezer({name: norm for name, norm in norms.items() if id(norm) not in heads})

    def detach(self) -> None:
        super().detach()
        if self._frozen_norms is not None:
            self._frozen_norms.close()
            self._frozen_norms = None


class FrozenPartsMethod(Method):
    """A method under which some parameters, and all BatchNorms, keep their bits from the second task on."""

    Plan: ClassVar[type[FrozenPartsPlan]] = FrozenPartsPlan

    def is_frozen(self, name: str) -> bool:
        """Whether this parameter of the trunk is frozen."""
        raise NotImplementedError

    def find_trunk_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter outside the heads, by its name in the model."""
        heads = {id(p) for p in self.heads.parameters(self.tasks).values()}
        return {name: p for name, p in list_parameters(self.model).items() if id(p) not in heads}
