"""The paper's experiments on data at hand: settings searched for every method alike, then several seeds.

AGSCL_DATA=FOLDER python benchmarks/supervised.py tinyimagenet32 --search --device cuda --fast     # results/search/…
AGSCL_DATA=FOLDER python benchmarks/supervised.py tinyimagenet32 --seeds 5 --device cuda --fast    # results/…

Both go on where they stopped (finished runs in --runs are not repeated). On one GPU several processes share it best
under NVIDIA's MPS (`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measured import commit, record, short

from agscl.experiments import compare, search
from agscl.experiments.jobs import Job, JobOutcome, run_jobs
from agscl.experiments.presets import get_fast_settings
from agscl.runs.errors import Interrupted

SIX = ("agscl", "ewc", "si", "rwalk", "mas", "hat")


def run(
    arguments: argparse.Namespace, jobs: Sequence[Job], processes: int, after_each: Callable[[], object] = lambda: None
) -> None:
    def report_end(job: Job, outcome: JobOutcome) -> None:
        if outcome.error is None:
            (job.folder / "commit").write_text(commit())
            after_each()
        print(f"{time.perf_counter() - START:6.0f} s  {job.folder.name:40} {job} {outcome.error or 'done'}", flush=True)

    run_jobs(
        jobs,
        processes=processes,
        checkpoint_every=1e9,
        should_stop=lambda: time.perf_counter() - START > arguments.deadline,
        on_job_end=report_end,
    )


def commits_of(folders: Iterable[Path]) -> list[str]:
    """At which commits runs were made, the commonest first; runs may be older than this call."""
    found = Counter(short(path.read_text().strip()) for folder in folders if (path := folder / "commit").exists())
    return [name for name, _ in found.most_common()]


def search_all(arguments: argparse.Namespace, methods: Sequence[str], changes: dict[str, Any]) -> None:
    """Every method at the same time, so that the device is never idle."""

    values = json.loads(arguments.values)
    folders = {method: arguments.runs / f"search-{arguments.preset}-{method}" for method in methods}

    def search_method(method: str) -> list[search.Trial]:
        folder = folders[method]
        try:
            return search.search_settings(
                arguments.preset,
                method,
                folder,
                lambda jobs: run(arguments, jobs, max(1, arguments.jobs // min(arguments.jobs, len(methods)))),
                seeds=arguments.seeds,
                only=arguments.only,
                values=values.get(method),
                device=arguments.device,
                **changes,
            )
        except Interrupted:
            stopped.append(method)
            return search.load_trials(folder, method, seeds=arguments.seeds)

    stopped: list[str] = []

    with ThreadPoolExecutor(min(arguments.jobs, len(methods))) as pool:
        found = dict(zip(methods, pool.map(search_method, methods), strict=True))
    for method, tried in found.items():
        for each in tried:
            print(f"{method:8} {each.settings} {each.valid_accuracy}")
    record(
        arguments.out or Path(f"results/search/{arguments.preset}.json"),
        {
            "preset": arguments.preset,
            "seed": search.SEED,
            "seeds": arguments.seeds,
            "changes": changes,
            "stopped_early": sorted(stopped),
            "commits": commits_of(path.parent for folder in folders.values() for path in folder.glob("*/result.json")),
            "methods": {method: [vars(each) for each in tried] for method, tried in found.items()},
        },
    )


def compare_all(arguments: argparse.Namespace, methods: Sequence[str], changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {}
    if arguments.settings is not None:
        tried = json.loads(arguments.settings.read_text())["methods"]
        settings = {method: tried[method][0]["settings"] for method in methods if method in tried}
    for method, own in json.loads(arguments.set).items():
        settings[method] = {**settings.get(method, {}), **own}
    plan = compare.plan_comparison(
        arguments.preset,
        methods,
        arguments.seeds,
        arguments.runs / f"compare-{arguments.preset}",
        settings=settings,
        device=arguments.device,
        **changes,
    )
    order = {method: number for number, method in enumerate(arguments.first.split(","))}
    long_first = sorted(plan, key=lambda job: order.get(job.config.method, len(order)))

    def write_finished() -> dict[str, Any]:
        compared = compare.collect_comparison(plan)
        record(
            arguments.out or Path(f"results/{arguments.preset}.json"),
            {
                "preset": arguments.preset,
                "changes": changes,
                "jobs": arguments.jobs,
                "commits": commits_of([job.folder for job in plan if job.is_finished]),
                "methods": compared,
                "complete": all(job.is_finished for job in plan),
            },
        )
        return compared

    try:
        run(arguments, long_first, arguments.jobs, after_each=write_finished)  # a machine may be gone before the end
    except Interrupted:
        print("stopped at the deadline; the same command continues", flush=True)
    for method, row in write_finished().items():
        print(f"{method:9} {row['average_accuracy']} forgetting {row['forgetting']['mean']}", flush=True)


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, those that all benchmarks of runs have among them, and what they change of a preset's training."""
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--training", default="{}", help="other settings of training as JSON, '{\"evaluations\": 10}'")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no more is run")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    preset = getattr(arguments, "preset", "digits")
    changes: dict[str, Any] = get_fast_settings(arguments.device, preset) if arguments.fast else {}
    changes |= json.loads(arguments.training)
    if arguments.epochs is not None:
        changes["epochs"] = arguments.epochs
    return arguments, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--only", nargs="+", default=None, help="with --search: these settings alone, e.g. lam")
    parser.add_argument(
        "--values", default="{}", help="with --search: just these values of its first setting, '{\"ewc\": [100, 400]}'"
    )
    parser.add_argument("--methods", default=",".join(SIX))
    parser.add_argument("--seeds", type=int, default=None, help="(default: 5; with --search 1)")
    parser.add_argument("--settings", type=Path, default=None, help="a search's result to take settings from")
    parser.add_argument("--first", default="", help="methods whose runs take longest, to start with")
    parser.add_argument("--set", default="{}", help='settings of methods as JSON, e.g. \'{"ewc": {"lam": 400}}\'')
    parser.add_argument("--out", type=Path, default=None)
    arguments, changes = parsed(parser)
    arguments.seeds = arguments.seeds or (1 if arguments.search else 5)
    methods = arguments.methods.split(",")
    try:
        (search_all if arguments.search else compare_all)(arguments, methods, changes)
    except Interrupted:
        print("stopped at the deadline; the same command continues", flush=True)
        sys.exit(130)


START = time.perf_counter()

if __name__ == "__main__":
    main()
