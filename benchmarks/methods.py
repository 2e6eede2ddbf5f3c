"""What each method costs on the paper's CIFAR network, batch 256, Adam: its training step as a ratio to plain training
in the same run, and the time to measure importances in epochs of plain training.

    python benchmarks/methods.py [--rounds 40] [--measurements 3] [--device cuda] [--avalanche PYTHON]

Every method is in its second task, so all it adds to a step is at work; what it does at the end of an epoch is spread
over the epoch's steps. All take turns, a step each, in an order drawn anew for every round, with a plain step between
any two. A ratio is that of a step to the plain ones beside it, in processor time on one thread; medians and quartiles
are over rounds. On a GPU, CUDA events time the step as it is and captured in a CUDA graph, as is then the end of an
epoch. What most methods add does
not depend on the batch: on a CPU, steps on batches of 16 show it more sharply.

With --avalanche, the plugins of the same names in Avalanche are timed in the same run, by an interpreter that has it:

    python -m venv build/avalanche
    build/avalanche/bin/pip install torch==2.13.0 torchvision==0.28.0 avalanche-lib
    python benchmarks/methods.py --avalanche build/avalanche/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measured import HOME, record
from timing import Pairs, clocked, compared, in_epochs, summary, take_turns
from torch import Tensor

from agscl import MultiHead, PaperAGSCL
from agscl.experiments.method_entries import METHODS
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.networks.cifar import CifarTrunk
from agscl.system.process import tune_malloc

PLAIN = "plain"
SMALL = 16  # the small batch
RATE = 1e-6  # so low that weights hardly move: a network that knows its one batch by heart has subnormal gradients
LIMITS = {
    "cpu": {"ewc": 1.10, "mas": 1.10, "si": 1.10, "rwalk": 1.10, "agscl": 1.03, "hat": 1.35},
    "captured": {"ewc": 1.15, "mas": 1.15, "si": 1.15, "rwalk": 1.15, "agscl": 1.15},
    "importance": {"ewc": 3.0},
}
FORMS: dict[str, list[dict[str, Any]]] = {  # further settings in which a method measures importances
    "ewc": [
        {"fisher": "exact"},
        {"fisher": "sampled"},
        {"fisher": "empirical"},
        {"fisher": "batched"},
        {"fisher": "batched", "batch": 256},
    ],
    "mas": [{"batch": 20}, {"batch": 256}],
}
Batch = tuple[Tensor, Tensor]


@dataclass
class Contender:
    """A model in its second task, and the method that trains it, if any."""

    model: MultiHead
    optimizer: torch.optim.Optimizer
    method: Method | None
    batch: Batch
    task: str = "second"

    def step(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad()
        output = self.model(x, self.task)
        loss = F.cross_entropy(output, y)
        if self.method is not None and type(self.method).loss is not Method.loss:
            loss = loss + self.method.loss(x, output)
        loss.backward()
        self.optimizer.step()


def images(count: int, device: str) -> Batch:
    """Random pictures with neighbours alike, as in real ones, and random classes."""
    draw = torch.Generator().manual_seed(0)
    coarse = F.interpolate(torch.randn(count, 3, 8, 8, generator=draw), scale_factor=4, mode="bilinear")
    x = coarse + 0.1 * torch.randn(count, 3, 32, 32, generator=draw)
    return x.to(device), torch.randint(10, (count,), generator=draw).to(device)


def first_task(name: str, settings: dict[str, Any], batch: Batch, steps: int, device: str) -> Contender:
    """A contender that has made one step in its first task."""
    torch.manual_seed(0)
    model = MultiHead(CifarTrunk(), features=CifarTrunk.features).to(device)
    model.add_head("first", 10)
    on_gpu = {"capturable": True, "fused": True} if device == "cuda" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, **on_gpu)
    method = None
    if name != PLAIN:
        kind = METHODS[name].method_class
        more = {"example_input": batch[0][:2]} if issubclass(kind, NodeMethod) else {}
        method = kind(model, **settings, **more)
        method.begin_task("first", optimizer, epochs=1, steps_per_epoch=steps)
    contender = Contender(model, optimizer, method, batch, "first")
    contender.step()
    return contender


def second_task(name: str, batch: Batch, steps: int, device: str) -> Contender:
    contender = first_task(name, {}, batch, steps, device)
    model, optimizer, method = contender.model, contender.optimizer, contender.method
    if isinstance(method, PaperAGSCL):  # every second node is silent, so it stays free
        with torch.no_grad():
            for layer in method.graph.layers.values():
                layer.module.weight[::2] = 0
                layer.module.bias[::2] = 0
    if method is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfCheckWarning)  # a task of one step is what they warn of
            method.end_epoch()
            method.end_task([batch])
    model.add_head("second", 10)
    if method is not None:
        method.begin_task("second", optimizer, epochs=1_000_000, steps_per_epoch=steps)
    else:
        optimizer.param_groups[0]["params"].extend(model.heads["second"].parameters())
    contender.task = "second"
    contender.step()
    return contender


def captured(contender: Contender) -> Callable[[], None]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            contender.step()
    torch.cuda.current_stream().wait_stream(side)
    contender.optimizer.zero_grad(set_to_none=True)
    replay = graph_of(contender.step)
    weight = next(contender.model.heads["second"].parameters())
    before = weight.detach().clone()
    replay()
    torch.cuda.synchronize()
    if torch.equal(before, weight):
        raise RuntimeError("the captured step moves no weight")
    return replay


def graph_of(act: Callable[[], object]) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def time_steps(contenders: dict[str, Contender], batch: Batch, rounds: int, steps: int, device: str) -> dict[str, Any]:
    times = 3 if device == "cuda" else 1
    for contender in contenders.values():
        contender.batch = batch
    acts = {name: one.step for name, one in contenders.items() if name != PLAIN}
    taken = take_turns(contenders[PLAIN].step, acts, rounds, device, times)
    ends = {name: one.method.end_epoch for name, one in contenders.items() if one.method is not None}
    return {name: figures(taken[name], time_epoch_end(acts[name], ends[name], device), steps) for name in acts}


def time_captured(contenders: dict[str, Contender], rounds: int, steps: int) -> dict[str, Any]:
    """As `time_steps`; a method whose step cannot be captured gives the reason."""
    replays: dict[str, Callable[[], None]] = {}
    ends: dict[str, Callable[[], None]] = {}
    found: dict[str, Any] = {}
    for name, contender in contenders.items():
        try:
            replays[name] = captured(contender)
            if contender.method is not None:
                repeats = contender.method.end_epoch_capturable
                ends[name] = graph_of(contender.method.end_epoch) if repeats else contender.method.end_epoch
        except Exception as error:  # the others are still worth timing
            replays.pop(name, None)
            found[name] = {"error": reason(error)}
            print(f"{name} cannot be captured: {error}")
    if PLAIN not in replays:
        return found
    taken = take_turns(replays.pop(PLAIN), replays, rounds, "cuda", 10)
    return found | {
        name: figures(taken[name], time_epoch_end(replay, ends[name], "cuda"), steps)
        for name, replay in replays.items()
    }


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def time_epoch_end(step: Callable[[], None], end: Callable[[], None], device: str) -> float:
    """Seconds that a method takes at the end of an epoch; a step as in training comes before it."""
    taken = []
    for _ in range(6):
        step()
        taken.append(clocked(end, device))
    return float(summary(taken[1:])["median"])


def figures(pairs: Pairs, end: float, steps: int) -> dict[str, Any]:
    return {**compared(pairs, end / steps), "end_of_epoch_milliseconds": 1e3 * end}


def time_importances(names: list[str], batches: list[Batch], rounds: int, device: str) -> dict[str, Any]:
    """What `end_task` takes on `batches`, in epochs of plain training on them."""
    forms = [(name, settings) for name in names for settings in [{}, *FORMS.get(name, [])]]
    taken: dict[str, list[float]] = {label(*form): [] for form in forms}
    epochs: list[float] = []
    for _ in range(rounds):
        plain = first_task(PLAIN, {}, batches[0], len(batches), device)
        epochs.append(waited(lambda plain=plain: epoch(plain, batches), device))
        for form in forms:
            contender = first_task(*form, batches[0], len(batches), device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SelfCheckWarning)
                method = contender.method
                assert method is not None
                taken[label(*form)].append(waited(lambda method=method: method.end_task(batches), device))
            method.close()
    return in_epochs(taken, epochs)


def label(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])


def epoch(contender: Contender, batches: list[Batch]) -> None:
    for batch in batches:
        contender.batch = batch
        contender.step()


def waited(act: Callable[[], object], device: str) -> float:
    """Seconds until all is done: by the wall clock on a GPU, where the host waits too, else processor time."""
    if device != "cuda":
        return clocked(act, device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def time_avalanche(python: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "avalanche.json"
        words = [python, str(HOME / "benchmarks" / "avalanche_methods.py"), "--out", str(out)]
        for name in ("rounds", "measurements", "batch", "images"):
            words += [f"--{name}", str(getattr(arguments, name))]
        words += ["--small-batch", str(SMALL)]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(HOME / "src")})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each method")
    parser.add_argument("--measurements", type=int, default=3, help="how often importances are measured; 0: not at all")
    parser.add_argument("--methods", nargs="+", default=[name for name, one in METHODS.items() if not one.is_bound])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=4500, help="of an epoch, and to measure importances on")
    parser.add_argument("--avalanche", metavar="PYTHON", help="an interpreter that has Avalanche; on a CPU alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    if device == "cuda" and arguments.avalanche:
        parser.error("--avalanche goes with --device cpu")
    name = "methods_cuda" if device == "cuda" else "methods"
    out = arguments.out or HOME / "results" / "benchmarks" / f"{name}.json"
    torch.set_num_threads(1)
    if device == "cpu":
        tune_malloc()
    x, y = images(arguments.images, device)
    batches = list(zip(x.split(arguments.batch), y.split(arguments.batch), strict=True))
    steps = len(batches)
    names = [PLAIN, *arguments.methods]
    contenders = {name: second_task(name, batches[0], steps, device) for name in names}
    found: dict[str, Any] = {
        "network": "CifarTrunk",
        "batch": arguments.batch,
        "images": arguments.images,
        "steps_per_epoch": steps,
        "rounds": rounds,
        "device": device,
        "limits": LIMITS,
        "step": time_steps(contenders, batches[0], rounds, steps, device),
    }
    if device == "cpu":
        small = time_steps(contenders, (x[:SMALL], y[:SMALL]), 5 * rounds, steps, device)
        found |= {"small_batch": SMALL, "small_rounds": 5 * rounds, "small_step": small}
        report(f"batch {SMALL}: step", found["small_step"], {})
    report("step", found["step"], LIMITS["cpu"] if device == "cpu" else {})
    if arguments.measurements:
        found["importance"] = time_importances(arguments.methods, batches, arguments.measurements, device)
        for name, one in found["importance"]["methods"].items():
            print(f"importance {name}: {one['epochs']['median']:.2f} epochs")
    if device == "cuda":
        try:
            found["captured"] = time_captured(contenders, rounds, steps)
        except Exception as error:  # what was timed before is kept
            found["captured"] = {PLAIN: {"error": reason(error)}}
            print(f"captured steps could not be timed: {error}")
        report("captured step", found["captured"], LIMITS["captured"])
    if arguments.avalanche:
        found["avalanche"] = time_avalanche(arguments.avalanche, arguments)
    record(out, found)


def report(what: str, found: dict[str, Any], limits: dict[str, float]) -> None:
    for name, one in found.items():
        if "error" in one:
            continue
        low, high = one["ratio"]["certain"]
        limit = f", limit {limits[name]}" if name in limits else ""
        print(f"{what} {name}: {one['ratio']['median']:.3f} of plain training ({low:.3f} to {high:.3f}{limit})")


if __name__ == "__main__":
    main()
