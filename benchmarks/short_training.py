"""Short training: fine-tuning, PackNet and AGS-CL at their defaults, on five small tasks of tinyimagenet32.

Accuracy on validation data, on which the budget's schedule was chosen too. Needs the data (see docs/data.md).

python benchmarks/short_training.py [--seeds 4] [--cells 0 3]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measured import record
from small_loop import SmallTask, learn_tasks
from torch import Tensor, nn

from agscl import AGSCL, FineTune, PackNet
from agscl import tasks as sequences

TASKS, FIRST_SEED = 5, 1000


class Cell(NamedTuple):
    """A network; classes and examples per task; epochs of an optimizer; `told`: as many, too many or none."""

    network: str
    classes: int
    examples: int
    epochs: int
    optimizer: str
    told: float | None = 1.0


CELLS = [
    *(Cell("mlp", 10, 1000, epochs, "adam") for epochs in (1, 3, 10)),
    Cell("mlp", 2, 400, 3, "adam"),
    Cell("mlp", 10, 1000, 10, "sgd 0.1"),
    Cell("mlp", 10, 1000, 3, "sgd momentum"),
    *(Cell("cnn", 10, 1000, epochs, "adam") for epochs in (1, 3)),
    Cell("cnn", 2, 400, 3, "adam"),
    Cell("cnn", 10, 1000, 3, "sgd momentum"),
    Cell("cnn with BatchNorm", 10, 1000, 3, "adam"),
    Cell("cnn with BatchNorm", 5, 500, 2, "sgd momentum"),
    Cell("mlp", 10, 1000, 10, "adam", told=3.0),  # stops early
    Cell("cnn", 5, 1000, 8, "sgd momentum", told=3.0),
    Cell("mlp", 10, 1000, 10, "adam", told=None),
    Cell("cnn", 5, 1000, 8, "sgd momentum", told=None),
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd 0.1": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
}


def make_network(name: str) -> nn.Sequential:
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    norm = [nn.BatchNorm2d(16)], [nn.BatchNorm2d(32)]
    first, second = norm if "BatchNorm" in name else ([], [])
    convolutions = (
        *(nn.Conv2d(3, 16, 3, padding=1), *first, nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), *second, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
    )
    return nn.Sequential(*convolutions, *([] if first else [nn.Linear(512, 64), nn.ReLU()]))


def load_pictures(seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per task: pictures of 16 by 16 and labels of the first ten classes, for training and for validation."""
    pictures = []
    for task in sequences.load("tinyimagenet32", seed=seed)[:TASKS]:
        part = []
        for x, y in ((task.train_x, task.train_y), (task.valid_x, task.valid_y)):
            part += [F.avg_pool2d(task.prepare_inputs(x[y < 10]), 2), y[y < 10]]
        pictures.append(tuple(part))
    return pictures


def measure(kind: type, cell: Cell, pictures: list[tuple[Tensor, Tensor, Tensor, Tensor]], seed: int) -> float:
    """Average accuracy over the tasks after the last one."""
    tasks = []
    for x, y, valid_x, valid_y in pictures:
        known, valid = y < cell.classes, valid_y < cell.classes
        part = (x[known][: cell.examples], y[known][: cell.examples], valid_x[valid], valid_y[valid])
        part = [F.avg_pool2d(t, 2) if cell.network == "mlp" and t.dim() == 4 else t for t in part]
        tasks.append(SmallTask(cell.classes, *part))
    torch.manual_seed(seed)
    accuracies = learn_tasks(
        kind, make_network(cell.network), tasks, OPTIMIZERS[cell.optimizer], cell.epochs, cell.told
    )
    return sum(accuracies) / len(accuracies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--cells", type=int, nargs="*", help="numbers of the cells to measure; all, unless told")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    pictures = {seed: load_pictures(seed) for seed in seeds}
    rows = []
    for number in arguments.cells or range(len(CELLS)):
        cell = CELLS[number]
        row: dict[str, Any] = {**cell._asdict()}
        for kind in (FineTune, PackNet, AGSCL):
            row[kind.__name__] = [round(measure(kind, cell, pictures[seed], seed), 2) for seed in seeds]
        rows.append(row)
        means = [f"{kind} {sum(row[kind]) / len(seeds):.1f}" for kind in ("FineTune", "PackNet", "AGSCL")]
        print(*cell, "|", ", ".join(means), flush=True)
    if not arguments.cells:
        record(Path("results/short_training.json"), {"seeds": list(seeds), "cells": rows})


if __name__ == "__main__":
    main()
