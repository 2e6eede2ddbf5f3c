"""A run's log as TensorBoard sees it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agscl.runs.events import read_events


class Board:
    """Losses, rates and accuracies of a run in its folder `tensorboard`, made anew from the log whenever it is opened.

    Losses and rates are counted in epochs over all tasks, accuracies in tasks.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._epochs = epochs
        self.folder = folder / "tensorboard"
        shutil.rmtree(self.folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(self.folder))
        self._names: dict[int, str] = {}  # of tasks, by their places
        for event in read_events(folder / "events.jsonl"):
            self.write(event)

    def write(self, event: dict[str, Any]) -> None:
        """Add one event of the log."""
        of, time, task = event.get("method"), event.get("time"), event.get("task", 0)
        if event.get("event") == "epoch":
            for key in ("loss", "valid_loss", "lr"):
                if key in event:
                    self._writer.add_scalar(f"{of}/{key}", event[key], task * self._epochs + event["epoch"], time)
        elif event.get("event") == "task ended":
            self._names[task] = event["name"]
            accuracies = event["accuracies"]
            for place, accuracy in enumerate(accuracies):
                if place in self._names:  # what a damaged log does not tell of has no name
                    self._writer.add_scalar(f"{of}/accuracy/{self._names[place]}", accuracy, task, time)
            self._writer.add_scalar(f"{of}/accuracy", sum(accuracies) / len(accuracies), task, time)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
