"""Methods against each other over several seeds: each run in a folder of its own, several at a time."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.experiments.execute import Interrupted, execute
from agscl.experiments.methods import METHODS, REFERENCE
from agscl.experiments.presets import RunConfig, configure
from agscl.methods._parts.lifecycle import SelfCheckWarning
from agscl.runs import Run, RunError, is_finished, read_finished_runs, read_result
from agscl.runs.events import read_last_event
from agscl.runs.folder import DIVERGED, read_json
from agscl.system.files import encode_json, write_if_changed
from agscl.system.process import skip_gc_at_exit, tune_malloc
from agscl.tasks import DataMissing

MEASURES = ("average_accuracy", "plasticity", "stability", "forgetting")
POLL = 0.2
"""Seconds between two looks at how far the runs are."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    config: RunConfig
    folder: Path
    label: str = ""
    """What it is, for a person; else its method and seed."""

    @property
    def finished(self) -> bool:
        return is_finished(self.folder)

    @property
    def diverged(self) -> bool:
        """Whether training with just this configuration failed in a way that it would again."""
        if self.finished or not (self.folder / DIVERGED).is_file():
            return False
        stored = self.folder / "config.json"
        return stored.is_file() and read_json(stored) == json.loads(encode_json(self.config.as_dict()))

    @property
    def progress(self) -> float:
        """The share of its steps that its log tells of."""
        event = read_last_event(self.folder / "events.jsonl")
        return event["progress"] if event else 0.0

    def __str__(self) -> str:
        return self.label or f"{METHODS[self.config.method].title}, seed {self.config.seed}"


@dataclass
class Ended:
    """How a job went."""

    failed: str | None = None
    notes: list[str] = field(default_factory=list)
    """What the method warned about."""


def plan(
    preset: str,
    methods: Sequence[str],
    seeds: int,
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> list[Job]:
    """All runs of a comparison, in the order of the paper's table. Fine-tuning is always one of them, once per seed.

    `settings` are those of single methods, `changes` those of training, for all.
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


def run_all(
    jobs: Sequence[Job],
    *,
    processes: int,
    checkpoint_every: float,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[list[Job]], None] = lambda running: None,
    ended: Callable[[Job, Ended], None] = lambda job, how: None,
) -> None:
    """Run what is not finished, `processes` at a time, each with one thread.

    When `stop` says so the runs under way store a checkpoint, and `Interrupted` is raised; they do so too when anything
    else ends this. A run that fails leaves the others alone.
    """
    for job in jobs:
        Run(job.folder).check_config(job.config.as_dict())
    waiting = [job for job in jobs if not job.finished]
    if not waiting:
        return
    stop()  # from here on a signal is a request
    context = multiprocessing.get_context("spawn")
    halt = context.Event()
    with ProcessPoolExecutor(min(processes, len(waiting)), context, _begin, (halt,)) as pool:
        try:
            _follow(_submitted(pool, waiting, checkpoint_every), halt, stop, watch, ended)
        except BrokenProcessPool as error:
            if halt.is_set():
                raise Interrupted from error
            raise RunError(
                "a process of the comparison was killed (is the memory enough for --jobs?). "
                "The same command continues with what is not finished."
            ) from error
        except KeyboardInterrupt:  # Ctrl-C once more: workers look up between two steps only, and may be reading data
            for worker in list(pool._processes.values()):
                worker.kill()  # a checkpoint is written under another name first, so that none is harmed
            raise
        finally:
            halt.set()  # what waits then ends at once
    if stop():  # while the workers ended
        raise Interrupted


def _submitted(
    pool: ProcessPoolExecutor, jobs: Sequence[Job], checkpoint_every: float
) -> dict[Future[Ended | None], Job]:
    """Start the workers. Ctrl-C reaches them too, and would end them before they can look away, so it is blocked."""
    block = getattr(signal, "pthread_sigmask", None)  # not on Windows
    before = block(signal.SIG_BLOCK, [signal.SIGINT]) if block else None
    try:
        return {pool.submit(_work, job, checkpoint_every): job for job in jobs}
    finally:
        if block:
            block(signal.SIG_SETMASK, before)


def _follow(
    futures: Mapping[Future[Ended | None], Job],
    halt: Event,
    stop: Callable[[], bool],
    watch: Callable[[list[Job]], None],
    ended: Callable[[Job, Ended], None],
) -> None:
    left = set(futures)
    while left:
        done, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
        if stop():
            halt.set()
        for future in done:
            how = future.result()
            if how is not None:
                ended(futures[future], how)
        watch([futures[future] for future in left if future.running()])
    if halt.is_set():
        raise Interrupted


def collect(jobs: Sequence[Job]) -> dict[str, Any]:
    """The measures of all finished runs: every value, mean and standard deviation, method by method."""
    results = {(job.config.method, job.config.seed): read_result(job.folder) for job in jobs if job.finished}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(job.config.method for job in jobs):
        mine = {seed: result for (method, seed), result in results.items() if method == name}
        if not mine:
            continue
        values = [
            measures(result["methods"][name], results.get((REFERENCE, seed), {}).get("methods"))
            for seed, result in mine.items()
        ]
        first = next(iter(mine.values()))
        found[name] = {
            "settings": {key: value for key, value in first["config"]["settings"].items() if key != "seed"},
            "seeds": list(mine),
            "accuracies": [result["methods"][name]["accuracies"] for result in mine.values()],
            "memory": first["methods"][name]["memory"],
            "seconds": [result["seconds"][name] for result in mine.values()],
            **{measure: spread([each[measure] for each in values]) for measure in MEASURES},
        }
    return found


def with_others(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """These jobs, and all others that are finished in their folder; in the order of the paper's table."""
    every, places = list(jobs), list(METHODS)
    for place, result in read_finished_runs(folder):
        if place not in {job.folder for job in jobs}:
            with contextlib.suppress(RunError):  # of another version: it was not asked for
                config = RunConfig.from_dict(result["config"])
                if place.name == f"{config.method}-seed{config.seed}":  # else it is of a study
                    every.append(Job(config, place))
    every = [job for job in every if job.config.method in places]
    return sorted(every, key=lambda job: (job.config.seed, places.index(job.config.method)))


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation (of a sample: n − 1); the deviation of one value is not known."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.mean(known) if known else None,
        "deviation": statistics.stdev(known) if len(known) > 1 else None,
        "values": list(values),
    }


def store(folder: Path, preset: str, compared: dict[str, Any], missing: Mapping[str, str]) -> Path:
    path = folder / "comparison.json"
    write_if_changed(path, encode_json({"preset": preset, "methods": compared, "missing": dict(missing)}))
    return path


def measures(outcome: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, float | None]:
    """Those of one run; plasticity against that of fine-tuning on the same seed, where it is known."""
    found = {measure: outcome[measure] for measure in MEASURES}
    if reference is not None:
        found["plasticity"] = metrics.plasticity(outcome["accuracies"], reference[REFERENCE]["accuracies"])
    return found


# In a process of its own ---------------------------------------------------------------------------------------------

_halt: Event


def _begin(halt: Event) -> None:
    """Prepare a worker: it stops when it is told to, and never outlives the command."""
    global _halt
    _halt = halt
    skip_gc_at_exit()
    tune_malloc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the command decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def follow() -> None:
        wait_for([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(job: Job, checkpoint_every: float) -> Ended | None:
    """Run or continue a job; None when it was told to stop."""
    if _halt.is_set():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Run(job.folder) as run:
                execute(job.config, run, checkpoint_every=checkpoint_every, threads=1, stop=_halt.is_set)
        except Interrupted:
            return None
        except DataMissing:
            raise
        except RunError as error:
            return Ended(failed=str(error))
        except Exception as error:  # whatever a method raises must not end the other runs
            return Ended(failed=f"{type(error).__name__}: {error}")
    own = [warning for warning in caught if issubclass(warning.category, SelfCheckWarning)]
    return Ended(notes=[str(warning.message) for warning in own])
