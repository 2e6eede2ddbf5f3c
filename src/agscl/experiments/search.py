"""A small search for a method's settings on a preset, scored on validation data alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.experiments.build import HOLD_OUT
from agscl.experiments.jobs import Job
from agscl.experiments.method_entries import METHODS, get_entry
from agscl.experiments.run_config import configure
from agscl.methods._parts.search_axis import SearchAxis
from agscl.runs import RunError, read_finished_runs, read_result
from agscl.runs.json_files import encode_json
from agscl.system.files import write_if_changed

SEED = 1000
"""The first seed of a search. Comparisons use 0, 1, 2, …, so settings are never chosen on the seeds they report."""
MAX_EXTENSIONS = 3
"""How often a search goes beyond the first or last value of an axis."""


@dataclass(frozen=True)
class Trial:
    """One choice of settings that a search tried, and its score."""

    settings: dict[str, Any]
    valid_accuracy: float | None
    """Average validation accuracy after the last task, the mean over seeds; None if it diverged on any seed."""
    by_seed: list[float | None]
    stopped_after: int | None = None
    """How many tasks it had learned when it was stopped because it was poor; None if it was not stopped."""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "stopped_after" or value is not None}


def search_settings(
    preset: str,
    method: str,
    folder: Path,
    run_jobs: Callable[[Sequence[Job]], None],
    *,
    seed: int = SEED,
    seeds: int = 1,
    only: Sequence[str] | None = None,
    values: Sequence[float] | None = None,
    **changes: Any,
) -> list[Trial]:
    """Search the axes of a method one after the other; the best trial comes first. `run_jobs` runs unfinished jobs.

    Each choice is tried on `seeds` seeds, starting with `seed`, and scored by the mean. With `only`, these settings are
    searched and the others stay as in the preset. With `values`, only these values of the first setting are tried.

    All trials, including those of earlier searches in the folder, are stored as search.json. Finished runs are not
    repeated.
    """
    space = SearchSpace.from_options(preset, method, folder, seed, seeds, only, changes)
    axes, best = space.axes, space.start
    if values:
        axes = (SearchAxis(axes[0].setting, values=tuple(values)),)
        best = {**best, axes[0].setting: values[0]}
    trials: dict[str, Trial] = {}
    for axis in axes:
        candidates, tried = axis.list_candidates(best), set()
        for _ in range(1 + MAX_EXTENSIONS):
            jobs = [space.make_jobs(settings) for settings in candidates]
            run_jobs([job for jobs_of_one in jobs for job in jobs_of_one if not job.has_diverged])
            for settings, jobs_of_one in zip(candidates, jobs, strict=True):
                trials[name_settings(settings)] = make_trial(settings, [score_job(job) for job in jobs_of_one])
                tried.add(settings[axis.setting])
            ranking = _sort_by_score(trials.values())
            if ranking[0].valid_accuracy is not None:
                best = ranking[0].settings
            candidates = axis.extend(best, tried)
            if not candidates or ranking[0].valid_accuracy is None:
                break
    return space.store(trials.values())


@dataclass(frozen=True)
class SearchSpace:
    """What a search may try, and where its runs are."""

    preset: str
    method: str
    folder: Path
    seed: int
    seeds: int
    axes: tuple[SearchAxis, ...]
    """The settings to search."""
    start: dict[str, Any]
    """The start values of all settings that the method declares for searches."""
    changes: dict[str, Any]
    """What all runs change of the preset."""

    @classmethod
    def from_options(
        cls,
        preset: str,
        method: str,
        folder: Path,
        seed: int,
        seeds: int,
        only: Sequence[str] | None,
        changes: dict[str, Any],
    ) -> SearchSpace:
        """Check what a search was asked for; raises ValueError."""
        all_axes = get_entry(method).search
        if not all_axes:
            searchable = [name for name, entry in METHODS.items() if entry.search]
            raise ValueError(f"{method} has no settings to search. These have: {', '.join(searchable)}")
        if seeds < 1:
            raise ValueError(f"seeds must be at least 1, not {seeds}")
        given = configure(preset, method=method, seed=seed, **changes).settings
        base = {**vars(get_entry(method).method_class.Config(**given)), **given}
        axes = tuple(axis for axis in all_axes if only is None or axis.setting in only)
        if unknown := [name for name in only or () if name not in {axis.setting for axis in all_axes}]:
            known = ", ".join(axis.setting for axis in all_axes)
            raise ValueError(f"{method} has no setting {unknown[0]!r} to search. It has: {known}")
        start = {axis.setting: base[axis.setting] for axis in all_axes}
        return cls(preset, method, folder, seed, seeds, axes, start, changes)

    def make_jobs(self, settings: Mapping[str, Any]) -> list[Job]:
        """The search's runs of these settings, one for each seed."""
        return [
            _make_job(self.preset, self.method, settings, self.folder, self.seed + i, self.changes, i > 0)
            for i in range(self.seeds)
        ]

    def store(self, trials: Iterable[Trial]) -> list[Trial]:
        """Write search.json, with the trials of earlier searches in the folder; returns the new ones, best first."""
        ranking = _sort_by_score(trials)
        names = {name_settings(trial.settings) for trial in ranking}
        finished = load_trials(self.folder, self.method, self.seed, self.seeds)
        earlier = [trial for trial in finished if name_settings(trial.settings) not in names]
        content = {
            "preset": self.preset,
            "method": self.method,
            "seed": self.seed,
            "seeds": self.seeds,
            "changes": self.changes,
            "tried": [trial.as_dict() for trial in _sort_by_score([*ranking, *earlier])],
        }
        write_if_changed(self.folder / "search.json", encode_json(content))
        return ranking


def load_trials(folder: Path, method: str, seed: int = SEED, seeds: int = 1) -> list[Trial]:
    """The trials of a search that are finished on all its seeds, the best first; the search may have been stopped."""
    scores: dict[str, list[tuple[dict[str, Any], float | None]]] = {}
    for _, result in read_finished_runs(folder):
        if result["config"]["seed"] not in range(seed, seed + seeds):
            continue
        settings = {axis.setting: result["config"]["settings"][axis.setting] for axis in get_entry(method).search}
        score = metrics.average_accuracy(result["methods"][method]["valid_accuracies"])
        scores.setdefault(name_settings(settings), []).append((settings, score))
    complete = [runs for runs in scores.values() if len(runs) == seeds]
    return _sort_by_score([make_trial(runs[0][0], [score for _, score in runs]) for runs in complete])


def score_job(job: Job) -> float | None:
    """The score of a search's job: the average validation accuracy after its last task; None if it diverged."""
    if job.has_diverged:
        return None
    if not job.is_finished:  # e.g. out of memory, which says nothing about the settings
        raise RunError(f"{job.folder} did not finish, so the search cannot continue. The same command tries it again")
    outcome = read_result(job.folder)["methods"][job.config.method]
    return metrics.average_accuracy(outcome["valid_accuracies"])


def name_settings(settings: Mapping[str, Any]) -> str:
    """A name for a choice of settings, as its run's folder has it, e.g. lam=400-mu=10."""
    return _format_settings(settings, "-")


def _make_job(
    preset: str,
    method: str,
    settings: Mapping[str, Any],
    folder: Path,
    seed: int,
    changes: Mapping[str, Any],
    name_seed: bool,
) -> Job:
    """The run of these settings on one seed; its name has the seed where `name_seed`: all but the search's first."""
    config = configure(preset, method=method, seed=seed, reference=False, hold_out=HOLD_OUT, **{**changes, **settings})
    name, label = name_settings(settings), _format_settings(settings, " ")
    if name_seed:
        name, label = f"{name}-seed{seed}", f"{label} seed {seed}"
    return Job(config, folder / name, label)


def make_trial(settings: dict[str, Any], scores: list[float | None]) -> Trial:
    known = [score for score in scores if score is not None]
    return Trial(settings, statistics.mean(known) if len(known) == len(scores) else None, scores)


def _sort_by_score(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: -(trial.valid_accuracy or 0.0))  # stable: of equals, the first tried


def _format_settings(settings: Mapping[str, Any], separator: str) -> str:
    return separator.join(f"{key}={value:g}" for key, value in settings.items())
