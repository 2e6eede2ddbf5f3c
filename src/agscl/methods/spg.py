"""SPG: soft-masking of parameter-level gradient flow (Konishi, Kurokawa, Ono, Ke, Kim, Liu; ICML 2023).

A weight's importance, between 0 and 1, is how far the gradient of a task's loss lies from the mean of its layer. Later
tasks move the weight by the share of a step that it leaves: 1 − importance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.methods._parts.batches import make_repeatable
from agscl.methods._parts.frozen_parts import FrozenPartsMethod, FrozenPartsPlan
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.recorded_outputs import concat_tensors
from agscl.methods._parts.sample_gradients import Score, as_single_score, measure_gradients
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.soft_masks import SoftMask, mask_gradients_, mask_updates_
from agscl.methods._parts.weight_method import Tensors, find_protected
from agscl.system.describe import describe_value
from agscl.system.sums import to_sum_dtype

__all__ = ["SPG", "SPGConfig"]

BATCH_SIZE = 256  # samples in one backward pass while importances are measured


@dataclass(frozen=True, kw_only=True)
class SPGConfig(Settings):
    """Settings of SPG. The paper has none to tune."""

    mask: Literal["gradient", "update"] = "update"
    """What is multiplied by 1 − importance: the optimizer's change, or the gradient, as the paper writes it. Under SGD
    without weight decay both are the same; Adam divides gradients by their running size, which undoes the mask."""


@dataclass
class SPGKnowledge(Knowledge):
    """What SPG keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {"importances": "importances"}
    importances: Tensors = field(default_factory=dict)
    """Per weight, the largest importance of all tasks: γ of the paper."""


class SPGPlan(FrozenPartsPlan):
    """One task of SPG: each weight takes a share of its steps, and the head the mean share of all weights."""

    method: SPG

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._masks: list[SoftMask] = []

    def build(self) -> None:
        method, importances = self.method, self.method.knowledge.importances
        if not importances:
            return
        factors = {name: 1 - importance for name, importance in importances.items()}
        parameters = method.heads.list_task_parameters(self.task, method.tasks)
        factor = method.head_factor()
        if not method.heads.is_shared:
            head = {id(p) for p in method.heads.get_head(self.task, method.tasks).parameters()}
            factors |= {name: p.new_tensor(factor) for name, p in parameters.items() if id(p) in head}
        updates = method.config.mask == "update"
        self._masks = [
            SoftMask(parameters[name], share, parameters[name].detach().clone() if updates else share.new_empty(0))
            for name, share in factors.items()
        ]

    def start(self) -> None:
        importances = self.method.knowledge.importances
        if len(self.method.tasks) > 1 and not any(bool(importance.any()) for importance in importances.values()):
            self.method.warn_once(
                "importances",
                "Every importance is 0, so old tasks are forgotten. Does what end_task's `forward` returns depend on "
                "the weights?",
            )

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.method.config.mask == "gradient":
            mask_gradients_(self._masks, optimizer)

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if self.method.config.mask == "update":
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mask_updates_((mask for mask in self._masks if id(mask.parameter) in trained), soft=True)

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return {"masks": [mask.factor for mask in self._masks], "anchors": [mask.before for mask in self._masks]}


class SPG(FrozenPartsMethod):
    """Let later tasks change a weight the less, the more important it is to earlier ones.

    >>> method = SPG(model)
    >>> method = SPG(model, mask="gradient")  # as the paper writes it, for SGD

    **Importance.** When a task ends, g is the mean gradient of its loss over its data, and the importance of the
    entries of a weight tensor is |tanh((g − mean g) / std g)|, mean and standard deviation over that tensor. The same
    is done with the sum of the outputs of each earlier head, on the new data, in place of the loss (cross-head
    importance). The largest over all these and over all tasks counts. A tensor with one entry, or with the same
    gradient everywhere, has importance 0. Measured in eval mode; the batches' size makes no difference.

    **Mask.** From the second task on, a weight takes the share 1 − importance of each step; the head of the task takes
    the mean share of all weights, so that it does not run ahead of them. With mask="gradient" the optimizer sees
    (1 − importance) · gradient, in its moments too, and all it does besides is not masked: weight decay, decoupled or
    not, moves every weight, one with importance 1 too, and momentum left from an earlier task runs out. With
    mask="update" the whole change is masked, decay and momentum included: a weight with importance 1 keeps its bits.

    BatchNorm statistics are those of the first task. `end_task` needs batches of `x` or `(x, y)`; a `forward` of your
    own returns the loss, and x is still the batch or its first part.
    """

    title = "SPG"
    formula = (
        "Δθ ← (1 − γ) Δθ",
        "γ = max over tasks of |tanh((g − mean g) / std g)|, over the entries of each weight tensor",
    )
    Config = SPGConfig
    config: SPGConfig
    Knowledge = SPGKnowledge
    knowledge: SPGKnowledge
    Plan = SPGPlan

    @property
    def depends_on_batch_size(self) -> bool:
        return False

    def is_frozen(self, name: str) -> bool:
        return False

    def head_factor(self) -> float:
        """The mean of 1 − importance over all weights: the share of a step that a head takes in SPG."""
        importances = self.knowledge.importances.values()
        count = sum(importance.numel() for importance in importances)
        return 1 - sum(float(to_sum_dtype(importance).sum()) for importance in importances) / max(1, count)

    @torch.no_grad()
    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        knowledge, protected = self.knowledge, find_protected(self)
        if len(self.tasks) > 1:
            batches = make_repeatable(batches)  # once for each head
        scores: list[Score] = [lambda batch: as_single_score(forward(batch))]
        if not self.heads.is_shared:
            scores += [self._score_head(task) for task in self.tasks[:-1]]
        importances = dict(knowledge.importances)
        for score in scores:
            gradients = measure_gradients(self.model, protected, batches, score, power=None, batch_size=BATCH_SIZE)
            for name, gradient in gradients.items():
                if not bool(gradient.isfinite().all()):
                    raise FloatingPointError(
                        f"The gradient of {name} is not finite: training of task {self.task!r} diverged. The task was "
                        "not ended; go back to the last good weights, or lower the learning rate."
                    )
                importance = normalise_gradient(gradient).abs().to(protected[name].dtype)
                importances[name] = torch.maximum(importances.get(name, importance), importance)
        knowledge.importances = importances
        knowledge.statistics = {
            "importance_mean": 1 - self.head_factor(),
            "importance_max": max((float(importance.max()) for importance in importances.values()), default=0.0),
        }

    def _score_head(self, task: str) -> Score:
        """The sum of the outputs of an earlier task's head, per sample of a batch."""

        def score(batch: Any) -> tuple[Tensor, Tensor]:
            output = self.call_model(batch[0] if isinstance(batch, tuple | list) else batch, task)
            if (values := concat_tensors(output)) is None:
                raise ValueError(
                    f"SPG needs the outputs of the head of task {task!r}; the model returned {describe_value(output)}, "
                    "which holds no tensor. Let the model return a tensor, or a tuple, list or dict of tensors."
                )
            return as_single_score(values.sum(1))

        return score

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of SPG: one importance for each weight."""
        return Memory.from_counts(importances=outline.weights.numbers, bytes=outline.weights.bytes)

    def statistics(self) -> dict[str, Any]:
        """Of SPG's last task: mean and maximum of the importances after it."""
        return super().statistics()


def normalise_gradient(gradient: Tensor) -> Tensor:
    """A gradient as SPG compares it: tanh of entries less their mean, in units of their deviation (over n − 1)."""
    centred = to_sum_dtype(gradient)
    centred = centred - centred.mean()
    deviation = centred.square().sum().div(max(1, gradient.numel() - 1)).sqrt()
    return torch.tanh(centred / deviation) if bool(deviation > 0) else torch.zeros_like(centred)
