"""Avalanche: a multi-head model whose heads come with the experiences, and a plugin with which a method learns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from avalanche.core import SupervisedPlugin
from avalanche.models import MultiTaskModule
from torch import Tensor
from torch.optim import Optimizer

from agscl.heads import MultiHead
from agscl.integrations._attach import begin_or_continue, check_method, check_model, follow_optimizers
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.system.describe import describe_value

__all__ = ["AvalancheModel", "AvalanchePlugin"]


class AvalancheModel(MultiTaskModule):
    """A `MultiHead` as Avalanche's strategies take it: the name of a task is its label, as text.

    >>> strategy = Naive(model=AvalancheModel(model), optimizer=…, plugins=[AvalanchePlugin(method)])

    A head is added with the first experience of a task, with as many outputs as its highest class needs.
    """

    def __init__(self, model: MultiHead) -> None:
        super().__init__()
        if not isinstance(model, MultiHead):
            raise TypeError(f"AvalancheModel needs a MultiHead(trunk), got {describe_value(model)}.")
        self.model = model

    def adaptation(self, experience: Any) -> None:
        super().adaptation(experience)
        for label in experience.task_labels:
            if str(label) not in self.model.heads:
                self.model.add_head(str(label), max(experience.classes_in_this_experience) + 1)

    def forward_single_task(self, x: Tensor, task_label: int) -> Tensor:
        output: Tensor = self.model(x, str(task_label))
        return output


class AvalanchePlugin(SupervisedPlugin):
    """Learns each experience that a strategy trains on as a task of `method`.

    `method` was made of the strategy's model, or of a part of it, with a head for each task: of the `MultiHead` within
    an `AvalancheModel`, or of any model with heads by label: `heads="classifier.classifiers"` of Avalanche's own.
    `forward(batch)` runs that model on a mini-batch `[x, y, task labels]`, as in `end_task`.
    """

    def __init__(self, method: Method, *, forward: Forward | None = None) -> None:
        super().__init__()
        check_method(method, type(self).__name__)
        self.method, self.forward = method, forward

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        check_model(self.method, strategy.model)
        task = name_task(strategy.experience)
        if task in self.method.tasks and task != self.method.task:
            raise ValueError(
                f"Task {task} was learned in an earlier experience, and is frozen since. {type(self).__name__} needs a "
                "label of its own for each experience: make the benchmark with task labels."
            )
        epochs, steps = strategy.train_epochs, len(strategy.dataloader)
        begin_or_continue(self.method, task, find_optimizers(strategy), epochs=epochs, steps_per_epoch=steps)

    def before_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        follow_optimizers(self.method, find_optimizers(strategy))

    def after_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.method.end_epoch()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        def batches() -> Iterator[list[Tensor]]:
            for batch in strategy.dataloader:
                yield [part.to(strategy.device) for part in batch]

        self.method.end_task(batches, self.forward)


def name_task(experience: Any) -> str:
    labels = sorted(set(experience.task_labels))
    if len(labels) != 1:
        raise ValueError(f"An experience must be of one task; this one has the task labels {labels}.")
    return str(labels[0])


def find_optimizers(strategy: Any) -> list[Optimizer]:
    """All optimizers of a strategy, the main one first."""
    found = [strategy.optimizer, *(value for value in vars(strategy).values() if isinstance(value, Optimizer))]
    return list({id(optimizer): optimizer for optimizer in found}.values())
