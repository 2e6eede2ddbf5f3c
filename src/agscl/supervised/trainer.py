"""The paper's loop over a task sequence, cut into units so that it can stop and continue between any two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.heads import MultiHead
from agscl.methods.base import Method
from agscl.tasks import Task, TaskSequence

Event = dict[str, Any]

EVALUATION_BATCH = 512


class TrainingFailed(Exception):
    """Training cannot go on; the message says where and why."""


@dataclass(frozen=True)
class TrainingConfig:
    """How each task is trained."""

    epochs: int = 100
    """Epochs per task; training never stops early."""
    batch_size: int = 256
    """Examples per optimizer step."""
    lr: float = 1e-3
    """Learning rate at the start of every task."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer, made anew for every task."""
    momentum: float = 0.0
    """Momentum, for sgd only."""
    weight_decay: float = 0.0
    """The optimizer's weight decay."""
    patience: int | None = 5
    """Epochs without a better validation loss before the rate drops; none keeps the rate constant."""
    factor: float = 3.0
    """What the rate is divided by when it drops; the optimizer's state is cleared then."""
    restore_best: bool = True
    """Whether a task ends with the weights of the epoch with the best validation loss, or with the last ones."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, or none for a constant rate, not {self.patience}")
        if not self.factor > 1:
            raise ValueError(f"factor must be above 1, not {self.factor}")

    @property
    def validates(self) -> bool:
        return self.patience is not None or self.restore_best


class Trainer:
    """Trains `model` with `method` on one task after the other.

    `advance()` does one unit of work: the start of a task, one optimizer step, the end of an epoch, or the end of a
    task. Between any two units `state_dict()` holds all that is needed to continue with the same bits on a CPU.
    Torch's global generator is seeded at the start of each task, from the seed and the task's place.
    """

    def __init__(
        self,
        model: MultiHead,
        method: Method,
        tasks: TaskSequence,
        config: TrainingConfig,
        *,
        seed: int,
        device: torch.device | str | None = None,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        for task in tasks:
            if config.validates and task.valid_x is None:
                raise ValueError(
                    f"task {task.name!r} has no validation split: set patience=None and restore_best=False"
                )
        self.model = model
        self.method = method
        self.tasks = tasks
        self.config = config
        self.seed = seed
        self.emit = emit
        self.device = next(model.parameters()).device if device is None else torch.device(device)

        self.task_index = 0
        self.epoch = 0
        self.step = 0
        self.accuracies: list[list[float]] = []
        self.losses: list[list[float]] = []
        self.statistics: list[dict[str, Any]] = []
        self._optimizer: torch.optim.Optimizer | None = None  # between tasks there is none
        self._loss_sum = torch.zeros((), device=self.device)
        self._best_loss = float("inf")
        self._best_weights: dict[str, Tensor] | None = None
        self._stalled = 0

    @property
    def done(self) -> bool:
        return self.task_index == len(self.tasks)

    @property
    def progress(self) -> float:
        """The share of all optimizer steps already taken, counting every task alike."""
        within = self.epoch + (self.step / self.steps_per_epoch if self._optimizer else 0)
        return (self.task_index + within / self.config.epochs) / len(self.tasks)

    @cached_property
    def task(self) -> Task:
        """The task under way, on the model's device."""
        return self.tasks[self.task_index].to(self.device)

    @property
    def examples(self) -> int:
        """Training examples in an epoch."""
        return len(self.task.train_y)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.examples // self.config.batch_size)

    def advance(self) -> bool:
        """Do one unit of work; False once there is none left."""
        if self.done:
            return False
        if self._optimizer is None:
            self._begin_task()
        elif self.epoch == self.config.epochs:
            self._end_task()
        elif self.step == self.steps_per_epoch:
            self._end_epoch(self._optimizer)
        else:
            self._train_step(self._optimizer)
        return True

    def check(self) -> None:
        """Raise if the loss or a weight is no longer finite."""
        # The loss is taken before the step, so a weight can be broken while every loss so far was finite.
        norms = torch._foreach_norm([p for p in self.model.parameters() if p.is_floating_point()])
        if not torch.isfinite(torch.stack([self._loss_sum, *norms])).all():
            raise TrainingFailed(
                f"the loss or a weight became infinite or NaN in task {self.task_index + 1} ({self.task.name}), "
                f"epoch {self.epoch + 1}; a lower learning rate than {self.config.lr:g} may help"
            )

    def _begin_task(self) -> None:
        task = self.task
        torch.manual_seed(mixed_seed(self.seed, self.task_index))
        self.model.add_head(task.name, task.classes)
        self.model.to(self.device)
        self._optimizer = self._new_optimizer()
        self.method.begin_task(
            task.name, self._optimizer, epochs=self.config.epochs, steps_per_epoch=self.steps_per_epoch
        )
        self.model.train()
        self._best_loss, self._best_weights, self._stalled = float("inf"), None, 0
        self.losses.append([])
        self.emit({"event": "task started", "task": self.task_index, "name": task.name})

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters, config = self.model.parameters(), self.config
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)

    @cached_property
    def _batches(self) -> tuple[Tensor, ...]:
        """The rows of each batch of this epoch; drawn from the position alone, so there is no state to keep."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.task_index, self.epoch))
        order = torch.randperm(self.examples, generator=generator).to(self.device)
        return torch.split(order, self.config.batch_size)

    def _train_step(self, optimizer: torch.optim.Optimizer) -> None:
        rows = self._batches[self.step]
        loss = self._loss(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self._loss_sum += loss.detach() * len(rows)
        self.step += 1

    def _loss(self, rows: Tensor) -> Tensor:
        """The mean loss of these rows of the training data."""
        x, y = self.task.train_x[rows], self.task.train_y[rows]
        output = self.model(x, self.task.name)
        return F.cross_entropy(output, y) + self.method.loss(x, output)

    def _end_epoch(self, optimizer: torch.optim.Optimizer) -> None:
        self.method.end_epoch()
        self.check()
        event: Event = {
            "event": "epoch",
            "task": self.task_index,
            "epoch": self.epoch,
            "lr": optimizer.param_groups[0]["lr"],
            "loss": self._loss_sum.item() / self.examples,
        }
        if self.config.validates:
            event["valid_loss"] = self._validation_loss()
            self._select(event["valid_loss"], optimizer)
        self.losses[-1].append(event["loss"])
        self.emit(event)
        self.epoch += 1
        self.step = 0
        self._loss_sum.zero_()
        self.__dict__.pop("_batches", None)

    def _select(self, valid_loss: float, optimizer: torch.optim.Optimizer) -> None:
        """Remember the best epoch; drop the rate after `patience` epochs without a better one."""
        if valid_loss < self._best_loss:
            self._best_loss, self._stalled = valid_loss, 0
            if self.config.restore_best:
                self._best_weights = {name: value.clone() for name, value in self._trained(optimizer).items()}
            return
        self._stalled += 1
        if self.config.patience is not None and self._stalled >= self.config.patience:
            self._stalled = 0
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / self.config.factor

    def _trained(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """All that training moves: the model's state, and what a method gave to the optimizer beside it."""
        known = {id(parameter) for parameter in self.model.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        return self.model.state_dict() | {f"method/{place}": p.detach() for place, p in enumerate(parameters)}

    def _end_task(self) -> None:
        if self._best_weights is not None and self._optimizer is not None:
            for name, value in self._trained(self._optimizer).items():
                value.copy_(self._best_weights[name])
        self.method.end_task(self._training_data())
        self.check()
        self._optimizer, self._best_weights = None, None

        learned = [task.to(self.device) for task in self.tasks[: self.task_index + 1]]
        self.accuracies.append([self._accuracy(task) for task in learned])
        self.statistics.append(self.method.statistics())
        self.emit(
            {
                "event": "task ended",
                "task": self.task_index,
                "name": self.task.name,
                "accuracies": self.accuracies[-1],
                "statistics": self.statistics[-1],
            }
        )
        self.task_index += 1
        self.epoch = 0
        self.__dict__.pop("task", None)

    def _training_data(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.config.batch_size
        return zip(self.task.train_x.split(size), self.task.train_y.split(size), strict=True)

    def _outputs(self, x: Tensor, task: str) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            outputs = torch.cat([self.model(part, task) for part in x.split(EVALUATION_BATCH)])
        self.model.train()
        return outputs

    def _validation_loss(self) -> float:
        """The loss that training lowers, penalties included, on the validation split of the task under way."""
        return self._loss_on_valid(self.task) + self.method.penalty().item()

    def _loss_on_valid(self, task: Task) -> float:
        assert task.valid_x is not None
        assert task.valid_y is not None
        total = torch.zeros((), device=self.device)
        self.model.eval()
        with torch.no_grad():
            for x, y in zip(task.valid_x.split(EVALUATION_BATCH), task.valid_y.split(EVALUATION_BATCH), strict=True):
                output = self.model(x, task.name)
                total += len(y) * (F.cross_entropy(output, y) + self.method.loss(x, output))
        self.model.train()
        return total.item() / len(task.valid_y)

    def _accuracy(self, task: Task) -> float:
        hits = self._outputs(task.test_x, task.name).argmax(1) == task.test_y
        return int(hits.sum()) / len(hits)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as nested dicts of tensors and plain values."""
        self.check()
        state = {
            "task": self.task_index,
            "epoch": self.epoch,
            "step": self.step,
            "accuracies": self.accuracies,
            "losses": self.losses,
            "statistics": self.statistics,
            "loss_sum": self._loss_sum,
            "best_loss": self._best_loss,
            "best_weights": self._best_weights,
            "stalled": self._stalled,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": None if self._optimizer is None else optimizer_state(self._optimizer, self.model),
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; this trainer, its model and its method must be new."""
        begun = state["task"] + (state["optimizer"] is not None)
        for task in self.tasks[:begun]:
            self.model.add_head(task.name, task.classes)
        self.model.to(self.device)
        self.model.load_state_dict(state["model"])
        self.model.train()

        self.task_index, self.epoch, self.step = state["task"], state["epoch"], state["step"]
        self.accuracies, self.losses, self.statistics = state["accuracies"], state["losses"], state["statistics"]
        self._loss_sum = state["loss_sum"].to(self.device)
        self._best_loss, self._stalled = state["best_loss"], state["stalled"]
        self._best_weights = state["best_weights"]
        if state["optimizer"] is None:
            self.method.load_state_dict(state["method"])
        else:
            self._optimizer = self._new_optimizer()
            self.method.load_state_dict(state["method"], self._optimizer)
            load_optimizer_state(self._optimizer, self.model, state["optimizer"])
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimizer's rates and moments by parameter name, every tensor in its own dtype and shape."""
    return {
        "lr": [group["lr"] for group in optimizer.param_groups],
        "moments": {
            name: dict(optimizer.state[parameter])
            for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        },
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    # Not optimizer.load_state_dict: it casts the moments to the parameter's dtype and goes by position, not by name.
    for group, lr in zip(optimizer.param_groups, state["lr"], strict=True):
        group["lr"] = lr
    parameters = dict(model.named_parameters())
    for name, moments in state["moments"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            # Adam's step counter stays on the host, as Adam itself keeps it.
            key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
            for key, value in moments.items()
        }


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, so that neighbouring seeds and positions share no random stream."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
