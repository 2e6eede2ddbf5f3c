"""The fast path on a GPU: a task's training as a few CUDA graphs, launched without waiting for the host.

One graph holds a whole step (gather, forward, backward, penalty, optimizer, masks) for each size of batch; one holds
the end of an epoch (proximal step, validation, choice of the best weights, learning rate). The first step of each size
and the first end of an epoch run as they are, the next is captured and from then on replayed: all are steps of the
training. Counters are tensors on the device. Graphs are captured anew for every task.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.fast.compiled import let_compilers_go
from agscl.system.bitwise import copy_where_, zero_where_
from agscl.system.process import gc_paused

if TYPE_CHECKING:
    from agscl.training.trainer import Trainer

AHEAD = 3
"""Epochs that may be launched before the first of them has ended."""


class Captured:
    """The training of one task, epoch by epoch. Without CUDA the same steps run uncaptured, which tests make use of."""

    capture: ClassVar[bool] = True  # false: nor on a GPU

    def __init__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self.trainer, self.optimizer = trainer, optimizer
        config, device = trainer.config, trainer.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.capture else None
        self.graphs: dict[int | str, torch.cuda.CUDAGraph] = {}
        self.warm: set[int | str] = set()
        self.method_version = trainer.method.version
        self.compiled_version = self._compiled_version()
        self.order = torch.zeros(trainer.examples, dtype=torch.long, device=device)
        self.places = torch.arange(config.batch_size, device=device)
        self.at = torch.tensor(trainer.step * config.batch_size, device=device)
        self.best_loss = torch.tensor(trainer._best_loss, dtype=torch.float64, device=device)
        self.stalled = torch.tensor(trainer._stalled, device=device)
        self.figures = torch.zeros(3, dtype=torch.float64, device=device)  # loss, validation loss, rate of an epoch
        self.launched: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()  # epochs not told of yet

    @property
    def rate(self) -> Tensor:
        """The learning rate of all groups, which share one tensor."""
        rate: Tensor = self.optimizer.param_groups[0]["lr"]
        return rate

    def run_epoch(self) -> None:
        """Launch what is left of the epoch under way."""
        trainer = self.trainer
        order = trainer._order(pin_memory=self.stream is not None)
        self.order.copy_(order, non_blocking=True)
        size, count = trainer.config.batch_size, trainer.examples
        for start in range(trainer.step * size, count, size):
            width = min(size, count - start)
            self._launch(width, lambda width=width: self._step(width))  # type: ignore[misc]
            # A method may look the network over at the first step, and nothing may be compiled during a capture.
            if not trainer._met or self._compiled_version() != self.compiled_version:
                trainer._met, self.warm, self.compiled_version = True, set(), self._compiled_version()
            trainer.step += 1
        sizes = {min(size, count), count % size or size}
        if trainer.method.same_every_epoch:
            self._launch("end", lambda: self._end_epoch(True), ready=self.graphs.keys() >= sizes)
        else:
            trainer.method.end_epoch()
            if trainer.method.version != self.method_version:
                self.method_version = trainer.method.version
                self._drop_graphs()
                self.best_loss.fill_(math.inf)  # weights from before, e.g. unpruned ones, are no longer to be had
                self.stalled.zero_()
            self._launch("end", lambda: self._end_epoch(False))
        self._note_figures()
        trainer.epoch, trainer.step = trainer.epoch + 1, 0
        if trainer.epoch == trainer.config.drop_at:
            self.rate.div_(trainer.config.factor)
        self.tell(AHEAD)

    def _compiled_version(self) -> int:
        return self.trainer._compiled.version if self.trainer._compiled else 0

    def tell(self, behind: int = 0) -> None:
        """Report the epochs that were launched, but for the last `behind`; waits for those it reports."""
        while len(self.launched) > behind:
            epoch, figures, ended = self.launched.popleft()
            if ended is not None:
                ended.synchronize()
            loss, valid_loss, rate = figures.tolist()
            self.trainer._tell_epoch(epoch, loss, valid_loss if self.trainer.config.validates else None, rate)

    def settle(self) -> None:
        """Report everything, and give the trainer what was chosen on the device."""
        self.tell()
        self.trainer._best_loss, self.trainer._stalled = float(self.best_loss), int(self.stalled)

    def close(self) -> None:
        """As `settle`, and give the graphs' memory back: those of the next task take their own."""
        self.settle()
        self.optimizer.zero_grad(set_to_none=True)
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.trainer.device)  # a graph under way must not be dropped
            self.graphs.clear()
            torch.cuda.empty_cache()

    # What the graphs hold --------------------------------------------------------------------------------------------

    def _step(self, width: int) -> None:
        trainer = self.trainer
        rows = self.order[self.at + self.places[:width]]
        self.at += width
        self.optimizer.zero_grad(set_to_none=True)
        loss = trainer._loss(rows)
        loss.backward()
        self.optimizer.step()
        trainer._loss_sum.add_(loss.detach(), alpha=width)

    @torch.no_grad()
    def _end_epoch(self, tell_method: bool) -> None:
        trainer, config = self.trainer, self.trainer.config
        if tell_method:
            trainer.method.end_epoch()
        if config.restore_best and trainer._best_weights is None:  # never while this is captured: it has run before
            trainer._best_weights = {name: value.clone() for name, value in trainer._trained(self.optimizer).items()}
        self.figures[0] = torch.where(trainer._finite(), trainer._loss_sum / trainer.examples, math.nan)
        self.figures[2] = self.rate
        if config.validates:
            loss = trainer._validation_loss()
            self.figures[1] = loss
            better = loss < self.best_loss
            self.best_loss.copy_(torch.where(better, loss, self.best_loss))
            self.stalled.copy_(torch.where(better, 0, self.stalled + 1))
            if trainer._best_weights is not None:
                now = trainer._trained(self.optimizer)
                copy_where_([trainer._best_weights[name] for name in now], list(now.values()), better)
            if config.patience is not None:
                self._drop_rate(self.stalled >= config.patience, config.factor)
        trainer._loss_sum.zero_()
        self.at.zero_()

    def _drop_rate(self, drop: Tensor, factor: float) -> None:
        self.stalled.masked_fill_(drop, 0)
        self.rate.copy_(torch.where(drop, self.rate / factor, self.rate))
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        zero_where_([value for value in states if isinstance(value, Tensor)], drop)
        self.trainer.method.clear_moments(drop)

    # Capturing -------------------------------------------------------------------------------------------------------

    def _launch(self, key: int | str, work: Callable[[], None], ready: bool = True) -> None:
        """Do the work: as it is for the first time, then captured, then by replaying the graph."""
        if self.stream is None:
            work()
        elif key in self.graphs:
            self.graphs[key].replay()
        elif key in self.warm and ready:
            self.graphs[key] = self._capture(work)
            self.graphs[key].replay()
        else:
            self.warm.add(key)
            with _on(self.stream):
                work()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        assert self.stream is not None
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)  # gradients then live within the graph
        torch.cuda.synchronize(self.trainer.device)
        # A collection in the middle of a capture could free another graph, which is not allowed then.
        with gc_paused(), torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # what follows from the error, and would hide it
                    graph.capture_end()
                raise
            graph.capture_end()
        let_compilers_go()  # what is captured is compiled
        return graph

    def _note_figures(self) -> None:
        if self.stream is None:
            self.launched.append((self.trainer.epoch, self.figures.clone(), None))
            return
        figures = torch.empty(3, dtype=torch.float64, pin_memory=True)
        figures.copy_(self.figures, non_blocking=True)
        ended = torch.cuda.Event(blocking=True)  # who waits for it leaves the core to others
        ended.record()
        self.launched.append((self.trainer.epoch, figures, ended))


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on a stream of its own, in order with the current one."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
