"""What a task takes when many were learned before: `begin_task`, ten steps, `end_task`, after 50 tasks and after 500.

    python benchmarks/many_tasks.py [--tasks 50 500] [--steps 10] [--methods agscl,ewc]

A small network (64 inputs, two layers of 64 nodes, heads of two classes), Adam over all of it, batches of 16: hardly
anything but what grows with the number of tasks. A model with few tasks and one with many learn a task in turns, so
that a busy machine slows both alike; the fastest of thirty turns, in processor time on one thread: another program
that empties the processor's caches makes what visits hundreds of heads look slower than it is. `plain` is training
without a method, which adds each head to the optimizer. Left out by default are LwF, which runs every old head at each
step, and SPG, which does when a task ends: that grows with the number of tasks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measured import record
from torch import nn

from agscl import MultiHead
from agscl.experiments.method_entries import METHODS
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.warnings import SelfCheckWarning

PLAIN = "plain"
ROUNDS = 30
MEASURED = [name for name, one in METHODS.items() if not one.is_bound and name not in ("lwf", "spg")]
MOST_TASKS = {"packnet": 240}  # it marks weights with a byte
LIMIT = 2.0  # times as long after many tasks as after few
PARTS = ("begin_task", "steps", "end_task")


def make_method(name: str, model: MultiHead) -> Method | None:
    if name == PLAIN:
        return None
    kind = METHODS[name].method_class
    return kind(model, **({"example_input": torch.zeros(2, 64)} if issubclass(kind, NodeMethod) else {}))


class Learner:
    """A model that learns one task after the other with a method."""

    def __init__(self, name: str, steps: int) -> None:
        torch.manual_seed(0)
        self.steps = steps
        self.model = MultiHead(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), features=64)
        self.method = make_method(name, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch, self.learned = (torch.randn(16, 64), torch.arange(16) % 2), 0

    def learn_task(self) -> list[float]:
        """Milliseconds that `PARTS` take."""
        model, method, optimizer, (x, y), task = self.model, self.method, self.optimizer, self.batch, f"t{self.learned}"
        model.add_head(task, 2)
        times = [time.process_time()]
        if method is None:
            optimizer.param_groups[0]["params"].extend(model.heads[task].parameters())
        else:
            method.begin_task(task, optimizer, epochs=1, steps_per_epoch=self.steps)
        times.append(time.process_time())
        for _ in range(self.steps):
            optimizer.zero_grad()
            output = model(x, task)
            loss = F.cross_entropy(output, y)
            if method is not None:
                loss = loss + method.loss(x, output)
            loss.backward()
            optimizer.step()
        times.append(time.process_time())
        if method is not None:
            method.end_epoch()
            method.end_task([self.batch])
        times.append(time.process_time())
        self.learned += 1
        return [1e3 * (after - before) for before, after in pairwise(times)]


def compare_counts(name: str, few: int, many: int, steps: int) -> dict[str, Any]:
    """A task after `few` tasks and one after `many`, in turns."""
    learners = [Learner(name, steps), Learner(name, steps)]
    for learner, count in zip(learners, (few, many), strict=True):
        for _ in range(count - ROUNDS // 2):
            learner.learn_task()
    rounds = [[learner.learn_task() for learner in learners] for _ in range(ROUNDS)]
    fastest = [{part: min(each[n][i] for each in rounds) for i, part in enumerate(PARTS)} for n in range(2)]
    first, last = (sum(parts.values()) for parts in fastest)
    medians = [statistics.median(sum(each[n]) for each in rounds) for n in range(2)]
    return {
        "tasks": [few, many],
        "milliseconds": fastest,
        "times_as_long": last / first,
        "medians": {"milliseconds": medians, "times_as_long": medians[1] / medians[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs=2, default=[50, 500])
    parser.add_argument("--steps", type=int, default=10, help="steps of each task")
    parser.add_argument("--methods", default=",".join(MEASURED))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/many_tasks.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # a collection would count for the task in which it happens
    warnings.simplefilter("ignore", SelfCheckWarning)  # a task of one step is what they warn of
    methods: dict[str, Any] = {}
    few, many = arguments.tasks
    for name in [PLAIN, *arguments.methods.split(",")]:
        found = methods[name] = compare_counts(name, few, min(many, MOST_TASKS.get(name, many)), arguments.steps)
        gc.collect()
        first, last = found["milliseconds"]
        parts = ", ".join(f"{part} {first[part]:.2f} → {last[part]:.2f}" for part in PARTS)
        print(f"{name}: {found['times_as_long']:.2f} times as long ({parts} ms)", flush=True)
    record(arguments.out, {"limit": LIMIT, "steps": arguments.steps, "methods": methods})


if __name__ == "__main__":
    main()
