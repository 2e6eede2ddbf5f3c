"""EWC: elastic weight consolidation (Kirkpatrick et al.; PNAS 2017).

The importance of a weight is its diagonal entry of the Fisher information at the end of a task: how fast the
predicted distribution changes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.sample_gradients import as_single_score, count_samples, measure_gradients
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.weight_method import Tensors, WeightConfig, WeightKnowledge, WeightMethod
from agscl.system.sums import sum_dtype, to_sum_dtype

__all__ = ["EWC", "EWCConfig"]


@dataclass(frozen=True, kw_only=True)
class EWCConfig(WeightConfig):
    """Settings of EWC. The defaults are the definitions of its own paper, the Fisher estimated; λ must be searched."""

    lam: float = 400.0
    """λ: the penalty is λ/2 Σ F (θ − θ*)²."""
    fisher: Literal["estimated", "exact", "sampled", "empirical", "batched"] = "estimated"
    """Fisher diagonal. Per sample: the expectation over the predicted classes, estimated from one backward pass with
    random signs or exact (a backward pass for each class); from one class drawn from the prediction; or with the true
    label. Or batched: the squared gradient of mini-batches' mean loss."""
    accumulation: Literal["separate", "merged", "online"] = "separate"
    """Over tasks: a penalty for each; one with the mean of all Fishers, held at the last weights; or one with
    F ← γF + F_task, held there too."""
    gamma: float = 1.0
    """γ: how much of the Fisher lasts from task to task, with accumulation="online"."""
    batch: int = 20
    """Size of the mini-batches, with fisher="batched"."""
    mode: Literal["eval", "train"] = "eval"
    """Mode in which the Fisher is measured; train (dropout on) needs fisher="batched"."""
    seed: int = 0
    """Seed of what is drawn, with fisher="estimated" or "sampled"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("lam", 0)
        self.require(0 < self.gamma <= 1, f"gamma must be above 0 and at most 1, not {self.gamma}")
        self.require(isinstance(self.batch, int) and self.batch >= 1, f"batch is a number of samples, not {self.batch}")
        self.require(
            self.mode == "eval" or self.fisher == "batched",
            "mode='train' needs fisher='batched'; gradients per sample are taken in eval mode",
        )

    def find_unused(self) -> dict[str, str]:
        unused = {} if self.accumulation == "online" else {"gamma": "it is for accumulation='online'"}
        return unused if self.fisher == "batched" else {**unused, "batch": "it is for fisher='batched'"}


@dataclass
class EWCKnowledge(WeightKnowledge):
    """What EWC keeps from task to task."""

    minimum: float = 0.0  # of Σ F (θ − θ*)² over all tasks, with accumulation="separate"


class EWC(WeightMethod):
    """Hold every weight by how much the predictions for earlier tasks depend on it.

    >>> method = EWC(model, lam=400)
    >>> method = EWC(model, lam=10_000, **EWC.paper)  # as in the AGS-CL paper's table

    `end_task` takes `(x, y)`, or `x` alone where no labels are needed. Its `forward(batch)` may return logits
    (samples, classes), or a loss or log-probability (then its gradient is squared, and fisher must be neither
    "estimated" nor "exact").

    With accumulation="separate" the sum of the tasks' penalties is held as one quadratic: `importances` is the sum of
    the Fishers, `anchors` the mean of the tasks' weights, weighted by them. It is the same penalty, whatever the
    number of tasks, in the memory of one.
    """

    title = "EWC"
    formula = (
        "loss + λ/2 Σ F (θ − θ*)²",
        "F = E[(∂ log p(y | x) / ∂θ)²], the diagonal of the Fisher information, at the end of a task",
    )
    search = (SearchAxis("lam", FACTORS),)
    Config = EWCConfig
    config: EWCConfig
    Knowledge = EWCKnowledge
    knowledge: EWCKnowledge
    paper: ClassVar[Mapping[str, Any]] = {"fisher": "batched", "batch": 20, "mode": "train", "accumulation": "merged"}

    no_importance_advice = (
        "The Fisher of every task was 0: predictions were certain to the last bit (probabilities of exactly 0 and 1), "
        "or what end_task's `forward` returns does not depend on the weights."
    )

    @property
    def strength(self) -> float:
        return self.config.lam / 2

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """EWC's λ/2 Σ F (θ − θ*)² for the weights as they are now, summed over tasks with accumulation="separate"."""
        return self.strength * (self._sum_weighted_distances() + self.knowledge.minimum)

    # Measuring -------------------------------------------------------------------------------------------------------

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        fisher, default = self.config.fisher, forward == self._default_forward

        def compute_output(batch: Any) -> Any:
            assert self.task is not None
            if default:
                output = self.call_model(batch[0] if isinstance(batch, tuple | list) else batch, self.task)
            else:
                output = forward(batch)
            if isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] == 1:
                self._warn_of_one_output()
            return output

        def exact_score(batch: Any) -> tuple[Tensor, Tensor]:
            log_probabilities = F.log_softmax(_require_logits(compute_output(batch), fisher), 1)[0]
            return log_probabilities, log_probabilities.detach().exp()

        def estimated_score(batch: Any) -> tuple[Tensor, Tensor]:
            """Σ ±√p·log p over the classes. Products of two classes have random signs, so the mean of its squared
            gradient is the expectation over classes. One drawn class is unbiased too, but 0 for certain predictions."""
            task_batch, signs = batch
            log_probabilities = F.log_softmax(_require_logits(compute_output(task_batch), fisher), 1)
            return as_single_score((signs * (log_probabilities.detach() / 2).exp() * log_probabilities).sum(1))

        def sampled_score(batch: Any) -> tuple[Tensor, Tensor]:
            task_batch, uniforms = batch
            output = compute_output(task_batch)
            is_logits = isinstance(output, Tensor) and output.dim() == 2
            return as_single_score(F.cross_entropy(output, sample_classes(output, uniforms)) if is_logits else output)

        def loss_score(batch: Any) -> tuple[Tensor, Tensor]:
            return as_single_score(forward(batch))

        if fisher == "batched":
            return measure_gradients(
                self.model,
                protected,
                batches,
                loss_score,
                power=2,
                batch_size=self.config.batch,
                train=self.config.mode == "train",
            )
        if fisher in ("estimated", "sampled"):
            batches = self._add_draws(batches, compute_output)
        score = {"exact": exact_score, "estimated": estimated_score, "sampled": sampled_score, "empirical": loss_score}[
            fisher
        ]
        return measure_gradients(self.model, protected, batches, score, power=2)

    def _warn_of_one_output(self) -> None:
        self.warn_once(
            "penalty",
            f"Task {self.task!r} has one output, and a softmax over one output is always certain: its Fisher is 0, so "
            "nothing protects the task. Use EWC(model, fisher='empirical') and give end_task a `forward` that returns "
            "the loss; or give it one that returns logits of both classes, torch.cat([0 * output, output], 1).",
        )

    def _add_draws(self, batches: Iterable[Any], compute_output: Forward) -> Iterator[tuple[Any, Tensor]]:
        """Yield (batch, draws): per sample a random sign for each class, or a number in [0, 1) to draw one class by."""
        generator = torch.Generator().manual_seed((self.config.seed << 16) + len(self.tasks))
        parameter, classes = next(self.model.parameters()), 0
        for batch in batches:
            samples = count_samples(tree_flatten(batch)[0])
            if self.config.fisher == "sampled":
                uniforms = torch.rand(samples, generator=generator, dtype=torch.float64)
                yield batch, uniforms.to(parameter.device, sum_dtype(parameter.device))
                continue
            classes = classes or _require_logits(compute_output(batch), self.config.fisher).shape[1]
            yield batch, (2 * torch.randint(2, (samples, classes), generator=generator) - 1).to(parameter)

    # Over tasks ------------------------------------------------------------------------------------------------------

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        knowledge, learned = self.knowledge, len(self.tasks) - 1
        for name, parameter in protected.items():
            fisher, weights = to_sum_dtype(new[name]), to_sum_dtype(parameter.detach(), copy=True)
            if (old := knowledge.importances.get(name)) is not None:
                if self.config.accumulation == "merged":
                    fisher = (fisher + learned * old) / (learned + 1)
                elif self.config.accumulation == "online":
                    fisher = fisher + self.config.gamma * old
                else:
                    total, anchor = fisher + old, to_sum_dtype(knowledge.anchors[name])
                    knowledge.minimum += float(
                        torch.where(total > 0, fisher * old / total * (anchor - weights).square(), 0.0).sum()
                    )
                    weights = torch.where(total > 0, (fisher * weights + old * anchor) / total, weights)
                    fisher = total
            knowledge.importances[name] = fisher.to(parameter.dtype)
            knowledge.anchors[name] = weights.to(parameter.dtype)


def sample_classes(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw (samples,) classes for EWC's Fisher from the predicted distributions, by inverting their cumulative sums.

    `uniforms` (samples,) are random numbers in [0, 1).
    """
    cumulative = to_sum_dtype(logits.detach()).softmax(1).cumsum(1)
    return (cumulative < uniforms[:, None] * cumulative[:, -1:]).sum(1)


def _require_logits(output: Any, fisher: str) -> Tensor:
    if isinstance(output, Tensor) and output.dim() == 2:
        return output
    description = f"a tensor of {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ValueError(
        f"fisher={fisher!r} needs logits of (samples, classes); the forward pass returned {description}. Give end_task "
        "a `forward` that returns them; or one that returns the loss, or a log-probability of what was drawn, with "
        "fisher='sampled' or 'empirical'."
    )
