"""How fast the paper's loop runs on tinyimagenet32 with AGS-CL, way by way: steps one by one, captured, and so on.

python benchmarks/fast.py --device cuda                  # a step, way by way: results/benchmarks/fast_<device>.json
python benchmarks/fast.py --device cuda --whole 5 --mps  # whole runs: results/benchmarks/whole_<device>.json
python benchmarks/fast.py --agree 3                      # do ways end alike? results/benchmarks/agree_<device>.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measured import record
from timing import compared, take_turns

from agscl import tasks
from agscl.experiments.build import build_trainer
from agscl.experiments.compare import summarize_values
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.fast.fast_engine import GraphEngine
from agscl.runs import Run
from agscl.system.process import skip_gc_at_exit, tune_malloc

PRESET = "tinyimagenet32"
SETTINGS = {"lam": 10_000.0}
FAST = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "plain": {"engine": "plain"},
        "captured": {"engine": "captured"},
        "captured, TF32": {"engine": "captured", "precision": "tf32"},
        "captured, TF32, channels last": {"engine": "captured", "precision": "tf32", "channels_last": True},
        "captured, bf16, channels last": {"engine": "captured", "precision": "bf16", "channels_last": True},
        "captured, TF32, channels last, compiled": {**FAST, "precision": "tf32"},
        "captured, bf16, channels last, compiled": FAST,
    },
    "cpu": {
        "plain": {"engine": "plain"},
        "channels last": {"engine": "plain", "channels_last": True},
        "memory kept": {"engine": "plain", "keep_memory": True},
        "memory kept, channels last": {"engine": "plain", "keep_memory": True, "channels_last": True},
        "memory kept, compiled": {"engine": "plain", "keep_memory": True, "compile": True},
    },
}
COMPARED = (
    "plain",
    "captured, TF32, channels last, compiled",
    "captured, bf16, channels last, compiled",
    "channels last",
)


def wait_and_read_clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_step(way: dict[str, Any], device: str, sequence: tasks.TaskSequence, epochs: int) -> dict[str, Any]:
    """Milliseconds per step within the second task, ends of epochs included, after two epochs to warm up."""
    config = configure(PRESET, method="paper-agscl", device=device, epochs=epochs, **SETTINGS, **way)
    trainer = build_trainer(config, "paper-agscl", sequence[:2])
    start = wait_and_read_clock(device)
    while trainer.task_index < 1 or trainer.epoch < 2:
        trainer.advance()
    warm = wait_and_read_clock(device)
    while trainer.epoch < epochs:
        trainer.advance()
    end = wait_and_read_clock(device)
    steps = (epochs - 2) * trainer.steps_per_epoch
    return {"way": way, "ms_per_step": 1000 * (end - warm) / steps, "seconds_before": warm - start}


def measure_steps_in_turns(rounds: int) -> dict[str, Any]:
    """The same on a CPU, which other programs share: all ways take turns, a step each, with a plain one between any
    two, each in a process of its own. Ends of epochs are not counted."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, way in WAYS["cpu"].items():
        pipes[name], other_end = context.Pipe()
        context.Process(target=_serve_steps, args=(other_end, way), daemon=True).start()
        pipes[name].recv()
        print(f"{name} is ready", flush=True)

    def clock(step: Any, device: str, times: int) -> float:
        pipes[step()].send(True)
        return float(pipes[step()].recv())

    names = {name: partial(str, name) for name in pipes}
    rows: dict[str, Any] = {}
    for name, pairs in take_turns(names.pop("plain"), names, rounds, "cpu", clock=clock).items():
        results = compared(pairs)
        rows.setdefault("plain", {"way": WAYS["cpu"]["plain"], "ms_per_step": results["plain_milliseconds"]["median"]})
        rows[name] = {"way": WAYS["cpu"][name], "ms_per_step": results["milliseconds"]["median"], **results}
        print(f"{name:42} {rows[name]['ms_per_step']:8.1f} ms, {1 / results['ratio']['median']:.2f} times as fast")
    for pipe in pipes.values():
        pipe.send(False)
    return rows


def _serve_steps(requests: Connection, way: dict[str, Any]) -> None:
    """Make a step of the second task at every request, and answer with the seconds of processor time it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if way.get("keep_memory"):
        tune_malloc()
    first, second = tasks.load(PRESET, seed=0)[:2]
    size = len(first.train_y) // 16  # of the first task a little is enough
    short = replace(first, train_x=first.train_x[:size], train_y=first.train_y[:size])
    options = {name: value for name, value in way.items() if name != "keep_memory"}
    config = configure(PRESET, method="paper-agscl", device="cpu", epochs=1, **SETTINGS, **options)
    trainer = build_trainer(config, "paper-agscl", (short, second))
    while trainer.task_index < 1 or trainer.step < 2:
        trainer.advance()
    whole = trainer.examples // config.training.batch_size  # batches but for the last
    requests.send(True)
    while requests.recv():
        trainer.step %= whole
        start = time.process_time()
        trainer.advance()
        requests.send(time.process_time() - start)


PARTS = (
    ("gradients of weights", ("wgrad", "weight_grad", "conv_relu_input_backward", "_sum_partials")),
    ("gradients of inputs", ("dgrad",)),
    ("forward convolutions", ("fprop", "convolve", "conv_relu_input_forward")),
    ("between layers", ("triton_", "_link_")),
    ("optimizer", ("FusedOptimizer",)),
)
"""Kernels of a step by words in their names; all others are small ones."""


def profile_step(way: dict[str, Any], device: str, sequence: tasks.TaskSequence) -> dict[str, Any]:
    """Microseconds of GPU time of one captured step of the second task, part by part."""
    from torch.profiler import ProfilerActivity, profile

    config = configure(PRESET, method="paper-agscl", device=device, epochs=6, **SETTINGS, **way)
    trainer = build_trainer(config, "paper-agscl", sequence[:2])
    while trainer.task_index < 1 or trainer.epoch < 4:
        trainer.advance()
    engine = trainer.engine
    assert isinstance(engine, GraphEngine)
    assert engine.state is not None
    step = engine.runner.graphs[config.training.batch_size]
    engine.state.position.zero_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            step.replay()
        torch.cuda.synchronize()
    results = dict.fromkeys([name for name, _ in PARTS] + ["others"], 0.0)
    rows = profiled.key_averages()
    for row in rows:
        results[classify_kernel(row.key)] += row.device_time_total / STEPS
    return {"microseconds": results, "kernels": sum(row.count for row in rows) / STEPS}


STEPS = 10
"""Not more than an epoch has."""


def classify_kernel(kernel: str) -> str:
    return next((name for name, words in PARTS if any(word in kernel for word in words)), "others")


def execute_whole_run(seed: int, device: str, way: dict[str, Any], epochs: int = 100) -> dict[str, Any]:
    """All ten tasks as a run on disk, certificates and checkpoints included."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    way = {**way, "epochs": epochs}
    config = configure(PRESET, method="paper-agscl", seed=seed, device=device, reference=False, **SETTINGS, **way)
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run") as run:
        result = execute_run(config, run, checkpoint_every=60.0, threads=1)  # as `compare` does, and a run on a GPU
    outcome = result["methods"]["paper-agscl"]
    return {
        "seed": seed,
        "seconds": time.perf_counter() - start,
        "training_seconds": result["seconds"]["paper-agscl"],
        "average_accuracy": outcome["average_accuracy"],
        "forgetting": outcome["forgetting"],
        "training": asdict(config.training),
    }


def measure_process(device: str) -> dict[str, Any]:
    """Seconds of a process of its own from its start to its end, with nothing compiled before, and again: the middle
    one of three, beside what each took."""
    words = [sys.executable, __file__, "--device", device, "--one"]
    with tempfile.TemporaryDirectory() as folder:

        def process() -> dict[str, Any]:
            start = time.perf_counter()
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            out = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
            results = {"process_seconds": time.perf_counter() - start, **json.loads(out.splitlines()[-1])}
            print(f"alone: {results['process_seconds']:.1f} s, {results['seconds']:.1f} s of it the run", flush=True)
            return results

        first, *rest = (process() for _ in range(4))
    again = sorted(rest, key=lambda run: float(run["process_seconds"]))[1]
    again["each"] = [run["process_seconds"] for run in rest]
    return {"nothing compiled before": first, "again": again}


@contextmanager
def mps_daemon(wanted: bool) -> Iterator[None]:
    """Let processes compute on the GPU at the same time (NVIDIA's MPS), instead of in turns."""
    if wanted:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        if wanted:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True)


def compare_outcomes(seeds: int, device: str, epochs: int, jobs: int) -> dict[str, Any]:
    """Average accuracy and forgetting of short runs, way by way and seed by seed."""
    ways = {name: way for name, way in WAYS[device].items() if name in COMPARED}
    work = [(seed, device, way, epochs) for way in ways.values() for seed in range(seeds)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        runs = pool.starmap(execute_whole_run, work, chunksize=1)
    results = {}
    for number, name in enumerate(ways):
        way_runs = runs[number * seeds : (number + 1) * seeds]
        results[name] = {
            key: summarize_values([run[key] for run in way_runs]) for key in ("average_accuracy", "forgetting")
        }
        print(name, results[name], flush=True)
    return {"preset": PRESET, "method": "paper-agscl", "settings": SETTINGS, "epochs": epochs, "ways": results}


def measure_whole_runs(seeds: int, device: str, way: dict[str, Any], mps: bool) -> dict[str, Any]:
    """By themselves, here once all is at hand, and several side by side."""
    results: dict[str, Any] = {"alone": measure_process(device)}
    execute_whole_run(0, device, way, epochs=1)
    results["whole"] = execute_whole_run(0, device, way)
    print(results["whole"], flush=True)
    start = time.perf_counter()
    with mps_daemon(mps), multiprocessing.get_context("spawn").Pool(seeds) as pool:
        runs = pool.starmap(execute_whole_run, [(seed, device, way) for seed in range(seeds)])
    results["side_by_side"] = {"seconds": time.perf_counter() - start, "mps": mps, "runs": runs}
    print(results["side_by_side"]["seconds"], [(run["seconds"], run["average_accuracy"]) for run in runs], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15, help="on a CPU: steps of each way")
    parser.add_argument(
        "--whole",
        type=int,
        default=0,
        metavar="SEEDS",
        help="instead: whole runs the fastest way, so many at once",
    )
    parser.add_argument("--mps", action="store_true", help="with --whole: NVIDIA's MPS for those at once")
    parser.add_argument("--one", action="store_true", help="instead: one whole run, as JSON")
    parser.add_argument("--agree", type=int, default=0, metavar="SEEDS", help="instead: runs of so many seeds each way")
    parser.add_argument("--jobs", type=int, default=2, help="with --agree: runs at a time")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = arguments.device
    if device == "cpu":
        torch.set_num_threads(1)
    way = FAST if device == "cuda" else {}
    if arguments.one:
        skip_gc_at_exit()  # as `agscl` does
        tune_malloc()
        print(json.dumps(execute_whole_run(0, device, way)))
        return
    if arguments.agree:
        results = compare_outcomes(arguments.agree, device, arguments.epochs, arguments.jobs)
        record(arguments.out or Path(f"results/benchmarks/agree_{device}.json"), results)
        return
    results: dict[str, Any] = {"preset": PRESET, "method": "paper-agscl", "settings": SETTINGS}
    if arguments.whole:
        results |= measure_whole_runs(arguments.whole, device, way, arguments.mps)
        record(arguments.out or Path(f"results/benchmarks/whole_{device}.json"), results)
        return
    start = time.perf_counter()
    sequence = tasks.load(PRESET, seed=0)
    print(f"data: {time.perf_counter() - start:.1f} s", flush=True)
    if device == "cpu":
        results |= {"rounds": arguments.rounds, "ways": measure_steps_in_turns(arguments.rounds)}
        record(arguments.out or Path(f"results/benchmarks/fast_{device}.json"), results)
        return
    rows = {}
    for name, tried in WAYS[device].items():
        try:
            rows[name] = measure_step(tried, device, sequence, arguments.epochs)
            print(f"{name:42} {rows[name]['ms_per_step']:8.3f} ms, {rows[name]['seconds_before']:6.1f} s", flush=True)
        except Exception as error:
            rows[name] = {"way": tried, "failed": f"{type(error).__name__}: {error}"}
            print(f"{name:42} failed: {rows[name]['failed'][:1500]}", flush=True)
    results |= {"epochs": arguments.epochs, "ways": rows}
    results["step"] = profile_step(FAST, device, sequence)
    print(results["step"], flush=True)
    record(arguments.out or Path(f"results/benchmarks/fast_{device}.json"), results)


if __name__ == "__main__":
    main()
