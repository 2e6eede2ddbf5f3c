"""The two bounds: what could be reached with all data at hand, and with a network for each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.heads import MultiHead
from agscl.methods.cpr import cpr_loss
from agscl.training import Trainer

__all__ = ["Joint", "Separate", "all_heads"]


class Joint(Trainer):
    """The bound joint: trains one network on the data of all tasks so far together, keeping all data.

    Each task continues with the network of the one before. An epoch goes once through all data so far, so the last of n
    tasks takes about n times the steps of the first.
    """

    capturable = False  # how many examples each head gets differs from step to step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def examples(self) -> int:
        return sum(len(task.train_y) for task in self.tasks[: self.task_index + 1])

    def training_loss(self, rows: Tensor) -> Tensor:
        """Joint's mean loss of these rows of the pooled data, each read by the head of its task."""
        task_indices, task_rows = (column[rows] for column in self._pool())
        masks = {index: task_indices == index for index in task_indices.unique().tolist()}
        batches = {index: self.task_at(index).make_batch(task_rows[mask]) for index, mask in masks.items()}
        first = next(iter(batches.values()))[0]
        x = first.new_empty(len(rows), *first.shape[1:])
        for index, (inputs, _) in batches.items():
            x[masks[index]] = inputs
        with self.autocast():
            features = self.model.trunk(self.to_memory_format(x)).flatten(1).float()
        total = torch.zeros((), device=self.device)
        for index, (_, y) in batches.items():
            output = self.model.heads[self.tasks[index].name](features[masks[index]])
            total = total + F.cross_entropy(output, y, reduction="sum")
            if self.config.cpr:
                total = total + len(y) * cpr_loss(output, self.config.cpr)
        return total / len(rows)

    def validation_loss(self) -> Tensor:
        """Joint's mean loss over the validation splits of all tasks so far."""
        tasks = [self.task_at(index) for index in range(self.task_index + 1)]
        sizes = [0 if task.valid_y is None else len(task.valid_y) for task in tasks]
        losses = torch.stack([self.validation_loss_of(task) for task in tasks])
        return (losses * torch.tensor(sizes, device=self.device)).sum() / sum(sizes)

    def _pool(self) -> tuple[Tensor, Tensor]:
        """For every example of all tasks so far: the index of its task, and its row there."""
        if self.task_index not in self._pools:
            labels = [self.task_at(index).train_y for index in range(self.task_index + 1)]
            task_indices = torch.cat([torch.full_like(y, index) for index, y in enumerate(labels)])
            task_rows = torch.cat([torch.arange(len(y), device=y.device) for y in labels])
            self._pools = {self.task_index: (task_indices, task_rows)}
        return self._pools[self.task_index]


class Separate(MultiHead):
    """The bound separate: a new network for each task; nothing is forgotten, and nothing is shared.

    Each network is a head of a model without a trunk, so that no other task changes it.
    """

    def __init__(self, make_trunk: Callable[[], Any]) -> None:
        super().__init__(nn.Identity())
        self._make_trunk = make_trunk

    def add_head(self, task: str, outputs: Any) -> nn.Module:
        trunk = self._make_trunk()
        if isinstance(outputs, Mapping):  # an agent's actor and critic read one trunk
            parts = {name: nn.Linear(trunk.features, number) for name, number in outputs.items()}
            return super().add_head(task, {"trunk": trunk, **parts})
        return super().add_head(task, nn.Sequential(trunk, nn.Flatten(), nn.Linear(trunk.features, outputs)))

    def forward(self, x: Any, task: str) -> Any:
        head = self.heads[task] if task in self.heads else None  # noqa: SIM401
        if not isinstance(head, nn.ModuleDict):
            return super().forward(x, task)
        features = head["trunk"](x).flatten(1)
        return {name: part(features) for name, part in head.items() if name != "trunk"}


def all_heads(model: nn.Module, task: str) -> nn.Module:
    """The container of all heads, given to methods as `heads=` by `Joint`: each task trains every head."""
    heads: nn.Module = model.get_submodule("heads")
    return heads
