"""The two bounds: what could be reached with all data at hand, and with a network for each task."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.heads import MultiHead
from agscl.training import Trainer

__all__ = ["Joint", "Separate", "all_heads"]


class Joint(Trainer):
    """One network learns all tasks so far together, from the data of all of them, kept for ever.

    Each task goes on with the network of the one before. An epoch goes once through all that data, so the last of n
    tasks takes about n times the steps of the first.
    """

    capturable = False  # how many examples each head gets differs from step to step

    @cached_property
    def _pool(self) -> tuple[Tensor, Tensor]:
        """Of every example of all tasks so far: the place of its task, and its row there."""
        labels = [self.task_at(place).train_y for place in range(self.task_index + 1)]
        of = torch.cat([torch.full_like(each, place) for place, each in enumerate(labels)])
        return of, torch.cat([torch.arange(len(each), device=each.device) for each in labels])

    @property
    def examples(self) -> int:
        return sum(len(task.train_y) for task in self.tasks[: self.task_index + 1])

    def _loss(self, rows: Tensor) -> Tensor:
        of, within = (part[rows] for part in self._pool)
        mine = {place: of == place for place in of.unique().tolist()}
        batches = {place: self.task_at(place).make_batch(within[here]) for place, here in mine.items()}
        some = next(iter(batches.values()))[0]
        x = some.new_empty(len(rows), *some.shape[1:])
        for place, (inputs, _) in batches.items():
            x[mine[place]] = inputs
        with self._computing():
            features = self.model.trunk(self._laid_out(x)).flatten(1).float()
        total = torch.zeros((), device=self.device)
        for place, (_, y) in batches.items():
            output = self.model.heads[self.tasks[place].name](features[mine[place]])
            total = total + F.cross_entropy(output, y, reduction="sum")
        return total / len(rows)

    def _validation_loss(self) -> Tensor:
        tasks = [self.task_at(place) for place in range(self.task_index + 1)]
        sizes = [0 if task.valid_y is None else len(task.valid_y) for task in tasks]
        losses = torch.stack([self._loss_on_valid(task) for task in tasks])
        return (losses * torch.tensor(sizes, device=self.device)).sum() / sum(sizes)

    def _end_task(self) -> None:
        super()._end_task()
        self.__dict__.pop("_pool", None)


class Separate(MultiHead):
    """A network of its own for each task, starting anew: nothing is forgotten, and nothing is shared.

    Each network is a head of a model without a trunk, so that no other task moves it.
    """

    def __init__(self, make_trunk: Callable[[], Any]) -> None:
        super().__init__(nn.Identity())
        self._make_trunk = make_trunk

    def add_head(self, task: str, outputs: Any) -> nn.Module:
        trunk = self._make_trunk()
        return super().add_head(task, nn.Sequential(trunk, nn.Flatten(), nn.Linear(trunk.features, outputs)))


def all_heads(model: nn.Module, task: str) -> nn.Module:
    """Where the head of any task is for `Joint`: each task trains every head."""
    heads: nn.Module = model.get_submodule("heads")
    return heads
