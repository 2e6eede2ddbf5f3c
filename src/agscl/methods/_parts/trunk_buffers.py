"""Buffers of the trunk that a module itself changes as it runs: outputs of old tasks change with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from agscl.digests import digest_tensors
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward, Method

__all__ = ["TrunkBufferKnowledge", "TrunkBufferMethod"]


@dataclass
class TrunkBufferKnowledge(Knowledge):
    """What a method that compares the trunk's buffers keeps from task to task."""

    buffer_digests: dict[str, str] = field(default_factory=dict)  # of the trunk, when the first task ended


class TrunkBufferMethod(Method):
    """A method that warns where buffers of the trunk, of which it does not take care, change after the first task."""

    knowledge: TrunkBufferKnowledge

    def list_buffer_modules(self) -> Mapping[str, nn.Module]:
        """The modules of the trunk whose buffers no step may change, by name."""
        return self.heads.list_trunk_modules(self.tasks)

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
            for name, module in self.list_buffer_modules().items()
            for key, buffer in module._buffers.items()
            if buffer is not None and _has_plain_values(buffer)
        }


def _has_plain_values(buffer: Tensor) -> bool:
    """Whether a buffer has bits to compare: not an empty or sparse one, say."""
    is_plain = not is_lazy(buffer) and buffer.layout is torch.strided and not buffer.is_quantized
    return is_plain and buffer.device.type != "meta" and buffer.numel() > 0
