"""A run's event log, written for TensorBoard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agscl.runs.events import read_events


class TensorBoardLog:
    """Losses, learning rates and accuracies of a run, in the folder `tensorboard` of the run.

    Opening it writes the whole event log again, so the folder is complete after a resume too. Losses and learning rates
    are counted in epochs over all tasks, accuracies in tasks; in reinforcement learning losses are counted in steps of
    a task, scores in evaluations.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._epochs = epochs
        self.folder = folder / "tensorboard"
        shutil.rmtree(self.folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(self.folder))
        self._task_names: dict[int, str] = {}  # by the task's index
        self._evaluations: dict[tuple[Any, int], int] = {}  # of a method and a task: how many there were
        for event in read_events(folder / "events.jsonl"):
            self.write_event(event)

    def write_event(self, event: dict[str, Any]) -> None:
        method, time, task = event.get("method"), event.get("time"), event.get("task", 0)
        if event.get("event") == "epoch":
            for key in ("loss", "valid_loss", "lr"):
                if key in event:
                    self._writer.add_scalar(f"{method}/{key}", event[key], task * self._epochs + event["epoch"], time)
        elif event.get("event") == "iteration":
            for key in ("loss", "lr", "score", "steps_per_second"):
                if event.get(key) is not None:
                    self._writer.add_scalar(f"{method}/task {task + 1}/{key}", event[key], event["steps"], time)
        elif event.get("event") == "evaluation":
            self._task_names[task] = event["name"]
            for index, score in enumerate(event["scores"]):
                if index in self._task_names:
                    step = self._evaluations.get((method, index), 0)
                    self._evaluations[method, index] = step + 1
                    self._writer.add_scalar(f"{method}/score/{self._task_names[index]}", score, step, time)
        elif event.get("event") == "task ended":
            self._task_names[task] = event["name"]
            accuracies = event["accuracies"]
            for index, accuracy in enumerate(accuracies):
                if index in self._task_names:  # a damaged log may lack the event with the name
                    self._writer.add_scalar(f"{method}/accuracy/{self._task_names[index]}", accuracy, task, time)
            self._writer.add_scalar(f"{method}/accuracy", sum(accuracies) / len(accuracies), task, time)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
