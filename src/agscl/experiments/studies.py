"""The paper's studies of AGS-CL: variants of its paper's form, compared on a preset."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.experiments.compare import METRICS, compute_metrics, summarize_values
from agscl.experiments.jobs import Job
from agscl.experiments.method_entries import METHODS, REFERENCE, get_entry
from agscl.experiments.presets import get_preset
from agscl.experiments.run_config import RunConfig, configure
from agscl.methods._parts.search_axis import FACTORS
from agscl.reinforcement import PPOConfig
from agscl.runs import RunError, read_finished_runs, read_result
from agscl.runs.json_files import encode_json
from agscl.system.files import write_if_changed

PAPER = METHODS["paper-agscl"].title
FORMS: dict[str, dict[str, Any]] = {
    PAPER: {},
    "without (I.1)": {"zero_init": "off"},
    "without (I.2)": {"rand_init": False},
    "without both": {"zero_init": "off", "rand_init": False},
}
"""The paper's form with and without its two re-initialisations: (I.1) zeros the weights that read free nodes, (I.2)
gives a share of the free nodes new random weights."""
RHOS = (0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class StudyLine:
    """One line of a study's table: a method with some settings, run on every seed."""

    label: str
    method: str
    settings: Mapping[str, Any]
    run_name: str = ""
    """The name of its runs, the same in every study that has them."""
    jobs: Sequence[Job] = ()
    """One run per seed."""


def _make_reinit_lines(get_strength: Callable[[str], float]) -> list[StudyLine]:
    return [StudyLine(label, "paper-agscl", form) for label, form in FORMS.items()]


def _make_tradeoff_lines(get_strength: Callable[[str], float]) -> list[StudyLine]:
    curves = [(label, "paper-agscl", form) for label, form in FORMS.items()]
    curves += [(METHODS[name].title, name, {}) for name in ("mas", "ewc")]
    return [
        StudyLine(f"{label}, λ {value:g}", method, {**form, "lam": value})
        for label, method, form in curves
        for value in sorted(float(f"{factor * get_strength(method):.3g}") for factor in FACTORS)
    ]


def _make_rho_lines(get_strength: Callable[[str], float]) -> list[StudyLine]:
    return [
        *[StudyLine(f"{PAPER}, ρ {rho:g}", "paper-agscl", {"rho": rho}) for rho in RHOS],
        StudyLine("MAS", "mas", {}),
    ]


def _make_prox_lines(get_strength: Callable[[str], float]) -> list[StudyLine]:
    return [StudyLine(PAPER, "paper-agscl", {}), StudyLine("without proximal steps", "paper-agscl", {"prox": False})]


def _make_aopc_lines(get_strength: Callable[[str], float]) -> list[StudyLine]:
    return [StudyLine(PAPER, "paper-agscl", {})]


STUDIES: dict[str, Callable[[Callable[[str], float]], list[StudyLine]]] = {
    "reinit": _make_reinit_lines,
    "tradeoff": _make_tradeoff_lines,
    "rho": _make_rho_lines,
    "prox": _make_prox_lines,
    "aopc": _make_aopc_lines,
}
"""By name; each makes the lines of a study, given a function that returns a method's λ."""


def list_methods(study: str) -> list[str]:
    """The methods whose runs a study needs; with fine-tuning, which plasticity is measured against."""
    if study not in STUDIES:
        raise ValueError(f"unknown study {study!r}. Available: {', '.join(STUDIES)}")
    reference = [] if study == "aopc" else [REFERENCE]
    return [*reference, *dict.fromkeys(line.method for line in STUDIES[study](lambda method: 1.0))]


def plan_study(
    preset: str,
    study: str,
    seeds: int,
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> list[StudyLine]:
    """The lines of a study with their runs. `settings` are those of single methods, `changes` apply to all training."""
    if study == "aopc" and isinstance(get_preset(preset).training, PPOConfig):
        raise ValueError(f"the study aopc prunes nodes by their accuracy on test data, which {preset} does not have")
    changes_for = {method: {**changes, **(settings or {}).get(method, {})} for method in list_methods(study)}

    def get_usual_settings(method: str) -> dict[str, Any]:
        """All settings of a method where a study changes none."""
        changed = configure(preset, method=method, **changes_for[method]).settings
        return vars(get_entry(method).method_class.Config(**changed)) if get_entry(method).settings else {}

    def add_jobs(line: StudyLine) -> StudyLine:
        usual = get_usual_settings(line.method)
        different = {key: value for key, value in line.settings.items() if value != usual[key]}
        name = "-".join([line.method, *[f"{key}={value}" for key, value in different.items()]])
        chosen = {**changes_for[line.method], **different}
        jobs = []
        for seed in range(seeds):
            config = configure(preset, method=line.method, seed=seed, reference=False, **chosen)
            jobs.append(Job(config, folder / f"{name}-seed{seed}", f"{line.label}, seed {seed}"))
        return replace(line, run_name=name, jobs=jobs)

    def get_strength(method: str) -> float:
        lam = float(get_usual_settings(method)["lam"])
        if study == "tradeoff" and not 0 < lam < math.inf:
            raise ValueError(
                f"the study tradeoff varies λ around {method}'s value, which is {lam:g}: set one above 0 and below inf"
            )
        return lam

    lines = STUDIES[study](get_strength)
    if REFERENCE in changes_for:
        lines = [StudyLine(METHODS[REFERENCE].title, REFERENCE, {}), *lines]
    return [add_jobs(line) for line in lines]


def add_finished_runs(lines: Sequence[StudyLine], folder: Path) -> list[StudyLine]:
    """A study's lines with every seed that is finished in the folder."""
    extended = []
    for line in lines:
        jobs = list(line.jobs)
        planned = {job.folder for job in jobs}
        for run_folder, result in read_finished_runs(folder, f"{line.run_name}-seed*"):
            if run_folder not in planned and line.method in result["methods"]:
                with contextlib.suppress(RunError):  # written by another version, and not asked for
                    jobs.append(Job(RunConfig.from_dict(result["config"]), run_folder))
        extended.append(replace(line, jobs=sorted(jobs, key=lambda job: job.config.seed)))
    return extended


def collect_study(lines: Sequence[StudyLine]) -> list[dict[str, Any]]:
    """The metrics of a study's finished runs, line by line; curves have one value per task, the mean over seeds."""
    results = [{job.config.seed: read_result(job.folder) for job in line.jobs if job.is_finished} for line in lines]
    reference = next((by_seed for line, by_seed in zip(lines, results, strict=True) if line.method == REFERENCE), {})
    collected = []
    for line, by_seed in zip(lines, results, strict=True):
        if not by_seed:
            continue
        outcomes = {seed: result["methods"][line.method] for seed, result in by_seed.items()}
        values = [compute_metrics(each, reference.get(seed, {}).get("methods")) for seed, each in outcomes.items()]
        averages = [_average_after_each_task(outcome["accuracies"]) for outcome in outcomes.values()]
        curves = {"average_accuracy": mean_curve(averages)}
        for figure in ("sparsity", "used_capacity", "frozen"):
            of_seeds = [[task.get(figure) for task in outcome["statistics"]] for outcome in outcomes.values()]
            if all(value is not None for curve in of_seeds for value in curve):
                curves[figure] = mean_curve(of_seeds)
        collected.append(
            {
                "label": line.label,
                "method": line.method,
                "settings": dict(line.settings),
                "seeds": list(outcomes),
                **{metric: summarize_values([of_run[metric] for of_run in values]) for metric in METRICS},
                "curves": curves,
            }
        )
    return collected


def store_study(folder: Path, preset: str, study: str, content: Mapping[str, Any], errors: Mapping[str, str]) -> Path:
    """Write STUDY.json; `errors` says why runs failed."""
    path = folder / f"{study}.json"
    write_if_changed(path, encode_json({"preset": preset, "study": study, **content, "missing": dict(errors)}))
    return path


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of the curves of a study's line over its seeds, point by point."""
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


def _average_after_each_task(accuracies: metrics.Matrix) -> list[float]:
    return [metrics.average_accuracy(accuracies[: end + 1]) for end in range(len(accuracies))]
