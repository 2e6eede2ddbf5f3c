"""A small search for a method's settings on a preset, judged on validation data alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.experiments.compare import Job
from agscl.experiments.execute import HOLD_OUT
from agscl.experiments.methods import listed
from agscl.experiments.presets import configure
from agscl.runs import RunError, read_finished_runs, read_result
from agscl.system.files import encode_json, write_if_changed

SEED = 1000
"""The first seed of a search. No comparison uses it, so that what was chosen on it is then tried on others."""
FACTORS = (0.1, 1 / 3, 1.0, 3.0, 10.0)
STEPS = 3
"""How often a search goes beyond the values of an axis."""


@dataclass(frozen=True)
class Axis:
    """One setting, and what is tried for it: these values, or the preset's times these factors."""

    setting: str
    factors: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def tried(self, base: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Settings with each value of this one: the base itself, then what is nearest to it."""
        now = base[self.setting]
        if self.factors and now == 0:
            raise ValueError(f"a search goes by factors, and {self.setting} starts at 0: start it above 0")
        values = [float(f"{factor * now:.3g}") for factor in self.factors] + list(self.values)
        nearest = sorted({now, *values}, key=lambda value: (abs(value - now) / (value + now or 1), value))
        return [{**base, self.setting: value} for value in nearest]

    def further(self, best: Mapping[str, Any], values: Collection[float]) -> list[dict[str, Any]]:
        """One step beyond the `values` tried, where the best is the first or the last of them."""
        if not self.factors or best[self.setting] not in (min(values), max(values)):
            return []
        low, high = self.factors[:2] if best[self.setting] == min(values) else self.factors[-1:-3:-1]
        return [{**best, self.setting: float(f"{best[self.setting] * low / high:.3g}")}]


AXES: dict[str, tuple[Axis, ...]] = {
    "agscl": (
        Axis("lam", FACTORS),
        Axis("mu", (0.5, 0.75, 1.5, 2.0)),
        Axis("rho", values=(0.1, 0.2, 0.3, 0.4, 0.5)),
    ),
    "ewc": (Axis("lam", FACTORS),),
    "si": (Axis("c", FACTORS),),
    "rwalk": (Axis("lam", FACTORS),),
    "mas": (Axis("lam", FACTORS),),
    "hat": (Axis("c", FACTORS),),
    "packnet": (Axis("share", values=(0.5, 0.6, 0.7, 0.8, 0.9)),),
    "lwf": (Axis("weight", FACTORS),),
    "l2": (Axis("lam", FACTORS),),
    "gpm": (Axis("threshold", values=(0.9, 0.95, 0.97, 0.99)),),
}
"""One setting after the other: the next starts from the best so far. Where the best value is the first or the last of
those tried, the search goes on beyond it."""


@dataclass(frozen=True)
class Tried:
    """One choice of settings and how it did."""

    settings: dict[str, Any]
    valid_accuracy: float | None
    """Average validation accuracy after the last task, the mean over seeds; none if it diverged on one of them."""
    by_seed: list[float | None]


def search(
    preset: str,
    method: str,
    folder: Path,
    run: Callable[[Sequence[Job]], None],
    *,
    seed: int = SEED,
    seeds: int = 1,
    only: Sequence[str] | None = None,
    values: Sequence[float] | None = None,
    **changes: Any,
) -> list[Tried]:
    """Try the axes of a method one after the other; the best comes first. `run` runs jobs that are not finished yet.

    Each choice is tried on so many `seeds`, from `seed` on, and judged by its mean. With `only`, these settings alone
    are searched; the others stay as the preset has them. With `values`, these of the first setting are tried and
    nothing else.

    All that was tried, now and before, is stored as search.json; what ran before is not run again.
    """
    if method not in AXES:
        raise ValueError(f"{method} has nothing to search. These have: {', '.join(AXES)}")
    if seeds < 1:
        raise ValueError("a search needs at least one seed")
    start = configure(preset, method=method, seed=seed, **changes).settings
    base = {**vars(listed(method).load().Config(**start)), **start}
    axes = [axis for axis in AXES[method] if only is None or axis.setting in only]
    if unknown := [name for name in only or () if name not in {axis.setting for axis in AXES[method]}]:
        known = ", ".join(axis.setting for axis in AXES[method])
        raise ValueError(f"{method} has no setting {unknown[0]!r} to search. It has: {known}")
    if values:
        axes = [Axis(axes[0].setting, values=tuple(values))]
        base = {**base, axes[0].setting: values[0]}
    best = {axis.setting: base[axis.setting] for axis in AXES[method]}
    tried: dict[str, Tried] = {}
    for axis in axes:
        settings, seen = axis.tried(best), set()
        for _ in range(1 + STEPS):
            jobs = [
                [_job(preset, method, each, folder, place, seed + place, changes) for place in range(seeds)]
                for each in settings
            ]
            run([job for of_one in jobs for job in of_one if not job.diverged])
            for each, of_one in zip(settings, jobs, strict=True):
                tried[name_of(each)] = _tried(each, [judge(job) for job in of_one])
                seen.add(each[axis.setting])
            order = _best_first(tried.values())
            if order[0].valid_accuracy is not None:
                best = order[0].settings
            settings = axis.further(best, seen)
            if not settings or order[0].valid_accuracy is None:
                break
    before = [one for one in finished(folder, method, seed, seeds) if name_of(one.settings) not in tried]
    content = encode_json(
        {
            "preset": preset,
            "method": method,
            "seed": seed,
            "seeds": seeds,
            "changes": changes,
            "tried": [vars(one) for one in _best_first([*order, *before])],
        }
    )
    write_if_changed(folder / "search.json", content)
    return order


def finished(folder: Path, method: str, seed: int = SEED, seeds: int = 1) -> list[Tried]:
    """What a search that was stopped has tried so far on all its seeds, the best first."""
    found: dict[str, list[tuple[dict[str, Any], float | None]]] = {}
    for _, result in read_finished_runs(folder):
        if result["config"]["seed"] not in range(seed, seed + seeds):
            continue
        settings = {axis.setting: result["config"]["settings"][axis.setting] for axis in AXES[method]}
        mark = metrics.average_accuracy(result["methods"][method]["valid_accuracies"])
        found.setdefault(name_of(settings), []).append((settings, mark))
    whole = [_tried(each[0][0], [mark for _, mark in each]) for each in found.values() if len(each) == seeds]
    return _best_first(whole)


def _best_first(tried: Iterable[Tried]) -> list[Tried]:
    return sorted(tried, key=lambda one: -(one.valid_accuracy or 0.0))  # of equals, the first tried


def _tried(settings: dict[str, Any], marks: list[float | None]) -> Tried:
    known = [mark for mark in marks if mark is not None]
    return Tried(settings, statistics.mean(known) if len(known) == len(marks) else None, marks)


def name_of(settings: Mapping[str, Any]) -> str:
    return _words(settings, "-")


def _words(settings: Mapping[str, Any], between: str = " ") -> str:
    return between.join(f"{key}={value:g}" for key, value in settings.items())


def _job(
    preset: str,
    method: str,
    settings: Mapping[str, Any],
    folder: Path,
    place: int,
    seed: int,
    changes: Mapping[str, Any],
) -> Job:
    """The run of these settings on one of the seeds; those but the first say so in their names."""
    config = configure(preset, method=method, seed=seed, reference=False, hold_out=HOLD_OUT, **{**changes, **settings})
    name, words = name_of(settings), _words(settings)
    return Job(config, folder / (f"{name}-seed{seed}" if place else name), f"{words} seed {seed}" if place else words)


def judge(job: Job) -> float | None:
    """A job's average validation accuracy after the last task; none if it diverged."""
    if job.diverged:
        return None
    if not job.finished:  # out of memory, say, which tells nothing of the settings
        raise RunError(f"{job.folder} did not finish, so the search cannot go on. The same command tries it again")
    outcome = read_result(job.folder)["methods"][job.config.method]
    return metrics.average_accuracy(outcome["valid_accuracies"])


def command(preset: str, method: str, best: Mapping[str, Any]) -> list[str]:
    """How to run a preset with these settings, word by word."""
    settings = [f"{key}={value:.12g}" for key, value in best.items()]
    return ["agscl", "run", preset, "--method", method, "--set", *settings]
