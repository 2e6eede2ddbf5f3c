"""Many runs at a time, each in its own process and folder: on this machine, or on a Ray cluster."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

from agscl.experiments.method_entries import METHODS
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import RunConfig
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.runs import Run, RunError, is_finished
from agscl.runs.errors import Interrupted
from agscl.runs.events import read_last_event
from agscl.runs.json_files import encode_json, read_checked_json
from agscl.runs.run_folder import DIVERGED
from agscl.system.process import skip_gc_at_exit, tune_malloc
from agscl.tasks import DataError

POLL_SECONDS = 0.2
"""How often the progress of the runs is looked up."""
STOP_REQUEST = "stop"
"""A file in the folder of a run that is asked to stop."""
MAX_LOSSES = 3
"""How often a worker may be lost before its job has stored a new checkpoint."""


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
        """The share of the job's steps that are done, from its event log."""
        event = read_last_event(self.folder / "events.jsonl")
        progress = (event or {}).get("progress")
        return progress if isinstance(progress, float) else 0.0

    def request_stop(self) -> None:
        """Ask this job alone to store a checkpoint and end, wherever it runs; running it again takes this back."""
        if self.folder.is_dir():
            (self.folder / STOP_REQUEST).touch()

    def __str__(self) -> str:
        return self.label or f"{METHODS[self.config.method].title}, seed {self.config.seed}"


@dataclass
class JobOutcome:
    """How a job ended."""

    error: str | None = None
    """Why it failed; None if it did not."""
    warnings: list[str] = field(default_factory=list)
    """What the method warned about."""


class WorkerLost(Exception):
    """The worker process of a job died, or the machine it ran on."""


class Workers(Protocol):
    """Where jobs run: processes of this machine, or a Ray cluster."""

    def __enter__(self) -> Workers: ...

    def __exit__(self, *exception: object) -> None:
        """Wait for jobs that were asked to stop."""

    def submit(self, job: Job) -> Future[JobOutcome | None]:
        """Start or continue a job as soon as there is room; None if it was stopped. May raise `WorkerLost`."""

    def is_running(self, job: Job, future: Future[JobOutcome | None]) -> bool: ...

    def stop(self) -> None:
        """Ask the running jobs to store a checkpoint and end, and drop those that are not running."""

    def kill(self) -> None:
        """End the running jobs now. Safe: a checkpoint is written under a temporary name and renamed."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    processes: int | None,
    checkpoint_every: float,
    on: str | None = None,
    gpus_per_job: float = 1.0,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[list[Job]], None] = lambda running: None,
    on_job_end: Callable[[Job, JobOutcome], None] = lambda job, outcome: None,
) -> None:
    """Run the jobs that are not finished, `processes` at a time, each with one thread.

    `on` is the address of a Ray cluster, or "local" for a Ray of this machine; there `processes` may be None: as many
    as fit. When `should_stop` returns True, the running jobs store a checkpoint and `Interrupted` is raised. They also
    store one when any exception ends this function. A job that fails does not stop the others.
    """
    for job in jobs:
        Run(job.folder).check_config(job.config.as_dict())
    unfinished = [job for job in jobs if not job.is_finished]
    if not unfinished:
        return
    for job in unfinished:
        (job.folder / STOP_REQUEST).unlink(missing_ok=True)
    workers: Workers
    if on is None:
        processes = min(processes or 1, len(unfinished))
        workers = LocalWorkers(processes, checkpoint_every)
    else:
        from agscl.experiments.ray_jobs import RayWorkers

        workers = RayWorkers(on, unfinished, processes, checkpoint_every, gpus_per_job)
    should_stop()  # from this first call on, a signal no longer interrupts but asks to stop
    with workers:
        try:
            _run_on_workers(unfinished, workers, processes, should_stop, on_progress, on_job_end)
        except KeyboardInterrupt:  # a second Ctrl-C: a worker looks for a stop only between steps, and may be loading
            workers.kill()
            raise
        finally:
            workers.stop()
    if should_stop():  # asked while the workers ended
        raise Interrupted


def _run_on_workers(
    jobs: Sequence[Job],
    workers: Workers,
    limit: int | None,
    should_stop: Callable[[], bool],
    on_progress: Callable[[list[Job]], None],
    on_job_end: Callable[[Job, JobOutcome], None],
) -> None:
    waiting = deque(jobs)
    futures: dict[Future[JobOutcome | None], Job] = {}
    losses = {job.folder: _Losses() for job in jobs}
    stopped = False
    while futures or (waiting and not stopped):
        while waiting and not stopped and (limit is None or len(futures) < limit):
            job = waiting.popleft()
            futures[workers.submit(job)] = job
        done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        if should_stop() and not stopped:
            stopped = True
            workers.stop()
        for future in done:
            job = futures.pop(future)
            try:
                outcome = future.result()
            except WorkerLost as error:
                outcome = None
                if not losses[job.folder].may_continue(job):
                    outcome = JobOutcome(error=f"{error}, {MAX_LOSSES} times without a checkpoint in between")
                elif not stopped:
                    waiting.append(job)
            except BrokenProcessPool as error:
                if stopped:
                    raise Interrupted from error
                raise RunError(
                    "a worker process was killed. Out of memory? Try fewer --jobs. "
                    "The same command continues with the unfinished runs."
                ) from error
            if outcome is not None:
                outcome.warnings += losses[job.folder].describe()
                on_job_end(job, outcome)
        on_progress([job for future, job in futures.items() if workers.is_running(job, future)])
    if stopped:
        raise Interrupted


@dataclass
class _Losses:
    """How often the worker of a job was lost."""

    total: int = 0
    in_vain: int = 0
    """Since the last checkpoint."""
    checkpoint: int = -1
    """The newest one at the last loss."""

    def may_continue(self, job: Job) -> bool:
        """Count a lost worker; whether to take the job up again from its checkpoint."""
        newest = max(Run(job.folder).checkpoints.list_numbers(), default=0)
        self.in_vain = self.in_vain + 1 if newest == self.checkpoint else 1
        self.total, self.checkpoint = self.total + 1, newest
        return self.in_vain < MAX_LOSSES

    def describe(self) -> list[str]:
        times = "once" if self.total == 1 else f"{self.total} times"
        return [f"its worker was lost {times}; it continued from its last checkpoint"] if self.total else []


class LocalWorkers:
    """Worker processes of this machine. If one is killed, all end: most likely memory ran out."""

    def __init__(self, processes: int, checkpoint_every: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._checkpoint_every = checkpoint_every
        self._stop_event = context.Event()
        self._pool = ProcessPoolExecutor(processes, context, _start_worker, (self._stop_event,))

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def submit(self, job: Job) -> Future[JobOutcome | None]:
        """Start a worker with Ctrl-C and SIGHUP blocked: both reach it too, before it can ignore them."""
        set_mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
        before = set_mask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP]) if set_mask else None
        try:
            return self._pool.submit(_run_job, job, self._checkpoint_every)
        except BrokenProcessPool as error:  # reported by the future of the job that broke it
            future: Future[JobOutcome | None] = Future()
            future.set_exception(error)
            return future
        finally:
            if set_mask:
                set_mask(signal.SIG_SETMASK, before)

    def is_running(self, job: Job, future: Future[JobOutcome | None]) -> bool:
        return future.running()

    def stop(self) -> None:
        self._stop_event.set()

    def kill(self) -> None:
        for worker in list(self._pool._processes.values()):
            worker.kill()


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
    return run_job(job, checkpoint_every, _stop_event.is_set)


def run_job(
    job: Job, checkpoint_every: float, should_stop: Callable[[], bool], wait_for_lock: float = 0.0
) -> JobOutcome | None:
    """Start or continue a job in this process; None if it was stopped."""
    if should_stop():
        return None
    should_stop = _look_for_request(job, should_stop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Run(job.folder, wait_for_lock) as run:
                execute_run(job.config, run, checkpoint_every=checkpoint_every, threads=1, should_stop=should_stop)
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


def _look_for_request(job: Job, should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """`should_stop`, or whether `job.request_stop` was called; the file is looked for a few times a second."""
    last = time.monotonic()

    def is_requested() -> bool:
        nonlocal last
        if time.monotonic() - last < POLL_SECONDS:
            return False
        last = time.monotonic()
        return (job.folder / STOP_REQUEST).exists()

    return lambda: should_stop() or is_requested()
