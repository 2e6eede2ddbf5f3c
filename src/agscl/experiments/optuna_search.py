"""A search whose trials Optuna suggests. Poor ones are stopped after a task. Trials are kept in a journal file."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agscl.experiments.jobs import Job
from agscl.experiments.search import MAX_EXTENSIONS, SEED, SearchSpace, Trial, make_trial, score_job
from agscl.runs import RunError, WrongOptions
from agscl.runs.events import read_events
from agscl.system.files import encode_json, lock_file
from agscl.training.seeds import derive_seed

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
except ImportError as error:
    raise WrongOptions("--sampler optuna needs Optuna: pip install 'agscl[optuna]'") from error

JOURNAL = "optuna.log"
RANDOM_TRIALS = 5
"""So many trials are drawn at random, and none is pruned before so many are finished."""

RunJobs = Callable[[Sequence[Job], Callable[[], None]], None]


def search_with_optuna(
    preset: str,
    method: str,
    folder: Path,
    run_jobs: RunJobs,
    *,
    trials: int,
    at_once: int = 1,
    seed: int = SEED,
    seeds: int = 1,
    only: Sequence[str] | None = None,
    **changes: Any,
) -> list[Trial]:
    """Try so many choices of settings, `at_once` at a time; the best trial comes first.

    The first trial has the start values. The others are suggested by Optuna's TPE sampler, from the ranges that the
    method declares. `run_jobs(jobs, watch)` runs unfinished jobs and calls `watch` now and then, which stops the runs
    of trials that are worse after a task than the median. The same call continues an interrupted search with all its
    trials; a larger `trials` adds to them. search.json is as `search_settings` has it.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")
    space = SearchSpace.from_options(preset, method, folder, seed, seeds, only, changes)
    with _open_study(space) as study:
        while True:
            known = [one for one in study.get_trials(deepcopy=False) if one.state != optuna.trial.TrialState.WAITING]
            running = [_TrialRuns(space, study, one._trial_id) for one in known if not one.state.is_finished()]
            # An interrupted batch is filled up, so that its trials are those of a search that was not interrupted.
            wanted = min(trials, len(known) + (-len(known) % at_once if running else at_once))
            running += [_suggest(space, study) for _ in range(len(known), wanted)]
            if not running:
                return space.store(_list_trials(space, study))
            _run_trials(running, run_jobs)


def _run_trials(running: Sequence[_TrialRuns], run_jobs: RunJobs) -> None:
    def watch() -> None:
        for one in running:
            one.report()
            one.stop_if_poor()

    jobs = {job.folder: job for one in running for job in one.jobs if not job.has_diverged}
    run_jobs(list(jobs.values()), watch)
    outcomes = [one.score() for one in running]  # all, before any is stored: raises where a run failed
    for one, outcome in zip(running, outcomes, strict=True):
        one.report()
        one.tell(outcome)


def _suggest(space: SearchSpace, study: optuna.Study) -> _TrialRuns:
    """A new trial. The sampler's seed depends on the trial's number, so an interrupted search continues the same."""
    number = len([one for one in study.get_trials(deepcopy=False) if one.state != optuna.trial.TrialState.WAITING])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(
            seed=derive_seed(space.seed, number) % 2**32, n_startup_trials=RANDOM_TRIALS, constant_liar=True
        )
    trial = study.ask()
    for axis in space.axes:
        low, high = axis.get_range(space.start, MAX_EXTENSIONS)
        trial.suggest_float(axis.setting, low, high, log=bool(axis.factors))
    return _TrialRuns(space, study, trial._trial_id)


def _list_trials(space: SearchSpace, study: optuna.Study) -> Iterator[Trial]:
    """The trials that are over, each choice of settings once."""
    found = {}
    for one in study.get_trials(deepcopy=False):
        if one.state.is_finished():
            trial = _TrialRuns(space, study, one._trial_id)
            found[trial.jobs[0].folder] = trial.describe()
    yield from found.values()


class _TrialRuns:
    """A trial of Optuna's, and its runs: one for each seed."""

    def __init__(self, space: SearchSpace, study: optuna.Study, trial_id: int) -> None:
        self._study = study
        self._trial = optuna.trial.Trial(study, trial_id)
        chosen = {name: float(f"{value:.3g}") for name, value in self._trial.params.items()}
        self.settings = {**space.start, **chosen}
        self.jobs = space.make_jobs(self.settings)
        self._logs = [_TaskScores(job) for job in self.jobs]
        self._judged = 0  # tasks after which it was compared with the other trials

    @property
    def _values(self) -> dict[int, float]:
        """The average validation accuracy after each task, as reported to Optuna."""
        frozen = self._study._storage.get_trial(self._trial._trial_id)
        return dict(frozen.intermediate_values)

    def report(self) -> None:
        """Report to Optuna what the runs have measured after tasks that all of them have learned."""
        known = self._values
        for index, scores in enumerate(zip(*[log.read() for log in self._logs], strict=False)):
            if index + 1 not in known:
                self._trial.report(statistics.mean(scores), index + 1)

    def stop_if_poor(self) -> None:
        tasks = len(self._values)
        if tasks > self._judged and not all(job.is_finished for job in self.jobs):
            self._judged = tasks
            if self._trial.should_prune():
                self._trial.set_user_attr("pruned after", tasks)
                for job in self.jobs:
                    job.request_stop()

    def score(self) -> list[float | None] | None:
        """The score of each seed; None if the trial was stopped because it was poor."""
        if "pruned after" in self._trial.user_attrs and not all(job.is_finished for job in self.jobs):
            return None
        return [score_job(job) for job in self.jobs]

    def tell(self, scores: list[float | None] | None) -> None:
        """Store in the study how the trial ended. One that diverged is stored as pruned, so as the worst."""
        value = None if scores is None else make_trial(self.settings, scores).valid_accuracy
        state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(self._trial, value, state)

    def describe(self) -> Trial:
        scores = self.score()
        if scores is None:
            return Trial(self.settings, None, [None] * len(self.jobs), self._trial.user_attrs["pruned after"])
        return make_trial(self.settings, scores)


@dataclass
class _TaskScores:
    """The average validation accuracy of a run after each of its tasks, from its event log, read as it grows."""

    job: Job
    size: int = -1
    scores: tuple[float, ...] = ()

    def read(self) -> tuple[float, ...]:
        path = self.job.folder / "events.jsonl"
        with contextlib.suppress(FileNotFoundError):
            if (size := path.stat().st_size) != self.size:
                self.size = size
                after = {
                    event["task"]: statistics.mean(event["valid_accuracies"])
                    for event in read_events(path)
                    if event.get("event") == "task ended" and event.get("valid_accuracies")
                }
                self.scores = tuple(after[task] for task in sorted(after))
        return self.scores


class MedianPruner(optuna.pruners.BasePruner):
    """Stops a trial that is worse after a task than the median of the others after the same task.

    Optuna's pruner of this name compares the best value of a trial so far. An average over tasks is highest after the
    first one and falls with forgetting, so it would stop none.
    """

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        step = trial.last_step
        finished = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        values = [one.intermediate_values[step] for one in finished if step in one.intermediate_values]
        return len(values) >= RANDOM_TRIALS and trial.intermediate_values[step] < statistics.median(values)


# The journal ---------------------------------------------------------------------------------------------------------


class _NoLock(JournalFileSymlinkLock):
    """The search holds a lock of its own. Those of Optuna would outlive a killed process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextlib.contextmanager
def _open_study(space: SearchSpace) -> Iterator[optuna.Study]:
    """The study of a search, new or with all trials of an interrupted one. Only one process at a time may hold it."""
    for axis in space.axes:
        if not all(map(math.isfinite, axis.get_range(space.start, MAX_EXTENSIONS))):
            start = space.start[axis.setting]
            raise ValueError(f"{axis.setting} starts at {start}, around which there is no range: --set a finite value")
    described = {
        "preset": space.preset,
        "method": space.method,
        "seed": space.seed,
        "seeds": space.seeds,
        "settings": [axis.setting for axis in space.axes],
        "start": space.start,
        "changes": space.changes,
    }
    described = json.loads(encode_json(described))
    space.folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = space.folder / JOURNAL
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(space.folder / f"{JOURNAL}.lock", wait=False))
        except BlockingIOError as error:
            raise RunError(f"another search is using {space.folder}: wait for it, or stop it") from error
        _drop_partial_line(path)
        try:
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(path), lock_obj=_NoLock(str(path))))
            study = optuna.create_study(
                storage=storage, study_name="search", direction="maximize", pruner=MedianPruner(), load_if_exists=True
            )
            stored = study.user_attrs.get("search")
        except (ValueError, KeyError) as error:
            raise RunError(f"{path} is damaged ({error}). Remove it: finished runs are not repeated") from error
        if stored is None:
            study.set_user_attr("search", described)
        elif changed := [key for key, value in described.items() if stored.get(key) != value]:
            raise WrongOptions(
                f"{space.folder} holds a search with other options ({', '.join(changed)}): choose another --name"
            )
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial({axis.setting: space.start[axis.setting] for axis in space.axes})
        yield study


def _drop_partial_line(path: Path) -> None:
    """Drop what a killed process wrote of a last line, which Optuna could not read."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
