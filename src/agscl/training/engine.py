"""How a trainer's steps are run: the interface of an engine, and the plain one.

`agscl.fast` has others (CUDA graphs, compiled trunks). Only the functions at the end of this file import it, where a
configuration needs it.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.training.optimizers import make_optimizer
from agscl.training.plateau_schedule import PlateauSchedule

if TYPE_CHECKING:
    from agscl.training.trainer import Trainer


class CompileFailed(RuntimeError):
    """An engine could not compile the network on this machine."""


class Engine(ABC):
    """Runs the training of one task after the other for a trainer.

    The trainer owns what is trained, the position (`epoch`, `step`) and what a checkpoint holds. The engine decides how
    `trainer.train_step` and the end of each epoch run, and advances the position.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @abstractmethod
    def make_optimizer(self) -> Optimizer:
        """The engine's optimizer of the model's parameters, a new one for a task."""

    @abstractmethod
    def start_task(self) -> None:
        """Prepare the engine for the steps of a task that begins, or is resumed from a checkpoint."""

    @abstractmethod
    def advance(self) -> None:
        """Let the engine run the next unit of the epoch under way: a step, the end of the epoch, or all of it."""

    @abstractmethod
    def sync(self) -> None:
        """Wait for all work that the engine launched, and bring the trainer's losses and counters up to date."""

    def end_task(self) -> None:
        """`sync`, then free what the engine allocated for the task."""
        self.sync()

    def trunk_context(self, *, full_batch: bool) -> AbstractContextManager[Any]:
        """The context in which the engine runs the trunk; `full_batch`: on a training batch of the usual size."""
        return nullcontext()


class PlainEngine(Engine):
    """Runs steps one by one; its `schedule` decides which weights are best and when the learning rate drops."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.schedule = PlateauSchedule(trainer)
        self._batches: tuple[Tensor, ...] | None = None  # the rows of each batch of the epoch under way

    def make_optimizer(self) -> Optimizer:
        return make_optimizer(self.trainer.config, self.trainer.model.parameters())

    def start_task(self) -> None:
        self._batches = None

    def advance(self) -> None:
        if self.trainer.step < self.trainer.steps_per_epoch:
            self._run_step()
        else:
            self._end_epoch()

    def sync(self) -> None:
        pass  # the trainer is always up to date

    def _run_step(self) -> None:
        trainer = self.trainer
        if self._batches is None:
            self._batches = trainer.epoch_order().to(trainer.device).split(trainer.config.batch_size)
        train_step = trainer.train_step if trainer.ranks.size == 1 else trainer.train_step_together
        train_step(self._batches[trainer.step])
        trainer.step += 1

    def _end_epoch(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        trainer.method.end_epoch()
        pruned = trainer.note_plan_version()
        if pruned:  # weights of earlier epochs cannot be restored any more
            trainer.best_loss, trainer.stalled_epochs = math.inf, 0
        trainer.check_finite()
        loss, valid_loss = trainer.loss_sum.item() / trainer.examples, None
        rate = self.schedule.optimizer.param_groups[0]["lr"]
        if config.validates:
            valid_loss = float(trainer.ranks.broadcast(trainer.validation_loss().item()))
            self.schedule.select_best(valid_loss)
        trainer.report_epoch(trainer.epoch, loss, valid_loss, rate)
        trainer.epoch, trainer.step = trainer.epoch + 1, 0
        trainer.loss_sum.zero_()
        self._batches = None
        if pruned and config.patience is not None:
            self.schedule.restart_rate()
        if trainer.epoch == config.drop_at:
            self.schedule.divide_rate()


class WorkRunner:
    """Runs work that is repeated, known by a key: here, each time anew. That of `agscl.fast` captures CUDA graphs."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Any] = {}  # by key

    def on_stream(self) -> AbstractContextManager[Any]:
        """The context in which the runner's work must be launched: here, any."""
        return nullcontext()

    def run(self, key: Hashable, work: Callable[[], None], may_capture: bool = True) -> None:
        work()

    def forget_warm_ups(self) -> None:
        """Nothing here: what is not captured needs no warm-up."""

    def release(self) -> None:
        """Nothing here: nothing was captured that must be freed."""


class StepCompiler:
    """Makes parts of a step faster, equal to rounding: here, none. That of `agscl.fast` compiles them."""

    version = 0
    """Counts up when the trunk is compiled in another way from now on: warm-ups must be repeated then."""

    def trunk_context(self) -> AbstractContextManager[Any]:
        """The context in which the trunk runs on training batches, all of one size: here, as it is."""
        return nullcontext()

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def make_runner(device: torch.device, before_capture: Callable[[], None], *, captured: bool) -> WorkRunner:
    """A runner that captures CUDA graphs, or one that does not."""
    if not captured:
        return WorkRunner()
    module = importlib.import_module("agscl.fast.cuda_graphs")
    runner: WorkRunner = module.GraphRunner(device, before_capture=before_capture)
    return runner


def make_step_compiler(trunk: nn.Module, device: torch.device, *, bf16_channels_last: bool) -> StepCompiler:
    """A compiler of the trunk and of functions, for `device`."""
    module = importlib.import_module("agscl.fast.step_compiler")
    compiler: StepCompiler = module.TorchStepCompiler(trunk, device, bf16_channels_last=bf16_channels_last)
    return compiler


def make_engine(trainer: Trainer) -> Engine:
    """The engine that the trainer's configuration asks for."""
    if trainer.ranks.size > 1:
        if trainer.config.compile or trainer.config.engine == "captured":
            raise ValueError(
                "compile and engine='captured' are for one process: with torchrun leave them and --fast out"
            )
        return PlainEngine(trainer)
    captured = uses_cuda_graphs(trainer)
    if not captured and not trainer.config.compile:
        return PlainEngine(trainer)
    engine: Engine = importlib.import_module("agscl.fast.fast_engine").make_fast_engine(trainer, captured=captured)
    return engine


def uses_cuda_graphs(trainer: Trainer) -> bool:
    """Whether the trainer needs an engine that captures its steps, as its configuration, method and device have it."""
    capturable = trainer.capturable and trainer.method.capturable
    if trainer.config.engine == "captured" and not capturable:
        culprit = type(trainer).__name__ if trainer.method.capturable else repr(trainer.method)
        raise ValueError(f"steps of {culprit} cannot be captured as CUDA graphs: use engine='plain'")
    capturable = capturable and trainer.config.epochs >= trainer.method.min_captured_epochs
    automatic = trainer.config.engine == "auto" and trainer.device.type == "cuda" and capturable
    return trainer.config.engine == "captured" or automatic
