"""What important nodes read of nodes that later tasks add: learned with those tasks, out of sight of earlier ones.

Beyond the paper, in which such weights are 0 (I.1): the outputs of an old task keep their bits in both. But here every
node goes on learning from new ones, so that a task trains more weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from agscl.graph.nodes import NodeGraph
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.task_views import TaskViews, UsedWeight
from agscl.methods._parts.zero_masks import ZeroRule

__all__ = ["NodeViews"]


class NodeViews(TaskViews, NodeMethod):
    """A method of nodes under which a task does not see the nodes of later ones, if that is its `zero_rule`."""

    @property
    def zero_rule(self) -> ZeroRule:
        """What the setting `zero_init` means for this model."""
        config: Any = self.config
        rule: ZeroRule | Literal["auto"] = config.zero_init
        if rule != "auto":
            return rule
        return "earlier_tasks" if self.heads.takes_task and config.freezes else "paper"

    def _init_nodes(self) -> None:
        if self.zero_rule == "earlier_tasks":
            self._inputs = ViewedInputs(self.graph)
            self.start_views()

    def list_viewed_weights(self) -> Iterator[UsedWeight]:
        return self._inputs.list_weights()

    def hide_later_weights(self, number: int) -> Iterator[UsedWeight]:
        return self._inputs.hide_later(self.knowledge.first_task, number)  # type: ignore[attr-defined]


class ViewedInputs:
    """The weights with which nodes read nodes."""

    def __init__(self, graph: NodeGraph) -> None:
        self.readers = [graph.readers[name] for name in graph.layers if name in graph.readers]
        self.sources: list[Tensor] = []  # the group that each weight reads; on the device, as captured steps need it

    def list_weights(self) -> Iterator[UsedWeight]:
        for reader in self.readers:  # the module's own weight, whatever is shown in its place
            yield reader.module, "weight", dict.__getitem__(reader.module._parameters, "weight")  # type: ignore[misc]

    def hide_later(self, first_task: Tensor, number: int) -> Iterator[UsedWeight]:
        """The same with 0 where a node is read that became important after task `number`."""
        first = F.pad(first_task, (0, 1), value=-1)  # the last: no node
        if not self.sources or self.sources[0].device != first.device:
            self.sources = [reader.source_groups().to(first.device) for reader in self.readers]
        for (module, key, weight), sources in zip(self.list_weights(), self.sources, strict=True):
            later = (first[sources] > number).to(weight.device)
            yield module, key, nn.Parameter(weight.detach().masked_fill(later, 0.0), requires_grad=False)
