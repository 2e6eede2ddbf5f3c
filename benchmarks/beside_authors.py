"""What the authors' code reached (results/authors.json), and this library with the same settings on the same data.

AGSCL_DATA=FOLDER python benchmarks/beside_authors.py --device cuda --fast     # results/beside_authors.json

Goes on where it stopped. Theirs was one seed, 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measured import HOME, record
from supervised import commits_of, parsed, run

from agscl.experiments.compare import summarize_values
from agscl.experiments.jobs import Job
from agscl.experiments.run_config import configure
from agscl.experiments.search import name_settings
from agscl.runs.errors import Interrupted
from agscl.runs.json_files import read_json

PRESET = "tinyimagenet32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/beside_authors.json"))
    arguments, changes = parsed(parser)
    theirs = json.loads((HOME / "results" / "authors.json").read_text())[PRESET]
    planned = [[job_of(row, seed, arguments, changes) for seed in range(arguments.seeds)] for row in theirs]
    every = [job for jobs in planned for job in jobs]
    try:
        run(arguments, every, arguments.jobs)
    except Interrupted:
        print("stopped at the deadline; the same command continues", flush=True)
    rows = [
        {
            "method": row["method"],
            "settings": row["settings"],
            "authors": row["average_accuracy"],
            "seeds": [job.config.seed for job in jobs if job.is_finished],
            **{key: summarize_values([outcome(job)[key] for job in jobs if job.is_finished]) for key in KEPT},
        }
        for row, jobs in zip(theirs, planned, strict=True)
    ]
    for row in rows:
        print(row["method"], row["settings"], "theirs", row["authors"], "ours", row["average_accuracy"], flush=True)
    finished = [job for job in every if job.is_finished]
    record(
        arguments.out,
        {
            "preset": PRESET,
            "changes": changes,
            "commits": commits_of(job.folder for job in finished),
            "rows": rows,
            "complete": finished == every,
        },
    )


KEPT = ("average_accuracy", "forgetting")


def job_of(row: dict[str, Any], seed: int, arguments: argparse.Namespace, changes: dict[str, Any]) -> Job:
    config = configure(
        PRESET, method=row["method"], seed=seed, device=arguments.device, reference=False, **changes, **row["settings"]
    )
    return Job(
        config, arguments.runs / "beside-authors" / f"{row['method']}-{name_settings(row['settings'])}-seed{seed}"
    )


def outcome(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = read_json(job.folder / "result.json")["methods"][job.config.method]
    return found


if __name__ == "__main__":
    main()
