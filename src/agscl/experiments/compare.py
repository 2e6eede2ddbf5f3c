"""Methods compared over several seeds: which runs, and their metrics as mean and standard deviation."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.experiments.jobs import Job
from agscl.experiments.method_entries import METHODS, REFERENCE
from agscl.experiments.run_config import RunConfig, configure
from agscl.runs import RunError, read_finished_runs, read_result
from agscl.runs.json_files import encode_json
from agscl.system.files import write_if_changed

METRICS = ("average_accuracy", "plasticity", "stability", "forgetting")


def plan_comparison(
    preset: str,
    methods: Sequence[str],
    seeds: int,
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> list[Job]:
    """All runs of a comparison, in the order of the paper's table, with fine-tuning once per seed.

    `settings` are the settings of single methods, by name; `changes` apply to the training of all.
    """
    names = [name for name in METHODS if name in {*methods, REFERENCE}]
    return [
        Job(
            configure(preset, method=name, seed=seed, reference=False, **{**changes, **(settings or {}).get(name, {})}),
            folder / f"{name}-seed{seed}",
        )
        for seed in range(seeds)
        for name in names
    ]


def add_finished_runs(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """The jobs, and all other finished runs of comparisons in the folder, in the order of the paper's table."""
    jobs, names = list(jobs), list(METHODS)
    planned = {job.folder for job in jobs}
    for run_folder, result in read_finished_runs(folder):
        if run_folder not in planned:
            with contextlib.suppress(RunError):  # written by another version, and not asked for
                config = RunConfig.from_dict(result["config"])
                if run_folder.name == f"{config.method}-seed{config.seed}":  # others belong to a study
                    jobs.append(Job(config, run_folder))
    known = [job for job in jobs if job.config.method in names]
    return sorted(known, key=lambda job: (job.config.seed, names.index(job.config.method)))


def collect_comparison(jobs: Sequence[Job]) -> dict[str, Any]:
    """The metrics of a comparison's finished runs, method by method: every value, mean and standard deviation."""
    results = {(job.config.method, job.config.seed): read_result(job.folder) for job in jobs if job.is_finished}
    collected: dict[str, Any] = {}
    for name in dict.fromkeys(job.config.method for job in jobs):
        by_seed = {seed: result for (method, seed), result in results.items() if method == name}
        if not by_seed:
            continue
        values = [
            compute_metrics(result["methods"][name], results.get((REFERENCE, seed), {}).get("methods"))
            for seed, result in by_seed.items()
        ]
        first = next(iter(by_seed.values()))
        collected[name] = {
            "settings": {key: value for key, value in first["config"]["settings"].items() if key != "seed"},
            "seeds": list(by_seed),
            "accuracies": [result["methods"][name]["accuracies"] for result in by_seed.values()],
            "memory": first["methods"][name]["memory"],
            "seconds": [result["seconds"][name] for result in by_seed.values()],
            **_collect_rewards([result["methods"][name] for result in by_seed.values()], by_seed, results),
            **{metric: summarize_values([of_run[metric] for of_run in values]) for metric in METRICS},
        }
    return collected


def _collect_rewards(
    outcomes: Sequence[Mapping[str, Any]], seeds: Iterable[int], results: Mapping[tuple[str, int], Any]
) -> dict[str, Any]:
    """Of agents: scores, all evaluations, the accumulated reward at the end, relative to fine-tuning's best, and the
    forward transfer, where there are agents that learned a single task each."""
    if not all("evaluations" in outcome for outcome in outcomes):
        return {}
    seeds = list(seeds)
    references: list[Any] = [results.get((REFERENCE, seed)) for seed in seeds]
    singles: list[Any] = [results.get(("separate", seed)) for seed in seeds]
    transfer = [
        single and metrics.forward_transfer(outcome["evaluations"], single["methods"]["separate"]["evaluations"])
        for outcome, single in zip(outcomes, singles, strict=True)
    ]
    accumulated: list[float | None] = []
    left_out: list[list[str]] = []
    for outcome, reference in zip(outcomes, references, strict=True):
        compared = reference and reference["methods"][REFERENCE]["evaluations"]
        accumulated.append(compared and metrics.accumulated_rewards(outcome["evaluations"], compared)[-1])
        left_out.append([reference["tasks"][task] for task in metrics.find_unlearned(compared)] if reference else [])
    return {
        "scores": [outcome["scores"] for outcome in outcomes],
        "evaluations": [outcome["evaluations"] for outcome in outcomes],
        "accumulated_reward": summarize_values(accumulated),
        "not_accumulated": left_out,
        "forward_transfer": summarize_values(transfer),
    }


def compute_metrics(outcome: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, float | None]:
    """The metrics of one run that is compared; plasticity against fine-tuning on the same seed, where that is known."""
    values = {metric: outcome[metric] for metric in METRICS}
    if reference is not None:
        values["plasticity"] = metrics.plasticity(outcome["accuracies"], reference[REFERENCE]["accuracies"])
    return values


def summarize_values(values: Sequence[float | None]) -> dict[str, Any]:
    """Of the runs compared, mean and sample standard deviation (n − 1; None for a single value)."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.mean(known) if known else None,
        "deviation": statistics.stdev(known) if len(known) > 1 else None,
        "values": list(values),
    }


def store_comparison(folder: Path, preset: str, collected: dict[str, Any], errors: Mapping[str, str]) -> Path:
    """Write comparison.json; `errors` says why runs failed."""
    path = folder / "comparison.json"
    write_if_changed(path, encode_json({"preset": preset, "methods": collected, "missing": dict(errors)}))
    return path
