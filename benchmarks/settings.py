"""The search behind the settings of the preset `digits`: every method alike, five values of its main setting.

python benchmarks/settings.py [--jobs 2] [--methods agscl,ewc] [--seeds 2]

It uses seeds that no comparison uses. The best value has the highest mean of average accuracy.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measured import record

from agscl.experiments.jobs import Job, JobOutcome, run_jobs
from agscl.experiments.run_config import configure
from agscl.runs.json_files import read_json

FIRST_SEED = 1000
SEARCHED: dict[str, tuple[str, list[float]]] = {
    "paper-agscl": ("lam", [200, 500, 1000, 2000, 5000]),
    "ewc": ("lam", [1e1, 1e2, 1e3, 1e4, 1e5]),
    "si": ("c", [1, 10, 100, 1e3, 1e4]),
    "rwalk": ("lam", [0.1, 1, 10, 100, 1000]),
    "mas": ("lam", [0.01, 0.1, 1, 10, 100]),
    "hat": ("c", [0.1, 0.25, 0.75, 1.5, 2.5]),
    "packnet": ("share", [0.6, 0.7, 0.8, 0.9, 0.95]),
    "wsn": ("c", [0.03, 0.05, 0.1, 0.3, 0.5]),
    "lwf": ("weight", [0.3, 1, 3, 10, 30]),
    "l2": ("lam", [0.01, 0.1, 1, 10, 100]),
    "gpm": ("threshold", [0.9, 0.95, 0.97, 0.99, 0.999]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/settings-digits"))
    parser.add_argument("--out", type=Path, default=Path("results/digits_settings.json"))
    parser.add_argument("--methods", default=",".join(SEARCHED))
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    searched = {name: SEARCHED[name] for name in arguments.methods.split(",")}

    tried: dict[tuple[str, float], list[Job]] = {}
    for method, (setting, values) in searched.items():
        for value in values:
            tried[method, value] = [
                Job(
                    configure("digits", method=method, seed=seed, reference=False, **{setting: value}),
                    arguments.runs / f"{method}-{setting}{value:g}-seed{seed}",
                )
                for seed in seeds
            ]

    def report_end(job: Job, outcome: JobOutcome) -> None:
        print(job.folder.name, outcome.error or "done", flush=True)

    every = [job for jobs in tried.values() for job in jobs]
    run_jobs(every, processes=arguments.jobs, checkpoint_every=1e9, on_job_end=report_end)

    found: dict[str, Any] = {}
    for method, (setting, values) in searched.items():
        averages = {value: [_average(job) for job in tried[method, value]] for value in values}
        best = max(values, key=lambda value: statistics.mean(averages[value]))
        found[method] = {
            "setting": setting,
            "best": best,
            "tried": [
                {"value": value, "average_accuracy": statistics.mean(averages[value]), "by_seed": averages[value]}
                for value in values
            ],
        }
        print(method, setting, {value: round(100 * statistics.mean(averages[value]), 1) for value in values}, "→", best)
    record(arguments.out, {"preset": "digits", "seeds": list(seeds), "methods": found})


def _average(job: Job) -> float:
    result = read_json(job.folder / "result.json")
    average: float = result["methods"][job.config.method]["average_accuracy"]
    return average


if __name__ == "__main__":
    main()
