"""Many runs at a time, each in its own process and folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.synchronize import Event
from pathlib import Path

from agscl.experiments.config import RunConfig
from agscl.experiments.methods import METHODS
from agscl.experiments.run import Interrupted, execute_run
from agscl.methods._parts.lifecycle import SelfCheckWarning
from agscl.runs import Run, RunError, is_finished
from agscl.runs.events import read_last_event
from agscl.runs.folder import DIVERGED, read_checked_json
from agscl.system.files import encode_json
from agscl.system.process import skip_gc_at_exit, tune_malloc
from agscl.tasks import DataError

POLL_SECONDS = 0.2
"""How often the progress of the runs is looked up."""


@dataclass(frozen=True)
class Job:
    """One of many runs: its configuration and its folder."""

    config: RunConfig
    folder: Path
    label: str = ""
    """How it is shown; by default its method and seed."""

    @property
    def is_finished(self) -> bool:
        return is_finished(self.folder)

    @property
    def has_diverged(self) -> bool:
        """Whether training with exactly this configuration diverged, as it would again."""
        if self.is_finished or not (self.folder / DIVERGED).is_file():
            return False
        stored = self.folder / "config.json"
        return stored.is_file() and read_checked_json(stored) == json.loads(encode_json(self.config.as_dict()))

    @property
    def progress(self) -> float:
        """The share of its steps that are done, from its event log."""
        event = read_last_event(self.folder / "events.jsonl")
        progress = (event or {}).get("progress")
        return progress if isinstance(progress, float) else 0.0

    def __str__(self) -> str:
        return self.label or f"{METHODS[self.config.method].title}, seed {self.config.seed}"


@dataclass
class JobOutcome:
    """How a job ended."""

    error: str | None = None
    """Why it failed; None if it did not."""
    warnings: list[str] = field(default_factory=list)
    """What the method warned about."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    processes: int,
    checkpoint_every: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[list[Job]], None] = lambda running: None,
    on_job_end: Callable[[Job, JobOutcome], None] = lambda job, outcome: None,
) -> None:
    """Run the jobs that are not finished, `processes` at a time, each with one thread.

    When `should_stop` returns True, the running jobs store a checkpoint and `Interrupted` is raised. They also store
    one when any exception ends this function. A job that fails does not stop the others.
    """
    for job in jobs:
        Run(job.folder).check_config(job.config.as_dict())
    unfinished = [job for job in jobs if not job.is_finished]
    if not unfinished:
        return
    should_stop()  # from this first call on, a signal no longer interrupts but asks to stop
    context = multiprocessing.get_context("spawn")
    stop_event = context.Event()
    with ProcessPoolExecutor(min(processes, len(unfinished)), context, _start_worker, (stop_event,)) as pool:
        try:
            futures = _submit_jobs(pool, unfinished, checkpoint_every)
            _wait_for_jobs(futures, stop_event, should_stop, on_progress, on_job_end)
        except BrokenProcessPool as error:
            if stop_event.is_set():
                raise Interrupted from error
            raise RunError(
                "a worker process was killed. Out of memory? Try fewer --jobs. "
                "The same command continues with the unfinished runs."
            ) from error
        except KeyboardInterrupt:  # a second Ctrl-C: a worker looks for a stop only between steps, and may be loading
            for worker in list(pool._processes.values()):
                worker.kill()  # safe: a checkpoint is written under a temporary name and renamed
            raise
        finally:
            stop_event.set()  # jobs still in the queue then end at once
    if should_stop():  # asked while the workers ended
        raise Interrupted


def _submit_jobs(
    pool: ProcessPoolExecutor, jobs: Sequence[Job], checkpoint_every: float
) -> dict[Future[JobOutcome | None], Job]:
    """Start the workers with Ctrl-C and SIGHUP blocked: both reach them too, before they can ignore them."""
    set_mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    before = set_mask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP]) if set_mask else None
    try:
        return {pool.submit(_run_job, job, checkpoint_every): job for job in jobs}
    finally:
        if set_mask:
            set_mask(signal.SIG_SETMASK, before)


def _wait_for_jobs(
    futures: Mapping[Future[JobOutcome | None], Job],
    stop_event: Event,
    should_stop: Callable[[], bool],
    on_progress: Callable[[list[Job]], None],
    on_job_end: Callable[[Job, JobOutcome], None],
) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        if should_stop():
            stop_event.set()
        for future in done:
            outcome = future.result()
            if outcome is not None:
                on_job_end(futures[future], outcome)
        on_progress([futures[future] for future in pending if future.running()])
    if stop_event.is_set():
        raise Interrupted


# In a worker process -------------------------------------------------------------------------------------------------

_stop_event: Event


def _start_worker(stop_event: Event) -> None:
    """Prepare a worker process: it stops when the event is set, and ends when the parent process ends."""
    global _stop_event
    _stop_event = stop_event
    skip_gc_at_exit()
    tune_malloc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too; the parent decides
    if hasattr(signal, "SIGHUP"):  # as does a closed terminal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def exit_with_parent() -> None:
        wait_for_any([sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_job(job: Job, checkpoint_every: float) -> JobOutcome | None:
    """Start or continue a job; None if it was stopped."""
    if _stop_event.is_set():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Run(job.folder) as run:
                execute_run(
                    job.config, run, checkpoint_every=checkpoint_every, threads=1, should_stop=_stop_event.is_set
                )
        except Interrupted:
            return None
        except DataError:
            raise
        except RunError as error:
            return JobOutcome(error=str(error))
        except Exception as error:  # whatever a method raises must not end the other runs
            return JobOutcome(error=f"{type(error).__name__}: {error}")
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, SelfCheckWarning)]
    return JobOutcome(warnings=messages)
