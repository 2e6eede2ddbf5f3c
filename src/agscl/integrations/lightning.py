"""A Lightning callback: a method learns a task while `Trainer.fit` trains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from agscl.integrations._attach import begin_or_continue, check_method, check_model, follow_optimizers
from agscl.methods._parts.ddp_and_compile import find_ddp_parameters
from agscl.methods._parts.lifecycle import Forward, Method

__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """Learns `task` with `method` during one `Trainer.fit`; make one, and a Trainer, for each task.

    >>> trainer = Trainer(max_epochs=20, callbacks=[LightningCallback(method, "birds")])
    >>> trainer.fit(module, loader)

    `method` was made of the model within the LightningModule, which has a head for `task` by now. `forward(batch)`
    runs that model where a batch is not `(x, y)`, as in `end_task`. The method's state is in Lightning's checkpoints:
    `trainer.fit(…, ckpt_path=…)` continues in the middle of a task.
    """

    def __init__(self, method: Method, task: str, *, forward: Forward | None = None) -> None:
        check_method(method, type(self).__name__)
        self.method, self.task, self.forward = method, task, forward
        self._epochs_ended = 0
        self._loaded: dict[str, Any] | None = None  # a checkpoint's state, until there are optimizers
        self._frozen: list[nn.Parameter] = []

    @property
    def state_key(self) -> str:
        key: str = self._generate_state_key(task=self.task)
        return key

    def state_dict(self) -> dict[str, Any]:
        return {"epochs_ended": self._epochs_ended, "method": self.method.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    # Called by the Trainer, in this order ----------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_model(self.method, pl_module)
        if trainer.world_size > 1 and not self.method.heads.is_shared:
            # DistributedDataParallel, which wraps the model next, waits for the gradients of all it finds trainable
            self._frozen = [parameter for parameter in self._list_other_heads() if parameter.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        method = self.method
        method.averaged_by_ddp = find_ddp_parameters(trainer.strategy.model)
        if self._loaded is not None:
            method.load_state_dict(self._loaded["method"], *trainer.optimizers)
            self._epochs_ended, self._loaded = self._loaded["epochs_ended"], None
            return
        epochs, steps = (None, None) if method.task == self.task else count_steps(trainer, pl_module)
        begin_or_continue(method, self.task, trainer.optimizers, epochs=epochs, steps_per_epoch=steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epochs(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        follow_optimizers(self.method, trainer.optimizers)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epochs(trainer.current_epoch + 1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the task, after other callbacks have written the last weights: averages, say."""
        with _on_device(trainer, pl_module):
            self._end_epochs(trainer.current_epoch)
            self._end_task(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------------------------------------------------------

    def _list_other_heads(self) -> list[nn.Parameter]:
        heads, tasks = self.method.heads, self.method.tasks
        try:
            return list(heads.other_parameters(self.task, [*dict.fromkeys([*tasks, self.task])]))
        except ValueError:  # this task's head comes later
            return list(heads.parameters(tasks).values())

    def _end_epochs(self, number: int) -> None:
        """Tell the method of epochs that are over; a checkpoint may have been saved just before one was."""
        while self._epochs_ended < number:
            self.method.end_epoch()
            self._epochs_ended += 1

    def _end_task(self, trainer: Trainer) -> None:
        device = next(self.method.model.parameters()).device
        loader = trainer.train_dataloader

        def batches() -> Iterable[Any]:
            return (move_data_to_device(batch, device) for batch in loader)

        self.method.end_task(batches, self.forward)


@contextmanager
def _on_device(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Within the block the model is on its device; at the end of a fit Lightning has moved it to the CPU."""
    _move_model(trainer, pl_module, trainer.strategy.root_device)
    try:
        yield
    finally:
        _move_model(trainer, pl_module, torch.device("cpu"))


def _move_model(trainer: Trainer, pl_module: LightningModule, device: torch.device) -> None:
    if any(parameter.device != device for parameter in pl_module.parameters()):
        pl_module.to(device)
        for optimizer in trainer.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # moves moments to where the parameters are


def count_steps(trainer: Trainer, pl_module: LightningModule) -> tuple[int | None, int | None]:
    """How many epochs a fit will have, and steps per epoch; None where that is not known in advance."""
    total = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches
    if math.isinf(total) or math.isinf(batches) or not batches:
        return None, None
    steps = math.ceil(batches / trainer.accumulate_grad_batches)
    epochs = max(1, math.ceil(total / steps))
    return (epochs, steps) if pl_module.automatic_optimization else (epochs, None)
