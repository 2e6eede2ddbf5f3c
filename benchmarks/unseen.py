"""Every method that needs no setting, at its defaults, on data on which nothing of this library was chosen.

Small networks and a loop of one's own, test data, one thread. "A network per task" is what each task reaches alone.
Needs the data of `mixed` (see docs/data.md).

python benchmarks/unseen.py [--seeds 5] [--sequences 0 3]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measured import record
from small_loop import SmallTask, learn_tasks
from torch import Tensor, nn

from agscl import AGSCL, GPM, HAT, WSN, FineTune, PackNet
from agscl import tasks as sequences
from agscl.data.datasets import load_examples
from agscl.data.decoding import ImageDecoder

METHODS = (AGSCL, PackNet, WSN, HAT, GPM, FineTune)
ALONE = "a network per task"


class Trial(NamedTuple):
    """What is learned, by which network, for how many epochs of which optimizer."""

    name: str
    load: Callable[[int], list[SmallTask]]
    network: Callable[[Tensor], nn.Module]
    epochs: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


def make_mlp(x: Tensor) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())


def make_cnn(x: Tensor, *, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((x.shape[1], 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else [])]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    side = x.shape[-1] // 4
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU())


def choose_examples(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(y), generator=generator)[:count]
    return x[rows], y[rows]


@functools.cache
def load_letters(split: str) -> tuple[Tensor, Tensor]:
    letters = load_examples("notmnist", split, ImageDecoder(28, 1))
    return torch.tensor(letters.x) / 255, torch.tensor(letters.y)


def load_pairs(seed: int) -> list[SmallTask]:
    """The ten letters of notMNIST in five pairs, 400 images each."""
    generator, (x, y), (test_x, test_y) = (
        torch.Generator().manual_seed(seed),
        load_letters("train"),
        load_letters("test"),
    )
    tasks = []
    for pair in torch.randperm(10, generator=generator).split(2):
        chosen, tested = torch.isin(y, pair), torch.isin(test_y, pair)
        part = choose_examples(x[chosen], (y[chosen] == pair[1]).long(), 400, generator)
        tasks.append(SmallTask(2, *part, test_x[tested], (test_y[tested] == pair[1]).long()))
    return tasks


def load_permuted(seed: int) -> list[SmallTask]:
    """The ten letters of notMNIST five times, with other pixels permuted, 1000 images each."""
    generator, (x, y), (test_x, test_y) = (
        torch.Generator().manual_seed(seed),
        load_letters("train"),
        load_letters("test"),
    )
    tasks = []
    for _ in range(5):
        pixels = torch.randperm(28 * 28, generator=generator)
        part = choose_examples(x.flatten(1)[:, pixels], y, 1000, generator)
        tasks.append(SmallTask(10, *part, test_x.flatten(1)[:, pixels], test_y))
    return tasks


def load_sequence(seed: int, name: str, chosen: slice, side: int) -> list[SmallTask]:
    """Tasks of a sequence of the library, at most 1000 images for training and for test each."""
    generator, tasks = torch.Generator().manual_seed(seed), []
    for task in sequences.load(name, seed=seed)[chosen]:
        x, y = choose_examples(task.train_x, task.train_y, 1000, generator)
        test_x, test_y = choose_examples(task.test_x, task.test_y, 1000, generator)
        inputs = [F.interpolate(task.prepare_inputs(part), side, mode="area") for part in (x, test_x)]
        tasks.append(SmallTask(task.classes, inputs[0], y, inputs[1], test_y))
    return tasks


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


load_alphabets = functools.partial(load_sequence, name="omniglot", chosen=slice(10), side=28)
load_mixed = functools.partial(load_sequence, name="mixed", chosen=slice(None), side=16)
SEQUENCES = [
    Trial("pairs of letters", load_pairs, make_cnn, 12, adam),
    Trial("pairs of letters", load_pairs, make_cnn, 3, sgd),
    Trial("permuted letters", load_permuted, make_mlp, 5, adamw),
    Trial("permuted letters", load_permuted, make_mlp, 10, sgd),
    Trial("ten alphabets", load_alphabets, make_mlp, 20, adam),
    Trial("ten alphabets", load_alphabets, functools.partial(make_cnn, norm=True), 10, sgd),
    Trial("ten unlike tasks", load_mixed, make_cnn, 10, adam),
    Trial("ten unlike tasks", load_mixed, functools.partial(make_cnn, norm=True), 5, adamw),
]


def learn_alone(sequence: Trial, tasks: Sequence[SmallTask]) -> list[float]:
    return [
        learn_tasks(FineTune, sequence.network(task.x), [task], sequence.optimizer, sequence.epochs)[0]
        for task in tasks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="*", help="numbers of the sequences; all, unless told")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for number in arguments.sequences or range(len(SEQUENCES)):
        sequence = SEQUENCES[number]
        accuracies: dict[str, list[float]] = {kind.title: [] for kind in METHODS} | {ALONE: []}
        for seed in range(arguments.seeds):
            tasks = sequence.load(seed)
            for kind in METHODS:
                torch.manual_seed(seed)
                trunk = sequence.network(tasks[0].x)
                learned = learn_tasks(kind, trunk, tasks, sequence.optimizer, sequence.epochs)
                accuracies[kind.title].append(round(statistics.mean(learned), 2))
            torch.manual_seed(seed)
            accuracies[ALONE].append(round(statistics.mean(learn_alone(sequence, tasks)), 2))
        trunk = sequence.network(tasks[0].x)
        network = "MLP" if isinstance(trunk[0], nn.Flatten) else "CNN"
        network += " with BatchNorm" if any(isinstance(module, nn.BatchNorm2d) for module in trunk) else ""
        setting = {"network": network, "epochs": sequence.epochs, "optimizer": sequence.optimizer.__name__}
        rows.append({"sequence": sequence.name, **setting, "accuracies": accuracies})
        means = [f"{name} {statistics.mean(values):.1f}" for name, values in accuracies.items()]
        print(sequence.name, *setting.values(), "|", ", ".join(means), flush=True)
    if not arguments.sequences:
        record(Path("results/unseen.json"), {"seeds": list(range(arguments.seeds)), "sequences": rows})


if __name__ == "__main__":
    main()
