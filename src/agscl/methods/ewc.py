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
from agscl.methods._parts.penalties import Tensors, WeightConfig, WeightKnowledge, WeightMethod
from agscl.methods._parts.sample_gradients import count_samples, measure_gradients
from agscl.methods._parts.search_axis import FACTORS, SearchAxis

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
        self._require_at_least("lam", 0)
        self._require(0 < self.gamma <= 1, f"gamma must be above 0 and at most 1, not {self.gamma}")
        self._require(
            isinstance(self.batch, int) and self.batch >= 1, f"batch is a number of samples, not {self.batch}"
        )
        self._require(
            self.mode == "eval" or self.fisher == "batched",
            "mode='train' needs fisher='batched'; gradients per sample are taken in eval mode",
        )


@dataclass
class EWCKnowledge(WeightKnowledge):
    """What EWC keeps from task to task."""

    minimum: float = 0.0  # Σ F (θ − θ*)² of separate penalties where their sum is smallest


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
        """λ/2 Σ F (θ − θ*)² for the weights as they are now, summed over tasks with accumulation="separate"."""
        return self.strength * (self._sum_weighted_distances() + self.knowledge.minimum)

    # Measuring -------------------------------------------------------------------------------------------------------

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        kind, default = self.config.fisher, forward == self._default_forward

        def output(batch: Any) -> Any:
            if not default:
                return forward(batch)
            assert self.task is not None
            return self.call_model(batch[0] if isinstance(batch, tuple | list) else batch, self.task)

        def exact(batch: Any) -> tuple[Tensor, Tensor]:
            logs = F.log_softmax(_require_logits(output(batch), kind), 1)[0]
            return logs, logs.detach().exp()

        def estimated(batch: Any) -> tuple[Tensor, Tensor]:
            """Σ ±√p·log p over the classes: squared, its gradient is that of each class by p, and what is mixed of two
            classes has mean 0. One drawn class would be unbiased too, but says nothing where predictions are sure."""
            inner, signs = batch
            logs = F.log_softmax(_require_logits(output(inner), kind), 1)
            return _as_one_value((signs * (logs.detach() / 2).exp() * logs).sum(1))

        def sampled(batch: Any) -> tuple[Tensor, Tensor]:
            inner, places = batch
            found = output(inner)
            logits = isinstance(found, Tensor) and found.dim() == 2
            return _as_one_value(F.cross_entropy(found, pick_classes(found, places)) if logits else found)

        def loss(batch: Any) -> tuple[Tensor, Tensor]:
            return _as_one_value(forward(batch))

        if kind == "batched":
            return measure_gradients(
                self.model,
                protected,
                batches,
                loss,
                power=2,
                batch_size=self.config.batch,
                train=self.config.mode == "train",
            )
        if kind in ("estimated", "sampled"):
            batches = self._add_draws(batches, output)
        score = {"exact": exact, "estimated": estimated, "sampled": sampled, "empirical": loss}[kind]
        return measure_gradients(self.model, protected, batches, score, power=2)

    def _add_draws(self, batches: Iterable[Any], output: Forward) -> Iterator[tuple[Any, Tensor]]:
        """Batches with what is drawn for every sample: a sign for each class, or a place in [0, 1) for one of them."""
        draw = torch.Generator().manual_seed((self.config.seed << 16) + len(self.tasks))
        like, classes = next(self.model.parameters()), 0
        for batch in batches:
            samples = count_samples(tree_flatten(batch)[0])
            if self.config.fisher == "sampled":
                yield batch, torch.rand(samples, generator=draw, dtype=torch.float64).to(like.device)
                continue
            classes = classes or _require_logits(output(batch), self.config.fisher).shape[1]
            yield batch, (2 * torch.randint(2, (samples, classes), generator=draw) - 1).to(like)

    # Over tasks ------------------------------------------------------------------------------------------------------

    def _accumulate(self, protected: dict[str, nn.Parameter], new: Tensors) -> None:
        knowledge, learned = self.knowledge, len(self.tasks) - 1
        for name, parameter in protected.items():
            fisher, weights = new[name].double(), parameter.detach().to(torch.float64, copy=True)
            if (old := knowledge.importances.get(name)) is not None:
                if self.config.accumulation == "merged":
                    fisher = (fisher + learned * old) / (learned + 1)
                elif self.config.accumulation == "online":
                    fisher = fisher + self.config.gamma * old
                else:
                    both, place = fisher + old, knowledge.anchors[name].double()
                    knowledge.minimum += float(
                        torch.where(both > 0, fisher * old / both * (place - weights).square(), 0.0).sum()
                    )
                    weights = torch.where(both > 0, (fisher * weights + old * place) / both, weights)
                    fisher = both
            knowledge.importances[name] = fisher.to(parameter.dtype)
            knowledge.anchors[name] = weights.to(parameter.dtype)


def pick_classes(logits: Tensor, places: Tensor) -> Tensor:
    """(samples,) classes drawn from the predictions: where `places` (samples,) in [0, 1) fall when the predicted
    probabilities are laid end to end."""
    ends = logits.detach().double().softmax(1).cumsum(1)
    return (ends < places[:, None] * ends[:, -1:]).sum(1)


def _require_logits(output: Any, fisher: str) -> Tensor:
    if isinstance(output, Tensor) and output.dim() == 2:
        return output
    found = f"a tensor of {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ValueError(
        f"fisher={fisher!r} needs logits of (samples, classes); the forward pass returned {found}. Give end_task a "
        "`forward` that returns them; or one that returns the loss, or a log-probability of what was drawn, with "
        "fisher='sampled' or 'empirical'."
    )


def _as_one_value(value: Any) -> tuple[Tensor, Tensor]:
    """The loss of a batch as the one value to differentiate."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        found = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"The Fisher needs a loss to differentiate; the forward pass returned {found}. Give end_task batches of "
            "(x, y), or a `forward` that returns the loss."
        )
    return value.mean().reshape(1), torch.ones(1, dtype=value.dtype, device=value.device)
