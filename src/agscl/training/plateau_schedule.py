"""The learning rate of a task: lower after epochs without a better validation loss, back to its start at a pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from agscl.training.trainer import Trainer


class PlateauSchedule:
    """Decides on the host which epoch has the best weights and when the learning rate drops.

    `fast.fast_engine` decides the same on a GPU, within its graphs.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def optimizer(self) -> Optimizer:
        assert self.trainer.optimizer is not None
        return self.trainer.optimizer

    def select_best(self, valid_loss: float) -> None:
        """Keep the weights of the best epoch; drop the rate on a plateau of `patience` epochs without a better one."""
        trainer, config = self.trainer, self.trainer.config
        if valid_loss < trainer.best_loss:
            trainer.best_loss, trainer.stalled_epochs = valid_loss, 0
            if config.restore_best:
                trainer.best_weights = {name: value.clone() for name, value in trainer.trained_tensors().items()}
            return
        trainer.stalled_epochs += 1
        if config.patience is not None and trainer.stalled_epochs >= config.patience:
            trainer.stalled_epochs = 0
            self.drop_rate()

    def drop_rate(self) -> None:
        """Divide the learning rate, and clear the state of the optimizer and the moments of the method."""
        self._clear_moments()
        self.divide_rate()

    def restart_rate(self) -> None:
        """Go back to the rate a task starts with: after a pruning, what stays must make up for what went."""
        self._clear_moments()
        for group in self.optimizer.param_groups:
            group["lr"] = self.trainer.config.get_restart_rate(self.trainer.epoch)

    def divide_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / self.trainer.config.factor

    def _clear_moments(self) -> None:
        self.optimizer.state.clear()
        self.trainer.method.clear_moments()
