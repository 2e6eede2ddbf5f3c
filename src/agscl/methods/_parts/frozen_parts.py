"""Parts of a trunk that the first task trains and no later one may move."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from agscl.methods._parts.batchnorm import FrozenStatistics, norms_with_statistics
from agscl.methods._parts.lifecycle import Method

__all__ = ["StillMethod"]


class StillMethod(Method):
    """A method under which some parameters, and all BatchNorms, keep their bits from the second task on.

    `_rests(name)` says which of the trunk's parameters these are.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._norms: FrozenStatistics | None = None
        super().__init__(model, **options)

    def _rests(self, name: str) -> bool:
        raise NotImplementedError

    def _trunk(self) -> dict[str, nn.Parameter]:
        """Every parameter outside the heads, by its name in the model."""
        heads = {id(p) for p in self.heads.parameters(self.tasks).values()}
        return {name: p for name, p in self.model.named_parameters() if id(p) not in heads}

    def _join(self, optimizers: tuple[Optimizer, ...]) -> None:
        super()._join(optimizers)
        if len(self.tasks) == 1:
            return
        self._hold_still(p for name, p in self._trunk().items() if self._rests(name))
        heads = {id(m) for task in self.tasks for m in self.heads.of(task, self.tasks).modules()}
        norms = norms_with_statistics(self.model)
        self._norms = FrozenStatistics({name: norm for name, norm in norms.items() if id(norm) not in heads})

    def _leave(self) -> None:
        super()._leave()
        if self._norms is not None:
            self._norms.close()
            self._norms = None
