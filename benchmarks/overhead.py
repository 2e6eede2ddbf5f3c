"""What AGS-CL adds to a training step of the paper's CIFAR network, as a ratio to plain training in the same run.

    python benchmarks/overhead.py [--rounds 40] [--threads 1]

Plain training and training with the method take turns, a step each, so that a busy machine slows both alike. The method
is in its second task, half of its nodes important: masks after every step; in the paper's form the proximal step once
an epoch or every step; with a budget frozen rows put back and pruned ones held at 0 after every step. Medians over
rounds, in processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measured import record

from agscl import AGSCL, MultiHead, PaperAGSCL
from agscl.networks.cifar import CifarTrunk

BATCH, STEPS = 256, 18  # an epoch of 4500 images, the paper's
LIMITS = {"epoch": 1.03, "step": 1.10, "budget": 1.08}
FORMS: dict[str, Callable[..., AGSCL]] = {
    "epoch": partial(PaperAGSCL, mu=10, lam=400, rho=0.3),
    "step": partial(PaperAGSCL, mu=10, lam=400, rho=0.3, prox_every="step"),
    "budget": AGSCL,
}


def prepare(make_method: Callable[..., AGSCL] | None) -> tuple[MultiHead, torch.optim.Optimizer, AGSCL | None]:
    torch.manual_seed(0)
    model = MultiHead(CifarTrunk())
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    model.add_head("first", 10)
    model(x, "first")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if make_method is None:
        model.add_head("second", 10)
        optimizer.param_groups[0]["params"].extend(model.heads["second"].parameters())
        return model, optimizer, None
    method = make_method(model, example_input=x)
    method.begin_task("first", optimizer)
    F.cross_entropy(model(x, "first"), y).backward()
    optimizer.step()
    with torch.no_grad():  # every second node is silent, so it stays free
        for layer in method.graph.layers.values():
            layer.module.weight[::2] = 0
            layer.module.bias[::2] = 0
    method.end_epoch()
    method.end_task([(x, y)])
    model.add_head("second", 10)
    method.begin_task("second", optimizer, epochs=100, steps_per_epoch=STEPS)
    method.plan.pruner.prune_(1.0)  # from here on, all there is to do in a step is done
    return model, optimizer, method


def clocked(act: Callable[[], object]) -> float:
    """Processor seconds: what other programs do in the meantime does not count."""
    start = time.process_time()
    act()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/overhead.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    contenders = {"plain": prepare(None), **{name: prepare(make_method) for name, make_method in FORMS.items()}}
    x, y = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64)
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    epochs: list[float] = []  # what the proximal step of an epoch takes

    def step(model: MultiHead, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x, "second"), y).backward()
        optimizer.step()

    for round_ in range(arguments.rounds + 1):
        for name, (model, optimizer, method) in contenders.items():
            taken = clocked(lambda model=model, optimizer=optimizer: step(model, optimizer))
            if round_:  # the first warms up
                steps[name].append(taken)
            if name == "epoch":
                epochs.append(clocked(method.end_epoch))
    plain = statistics.median(steps["plain"])
    each = {
        "epoch": statistics.median(steps["epoch"]) + statistics.median(epochs) / STEPS,
        "step": statistics.median(steps["step"]),
        "budget": statistics.median(steps["budget"]),
    }
    figures = {
        "network": "CifarTrunk",
        "batch": BATCH,
        "steps_per_epoch": STEPS,
        "rounds": arguments.rounds,
        "processor_milliseconds_per_step": {"plain": 1e3 * plain, **{name: 1e3 * t for name, t in each.items()}},
        "quartiles_of_plain": [1e3 * q for q in statistics.quantiles(steps["plain"], n=4)],
        "proximal_step_milliseconds": 1e3 * statistics.median(epochs),
        "ratio": {name: t / plain for name, t in each.items()},
        "limit": LIMITS,
    }
    record(arguments.out, figures)
    for name, limit in LIMITS.items():
        print(f"{name}: {figures['ratio'][name]:.3f} of plain training (limit {limit})")


if __name__ == "__main__":
    main()
