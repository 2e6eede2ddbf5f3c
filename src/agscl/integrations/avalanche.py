"""Avalanche: a multi-head model whose heads come with the experiences, and a plugin with which a method learns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.heads import MultiHead
from agscl.integrations._attach import begin_or_continue, check_method, check_model, follow_optimizers
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.system.describe import describe_value

try:
    from avalanche.core import SupervisedPlugin
    from avalanche.models import MultiTaskModule
except RuntimeError as error:  # of compiled operators
    raise ImportError(
        f"Avalanche imports torchvision, which does not work with torch {torch.__version__} ({error}). Install the "
        "torchvision that was built for this torch, from the same package index."
    ) from error

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
        self._optimizers: list[Optimizer] = []
        self._loaded: list[dict[str, Any]] | None = None  # what optimizers hold per parameter, until there are some

    def state_dict(self) -> dict[str, Any]:
        """Weights, heads, the optimizers' moments and the method's state, as plain values; between two experiences."""
        if self.method.task is not None:
            raise RuntimeError(f"Task {self.method.task} is being learned. Save after strategy.train(experience).")
        heads: Any = self.method.model.heads if isinstance(self.method.model, MultiHead) else {}
        outputs = {label: head.out_features for label, head in heads.items() if isinstance(head, nn.Linear)}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.method.model.named_parameters()}
        return {
            "heads": outputs,
            "model": self.method.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizers": self._loaded
            or [
                {names[parameter]: state for parameter, state in optimizer.state.items() if parameter in names}
                for optimizer in self._optimizers
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved state; make the optimizer and the strategy after it, when the heads are there."""
        self._loaded = state_dict["optimizers"]
        model = self.method.model
        for label, outputs in state_dict["heads"].items():
            if isinstance(model, MultiHead) and label not in model.heads:
                model.add_head(label, outputs)
        model.load_state_dict(state_dict["model"])
        self.method.load_state_dict(state_dict["method"])

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        check_model(self.method, strategy.model)
        task = name_task(strategy.experience)
        if task in self.method.tasks and task != self.method.task:
            raise ValueError(
                f"Task {task} was learned in an earlier experience, and is frozen since. {type(self).__name__} needs a "
                "label of its own for each experience: make the benchmark with task labels."
            )
        if self._loaded:  # else the state was saved before the first experience
            self._load_moments(find_optimizers(strategy), self._loaded)
        self._loaded = None
        epochs, steps = strategy.train_epochs, len(strategy.dataloader)
        begin_or_continue(self.method, task, find_optimizers(strategy), epochs=epochs, steps_per_epoch=steps)

    def _load_moments(self, optimizers: list[Optimizer], saved: list[dict[str, Any]]) -> None:
        """Only now: before its first experience a strategy clears what its optimizer holds."""
        for optimizer, state in zip(optimizers, saved, strict=True):
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self.method.model.named_parameters():
                if name in state and id(parameter) in held:
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                        for key, value in state[name].items()
                    }

    def before_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        follow_optimizers(self.method, find_optimizers(strategy))

    def after_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.method.end_epoch()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        def batches() -> Iterator[list[Tensor]]:
            for batch in strategy.dataloader:
                yield [part.to(strategy.device) for part in batch]

        self.method.end_task(batches, self.forward)
        self._optimizers = find_optimizers(strategy)


def name_task(experience: Any) -> str:
    labels = sorted(set(experience.task_labels))
    if len(labels) != 1:
        raise ValueError(f"An experience must be of one task; this one has the task labels {labels}.")
    return str(labels[0])


def find_optimizers(strategy: Any) -> list[Optimizer]:
    """All optimizers of an Avalanche strategy, the main one first."""
    found = [strategy.optimizer, *(value for value in vars(strategy).values() if isinstance(value, Optimizer))]
    return list({id(optimizer): optimizer for optimizer in found}.values())
