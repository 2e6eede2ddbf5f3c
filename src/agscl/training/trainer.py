"""The paper's loop over a task sequence, cut into units so that it can stop and continue between any two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.fast.adam import Adam, AdamW
from agscl.fast.captured import Captured
from agscl.fast.compiled import Compiled
from agscl.heads import MultiHead, check_name
from agscl.methods._parts.lifecycle import Method
from agscl.system.tf32 import tf32_for
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
    drop_at: int | None = None
    """After how many epochs the rate drops whatever the loss, once; the optimizer's state is kept."""
    factor: float = 3.0
    """What the rate is divided by when it drops; when the loss is the cause, the optimizer's state is cleared too."""
    restore_best: bool = True
    """Whether a task ends with the weights of the epoch with the best validation loss, or with the last ones."""
    engine: Literal["auto", "plain", "captured"] = "auto"
    """How steps run: one by one, or captured as CUDA graphs; auto captures on a GPU."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Arithmetic of the network's forward and backward passes; weights are always kept in float32."""
    channels_last: bool = False
    """Whether pictures and convolutions are laid out channels last, which is faster on most machines."""
    compile: bool = False
    """Whether the trunk is compiled for training, by torch or, where they cover it, as kernels of our own; takes some
    seconds once. The first step of a task is not, nor is the first after a run was resumed."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is for sgd alone, {self.optimizer} has its own: leave it out, or set it to 0")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, not {self.weight_decay}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, or none for a constant rate, not {self.patience}")
        if self.drop_at is not None and self.drop_at < 1:
            raise ValueError(f"drop_at is a number of epochs, at least 1, or none, not {self.drop_at}")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor must be above 1 and finite, not {self.factor}")
        for name, known in (
            ("engine", ("auto", "plain", "captured")),
            ("precision", ("float32", "tf32", "bf16")),
            ("optimizer", ("adam", "adamw", "sgd")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")

    @property
    def validates(self) -> bool:
        return self.patience is not None or self.restore_best


class Trainer:
    """Trains `model` with `method` on one task after the other.

    `advance()` does one unit of work: the start of a task, one optimizer step (with captured steps: a whole epoch), the
    end of an epoch, or the end of a task. Between any two units `state_dict()` holds all that is needed to continue
    with the same bits on a CPU (but for `compile`). Torch's global generator is seeded at the start of each task, from
    the seed and the task's place.
    """

    capturable = True  # whether `_loss` can be part of a CUDA graph

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
        for place, task in enumerate(tasks):
            check_name(task.name)
            if task.name in [other.name for other in tasks[:place]]:
                raise ValueError(f"two tasks are called {task.name!r}")
            task.check_data()
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
        capturable = self.capturable and method.capturable
        if config.engine == "captured" and not capturable:
            what = type(self).__name__ if method.capturable else repr(method)
            raise ValueError(f"steps of {what} cannot be captured as CUDA graphs: use engine='plain'")
        automatic = config.engine == "auto" and self.device.type == "cuda" and capturable
        self.captures = config.engine == "captured" or automatic
        self._captured: Captured | None = None  # of the task under way
        rounded = config.precision == "bf16" and config.channels_last
        options: dict[str, Any] = {"rearranged": self.device.type == "cuda", "rounded": rounded, "device": self.device}
        self._compiled = Compiled(model.trunk, **options) if config.compile else None
        self._moved: dict[int, Task] = {}

        self.task_index = 0
        self.epoch = 0
        self.step = 0
        self.accuracies: list[list[float]] = []
        self.valid_accuracies: list[list[float]] = []
        self.losses: list[list[float]] = []
        self.statistics: list[dict[str, Any]] = []
        self._optimizer: torch.optim.Optimizer | None = None  # between tasks there is none
        self._loss_sum = torch.zeros((), device=self.device)
        self._best_loss = float("inf")
        self._best_weights: dict[str, Tensor] | None = None
        self._stalled = 0
        self._met = False  # whether this object has made a step of the task: a method may look the network over at it

    @property
    def done(self) -> bool:
        return self.task_index == len(self.tasks)

    @property
    def progress(self) -> float:
        """The share of all optimizer steps already taken, counting every task alike."""
        within = self.epoch + (self.step / self.steps_per_epoch if self._optimizer else 0)
        return (self.task_index + within / self.config.epochs) / len(self.tasks)

    @property
    def task(self) -> Task:
        """The task under way, on the model's device."""
        return self.task_at(self.task_index)

    def task_at(self, place: int) -> Task:
        """A task on the model's device, where it stays: bytes take little room."""
        if place not in self._moved:
            moved = self.tasks[place].to(self.device)
            if self.device.type == "cuda":  # else a batch is: what is read from a file would be copied whole
                moved = moved.with_layout(self._laid_out)
            self._moved[place] = moved
        return self._moved[place]

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
        if self.device.type != "cuda":
            self._advance()
            return True
        with torch.cuda.device(self.device), tf32_for(self.config.precision):  # streams and events are of this device
            self._advance()
        return True

    def _advance(self) -> None:
        if self._optimizer is None:
            self._begin_task()
        elif self.epoch == self.config.epochs:
            self._end_task()
        elif self.captures:
            self._captured = self._captured or Captured(self, self._optimizer)
            self._captured.run_epoch()
        elif self.step == self.steps_per_epoch:
            self._end_epoch(self._optimizer)
        else:
            self._train_step(self._optimizer)

    def check(self) -> None:
        """Raise if the loss or a weight is no longer finite."""
        if not self._finite():
            raise self._failure(self.epoch)

    def _finite(self) -> Tensor:
        """Whether the epoch's loss and all weights are; the loss is taken before a step, which may break a weight."""
        norms = torch._foreach_norm([p for p in self.model.parameters() if p.is_floating_point()])
        return torch.isfinite(torch.stack([self._loss_sum, *norms])).all()

    def _failure(self, epoch: int) -> TrainingFailed:
        return TrainingFailed(
            f"the loss or a weight became infinite or NaN in task {self.task_index + 1} ({self.task.name}), "
            f"epoch {epoch + 1}; a lower learning rate than {self.config.lr:g} may help"
        )

    def _begin_task(self) -> None:
        task = self.task
        torch.manual_seed(mixed_seed(self.seed, self.task_index))
        self.model.add_head(task.name, task.classes)
        placed(self.model, self.device, self.config)
        self._optimizer = self._new_optimizer()
        self.method.begin_task(
            task.name, self._optimizer, epochs=self.config.epochs, steps_per_epoch=self.steps_per_epoch
        )
        self.model.train()
        self._best_loss, self._best_weights, self._stalled = float("inf"), None, 0
        self._met = False
        self.losses.append([])
        self.emit({"event": "task started", "task": self.task_index, "name": task.name})

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters, config = self.model.parameters(), self.config
        options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if self.captures:  # the rate changes on the device, and one kernel does all
            options |= {"lr": torch.tensor(config.lr, device=self.device), "fused": self.device.type == "cuda"}
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=config.momentum, **options)
        fused = options.get("fused", False)
        adam, adamw = (Adam, AdamW) if fused else (torch.optim.Adam, torch.optim.AdamW)
        kind = adam if config.optimizer == "adam" else adamw
        return kind(parameters, capturable=fused, **options)

    def _order(self, pin_memory: bool = False) -> Tensor:
        """The rows of this epoch in their order; drawn from the position alone, so there is no state to keep."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.task_index, self.epoch))
        return torch.randperm(self.examples, generator=generator, pin_memory=pin_memory)

    @cached_property
    def _batches(self) -> tuple[Tensor, ...]:
        """The rows of each batch of this epoch."""
        return torch.split(self._order().to(self.device), self.config.batch_size)

    def _train_step(self, optimizer: torch.optim.Optimizer) -> None:
        rows = self._batches[self.step]
        loss = self._loss(rows)
        self._met = True
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self._loss_sum.add_(loss.detach(), alpha=len(rows))
        self.step += 1

    def _loss(self, rows: Tensor) -> Tensor:
        """The mean loss of these rows of the training data."""
        x, y = self.task.make_batch(rows)
        whole = len(rows) == self.config.batch_size  # for the last batch alone torch's compiler does not pay
        try:
            with self._compiled.in_use(compiled=whole) if self._compiled and self._met else nullcontext():
                return self._loss_of(x, y, self.task.name)
        except ValueError as error:
            if len(rows) > 1:
                raise
            raise ValueError(
                f"the last batch of task {self.task.name!r} is one example, which BatchNorm cannot learn from: use "
                f"another batch_size than {self.config.batch_size} ({error})"
            ) from error

    def _loss_of(self, x: Tensor, y: Tensor, task: str) -> Tensor:
        x = self._laid_out(x)
        with self._computing():
            output = self.model(x, task)
            loss = F.cross_entropy(output.float(), y)
            none = type(self.method).loss is Method.loss  # which would be two kernels to add 0
            return loss if none else loss + self.method.loss(x, output)

    def _laid_out(self, x: Tensor) -> Tensor:
        pictures = self.config.channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if pictures else x

    def _computing(self) -> AbstractContextManager[Any]:
        """The arithmetic of forward passes."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def _end_epoch(self, optimizer: torch.optim.Optimizer) -> None:
        version = self.method.version
        self.method.end_epoch()
        if self.method.version != version:  # weights from before, e.g. unpruned ones, are no longer to be had
            self._best_loss, self._stalled = float("inf"), 0
        self.check()
        loss, rate, valid_loss = self._loss_sum.item() / self.examples, optimizer.param_groups[0]["lr"], None
        if self.config.validates:
            valid_loss = self._validation_loss().item()
            self._select(valid_loss, optimizer)
        self._tell_epoch(self.epoch, loss, valid_loss, rate)
        self.epoch += 1
        if self.epoch == self.config.drop_at:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / self.config.factor
        self.step = 0
        self._loss_sum.zero_()
        self.__dict__.pop("_batches", None)

    def _tell_epoch(self, epoch: int, loss: float, valid_loss: float | None, rate: float) -> None:
        if not math.isfinite(loss) or not math.isfinite(valid_loss or 0.0):
            raise self._failure(epoch)
        event: Event = {"event": "epoch", "task": self.task_index, "epoch": epoch, "lr": rate, "loss": loss}
        if valid_loss is not None:
            event["valid_loss"] = valid_loss
        self.losses[-1].append(loss)
        self.emit(event)

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
            self.method.clear_moments()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / self.config.factor

    def _trained(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """All that training moves: the model's state, and what a method gave to the optimizer beside it."""
        known = {id(parameter) for parameter in self.model.parameters()}
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        still = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        moved = {name: value for name, value in self.model.state_dict().items() if name not in still}
        return moved | {f"method/{place}": p.detach() for place, p in enumerate(others)}

    def _end_task(self) -> None:
        if self._captured is not None:
            self._captured.close()
            self._captured = None
        if self._best_weights is not None and self._optimizer is not None:
            for name, value in self._trained(self._optimizer).items():
                value.copy_(self._best_weights[name])
        self.method.end_task(self._training_data())
        self.check()
        self._optimizer, self._best_weights = None, None

        self.accuracies.append(self._accuracies(self.task_index + 1))
        if all(task.valid_x is not None for task in self.tasks):
            self.valid_accuracies.append(self._accuracies(self.task_index + 1, valid=True))
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

    def _training_data(self) -> Iterator[tuple[Tensor, Tensor]]:
        size, task = self.config.batch_size, self.task
        if not self.method.batch_size_matters:  # training a batch takes more memory than looking at two
            size = max(size, min(2 * size, EVALUATION_BATCH))
        for x, y in zip(task.train_x.split(size), task.train_y.split(size), strict=True):
            yield self._laid_out(task.prepare_inputs(x)), y

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def _validation_loss(self) -> Tensor:
        """The loss that training lowers, penalties included, on the validation split of the task under way."""
        return self._loss_on_valid(self.task) + self.method.penalty()

    def _loss_on_valid(self, task: Task) -> Tensor:
        assert task.valid_x is not None
        assert task.valid_y is not None
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with self._evaluating(), self._compiled.in_use(compiled=False) if self._compiled else nullcontext():
            for x, y in zip(task.valid_x.split(EVALUATION_BATCH), task.valid_y.split(EVALUATION_BATCH), strict=True):
                total += len(y) * self._loss_of(task.prepare_inputs(x), y, task.name)
        return total / len(task.valid_y)

    def test_accuracies(self) -> list[float]:
        """Of the model as it is now, on each task that has been learned."""
        return self._accuracies(self.task_index)

    def _accuracies(self, learned: int, valid: bool = False) -> list[float]:
        """On so many tasks, on their test examples or those for validation."""
        hits = torch.stack([self._hit_rate(self.task_at(place), valid) for place in range(learned)])
        return hits.tolist()

    def _hit_rate(self, task: Task, valid: bool) -> Tensor:
        inputs, labels = (task.valid_x, task.valid_y) if valid else (task.test_x, task.test_y)
        assert inputs is not None
        assert labels is not None
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with self._evaluating(), self._computing():
            for x, y in zip(inputs.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True):
                output = self.model(self._laid_out(task.prepare_inputs(x)), task.name)
                total += (output.argmax(1) == y).sum()
        return total / len(labels)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as nested dicts of tensors and plain values."""
        if self._captured is not None:
            self._captured.settle()
        self.check()
        state = {
            "task": self.task_index,
            "epoch": self.epoch,
            "step": self.step,
            "accuracies": self.accuracies,
            "valid_accuracies": self.valid_accuracies,
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
        placed(self.model, self.device, self.config)
        self.model.load_state_dict(state["model"])
        self.model.train()

        self.task_index, self.epoch, self.step = state["task"], state["epoch"], state["step"]
        self.accuracies, self.losses, self.statistics = state["accuracies"], state["losses"], state["statistics"]
        self.valid_accuracies = state["valid_accuracies"]
        self._loss_sum = state["loss_sum"].to(self.device)
        self._best_loss, self._stalled = state["best_loss"], state["stalled"]
        self._best_weights = state["best_weights"]
        if state["optimizer"] is None:
            self.method.load_state_dict(state["method"])
        else:
            self._optimizer = self._new_optimizer()
            self.method.load_state_dict(state["method"], self._optimizer)
            load_optimizer_state(self._optimizer, self.model, state["optimizer"])
        if self._best_weights is not None:
            self._best_weights = {name: value.to(self.device) for name, value in self._best_weights.items()}
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


def placed(model: MultiHead, device: torch.device | str, config: TrainingConfig) -> MultiHead:
    """The model on its device, laid out in memory as it is trained."""
    model.to(device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimizer's rates and moments by parameter name, every tensor in its own dtype and shape."""
    return {
        "lr": [float(group["lr"]) for group in optimizer.param_groups],
        "moments": {
            name: dict(optimizer.state[parameter])
            for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        },
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    # Not optimizer.load_state_dict: it casts the moments to the parameter's dtype and goes by position, not by name.
    for group, lr in zip(optimizer.param_groups, state["lr"], strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    parameters = dict(model.named_parameters())
    for name, moments in state["moments"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {key: _placed(key, value, parameter, optimizer) for key, value in moments.items()}


def _placed(key: str, value: Any, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    """A moment where the optimizer had it: on the parameter's device, laid out in memory as the parameter is."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and parameter.dim():
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    # Adam keeps its step counter on the host, unless its steps are captured.
    return value.to(parameter.device) if key != "step" or optimizer.defaults.get("capturable") else value


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, so that neighbouring seeds and positions share no random stream."""
    of = [len(parts), *parts]  # or (3,), (3, 0) and (3, 0, 0) would be one: trailing zeros do not count there
    return int(np.random.SeedSequence(of).generate_state(1, np.uint64)[0] >> 1)
