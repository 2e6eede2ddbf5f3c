"""What every method stores between tasks for every network: a forecast for the paper's number of tasks, and what the
method reports after two tasks of random images, with which the forecast must agree.

python benchmarks/memory.py [--networks mlp,cifar]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measured import record

from agscl import MultiHead, NodeGraph
from agscl.experiments.method_entries import METHODS
from agscl.methods import find_methods
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.node_method import NodeMethod
from agscl.networks import NETWORKS

TASKS = {  # as many as the paper's sequence has; digits has 5 for mlp
    "mlp": (5, 2),
    "cifar": (10, 10),
    "omniglot": (50, 32),
    "eight": (8, 43),
    "alexnet": (10, 20),
    "atari": (8, 18),
}
"""Tasks, and classes in each."""
START = {"reinit_from": "start"}  # a pre-trained network begins again from its trained weights, so they are kept
METHODS_AND_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "agscl": ("agscl", {}),
    "agscl, fresh=start": ("agscl", START),
    **{name: (name, {}) for name in find_methods() if name != "agscl"},
}
LEARNED = 2
IMAGES = 8


def model_of(name: str) -> MultiHead:
    trunk = NETWORKS[name]()
    return MultiHead(trunk, features=trunk.features)


def outline_of(name: str) -> Outline:
    model = model_of(name)
    model.add_head("t0", TASKS[name][1])
    example = (torch.zeros(2, *model.trunk.input_shape), "t0")
    return Outline.from_graph(NodeGraph(model, example), example)


def train_and_report(network: str, name: str, settings: dict[str, Any]) -> list[dict[str, int]]:
    """What the method itself reports after each of two tasks, one step each."""
    torch.manual_seed(0)
    model, kind = model_of(network), METHODS[name].method_class
    shape = model.trunk.input_shape
    known = {"example_input": torch.zeros(2, *shape)} if issubclass(kind, NodeMethod) else {}
    method: Method = kind(model, **known, **settings)
    found = []
    for number in range(LEARNED):
        task, classes = f"t{number}", TASKS[network][1]
        model.add_head(task, classes)
        x, y = torch.rand(IMAGES, *shape), torch.randint(classes, (IMAGES,))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        method.begin_task(task, optimizer, epochs=1, steps_per_epoch=1)
        output = model(x, task)
        (F.cross_entropy(output, y) + method.loss(x, output)).backward()
        optimizer.step()
        method.end_epoch()
        method.end_task([(x, y)])
        found.append(method.memory())
    method.close()
    return found


def agrees(forecast: Memory, reported: dict[str, int]) -> bool:
    return forecast.counts.keys() == reported.keys() and all(
        reported[purpose] <= count if purpose in forecast.upper_bounds else reported[purpose] == count
        for purpose, count in forecast.counts.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(TASKS))
    parser.add_argument("--out", type=Path, default=Path("results/memory.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # a step is too short for most methods, which is no matter here
    networks: dict[str, Any] = {}
    disagree = []
    for network in arguments.networks.split(","):
        outline, (tasks, _) = outline_of(network), TASKS[network]
        rows: dict[str, Any] = {}
        for row, (name, settings) in METHODS_AND_SETTINGS.items():
            began = time.monotonic()
            forecast = METHODS[name].forecast_memory(outline, tasks, settings)
            reports = train_and_report(network, name, settings)
            good = all(
                agrees(METHODS[name].forecast_memory(outline, learned, settings), report)
                for learned, report in enumerate(reports, start=1)
            )
            disagree += [] if good else [f"{network} {row}"]
            rows[row] = {
                "counts": dict(forecast.counts),
                "at_most": sorted(forecast.upper_bounds),
                "everything": forecast.total,
                "held_after_two_tasks": reports[-1],
                "agrees": good,
            }
            print(f"{network:<9} {row:<18} {forecast.bytes:>13,} bytes, {time.monotonic() - began:.1f} s", flush=True)
        networks[network] = {
            "tasks": tasks,
            "nodes": outline.groups,
            "weights": outline.weights.numbers,
            "methods": rows,
        }
    record(arguments.out, {"images": IMAGES, "networks": networks})
    if disagree:
        sys.exit(f"the forecast is wrong for: {', '.join(disagree)}")


if __name__ == "__main__":
    main()
