"""How long a whole run of tinyimagenet32 takes, method by method, from the start of its process to its end.

python benchmarks/whole_runs.py --device cuda                  # results/benchmarks/whole_runs_<device>.json
python benchmarks/whole_runs.py --device cpu --tiny            # the same on digits, to see that it works

Each run is a process of its own, alone on the machine. The first of each method, which compiles, is not counted; then
all methods take turns. Results are written after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from measured import record
from timing import summary

from agscl.experiments.presets import get_fast_settings
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run
from agscl.system.process import skip_gc_at_exit, tune_malloc

METHODS = ("finetune", "paper-agscl", "agscl", "packnet", "hat")
LIMITS = {
    ("agscl", "paper-agscl"): {"cuda": 1.15, "cpu": 1.05},
    ("hat", "finetune"): {"cuda": 2.0, "cpu": 2.0},
}
"""How many times as long as another method's run a run may take, by device."""


def run_once(method: str, device: str, tiny: bool) -> dict[str, Any]:
    """One whole run in this process: all tasks, checkpoints and certificates included."""
    preset = "digits" if tiny else "tinyimagenet32"
    fast = get_fast_settings(device, preset) | ({"epochs": 1} if tiny else {})
    config = configure(preset, method=method, seed=0, device=device, reference=False, **fast)
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run") as run:
        result = execute_run(config, run, checkpoint_every=60.0, threads=1)
    outcome = result["methods"][method]
    return {
        "training_seconds": result["seconds"][method],
        "average_accuracy": outcome["average_accuracy"],
        "forgetting": outcome["forgetting"],
    }


def run_process(method: str, device: str, tiny: bool, cache: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", method, "--device", device, *(["--tiny"] if tiny else [])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    start = time.perf_counter()
    done = subprocess.run(words, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{method} failed: {done.stderr.strip()[-2000:]}")
    print(f"{method}: {seconds:.1f} s", flush=True)
    return {"process_seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def compare(runs: dict[str, list[dict[str, Any]]], device: str) -> dict[str, Any]:
    """Seconds of each method, and how many times as long as another's they are, round by round."""
    seconds = {method: [run["process_seconds"] for run in own] for method, own in runs.items()}
    times = [
        {
            "method": method,
            "beside": other,
            "times_as_long": summary([a / b for a, b in zip(seconds[method], seconds[other], strict=True)]),
            "limit": limits[device],
        }
        for (method, other), limits in LIMITS.items()
        if seconds.keys() >= {method, other}
    ]
    rows = {method: {"process_seconds": summary(seconds[method]), "runs": own} for method, own in runs.items()}
    return {"methods": rows, "times_as_long": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method, after the first")
    parser.add_argument("--tiny", action="store_true", help="digits for an epoch")
    parser.add_argument("--one", help="instead: one run of a method, as JSON")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device, tiny = arguments.device, arguments.tiny
    warnings.simplefilter("ignore")
    if arguments.one:
        skip_gc_at_exit()  # as `agscl` does
        tune_malloc()
        print(json.dumps(run_once(arguments.one, device, tiny)))
        return
    out = arguments.out or Path(f"results/benchmarks/whole_runs_{device}.json")
    methods = arguments.methods.split(",")
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as cache:
        first = {method: run_process(method, device, tiny, cache) for method in methods}
        for number in range(arguments.repeats):
            for method in random.Random(number).sample(methods, len(methods)):
                runs[method].append(run_process(method, device, tiny, cache))
            record(out, {"preset": "digits" if tiny else "tinyimagenet32", "first": first, **compare(runs, device)})


if __name__ == "__main__":
    main()
