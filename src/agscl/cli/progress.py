"""Progress on the terminal: bars where there is one, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import rich.progress
from rich.text import Text

from agscl.cli.console import console, print_line
from agscl.cli.tables import format_percent
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run import list_trained_methods

if TYPE_CHECKING:
    from agscl.experiments.jobs import Job
    from agscl.experiments.run_config import RunConfig


LINE_INTERVAL = 10.0
"""Seconds between two plain lines on the progress within a task."""


class _Bars:
    """Progress bars on a terminal; nothing elsewhere."""

    def __init__(self, *columns: str | rich.progress.ProgressColumn) -> None:
        self._bars = rich.progress.Progress(
            *columns,
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=24 * 3600.0,  # an epoch may take long, and an estimate needs two
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._bars.stop()


class _TrainingBars(_Bars):
    """Bars with a title, a percentage, the remaining time and a note."""

    def __init__(self, title_width: int) -> None:
        super().__init__(
            f"[bold]{{task.description:<{title_width}}}",
            rich.progress.BarColumn(bar_width=24),
            "{task.percentage:>3.0f} %",
            rich.progress.TimeRemainingColumn(),
            "{task.fields[note]}",
        )


class RunProgress(_TrainingBars):
    """Of `agscl run`: one bar per method, and one for all if there are several; or one line per task."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(title_width=12)
        self._epochs = config.training.epochs
        self._started: dict[str, tuple[float, float]] = {}  # by method: when its first event came, and its progress
        self._last_line = 0.0  # when the last plain line on progress was printed
        self._methods = list_trained_methods(config)
        self._ids: dict[str, rich.progress.TaskID] = {}  # of the bars, by method
        self._all: rich.progress.TaskID | None = None  # the bar whose remaining time is that of the whole run

    def show_event(self, event: dict[str, Any]) -> None:
        method = event["method"]
        task = event["task"] + 1
        self._started.setdefault(method, (time.monotonic(), event["progress"]))
        if event["event"] == "step":  # within an epoch; not in the event log
            if method in self._ids:
                self._show_progress(method, event["progress"], self._describe_epoch(event))
            return
        if event["event"] == "task ended":
            accuracies = event["accuracies"]
            word = "score" if "scores" in event else "accuracy"
            accuracy, average = format_percent(accuracies[-1]), format_percent(sum(accuracies) / len(accuracies))
            note = f"task {task}: {accuracy}, average {average}"
            if not console.is_terminal:
                title = METHODS[method].title
                print_line(f"{title:<12} task {task}: {word} {accuracy}, average of all tasks so far {average}")
        elif event["event"] == "environments restarted":
            print_line(
                f"{METHODS[method].title:<12} task {task}: environments were restarted; learning goes on as it was"
            )
            return
        elif event["event"] == "evaluation":
            note = event["note"]
            if not console.is_terminal and time.monotonic() - self._last_line > LINE_INTERVAL:
                self._last_line = time.monotonic()
                print_line(f"{METHODS[method].title:<12} {note}{self._describe_time_left(method, event['progress'])}")
        elif event["event"] in ("epoch", "iteration"):
            note = self._describe_epoch(event)
        else:
            note = f"task {task}, {event['name']}"
        if console.is_terminal:
            if self._all is None and len(self._methods) > 1:
                self._all = self._bars.add_task("all", total=len(self._methods), note="")
            if method not in self._ids:
                self._ids[method] = self._bars.add_task(METHODS[method].title, total=1.0, note="")
            self._show_progress(method, event["progress"], note)

    def _show_progress(self, method: str, progress: float, note: str) -> None:
        self._bars.update(self._ids[method], completed=progress, note=note)
        if self._all is not None:
            self._bars.update(self._all, completed=self._methods.index(method) + progress)

    def _describe_time_left(self, method: str, progress: float) -> str:
        """The time the method will still take, judged by what this process did."""
        start, before = self._started[method]
        if progress <= before:
            return ""
        seconds = int((time.monotonic() - start) * (1 - progress) / (progress - before))
        return f", {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"

    def _describe_epoch(self, event: dict[str, Any]) -> str:
        if "note" in event:
            return str(event["note"])
        loss = f", loss {event['loss']:.3f}" if "loss" in event else ""
        return f"task {event['task'] + 1}, epoch {event['epoch'] + 1}/{self._epochs}{loss}"


class JobsProgress(_TrainingBars):
    """Of many runs: a bar for all, a bar for each running one, and a line for each that ended."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(title_width=21)
        self._jobs = jobs
        self._ended = sum(job.is_finished for job in jobs)
        note = self._describe_count()
        self._all = self._bars.add_task("all", total=len(jobs), completed=self._ended, note=note)
        self._ids: dict[Path, rich.progress.TaskID] = {}  # of the bars of running jobs, by folder

    def _describe_count(self) -> str:
        return f"{self._ended} of {len(self._jobs)} runs"

    def show_end(self, job: Job, line: str) -> None:
        self._ended += 1
        console.print(Text(f"{job!s:<21} {line}"), soft_wrap=True)

    def show_running(self, running: Sequence[Job]) -> None:
        if not console.is_terminal:
            return
        progress = {job.folder: job.progress for job in running}
        started = {folder: share for folder, share in progress.items() if share}
        for folder in [folder for folder in self._ids if folder not in started]:
            self._bars.remove_task(self._ids.pop(folder))
        for job in running:
            if job.folder in started and job.folder not in self._ids:
                self._ids[job.folder] = self._bars.add_task(str(job), total=1.0, note="")
        for folder, share in started.items():
            self._bars.update(self._ids[folder], completed=share)
        self._bars.update(self._all, completed=self._ended + sum(started.values()), note=self._describe_count())


class DownloadProgress(_Bars):
    """Of one file that a command downloads: a bar, or a line when it is complete."""

    def __init__(self, name: str, total: int) -> None:
        super().__init__(
            "[bold]{task.description}",
            rich.progress.BarColumn(bar_width=20),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
        )
        self._name, self._received = name, 0
        self._id = self._bars.add_task(name, total=total or None)

    def advance(self, by: int) -> None:
        self._received += by
        self._bars.update(self._id, completed=self._received)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and not console.is_terminal:
            print_line(f"{self._name}  {self._received / 1e6:.1f} MB")
