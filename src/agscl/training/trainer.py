"""The paper's loop over a task sequence, as a state machine that can stop and resume between any two steps:

for each task:              Trainer._begin_task: a new head, a new optimizer, method.begin_task
    for each epoch:
        for each batch:     Trainer.train_step: loss, backward, optimizer step
        at its end:         method.end_epoch, validation, the best weights so far, the learning rate (`engine`)
    at its end:             Trainer._end_task: the best weights, method.end_task, accuracies on all tasks so far
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from agscl.heads import MultiHead, check_task_name
from agscl.methods._parts.lifecycle import Method
from agscl.methods.cpr import cpr_loss
from agscl.system.sums import sum_dtype
from agscl.system.tf32 import tf32_for
from agscl.tasks import Task, TaskSequence
from agscl.training.batch_order import order_epoch
from agscl.training.config import TrainingConfig
from agscl.training.engine import Engine, make_engine
from agscl.training.optimizers import list_named_parameters, load_optimizer_state_dict, optimizer_state_dict
from agscl.training.ranks import Ranks
from agscl.training.seeds import derive_seed

Event = dict[str, Any]

EVALUATION_BATCH = 512
"""Examples per batch where nothing is trained."""
DIVERGED = 100
"""A loss so many times that of guessing means that training diverged."""


class TrainingFailed(Exception):
    """Training cannot go on; the message says where and why."""


class Trainer:
    """Trains `model` with `method` on one task after the other.

    `advance()` does one unit of work: it begins a task, runs a part of an epoch (the engine decides: a step, the end
    of the epoch, or all of it), or ends a task. Between any two units `state_dict()` holds all that is needed to
    continue; on a CPU, and without `compile`, the result is then the same to the bit. Torch's global generator is
    seeded at the start of each task, from the seed and the task's index.
    """

    capturable: ClassVar[bool] = True
    """Whether `train_step` can be part of a CUDA graph."""

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
        engine: Callable[[Trainer], Engine] = make_engine,
    ) -> None:
        _check_tasks(tasks, config)
        self.model = model
        self.method = method
        self.tasks = tasks
        self.config = config
        self.seed = seed
        self.emit = emit
        self.ranks = Ranks.current()
        self.device = next(model.parameters()).device if device is None else torch.device(device)
        self._tasks_on_device: dict[int, Task] = {}

        # The position, and what was measured so far.
        self.task_index = 0
        self.epoch = 0
        self.step = 0
        self.accuracies: list[list[float]] = []
        self.valid_accuracies: list[list[float]] = []
        self.losses: list[list[float]] = []
        self.statistics: list[dict[str, Any]] = []

        # The state of the task under way, which the engine updates.
        self.optimizer: Optimizer | None = None  # none between tasks
        self.loss_sum = torch.zeros((), device=self.device)  # of the epoch under way, over its examples
        self.best_loss = math.inf  # on the validation split
        self.best_weights: dict[str, Tensor] | None = None  # those of `trained_tensors` in the epoch of the best loss
        self.stalled_epochs = 0  # epochs since the best loss, or since the rate dropped
        self.plan_version = 0  # of the method's plan, when the best loss was last compared

        self.engine = engine(self)

    # The loop --------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Begin a task, train a step or an epoch of it, or end it; returns False if all tasks were done already."""
        if self.done:
            return False
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))  # streams and events belong to a device
                stack.enter_context(tf32_for(self.config.precision))
            if self.optimizer is None:
                self._begin_task()
            elif self.epoch < self.config.epochs:
                self.engine.advance()
            else:
                self._end_task()
        return True

    def _begin_task(self) -> None:
        task = self.task
        torch.manual_seed(derive_seed(self.seed, self.task_index))
        self.model.add_head(task.name, task.classes)
        place_model(self.model, self.device, self.config)
        self.optimizer = self.engine.make_optimizer()
        self.method.begin_task(
            task.name, self.optimizer, epochs=self.config.epochs, steps_per_epoch=self.steps_per_epoch
        )
        self.model.train()
        self.best_loss, self.best_weights, self.stalled_epochs, self.plan_version = math.inf, None, 0, 0
        self.losses.append([])
        self.engine.start_task()
        self.emit({"event": "task started", "task": self.task_index, "name": task.name})

    def epoch_order(self, pin_memory: bool = False) -> Tensor:
        """(examples,) the training rows in the order of the epoch under way."""
        position = {"seed": self.seed, "task": self.task_index, "epoch": self.epoch}
        return order_epoch(self.examples, **position, pin_memory=pin_memory)

    def train_step(self, rows: Tensor) -> None:
        """One optimizer step on these rows of the training data; the method acts in the optimizer's hooks."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.training_loss(rows)
        loss.backward()
        self.optimizer.step()
        self.loss_sum.add_(loss.detach(), alpha=len(rows))

    def train_step_together(self, rows: Tensor) -> None:
        """The trainer's `train_step` where several ranks train together: each computes its share of the rows."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        position = (self.seed, self.task_index, self.epoch, self.step)
        torch.manual_seed(derive_seed(*position, 1 + self.ranks.rank))  # other dropout and crops on each rank
        share, weight = self.ranks.take_share(rows)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        before = [buffer.clone() for buffer in statistics]
        loss = self.training_loss(share) * weight
        loss.backward()
        torch.manual_seed(derive_seed(*position, 0))  # what is drawn between steps is the same on all
        loss = loss.detach()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Changes, not values: the mean of equal values may have other bits, and what is frozen keeps its own.
        changes = [torch.where(new == old, 0, new - old) * weight for new, old in zip(statistics, before, strict=True)]
        self.ranks.average_([loss, *gradients, *changes])
        for buffer, old, change in zip(statistics, before, changes, strict=True):
            buffer.copy_(torch.where(change == 0, old, old + change))
        self.optimizer.step()
        self.loss_sum.add_(loss, alpha=len(rows))

    def training_loss(self, rows: Tensor) -> Tensor:
        """The mean loss of these rows of the training data."""
        x, y = self.task.make_batch(rows)
        try:
            with self.engine.trunk_context(full_batch=len(rows) == self.config.batch_size):
                return self.batch_loss(x, y, self.task.name)
        except ValueError as error:
            if len(rows) > 1:
                raise
            raise ValueError(
                f"the last batch of task {self.task.name!r} {'gives a process' if self.ranks.size > 1 else 'is'} one "
                f"example, which BatchNorm cannot normalise: use another batch_size than {self.config.batch_size} "
                f"({error})"
            ) from error

    def batch_loss(self, x: Tensor, y: Tensor, task: str) -> Tensor:
        """The mean cross-entropy of a batch, with CPR's term if configured, and what the method adds to it."""
        x = self.to_memory_format(x)
        with self.autocast():
            output = self.model(x, task)
            loss = F.cross_entropy(output.float(), y)
            if self.config.cpr:
                loss = loss + cpr_loss(output, self.config.cpr)
            adds_nothing = type(self.method).loss is Method.loss  # saves two kernels that would add 0
            return loss if adds_nothing else loss + self.method.loss(x, output)

    def to_memory_format(self, x: Tensor) -> Tensor:
        """A batch of images as channels last, if training is configured so."""
        channels_last = self.config.channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the trainer's forward passes."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def report_epoch(self, epoch: int, loss: float, valid_loss: float | None, rate: float) -> None:
        """Record and emit the figures of an epoch; raise if one of them is not finite."""
        if not math.isfinite(loss) or not math.isfinite(valid_loss or 0.0):
            raise self._make_divergence_error(epoch)
        event: Event = {"event": "epoch", "task": self.task_index, "epoch": epoch, "lr": rate, "loss": loss}
        if valid_loss is not None:
            event["valid_loss"] = valid_loss
        self.losses[-1].append(loss)
        self.emit(event)

    def _end_task(self) -> None:
        self.engine.end_task()
        if self.best_weights is not None:
            for name, value in self.trained_tensors().items():
                value.copy_(self.best_weights[name])
        self.method.end_task(self._importance_batches)
        self.check_finite()
        self._warn_of_divergence()
        self.optimizer, self.best_weights = None, None

        self.accuracies.append(self._measure_accuracies(self.task_index + 1))
        if all(task.valid_x is not None for task in self.tasks):
            self.valid_accuracies.append(self._measure_accuracies(self.task_index + 1, valid=True))
        self.statistics.append(self.method.statistics())
        self.emit(
            {
                "event": "task ended",
                "task": self.task_index,
                "name": self.task.name,
                "accuracies": self.accuracies[-1],
                "valid_accuracies": self.valid_accuracies[-1] if self.valid_accuracies else None,
                "statistics": self.statistics[-1],
            }
        )
        self.task_index += 1
        self.epoch = 0

    def _importance_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The training data in its stored order, for the method to measure importances on."""
        size, task = self.config.batch_size, self.task
        if not self.method.depends_on_batch_size:  # a forward pass alone takes less memory than a training step
            size = max(size, min(2 * size, EVALUATION_BATCH))
        for x, y in zip(task.train_x.split(size), task.train_y.split(size), strict=True):
            yield self.to_memory_format(task.prepare_inputs(x)), y

    # Position --------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.task_index == len(self.tasks)

    @property
    def progress(self) -> float:
        """The share of all optimizer steps already taken, counting every task alike."""
        within = self.epoch + (self.step / self.steps_per_epoch if self.optimizer else 0)
        return (self.task_index + within / self.config.epochs) / len(self.tasks)

    @property
    def task(self) -> Task:
        """The task under way, on the trainer's device."""
        return self.task_at(self.task_index)

    def task_at(self, index: int) -> Task:
        """A task on the trainer's device, where it stays: images are kept as bytes, which take little memory."""
        if index not in self._tasks_on_device:
            task = self.tasks[index].to(self.device)
            if self.device.type == "cuda":  # elsewhere each batch is converted: the data may be mapped from a file
                task = task.with_layout(self.to_memory_format)
            self._tasks_on_device[index] = task
        return self._tasks_on_device[index]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input of the tasks being trained on, as the network reads it."""
        first = self.tasks[0]
        return tuple(first.prepare_inputs(first.train_x[:1]).shape[1:])

    def describe_position(self) -> dict[str, Any]:
        """The task and epoch under way, and the mean loss of the epoch so far, where reading it is free: on a CPU."""
        position: dict[str, Any] = {"task": self.task_index, "epoch": min(self.epoch, self.config.epochs - 1)}
        if self.device.type == "cpu" and self.optimizer is not None and self.step:
            position["loss"] = self.loss_sum.item() / min(self.step * self.config.batch_size, self.examples)
        return position

    def extra_results(self) -> dict[str, Any]:
        """What a result of this trainer holds beside what one of agents has, too."""
        return {}

    @property
    def examples(self) -> int:
        """Training examples in an epoch."""
        return len(self.task.train_y)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.examples // self.config.batch_size)

    # What is trained -------------------------------------------------------------------------------------------------

    def trained_tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes: the model's state, and what the method added to the optimizer."""
        assert self.optimizer is not None
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        trained = {name: value for name, value in self.model.state_dict().items() if name not in frozen}
        in_model = dict(self.model.named_parameters())
        parameters = list_named_parameters(self.optimizer, self.model).items()
        return trained | {name: parameter.detach() for name, parameter in parameters if name not in in_model}

    def note_plan_version(self) -> bool:
        """Whether the trainer's method has changed what a step does (pruned, say) since this was last asked."""
        before, self.plan_version = self.plan_version, self.method.plan_version
        return self.plan_version != before

    def check_finite(self) -> None:
        """Raise if the trainer's loss or a weight is no longer finite."""
        if not self.all_finite():
            raise self._make_divergence_error(self.epoch)

    def all_finite(self) -> Tensor:
        """Whether the epoch's loss and all weights are finite: the last step may break a weight."""
        norms = torch._foreach_norm([p for p in self.model.parameters() if p.is_floating_point()])
        return torch.isfinite(torch.stack([self.loss_sum, *norms])).all()

    def _warn_of_divergence(self) -> None:
        """Warn where a task ends with a loss that is finite, but far above what guessing gives."""
        chance, loss = math.log(max(2, self.task.classes)), self.losses[-1][-1]
        if loss > DIVERGED * chance:
            self.method.warn_once(
                "diverged",
                f"Training diverged in task {self.task_index + 1} ({self.task.name}): its loss ended at {loss:.2g}, "
                f"where guessing gives {chance:.2g}. Use a lower learning rate than {self.config.lr:g}.",
            )

    def _make_divergence_error(self, epoch: int) -> TrainingFailed:
        return TrainingFailed(
            f"the loss or a weight became infinite or NaN in task {self.task_index + 1} ({self.task.name}), "
            f"epoch {epoch + 1}; a lower learning rate than {self.config.lr:g} may help"
        )

    # Evaluation ------------------------------------------------------------------------------------------------------

    def validation_loss(self) -> Tensor:
        """The loss that training lowers, penalties included, on the validation split of the task under way."""
        return self.validation_loss_of(self.task) + self.method.penalty()

    def validation_loss_of(self, task: Task) -> Tensor:
        """The mean loss on the validation split of a task."""
        assert task.valid_x is not None
        assert task.valid_y is not None
        total = torch.zeros((), device=self.device, dtype=sum_dtype(self.device))
        with self._eval_mode(), self.engine.trunk_context(full_batch=False):
            for x, y in zip(task.valid_x.split(EVALUATION_BATCH), task.valid_y.split(EVALUATION_BATCH), strict=True):
                total += len(y) * self.batch_loss(task.prepare_inputs(x), y, task.name)
        return total / len(task.valid_y)

    def test_accuracies(self) -> list[float]:
        """The accuracy of the model, as it is now, on each task learned so far."""
        return self._measure_accuracies(self.task_index)

    def _measure_accuracies(self, learned: int, valid: bool = False) -> list[float]:
        """The accuracy on each of the first `learned` tasks, on their test or their validation examples."""
        with self._eval_mode(), self.autocast():
            accuracies = torch.stack([self._accuracy(self.task_at(index), valid) for index in range(learned)])
        return accuracies.tolist()

    def _accuracy(self, task: Task, valid: bool) -> Tensor:
        inputs, labels = (task.valid_x, task.valid_y) if valid else (task.test_x, task.test_y)
        assert inputs is not None
        assert labels is not None
        correct = torch.zeros((), device=self.device, dtype=sum_dtype(self.device))
        for x, y in zip(inputs.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True):
            output = self.model(self.to_memory_format(task.prepare_inputs(x)), task.name)
            correct += (output.argmax(1) == y).sum()
        return correct / len(labels)

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a new trainer needs to continue with these tasks, as nested dicts of tensors and values."""
        self.engine.sync()
        self.check_finite()
        state = {
            "task": self.task_index,
            "epoch": self.epoch,
            "step": self.step,
            "accuracies": self.accuracies,
            "valid_accuracies": self.valid_accuracies,
            "losses": self.losses,
            "statistics": self.statistics,
            "loss_sum": self.loss_sum,
            "best_loss": self.best_loss,
            "best_weights": self.best_weights,
            "stalled": self.stalled_epochs,
            "plan_version": self.plan_version,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": None if self.optimizer is None else optimizer_state_dict(self.optimizer, self.model),
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the task of a saved `state`; this trainer, its model and its method must be newly made."""
        tasks_begun = state["task"] + (state["optimizer"] is not None)
        for task in self.tasks[:tasks_begun]:
            self.model.add_head(task.name, task.classes)
        place_model(self.model, self.device, self.config)
        self.model.load_state_dict(state["model"])
        self.model.train()

        self.task_index, self.epoch, self.step = state["task"], state["epoch"], state["step"]
        self.accuracies, self.losses, self.statistics = state["accuracies"], state["losses"], state["statistics"]
        self.valid_accuracies = state["valid_accuracies"]
        self.loss_sum = state["loss_sum"].to(self.device)
        self.best_loss, self.stalled_epochs = state["best_loss"], state["stalled"]
        self.plan_version = state["plan_version"]
        if (best := state["best_weights"]) is not None:
            self.best_weights = {name: value.to(self.device) for name, value in best.items()}
        if state["optimizer"] is None:
            self.method.load_state_dict(state["method"])
        else:
            self.optimizer = self.engine.make_optimizer()
            self.method.load_state_dict(state["method"], self.optimizer)
            load_optimizer_state_dict(self.optimizer, self.model, state["optimizer"])
            self.engine.start_task()
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


class _ModelFormat(Protocol):
    @property
    def channels_last(self) -> bool: ...


def place_model(model: MultiHead, device: torch.device | str, config: _ModelFormat) -> MultiHead:
    """Move the model to its device, and to channels last if configured."""
    model.to(device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _check_tasks(tasks: TaskSequence, config: TrainingConfig) -> None:
    for index, task in enumerate(tasks):
        check_task_name(task.name)
        if task.name in [other.name for other in tasks[:index]]:
            raise ValueError(f"two tasks are called {task.name!r}")
        task.check_data()
        if config.validates and task.valid_x is None:
            raise ValueError(f"task {task.name!r} has no validation split: set patience=None and restore_best=False")
