"""When a proximal step is due, and with which share of an epoch's thresholds."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.methods._agscl.learning_rates import LayerRates

__all__ = ["Every", "ProximalSchedule"]

Every = Literal["epoch", "step"] | int
Share = float | Tensor


class ProximalSchedule:
    """Decides when a proximal step runs: once an epoch, after every step, or after every n steps.

    Steps of the main optimizer are counted, without those that a fused optimizer skipped on overflow. With `every`
    other than "epoch", a proximal step has the share (steps since the last one) / (steps per epoch) of the thresholds,
    so that μ and λ mean the same; without `steps_per_epoch` the steps of the first epoch are counted, which then has
    one full proximal step at its end.
    """

    saved: ClassVar[tuple[str, ...]] = (
        *("steps_per_epoch", "steps_since", "counted_since", "others_stepped", "epoch_steps", "proximal_steps"),
        *("rate_sum", "rates"),
    )

    def __init__(self, rates: LayerRates, every: Every, steps_per_epoch: int | None) -> None:
        self.rates, self.every, self.steps_per_epoch = rates, every, steps_per_epoch
        self.steps_since = 0  # steps since the last proximal one,
        self.counted_since: Share = 0.0  # and of these the ones not skipped
        self.others_stepped = False  # whether an optimizer other than the main one has stepped since
        self.epoch_steps = self.proximal_steps = 0
        self.rate_sum = torch.zeros((), device=rates.device)  # Σα over the proximal steps
        self.captured = False  # whether a CUDA graph holds a step

    @property
    def once_an_epoch(self) -> bool:
        """Whether the next proximal step comes at the end of an epoch."""
        return self.every == "epoch" or not self.steps_per_epoch

    def count_step(self, optimizer: Optimizer, skipped: Tensor | None) -> Share | None:
        """Count a step; returns the share of the proximal step that is due, if one is."""
        self.rates.record(optimizer)
        if optimizer is not self.rates.main:
            self.others_stepped = True
            return None
        if self.rates.is_capturing:
            self._check_capture()
        self.steps_since += 1
        self.epoch_steps += 1
        self.counted_since = self.counted_since + (1 if skipped is None else 1 - skipped.reshape(()).clamp(max=1))
        if self.once_an_epoch or self.steps_since < (self.every if isinstance(self.every, int) else 1):
            return None
        assert self.steps_per_epoch
        return self.counted_since / self.steps_per_epoch

    def end_epoch(self) -> Share | None:
        """The share of the proximal step that is due at the end of an epoch, if one is."""
        due = self.once_an_epoch and bool(self.steps_since or self.captured)
        if self.once_an_epoch:
            self.steps_per_epoch = self.steps_per_epoch or self.epoch_steps or None
        self.epoch_steps = 0
        return 1.0 if due else None

    def end_task(self) -> Share | None:
        """The share of the proximal step that is due at the end of the task, if one is."""
        if not (self.steps_since or self.others_stepped):
            return None
        return 1.0 if self.once_an_epoch else self.counted_since / (self.steps_per_epoch or 1)

    def begin_proximal_step(self, share: Share) -> Share:
        """Record that a proximal step runs; returns its rate α, one for all layers or (groups,)."""
        alpha = self.rates.per_group()
        self.rates.restart()
        self.steps_since, self.counted_since, self.others_stepped = 0, 0.0, False
        self.proximal_steps += 1
        # in place: a captured step adds to this tensor in every replay
        self.rate_sum += (alpha * share).mean() if isinstance(alpha, Tensor) else alpha * share
        return alpha

    def _check_capture(self) -> None:
        """A captured step runs this code once and its kernels many times: nothing may be counted here."""
        self.captured = True
        if self.every not in ("epoch", "step", 1):
            raise RuntimeError(
                f"prox_every={self.every} counts steps, which a captured CUDA graph cannot: use 'epoch', with "
                "end_epoch() outside the graph, or 'step'."
            )
        if self.every != "epoch" and not self.steps_per_epoch:
            raise RuntimeError("A captured step cannot count an epoch's steps: give begin_task(…, steps_per_epoch=…).")
