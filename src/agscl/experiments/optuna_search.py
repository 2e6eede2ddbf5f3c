"""A search whose trials Optuna suggests. Poor ones are stopped after a task. Trials are kept in a journal file."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agscl.experiments.jobs import Job
from agscl.experiments.search import MAX_EXTENSIONS, SEED, SearchSpace, Trial, make_trial, score_job
from agscl.runs import RunError, WrongOptions
from agscl.runs.events import read_events
from agscl.runs.json_files import encode_json
from agscl.system.files import lock_file
from agscl.training.seeds import derive_seed

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    raise WrongOptions("--sampler optuna needs Optuna: pip install 'agscl[optuna]'") from error

JOURNAL = "optuna.log"
RANDOM_TRIALS = 5
"""So many trials are drawn at random, and none is stopped before so many are finished."""
STOPPED_AFTER = "stopped after"
"""Of a trial that was asked to stop: how many tasks it had learned."""

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
            known = [one for one in study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]
            running = [_TrialRuns(space, study, one.number) for one in known if not one.state.is_finished()]
            # An interrupted batch is filled up, so that its trials are those of a search that was not interrupted.
            wanted = min(trials, len(known) + (-len(known) % at_once if running else at_once))
            running += [_TrialRuns(space, study, number) for number in range(len(known), wanted)]
            if not running:
                over = [_TrialRuns(space, study, one.number) for one in known]
                return space.store({one.jobs[0].folder: one.describe() for one in over}.values())

            def watch(running: Sequence[_TrialRuns] = running) -> None:
                for one in running:
                    one.stop_if_poor()

            jobs = {job.folder: job for one in running for job in one.jobs if not job.has_diverged}
            run_jobs(list(jobs.values()), watch)
            outcomes = [one.describe() for one in running]  # all, before any is stored: raises where a run failed
            for one, outcome in zip(running, outcomes, strict=True):
                one.store(outcome)


class _TrialRuns:
    """A trial of Optuna's, known by its number or new, and its runs: one for each seed."""

    def __init__(self, space: SearchSpace, study: optuna.Study, number: int) -> None:
        self._study = study
        known = study.get_trials(deepcopy=False)
        is_new = number == len(known) or known[number].state == TrialState.WAITING
        self._trial = study.ask() if is_new else optuna.trial.Trial(study, known[number]._trial_id)
        chosen = {}
        for index, axis in enumerate(space.axes):
            # An own seed for each value, so that it does not depend on where a search was interrupted.
            study.sampler = _make_sampler(derive_seed(space.seed, number, index))
            low, high = axis.get_range(space.start, MAX_EXTENSIONS)
            value = self._trial.suggest_float(axis.setting, low, high, log=bool(axis.factors))  # or the one it has
            chosen[axis.setting] = value if value == space.start[axis.setting] else float(f"{value:.3g}")
        self.settings = {**space.start, **chosen}
        self.jobs = space.make_jobs(self.settings)

    def _report(self) -> dict[int, float]:
        """Report to Optuna, and return, the average validation accuracy after each task learned on all seeds."""
        logs = [_read_task_scores(job) for job in self.jobs]
        values = {step: statistics.mean(scores) for step, scores in enumerate(zip(*logs, strict=False), 1)}
        known = self._study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
        for step in values.keys() - known.keys():
            self._trial.report(values[step], step)
        return values

    def stop_if_poor(self) -> None:
        """Stop the runs of Optuna's trial if its last value is below the median of finished trials after the same task.

        Optuna's own MedianPruner compares the best value so far. An average over tasks is highest after the first one
        and falls with forgetting, so it would stop none.
        """
        values = self._report()
        if not values or STOPPED_AFTER in self._trial.user_attrs:
            return
        step = max(values)
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        others = [one.intermediate_values[step] for one in finished if step in one.intermediate_values]
        if len(others) >= RANDOM_TRIALS and values[step] < statistics.median(others):
            self._trial.set_user_attr(STOPPED_AFTER, step)
            for job in self.jobs:
                job.request_stop()

    def describe(self) -> Trial:
        """The scores of Optuna's trial, or after how many tasks it was stopped; raises where a run failed."""
        stopped_after = self._trial.user_attrs.get(STOPPED_AFTER)
        if stopped_after is not None and not all(job.is_finished for job in self.jobs):
            return Trial(self.settings, None, [None] * len(self.jobs), stopped_after)
        return make_trial(self.settings, [score_job(job) for job in self.jobs])

    def store(self, outcome: Trial) -> None:
        """Store in Optuna's study how the trial ended. One that diverged is stored as pruned, so as the worst."""
        self._report()
        state = TrialState.PRUNED if outcome.valid_accuracy is None else TrialState.COMPLETE
        self._study.tell(self._trial, outcome.valid_accuracy, state)


def _make_sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=RANDOM_TRIALS, constant_liar=True)


def _read_task_scores(job: Job) -> list[float]:
    """The average validation accuracy of a run after each task it has learned, from its event log."""
    path = job.folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    ended = [event for event in events if event.get("event") == "task ended" and event.get("valid_accuracies")]
    scores = {event["task"]: statistics.mean(event["valid_accuracies"]) for event in ended}
    return [scores[task] for task in sorted(scores)]


@contextlib.contextmanager
def _open_study(space: SearchSpace) -> Iterator[optuna.Study]:
    """The study of a search, new or with all trials of an interrupted one. Only one process at a time may hold it."""
    for axis in space.axes:
        if not all(map(math.isfinite, axis.get_range(space.start, MAX_EXTENSIONS))):
            start = space.start[axis.setting]
            raise ValueError(f"{axis.setting} starts at {start}, around which there is no range: --set a finite value")
    asked = {key: value for key, value in vars(space).items() if key not in ("folder", "axes")}
    asked = json.loads(encode_json({**asked, "settings": [axis.setting for axis in space.axes]}))
    space.folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = space.folder / JOURNAL
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(space.folder / "search.lock", wait=False))
        except BlockingIOError as error:
            raise RunError(f"another search is using {space.folder}: wait for it, or stop it") from error
        _repair_journal(path)
        try:
            study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))),
                study_name="search",
                direction="maximize",
                load_if_exists=True,
            )
            stored = study.user_attrs.get("search")
        except (ValueError, KeyError) as error:
            raise RunError(f"{path} is damaged ({error}). Remove it: finished runs are not repeated") from error
        if stored is None:
            study.set_user_attr("search", asked)
        elif changed := [key for key, value in asked.items() if stored.get(key) != value]:
            raise WrongOptions(
                f"{space.folder} holds a search with other options ({', '.join(changed)}): choose another --name"
            )
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial({axis.setting: space.start[axis.setting] for axis in space.axes})
        yield study


def _repair_journal(path: Path) -> None:
    """Remove what a killed process left: Optuna's lock, and a partial last line, which Optuna could not read."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
