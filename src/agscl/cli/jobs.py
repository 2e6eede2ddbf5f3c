"""Many runs with progress bars, as `agscl compare`, `search` and `study` need them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agscl.cli.errors import UsageError
from agscl.cli.options import check_at_least_one, check_checkpoint_every
from agscl.cli.signals import catch_stop_signals

if TYPE_CHECKING:
    from agscl.experiments.jobs import Job, JobOutcome


def run_jobs_with_progress(
    plan: Sequence[Job],
    processes: int | None,
    checkpoint_every: float,
    on: str | None = None,
    gpus_per_job: float | None = None,
    loggers: Sequence[str] = (),
    watch: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Run the jobs that are not finished, several at a time; returns why jobs failed, by their labels.

    `watch` is called a few times a second while they run.

    The figures of each job go to the loggers when it ends; those of jobs that were finished before, at the end.
    """
    from agscl.cli.console import print_line
    from agscl.cli.progress import JobsProgress
    from agscl.experiments.jobs import run_jobs
    from agscl.experiments.method_entries import METHODS
    from agscl.runs.errors import Interrupted

    check_checkpoint_every(checkpoint_every)
    check_at_least_one("--jobs", processes)
    if gpus_per_job is not None and (on is None or not 0 < gpus_per_job <= 1):
        raise UsageError(f"--gpus-per-job is a share of a GPU above 0 and up to 1, with --on; not {gpus_per_job:g}")
    if on is None:
        processes = processes or count_cores()
    unfinished = [job for job in plan if not job.is_finished]
    on_gpu = [job for job in unfinished if job.config.device.startswith("cuda")]
    if on is None and min(processes or 1, len(on_gpu)) > 1 and _could_start_mps():
        print_line("Several runs share a GPU better with NVIDIA's MPS. To start it: nvidia-cuda-mps-control -d")
    if unfinished:
        _check_data(plan, unfinished[0])

    errors: dict[str, str] = {}
    notes: dict[str, str] = {}
    working = list(loggers)  # a logger that failed is not tried again
    with _lock_folders(plan), catch_stop_signals() as should_stop, JobsProgress(plan) as progress:

        def on_job_end(job: Job, outcome: JobOutcome) -> None:
            title = METHODS[job.config.method].title
            for warning in outcome.warnings:  # almost the same for each seed: show it once
                notes.setdefault(f"{title} {re.sub('[0-9.e-]+', '', warning)}", f"Note ({job}): {warning}")
            if outcome.error is not None:
                errors[str(job)] = outcome.error
            progress.show_end(job, "failed" if outcome.error is not None else _describe_result(job))
            working[:] = _log_figures(job, working)

        def show_running(running: list[Job]) -> None:
            progress.show_running(running)
            watch()

        try:
            run_jobs(
                plan,
                processes=processes,
                checkpoint_every=checkpoint_every,
                on=on,
                gpus_per_job=1.0 if gpus_per_job is None else gpus_per_job,
                should_stop=should_stop,
                on_progress=show_running,
                on_job_end=on_job_end,
            )
        except Interrupted:
            progress.close()
            raise
    for job in plan:
        if job not in unfinished:
            working[:] = _log_figures(job, working)
    for note in notes.values():
        print_line(note)
    return errors


def print_finished_count(plan: Sequence[Job], folder: Path) -> None:
    from agscl.cli.console import print_line

    if finished := sum(job.is_finished for job in plan):
        print_line(f"{finished} of {len(plan)} runs in {folder} are finished already.")


def print_errors(errors: Mapping[str, str]) -> None:
    from agscl.cli.console import print_line

    for label, reason in errors.items():
        print_line(f"FAILED {label}: {reason}")


def _log_figures(job: Job, names: Sequence[str]) -> list[str]:
    """Write the figures of a job's event log to loggers; returns those that did not fail."""
    from agscl.cli.console import print_line
    from agscl.runs.loggers import Loggers

    loggers = Loggers(names, job.folder, job.config.as_dict(), print_line)
    if (job.folder / "events.jsonl").exists():
        loggers.update()
        loggers.close()
    return loggers.names


def _check_data(plan: Sequence[Job], unfinished: Job) -> None:
    """Load the data once, before several processes do, and check that finished runs of one's own data learned it."""
    from agscl.experiments.build import load_tasks
    from agscl.experiments.run import check_data_unchanged

    load_tasks(unfinished.config)
    one_per_seed = {job.config.seed: job for job in plan if job.is_finished and ":" in job.config.tasks}
    for job in one_per_seed.values():
        check_data_unchanged(job.folder, job.config)


def _describe_result(job: Job) -> str:
    from agscl.cli.tables import format_percent
    from agscl.experiments.search import score_job
    from agscl.runs import read_result

    if job.config.hold_out:  # part of a search
        return f"average validation accuracy {format_percent(score_job(job) or 0.0)}"
    outcome = read_result(job.folder)["methods"][job.config.method]
    return f"average accuracy {format_percent(outcome['average_accuracy'])}"


@contextlib.contextmanager
def _lock_folders(plan: Sequence[Job]) -> Iterator[None]:
    """Keep other commands from running the same unfinished jobs."""
    from agscl.system.files import lock_file

    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(job.folder.parent for job in plan if not job.is_finished):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock_file(folder / "lock", wait=False))
            except BlockingIOError as error:
                raise UsageError(f"another command is using {folder}: wait for it, or stop it") from error
        yield


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _could_start_mps() -> bool:
    """Whether NVIDIA's service for processes that share a GPU is installed and not running."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return shutil.which("nvidia-cuda-mps-control") is not None and not (pipes / "control").exists()
