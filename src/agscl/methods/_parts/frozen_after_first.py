"""Methods whose first task trains parts of the trunk that later tasks keep frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from agscl.digests import digest_tensors
from agscl.methods._parts.batchnorm import StatisticsFreezer, find_trunk_batchnorms
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods._parts.plan import Plan

__all__ = [
    "FixedWeightsKnowledge",
    "FixedWeightsMethod",
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
        """Whether this parameter of the trunk is frozen."""
        raise NotImplementedError

    def find_trunk_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter outside the heads, by its name in the model."""
        return self.heads.list_outside_parameters(self.tasks)


@dataclass
class FixedWeightsKnowledge(Knowledge):
    """What a method that fixes weights keeps from task to task."""

    buffer_digests: dict[str, str] = field(default_factory=dict)  # of the trunk, when the first task ended


class FixedWeightsMethod(FrozenPartsMethod):
    """A method under which old outputs keep their bits, but for buffers that a module itself changes as it runs."""

    Knowledge: ClassVar[type[FixedWeightsKnowledge]] = FixedWeightsKnowledge
    knowledge: FixedWeightsKnowledge

    def end_task(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], forward: Forward | None = None) -> None:
        super().end_task(batches, forward)
        if len(self.tasks) == 1:
            self.knowledge.buffer_digests = self._digest_buffers()
        elif not {"buffers", "dtype"}.intersection(self.knowledge.warned):
            self._warn_of_changed_buffers()

    def _warn_of_changed_buffers(self) -> None:
        digests, first = self._digest_buffers(), self.knowledge.buffer_digests
        if changed := [name for name, digest in digests.items() if first.get(name, digest) != digest]:
            listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            self.warn_once(
                "buffers",
                f"Buffers of the trunk changed since task {self.tasks[0]!r} ended: {listed}. Outputs of old tasks "
                "change with them. Between end_task and begin_task run the model in eval mode only. From the second "
                "task on put a module of your own that updates buffers into eval mode, after each model.train(), or "
                "move it into the heads. To undo it, load the weights that the first task ended with.",
            )

    def _digest_buffers(self) -> dict[str, str]:
        return {
            f"{name}.{key}" if name else key: digest_tensors({key: buffer}, [key])
            for name, module in self.heads.list_trunk_modules(self.tasks).items()
            for key, buffer in module._buffers.items()
            if buffer is not None and _has_plain_values(buffer)
        }


def _has_plain_values(buffer: Tensor) -> bool:
    """Whether a buffer has bits to compare: not an empty or sparse one, say."""
    is_plain = not is_lazy(buffer) and buffer.layout is torch.strided and not buffer.is_quantized
    return is_plain and buffer.device.type != "meta" and buffer.numel() > 0
