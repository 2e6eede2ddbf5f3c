"""A run's event log as figures, written for TensorBoard, MLflow and Weights & Biases under the same names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from agscl.runs.events import parse_event
from agscl.runs.json_files import encode_json
from agscl.runs.run_folder import is_finished
from agscl.system.files import write_atomically


class LoggedFigure(NamedTuple):
    """One number of a run."""

    name: str
    value: float
    step: int
    axis: str
    """What `step` counts: epochs over all tasks, tasks, steps of a task, or evaluations."""
    time: float
    """When it was logged, in seconds since 1970."""


class FigureReader:
    """Turns events into figures for loggers. It remembers tasks' names and counts evaluations: it needs all events."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._task_names: dict[int, str] = {}  # by the task's index
        self._evaluations: dict[tuple[str, int], int] = {}  # of a method and a task: how many there were

    def read(self, event: Mapping[str, Any]) -> list[LoggedFigure]:
        """The figures of an event; none where it is damaged."""
        try:
            return list(self._read(event))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return []

    def _read(self, event: Mapping[str, Any]) -> Iterator[LoggedFigure]:
        kind, method, task, time = event["event"], event["method"], event.get("task", 0), float(event["time"])
        if kind == "epoch":
            step = task * self._epochs + event["epoch"]
            for key in ("loss", "valid_loss", "lr"):
                if key in event:
                    yield LoggedFigure(f"{method}/{key}", float(event[key]), step, "epoch", time)
        elif kind == "iteration":
            for key in ("loss", "lr", "score", "steps_per_second"):
                if event.get(key) is not None:
                    yield LoggedFigure(
                        f"{method}/task {task + 1}/{key}", float(event[key]), event["steps"], "step", time
                    )
        elif kind == "evaluation":
            self._name_task(task, event["name"])
            for index, score in self._list_named(event["scores"]):
                step = self._evaluations.get((method, index), 0)
                self._evaluations[method, index] = step + 1
                yield LoggedFigure(f"{method}/score/{self._task_names[index]}", float(score), step, "evaluation", time)
        elif kind == "task ended":
            self._name_task(task, event["name"])
            accuracies = event["accuracies"]
            for index, accuracy in self._list_named(accuracies):
                yield LoggedFigure(f"{method}/accuracy/{self._task_names[index]}", float(accuracy), task, "task", time)
            # not `accuracy`: in MLflow's file store this would be a file and a folder
            yield LoggedFigure(f"{method}/average_accuracy", sum(accuracies) / len(accuracies), task, "task", time)

    def _name_task(self, task: int, name: str) -> None:
        """Give a task a name that every logger takes and no other task has."""
        clean = re.sub(r"[^\w .:-]", "_", name).strip(" .")[:200]
        others = [other for index, other in self._task_names.items() if index != task]
        self._task_names[task] = clean if clean and clean not in others else f"{clean} {task + 1}".strip()

    def _list_named(self, values: Sequence[float]) -> Iterator[tuple[int, float]]:
        """Values of tasks with their indices; a damaged log may lack the event with a task's name."""
        return ((index, value) for index, value in enumerate(values) if index in self._task_names)


class Writer(Protocol):
    """Writes figures of one run for a logger. It is given every figure of the run's log, after a resume too."""

    def write(self, figures: Sequence[LoggedFigure]) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Writes the folder `tensorboard` of the run, each time from the beginning."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, figures: Sequence[LoggedFigure]) -> None:
        for figure in figures:
            self._writer.add_scalar(figure.name, figure.value, figure.step, figure.time)
        if any(figure.axis == "task" for figure in figures):
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflowWriter:
    """Writes to the server that MLFLOW_TRACKING_URI names, or else to the folder `mlflow` beside the run.

    `mlflow.json` in the run's folder holds the id that the run has there. A resumed run is continued: figures that are
    there are not written again.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else recent versions refuse folders
        from mlflow import MlflowClient

        self._folder = folder
        self._client: Any = MlflowClient(tracking_uri=server or (folder.resolve().parent / "mlflow").as_uri())
        self._written: set[tuple[str, int]] = set()
        self._run_id = self._find_run(server) or self._create_run(server, config)

    def _find_run(self, server: str | None) -> str | None:
        """The id of this run, where it was written there before."""
        from mlflow.exceptions import MlflowException

        path = self._folder / "mlflow.json"
        stored = json.loads(path.read_bytes()) if path.exists() else {}
        if "run_id" not in stored or stored.get("server") != server:
            return None
        try:
            run = self._client.get_run(stored["run_id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.lifecycle_stage == "deleted":
            return None
        run_id: str = run.info.run_id
        for name in run.data.metrics:
            self._written.update((name, metric.step) for metric in self._client.get_metric_history(run_id, name))
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create_run(self, server: str | None, config: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(config["preset"])
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config["preset"])
        run_id: str = self._client.create_run(experiment_id, run_name=self._folder.name).info.run_id
        for key in ("preset", "method", "seed", "device"):
            self._client.log_param(run_id, key, config[key])
        write_atomically(self._folder / "mlflow.json", encode_json({"server": server, "run_id": run_id}))
        return run_id

    def write(self, figures: Sequence[LoggedFigure]) -> None:
        from mlflow.entities import Metric

        new = [figure for figure in figures if (figure.name, figure.step) not in self._written]
        metrics = [Metric(figure.name, figure.value, int(figure.time * 1000), figure.step) for figure in new]
        for start in range(0, len(metrics), 1000):  # the most that a server takes at once
            self._client.log_batch(self._run_id, metrics[start : start + 1000])
        self._written.update((figure.name, figure.step) for figure in new)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_finished(self._folder) else "KILLED")


class WandbWriter:
    """Writes the folder `wandb` of the run in offline mode, each time from the beginning and with the same id."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        earlier = sorted((folder / "wandb").glob("offline-run-*-*"))
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        self._run: Any = wandb.init(
            mode="offline",
            project="agscl",
            name=folder.name,
            id=earlier[-1].name.rpartition("-")[2] if earlier else None,
            dir=folder.resolve(),
            config=dict(config),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, x_disable_stats=True, x_disable_machine_info=True
            ),
        )
        self._names: set[str] = set()

    def write(self, figures: Sequence[LoggedFigure]) -> None:
        for figure in figures:
            if figure.name not in self._names:
                self._names.add(figure.name)
                self._run.define_metric(figure.name, step_metric=figure.axis)
        for (axis, step), some in groupby(figures, lambda figure: (figure.axis, figure.step)):
            self._run.log({axis: step, **{figure.name: figure.value for figure in some}})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # finish() returns before W&B's own process has written the last figures


WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "mlflow": MLflowWriter,
    "wandb": WandbWriter,
}
"""By the name of the logger, which is also the name of its package and of the extra that brings it."""


class Loggers:
    """Writes the figures of a run's event log to loggers.

    One that fails is dropped, with a line to `warn`; the others go on. Use it after the run has truncated its log.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]):
        self.folder, self.config, self.warn = folder, config, warn
        self.names = list(dict.fromkeys(names))
        """The loggers that have not failed."""
        self._reader = FigureReader(config["training"]["epochs"])
        self._log: BinaryIO | None = None
        self._writers: dict[str, Writer] = {}

    def update(self) -> None:
        """Write the figures of the events that were logged since the last call."""
        if not self.names:
            return
        if self._log is None:
            for name in self.names.copy():
                with self._dropping(name):
                    self._writers[name] = WRITERS[name](self.folder, self.config)
        try:
            figures = [figure for event in self._read_new_events() for figure in self._reader.read(event)]
        except OSError as error:
            self.warn(f"Warning: --log {', '.join(self.names)} was stopped: cannot read the event log: {error}")
            self.close()
            self.names.clear()
            return
        for name, writer in self._writers.copy().items() if figures else ():
            with self._dropping(name):
                writer.write(figures)

    def close(self) -> None:
        for name, writer in self._writers.copy().items():
            with self._dropping(name):
                writer.close()
        self._writers.clear()
        if self._log is not None:
            self._log.close()

    def _read_new_events(self) -> Iterator[dict[str, Any]]:
        if self._log is None:
            self._log = open(self.folder / "events.jsonl", "rb")  # noqa: SIM115
        while line := self._log.readline():
            if not line.endswith(b"\n"):  # being written
                self._log.seek(-len(line), os.SEEK_CUR)
                return
            if (event := parse_event(line)) is not None:
                yield event

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop the logger if it fails here."""
        try:
            yield
        except Exception as error:  # whatever a logger raises must not end the run
            self.names.remove(name)
            self._writers.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.warn(
                f"Warning: --log {name} failed ({reason}) and was stopped; the run is not affected. "
                "The same command, given again, writes what is missing."
            )
