"""What important nodes read of nodes that later tasks add: learned with those tasks, out of sight of earlier ones.

Beyond the paper, in which such weights are 0 (I.1): the outputs of an old task keep their bits in both. But here every
node goes on learning from new ones, so that a task trains more weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from agscl.graph.nodes import NodeGraph
from agscl.heads import MultiHead
from agscl.methods._agscl.zero_init import ZeroRule
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.task_views import TaskViewMethod, WeightPlace
from agscl.methods._parts.trunk_buffers import TrunkBufferMethod
from agscl.methods._parts.warnings import warn_user

__all__ = ["NodeViewMethod"]


class NodeViewMethod(TrunkBufferMethod, TaskViewMethod, NodeMethod):
    """A method of nodes under which a task does not see the nodes of later ones, if that is its `zero_rule`."""

    @property
    def zero_rule(self) -> ZeroRule:
        """Which nodes views hide: what the setting `zero_init` meant for this model when the method was made."""
        knowledge: Any = self.knowledge
        return knowledge.zero_rule or self._choose_zero_rule()

    def _choose_zero_rule(self) -> ZeroRule:
        config: Any = self.config
        rule: ZeroRule | Literal["auto"] = config.zero_init
        if rule != "auto":
            return rule
        names_task = isinstance(self.model, MultiHead) and self.heads.takes_task
        return "earlier_tasks" if names_task and config.freezes else "paper"

    @property
    def hides_weights(self) -> bool:
        return self._graph is not None and self.zero_rule == "earlier_tasks"

    def _init_nodes(self) -> None:
        knowledge: Any = self.knowledge
        knowledge.zero_rule = self._choose_zero_rule()
        self._follow_zero_rule()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        super()._load_knowledge(state, task)
        if self._graph is not None:
            if (chosen := self._choose_zero_rule()) != self.zero_rule:
                warn_user(
                    f"The state was saved with zero_init={self.zero_rule!r}, which continues: with {chosen!r} outputs "
                    "of learned tasks would change."
                )
            self._follow_zero_rule()

    def _follow_zero_rule(self) -> None:
        if not self.hides_weights:
            self.stop_views()
        elif not self._handles:
            self._inputs = LaterInputs(self.graph)
            self.start_views()

    def list_buffer_modules(self) -> dict[str, nn.Module]:
        """The trunk's modules but for BatchNorms, whose statistics are frozen node by node."""
        modules = super().list_buffer_modules()
        return {name: module for name, module in modules.items() if not isinstance(module, _BatchNorm)}

    def list_weight_places(self) -> Iterator[WeightPlace]:
        return self._inputs.list_weights()

    def mask_later_weights(self, number: int) -> Iterator[WeightPlace]:
        if replaced := self._inputs.find_replaced():
            self.warn_once(
                "replaced",
                f"{', '.join(replaced)} was replaced (quantised, say) after the method was made: weights of later "
                "tasks are not hidden there, and outputs of earlier tasks may be wrong. Replace layers in a plain copy "
                "of the model that has the weights state_dict_for(task) instead.",
            )
        knowledge: Any = self.knowledge
        return self._inputs.mask_later(knowledge.first_task, number)


class LaterInputs:
    """The weights with which nodes read nodes."""

    def __init__(self, graph: NodeGraph) -> None:
        self.model = graph.model
        self.readers = [graph.readers[name] for name in graph.layers if name in graph.readers]
        self.sources: list[Tensor] = []  # the group that each weight reads; on the device, as captured steps need it

    def list_weights(self) -> Iterator[WeightPlace]:
        for reader in self.readers:
            yield reader.module, "weight", reader.weight

    def mask_later(self, first_task: Tensor, number: int) -> Iterator[WeightPlace]:
        """These weights as a view shows them: 0 where a node is read that became important after task `number`."""
        first = F.pad(first_task, (0, 1), value=-1)  # the last: no node
        if not self.sources or self.sources[0].device != first.device:
            self.sources = [reader.source_groups().to(first.device) for reader in self.readers]
        for (module, key, weight), sources in zip(self.list_weights(), self.sources, strict=True):
            yield module, key, weight.masked_fill((first[sources] > number).to(weight.device), 0.0)

    def find_replaced(self) -> list[str]:
        """Layers with these weights that are no longer part of the model, so that no view can show them."""
        if all(_find_module(self.model, reader.name) is reader.module for reader in self.readers):
            return []
        modules = set(self.model.modules())  # a layer may have been moved
        return [reader.name for reader in self.readers if reader.module not in modules]


def _find_module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
