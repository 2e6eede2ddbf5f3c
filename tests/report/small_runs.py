"""Runs for tests of the report: real ones of seconds, and large ones made through the same writers."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np

from agscl.certificate import NEVER, Certificate, Layout
from agscl.experiments.certificate_chain import certificate_path, node_record_path
from agscl.experiments.run_config import configure
from agscl.runs import Run

ALEXNET = {"features.0": 96, "features.3": 256, "features.6": 384, "features.8": 384, "features.10": 256,
           "classifier.1": 4096, "classifier.4": 3872}  # fmt: skip
"""Layers of 9 344 nodes, about those of AlexNet."""


def write_large_run(
    folder: Path,
    layers: dict[str, int] = ALEXNET,
    tasks: int = 50,
    *,
    moves: bool = False,
    names: list[str] | None = None,
) -> Path:
    """A finished run with so many nodes and tasks, with figures that were made up."""
    draw, random_numbers = random.Random(0), np.random.default_rng(0)
    names = names or [f"task {number + 1}" for number in range(tasks)]
    config = configure("digits", method="agscl").as_dict()
    layout = _make_layout(layers)
    first = np.full(layout.size, NEVER, dtype=np.int64)
    accuracies: list[list[float]] = []
    statistics: list[dict[str, Any]] = []
    importance = np.zeros(layout.size, dtype="<f4")
    with Run(folder) as run:
        run.store_config(config)
        run.write_json("data.json", {"tasks": dict.fromkeys(names, 0)})
        run.write_json("environment.json", {"torch": "2.13.0", "threads": 1})
        for task, name in enumerate(names):
            free = np.flatnonzero(first == NEVER)
            before = np.flatnonzero(first != NEVER)
            new = random_numbers.choice(free, len(free) // 20, replace=False)
            first[new] = task
            importance *= np.float32(0.9)
            importance[first != NEVER] += random_numbers.random((first != NEVER).sum(), dtype=np.float32)
            moved = sorted(before[random_numbers.random(len(before)) < 0.02].tolist()) if moves else []
            kept = sorted(set(before.tolist()) - set(moved))
            heads = {one: f"{number:032x}" for number, one in enumerate(names[: task + 1])}
            Certificate(
                "AGSCL", name, task, "held" if moves else "guaranteed", "paper", layout, first.tolist(),
                [None if one == NEVER else "0" * 32 for one in first.tolist()], kept, moved, heads,
                {one: [f"heads.{one}.weight"] for one in heads}, frozen_for_good=not moves,
            ).save(certificate_path(folder, task + 1))  # fmt: skip
            record = {
                "task": name,
                "importance": base64.b64encode(importance.tobytes()).decode(),
                "fresh": base64.b64encode(np.packbits(first == NEVER).tobytes()).decode(),
            }
            node_record_path(folder, 1).parent.mkdir(exist_ok=True)
            run.write_json(f"nodes/{task + 1:02d}.json", record)
            accuracies.append([round(draw.uniform(0.8, 0.99), 3) for _ in range(task)] + [0.95])
            free_count = int((first == NEVER).sum())
            figures = {"nodes": layout.size, "free": free_count, "frozen": len(kept), "important_before": len(before)}
            statistics.append(figures | {"capacity": _count_capacity(layers, first)})
            event = {"method": "agscl", "progress": (task + 1) / tasks, "task": task, "name": name}
            run.log_event({**event, "event": "task started"})
            for epoch in range(30):
                run.log_event({**event, "event": "epoch", "epoch": epoch, "loss": 2.0 / (epoch + 1)})
            run.log_event({**event, "event": "task ended", "accuracies": accuracies[-1], "statistics": statistics[-1]})
        outcome = {
            "accuracies": accuracies, "statistics": statistics, "losses": [[2.0 / (e + 1) for e in range(30)]] * tasks,
            "memory": {"importances": layout.size, "anchors": 10**6, "masks": layout.size, "bytes": 4_100_000},
            "weights": 5 * 10**6, "plasticity": 1.0, "certificate": "made up",
        }  # fmt: skip
        run.write_json(
            "result.json",
            {"config": config, "tasks": names, "methods": {"agscl": outcome}, "environment": {"torch": "2.13.0"},
             "seconds": {"agscl": 3600.0}, "chain": [], "digest": "0" * 64},
        )  # fmt: skip
    return folder


def _make_layout(layers: dict[str, int]) -> Layout:
    parameters, readers, start = {}, {}, 0
    before: list[int] = []
    for name, size in layers.items():
        groups = list(range(start, start + size))
        parameters[f"{name}.weight"] = groups
        if before:
            readers[f"{name}.weight"] = [before]
        before, start = groups, start + size
    return Layout(start, parameters, {}, readers)


def _count_capacity(layers: dict[str, int], first: Any) -> dict[str, Any]:
    rows, start = [], 0
    for name, size in layers.items():
        own = first[start : start + size]
        free = int((own == NEVER).sum())
        rows.append({"layer": name, "nodes": size, "taken": size - free, "free": free, "tasks_left": 20,
                     "taken_by_last": 1})  # fmt: skip
        start += size
    return {"tasks_left": 20, "layers": rows}


def write_comparison(folder: Path, methods: list[str], seeds: int, tasks: int = 10) -> Path:
    """The finished runs of a comparison, with accuracies that were made up."""
    for number, method in enumerate(methods):
        for seed in range(seeds):
            draw = random.Random(100 * number + seed)
            config = configure("digits", method=method, seed=seed, reference=False).as_dict()
            path = folder / f"{method}-seed{seed}"
            loss = 0.4 if method == "finetune" else 0.02 * number
            accuracies = [
                [max(0.1, 0.95 - loss * (after - task) / tasks - draw.uniform(0, 0.05)) for task in range(after + 1)]
                for after in range(tasks)
            ]
            outcome = {
                "accuracies": accuracies, "statistics": [{}] * tasks, "losses": [[1.0, 0.5, 0.2]] * tasks,
                "memory": {"importances": 100 * number, "bytes": 1000 * number}, "weights": 8350,
                "average_accuracy": 0.0, "plasticity": None, "stability": 1.0, "forgetting": 0.0,
            }  # fmt: skip
            with Run(path) as run:
                run.store_config(config)
                run.log_event({"method": method, "progress": 1.0, "event": "task ended", "task": tasks - 1})
                run.write_json(
                    "result.json",
                    {"config": config, "tasks": [f"task {task + 1}" for task in range(tasks)],
                     "methods": {method: outcome}, "environment": {}, "seconds": {method: 10.0}, "chain": [],
                     "digest": "0" * 64},
                )  # fmt: skip
    return folder
