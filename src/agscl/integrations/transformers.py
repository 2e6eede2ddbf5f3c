"""A callback for the Trainer of Transformers: a method learns a task while `Trainer.train` trains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agscl.integrations._attach import (
    begin_or_continue,
    check_method,
    check_model,
    differentiates_logits,
    follow_optimizers,
)
from agscl.methods._parts.lifecycle import Forward, Method

__all__ = ["TransformersCallback"]

FILE = "agscl.pt"
"""The method's state, in each of the Trainer's checkpoints: tensors and plain values."""


class TransformersCallback(TrainerCallback):
    """Learns `task` with `method` during one `Trainer.train`; make one, and a Trainer, for each task.

    >>> trainer = Trainer(model, arguments, train_dataset=birds, callbacks=[TransformersCallback(method, "birds")])
    >>> trainer.train()

    `method` was made of the model, or of a part of it, which has a head for `task` by now. `forward(batch)` returns
    what is differentiated to measure importances; by default the loss of `model(**batch)`, or its logits where the
    method needs these. The method's state is saved with the Trainer's checkpoints:
    `trainer.train(resume_from_checkpoint=True)` continues in the middle of a task. Say `resume_from=` where such a
    checkpoint lies outside of `output_dir`.
    """

    def __init__(
        self, method: Method, task: str, *, forward: Forward | None = None, resume_from: str | Path | None = None
    ) -> None:
        check_method(method, type(self).__name__)
        self.method, self.task, self.forward, self.resume_from = method, task, forward, resume_from
        self._epochs_ended = 0

    # Called by the Trainer, in this order ----------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        check_model(self.method, given["model"])
        optimizer = unwrap_optimizer(given["optimizer"])
        if state.global_step:
            self._resume(Path(self.resume_from or find_checkpoint(args, state)), state, optimizer)
            return
        self._epochs_ended = 0
        epochs = state.num_train_epochs
        steps = math.ceil(state.max_steps / epochs)
        begin_or_continue(self.method, self.task, [optimizer], epochs=epochs, steps_per_epoch=steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._end_epochs(int((state.epoch or 0.0) + 1e-3))  # a checkpoint may be saved just before an epoch is over

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        follow_optimizers(self.method, [unwrap_optimizer(given["optimizer"])])

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._end_epochs(self._epochs_ended + 1)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        folder = find_checkpoint(args, state)
        if state.is_world_process_zero and folder.exists():  # with save_total_limit it may be deleted by now
            saved = {"task": self.task, "epochs_ended": self._epochs_ended, "method": self.method.state_dict()}
            torch.save(saved, folder / FILE)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._end_epochs(int((state.epoch or 0.0) + 1e-3))
        key = "logits" if differentiates_logits(self.method) else "loss"
        forward = self.forward or (lambda batch: pick_output(given["model"](**batch), key))
        self.method.end_task(given["train_dataloader"], forward)

    # ------------------------------------------------------------------------------------------------------------------

    def _end_epochs(self, number: int) -> None:
        while self._epochs_ended < number:
            self.method.end_epoch()
            self._epochs_ended += 1

    def _resume(self, folder: Path, state: TrainerState, optimizer: Optimizer) -> None:
        try:
            saved = torch.load(folder / FILE, weights_only=True)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"Training continues at step {state.global_step}, but {folder / FILE} is missing: the checkpoint was "
                "saved without this callback, or lies elsewhere (say where: resume_from=…)."
            ) from None
        if saved["task"] != self.task:
            raise ValueError(f"{folder} is a checkpoint of task {saved['task']!r}, not of {self.task!r}.")
        self.method.load_state_dict(saved["method"], optimizer)
        self._epochs_ended = saved["epochs_ended"]


def find_checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer behind accelerate's wrapper, which does the steps."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def pick_output(output: Any, key: str) -> Tensor:
    """The loss or the logits in the output of a model of Transformers: a dict, or a tuple that begins with both."""
    picked: Tensor = output[key] if isinstance(output, Mapping) else output[("loss", "logits").index(key)]
    return picked
