"""Omniglot's first alphabets with the paper's settings, fine-tuning and AGS-CL, several seeds side by side.

AGSCL_DATA=FOLDER python benchmarks/omniglot.py [--alphabets 5] [--seeds 3] [--device cuda]
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from measured import record

from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.experiments.verify import verify_run
from agscl.runs import Run

KEPT = (
    "accuracies",
    "average_accuracy",
    "plasticity",
    "stability",
    "forgetting",
    "statistics",
    "memory",
    "certificate",
)


def one(job: tuple[int, int, str, int | None]) -> dict[str, Any]:
    seed, alphabets, device, epochs = job
    changes = {} if epochs is None else {"epochs": epochs}
    config = configure("omniglot5", method="paper-agscl", seed=seed, device=device, **changes)
    config = dataclasses.replace(config, task_options={"alphabets": alphabets})
    with tempfile.TemporaryDirectory() as folder:
        with Run(Path(folder) / "run") as run:
            result = execute_run(config, run, checkpoint_every=1e9, threads=1)
        verdict = verify_run(Path(folder) / "run")
    methods = {
        name: {key: outcome[key] for key in KEPT if key in outcome} for name, outcome in result["methods"].items()
    }
    averages = {name: round(100 * outcome["average_accuracy"], 1) for name, outcome in methods.items()}
    print(f"seed {seed}: {averages}, {result['seconds']}", flush=True)
    return {
        "seed": seed,
        "config": config.as_dict(),
        "tasks": result["tasks"],
        "methods": methods,
        "verified": {"ok": verdict.ok, "lines": verdict.lines},
        "seconds": result["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alphabets", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    jobs = [(seed, arguments.alphabets, arguments.device, arguments.epochs) for seed in range(arguments.seeds)]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        runs = pool.map(one, jobs)
    out = arguments.out or Path(f"results/omniglot{arguments.alphabets}.json")
    record(out, {"preset": "omniglot5", "alphabets": arguments.alphabets, "runs": runs})


if __name__ == "__main__":
    main()
