"""(I.1) Weights that are zero because their source became important later than the node they lead to."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from agscl.certificate import NEVER
from agscl.graph.nodes import NodeGraph
from agscl.system.bitwise import as_bits, mask_bits_, uses_bits

__all__ = ["ZeroMasks", "ZeroRule", "zero_outgoing_"]

ZeroRule = Literal["earlier_tasks", "paper", "while_free", "off"]


class ZeroMasks:
    """Per node layer, the weights whose source node became important later than the node of their row.

    `rule` "paper" compares the tasks in which the two became important; "while_free" masks only sources that are still
    free; "off" masks nothing, nor does "earlier_tasks", of which see `node_views`. One mask per weight is made here and
    dropped with the plan; between tasks one integer per group, `first_task`, decides.
    """

    def __init__(self, graph: NodeGraph, first_task: Tensor, rule: ZeroRule) -> None:
        self._masks: list[tuple[nn.Parameter, Tensor]] = []
        self._kept_bits: list[Tensor] = []  # on a GPU: 1 where a weight is kept, in an integer dtype of its size
        if rule in ("off", "earlier_tasks"):
            return
        first = torch.cat([first_task, first_task.new_tensor([-1])])  # -1: the column reads no node
        sources = first if rule == "paper" else torch.where(first == NEVER, NEVER, -1)
        for name, layer in graph.layers.items():
            if reader := graph.readers.get(name):
                rows = first[layer.groups.to(first.device)].view(-1, *[1] * (layer.weight.dim() - 1))
                later = sources[reader.source_groups().to(first.device)] > rows
                if bool(later.any()):
                    self._masks.append((layer.weight, torch.empty_like(layer.weight, dtype=torch.bool).copy_(later)))
        if uses_bits(first_task) and len({weight.dtype for weight, _ in self._masks}) == 1:
            self._kept_bits = [(~later).to(as_bits(weight).dtype) for weight, later in self._masks]

    @torch.no_grad()
    def apply_(self) -> None:
        """Set the weights from a later node into an earlier one to exactly 0."""
        if self._kept_bits:
            mask_bits_([weight for weight, _ in self._masks], self._kept_bits)
            return
        for weight, later in self._masks:
            weight.masked_fill_(later, 0.0)


@torch.no_grad()
def zero_outgoing_(graph: NodeGraph, free: Tensor, head: nn.Module) -> None:
    """Set to 0 the weights with which later layers, and this task's head, read the `free` (groups,) groups."""
    in_head = {id(module) for module in head.modules()}
    for name, reader in graph.readers.items():
        excluded = not reader.is_head and name not in graph.layers
        if name in graph.layers or id(reader.module) in in_head or (excluded and graph.excluded == "train"):
            reader.weight.masked_fill_(reader.reads(free), 0.0)
