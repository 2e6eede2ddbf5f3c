"""The fast engines: plain steps with a compiled trunk, and whole epochs as CUDA graphs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.fast import split_adam
from agscl.fast.cuda_graphs import GraphRunner
from agscl.fast.fast_trunk import FastTrunk
from agscl.system.bitwise import copy_where_, zero_where_
from agscl.system.host_copies import HostCopy
from agscl.training.engine import Engine, PlainEngine
from agscl.training.optimizers import KINDS, make_optimizer
from agscl.training.trainer import Trainer

SPLIT_KINDS: dict[str, type[Optimizer]] = {**KINDS, "adam": split_adam.SplitAdam, "adamw": split_adam.SplitAdamW}
EPOCHS_AHEAD = 3
"""How many epochs may be launched before the first of them has ended."""


@dataclass(frozen=True)
class Pieces:
    """The parts of the fast path; benchmarks and tests switch single ones off."""

    cuda_graphs: bool = True
    """CUDA graphs; without, `GraphEngine` launches the same work kernel by kernel."""
    split_adam: bool = True
    """Our Adam, in pieces on several streams; without, torch's fused one."""
    own_convolutions: bool = True
    """Our 3 × 3 convolutions; without, cuDNN's."""
    fused_layers: bool = True
    """Our kernels between layers, for networks of plain layers; without, torch's compiler."""


PIECES = Pieces()
"""The pieces that `make_fast_engine` uses unless it is given others."""


def make_fast_engine(trainer: Trainer, *, captured: bool, pieces: Pieces | None = None) -> Engine:
    """The engine of a trainer whose steps are captured, or whose trunk is compiled, or both."""
    pieces = pieces or PIECES
    trunk = None
    if trainer.config.compile:
        trunk = FastTrunk(
            trainer.model.trunk,
            trainer.device,
            rewrite_layers=trainer.device.type == "cuda",
            bf16_channels_last=trainer.config.precision == "bf16" and trainer.config.channels_last,
            fused_layers=pieces.fused_layers,
            own_convolutions=pieces.own_convolutions,
        )
    if captured:
        return GraphEngine(trainer, trunk, pieces)
    return PlainEngine(trainer) if trunk is None else CompiledEngine(trainer, trunk)


class CompiledEngine(PlainEngine):
    """Runs steps one by one, with a compiled trunk."""

    def __init__(self, trainer: Trainer, trunk: FastTrunk) -> None:
        super().__init__(trainer)
        self.trunk = trunk

    def start_task(self) -> None:
        super().start_task()
        self.trunk.wait_for_warm_up()

    def trunk_context(self, *, full_batch: bool) -> AbstractContextManager[Any]:
        return self.trunk.use_fast_forward(full_batch)


class GraphEngine(Engine):
    """Runs an epoch at a time as a few CUDA graphs, launched without waiting for the device.

    One graph holds a whole step (gather, forward, backward, penalty, optimizer, masks) for each batch size; one holds
    the end of an epoch (proximal step, validation, selection of the best weights, learning rate). All counters and
    decisions are tensors on the device; an epoch's figures are read up to three epochs later. Graphs are captured anew
    for each task. Without a GPU the same work runs uncaptured, which tests use.
    """

    def __init__(self, trainer: Trainer, trunk: FastTrunk | None = None, pieces: Pieces = PIECES) -> None:
        super().__init__(trainer)
        self.trunk = trunk
        self.pieces = pieces
        self.runner = GraphRunner(
            trainer.device,
            enabled=pieces.cuda_graphs,
            before_capture=self._drop_gradients,  # so that the graph allocates gradients in its own memory
        )
        self.state: _DeviceState | None = None  # none between tasks

    def make_optimizer(self) -> Optimizer:
        config, device = self.trainer.config, self.trainer.device
        on_gpu = device.type == "cuda"
        options: dict[str, Any] = {"lr": torch.tensor(config.lr, device=device), "fused": on_gpu}
        if config.optimizer != "sgd":
            options["capturable"] = on_gpu
        kinds = SPLIT_KINDS if on_gpu and self.pieces.split_adam else KINDS
        return make_optimizer(config, self.trainer.model.parameters(), kinds=kinds, **options)

    def start_task(self) -> None:
        if self.trunk is not None:
            self.trunk.wait_for_warm_up()
        self.runner.forget_warm_ups()
        self.state = _DeviceState(self.trainer)

    def trunk_context(self, *, full_batch: bool) -> AbstractContextManager[Any]:
        return nullcontext() if self.trunk is None else self.trunk.use_fast_forward(full_batch)

    def advance(self) -> None:
        """Launch the graphs of the remaining steps and of the end of the epoch under way."""
        assert self.state is not None
        trainer, config = self.trainer, self.trainer.config
        with self._released_on_error():
            with self.runner.on_stream():
                self._launch_steps(self.state)
                self._launch_end_of_epoch(self.state)
                self.state.unreported.append((trainer.epoch, HostCopy(self.state.figures)))
            trainer.epoch, trainer.step = trainer.epoch + 1, 0
            if trainer.epoch == config.drop_at:
                self._rate.div_(config.factor)
            self._report_epochs(self.state, max_pending=EPOCHS_AHEAD)

    def sync(self) -> None:
        if self.state is None:
            return
        with self._released_on_error():
            self._report_epochs(self.state)
            self.trainer.best_loss = float(self.state.best_loss)
            self.trainer.stalled_epochs = int(self.state.stalled_epochs)

    def end_task(self) -> None:
        self.sync()
        self._drop_gradients()
        self.runner.release()
        self.state = None

    @contextmanager
    def _released_on_error(self) -> Iterator[None]:
        """Release the graphs if an error is raised: a graph that still runs must not be freed with the trainer."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # a consequence of the first error, which it would hide
                self.runner.release()
            raise

    # Launching -------------------------------------------------------------------------------------------------------

    def _launch_steps(self, state: _DeviceState) -> None:
        trainer, size, count = self.trainer, self.trainer.config.batch_size, self.trainer.examples
        # Only from pinned memory may a copy be left pending: torch keeps that memory until the copy is done.
        pinned = trainer.device.type == "cuda"
        state.order.copy_(trainer.epoch_order(pin_memory=pinned), non_blocking=pinned)
        for start in range(trainer.step * size, count, size):
            rows = min(size, count - start)
            self._run(rows, partial(self._step, state, rows))
            trainer.step += 1

    def _launch_end_of_epoch(self, state: _DeviceState) -> None:
        trainer, size, count = self.trainer, self.trainer.config.batch_size, self.trainer.examples
        if trainer.method.end_epoch_capturable:
            # Not before all steps are captured: methods hand tensors of the last captured step to the end of the epoch.
            batch_sizes = {min(size, count), count % size or size}
            captured = self.runner.graphs.keys() >= batch_sizes
            self._run("end", partial(self._end_epoch, state, call_method=True), may_capture=captured)
            return
        trainer.method.end_epoch()
        pruned = trainer.note_plan_version()
        if pruned and not trainer.method.prunes_in_place:
            self.runner.release()
        if pruned:
            state.best_loss.fill_(math.inf)  # weights of earlier epochs cannot be restored any more
            state.stalled_epochs.zero_()
        self._run("end", partial(self._end_epoch, state, call_method=False))
        if pruned and trainer.config.patience is not None:
            self.restart_rate()

    def _run(self, key: Hashable, work: Callable[[], None], may_capture: bool = True) -> None:
        """Run, capture or replay the work; repeat all warm-ups if the trunk changed its compiler meanwhile."""
        version = None if self.trunk is None else self.trunk.version
        self.runner.run(key, work, may_capture)
        if self.trunk is not None and self.trunk.version != version:
            self.runner.forget_warm_ups()

    def _report_epochs(self, state: _DeviceState, max_pending: int = 0) -> None:
        """Report the epochs that were launched, except the last `max_pending`; waits for those it reports."""
        while len(state.unreported) > max_pending:
            epoch, figures = state.unreported.popleft()
            loss, valid_loss, rate = figures.wait().tolist()
            self.trainer.report_epoch(epoch, loss, valid_loss if self.trainer.config.validates else None, rate)

    @property
    def _rate(self) -> Tensor:
        """The learning rate: one tensor, shared by all parameter groups."""
        assert self.trainer.optimizer is not None
        rate: Tensor = self.trainer.optimizer.param_groups[0]["lr"]
        return rate

    def _drop_gradients(self) -> None:
        """Free gradients, which lie in the memory of a graph."""
        assert self.trainer.optimizer is not None
        self.trainer.optimizer.zero_grad(set_to_none=True)

    # What the graphs hold --------------------------------------------------------------------------------------------

    def _step(self, state: _DeviceState, size: int) -> None:
        rows = state.order[state.position + state.offsets[:size]]
        state.position += size
        self.trainer.train_step(rows)

    @torch.no_grad()
    def _end_epoch(self, state: _DeviceState, call_method: bool) -> None:
        trainer, config = self.trainer, self.trainer.config
        if call_method:
            trainer.method.end_epoch()
        if config.restore_best and trainer.best_weights is None:  # at the first epoch only, so never in a capture
            trainer.best_weights = {name: value.clone() for name, value in trainer.trained_tensors().items()}
        state.figures[0] = torch.where(trainer.all_finite(), trainer.loss_sum / trainer.examples, math.nan)
        state.figures[2] = self._rate
        if config.validates:
            state.figures[1] = valid_loss = trainer.validation_loss()
            self.select_best(state, valid_loss)
        trainer.loss_sum.zero_()
        state.position.zero_()

    def select_best(self, state: _DeviceState, valid_loss: Tensor) -> None:
        """On the device, within a graph: keep the best epoch's weights; drop the rate after `patience` worse ones."""
        trainer, config = self.trainer, self.trainer.config
        better = valid_loss < state.best_loss
        state.best_loss.copy_(torch.where(better, valid_loss, state.best_loss))
        state.stalled_epochs.copy_(torch.where(better, 0, state.stalled_epochs + 1))
        if trainer.best_weights is not None:
            trained = trainer.trained_tensors()
            copy_where_([trainer.best_weights[name] for name in trained], list(trained.values()), better)
        if config.patience is not None:
            drop = state.stalled_epochs >= config.patience
            state.stalled_epochs.masked_fill_(drop, 0)
            self.drop_rate(drop)

    def drop_rate(self, condition: Tensor) -> None:
        """On the device: where `condition` () is true, divide the rate, clear moments of optimizer and method."""
        assert self.trainer.optimizer is not None
        self._rate.copy_(torch.where(condition, self._rate / self.trainer.config.factor, self._rate))
        self._clear_moments(condition)

    def restart_rate(self) -> None:
        """Within captured epochs: go back to the rate a task starts with, so that what stays makes up for what went."""
        self._rate.fill_(self.trainer.config.get_restart_rate(self.trainer.epoch + 1))  # with the epoch that ends
        self._clear_moments(torch.ones((), dtype=torch.bool, device=self.trainer.device))

    def _clear_moments(self, condition: Tensor) -> None:
        assert self.trainer.optimizer is not None
        values = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        zero_where_([value for value in values if isinstance(value, Tensor)], condition)
        self.trainer.method.clear_moments(condition)


class _DeviceState:
    """What a `GraphEngine` keeps during a task: counters on the device, and epochs that are not reported yet."""

    def __init__(self, trainer: Trainer) -> None:
        config, device = trainer.config, trainer.device
        self.order = torch.zeros(trainer.examples, dtype=torch.long, device=device)
        """The rows of the epoch in their order."""
        self.position = torch.tensor(trainer.step * config.batch_size, device=device)
        """Where the next batch begins in `order`."""
        self.offsets = torch.arange(config.batch_size, device=device)
        self.best_loss = torch.tensor(trainer.best_loss, dtype=torch.float64, device=device)
        self.stalled_epochs = torch.tensor(trainer.stalled_epochs, device=device)
        self.figures = torch.zeros(3, dtype=torch.float64, device=device)
        """Loss, validation loss and learning rate of the last epoch."""
        self.unreported: deque[tuple[int, HostCopy]] = deque()
        """Epochs that are not reported yet: number and figures."""
