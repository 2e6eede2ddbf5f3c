"""`agscl search`: a method's best settings on a preset."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from agscl.cli.errors import DONE, FAILED, UsageError, value_errors_as_usage_errors
from agscl.cli.folders import check_group_folder, choose_folder_name
from agscl.cli.jobs import count_cores, print_errors, run_jobs_with_progress
from agscl.cli.options import (
    CheckpointEvery,
    Device,
    Epochs,
    Fast,
    GpusPerJob,
    Jobs,
    On,
    Preset,
    Runs,
    SetPairs,
    TaskOptions,
    Tasks,
    check_at_least_one,
    collect_changes,
    describe,
    parse_settings,
)

if TYPE_CHECKING:
    from agscl.experiments.jobs import Job
    from agscl.experiments.search import Trial


def search(
    preset: Preset,
    /,
    *,
    method: Annotated[str, describe("METHOD")] = "agscl",
    seed: Annotated[int, describe("N")] = 1000,
    seeds: Annotated[int, describe("N")] = 1,
    jobs: Jobs = None,
    on: On = None,
    gpus_per_job: GpusPerJob = None,
    name: Annotated[str | None, describe("NAME", default="(default: made from preset, method and changes)")] = None,
    epochs: Epochs = None,
    sampler: Annotated[Literal["axes", "optuna"], describe("axes|optuna")] = "axes",
    trials: Annotated[int | None, describe("N", default="(default: 20)")] = None,
    only: Annotated[str | None, describe("NAME,NAME,...", default="(default: all that can be searched)")] = None,
    set: SetPairs = (),
    tasks: Tasks = None,
    task_options: TaskOptions = (),
    device: Device = "cpu",
    fast: Fast = False,
    runs: Runs = Path("runs"),
    checkpoint_every: CheckpointEvery = 5.0,
) -> int:
    """Search a method's settings by validation accuracy, or by score for agents.

    One setting after the other, AGS-CL's paper form λ, then μ, then ρ.

    With --sampler optuna all together; poor trials are stopped after a task.

    The same command continues where it stopped.

    Args:
        method: The method whose settings are searched; `agscl methods` lists them.
        seed: First seed of tasks, initial weights and batches; choose one that no comparison uses.
        seeds: Try each choice on this many seeds and take the mean; one seed alone may be off by a point or two.
        name: Name of the search's folder in --runs.
        sampler: Who chooses what is tried: axes, values of one setting after the other; optuna, Optuna's TPE sampler.
        trials: With --sampler optuna: how many choices of settings are tried in all.
        only: The settings to search, e.g. lam.
        set: Fixed settings, e.g. --set patience=5; for a searched setting, its start value.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.command_lines import make_command_with_settings
    from agscl.experiments.presets import get_preset
    from agscl.experiments.search import search_settings

    changes = collect_changes(
        {"epochs": epochs},
        parse_settings(method, set, preset),
        preset=preset,
        device=device,
        fast=fast,
        tasks=tasks,
        task_options=task_options,
    )
    folder = runs / (name or choose_folder_name(f"search-{preset}-{method}", device, changes))
    check_group_folder(folder, runs, "search")

    def run_jobs(plan: Sequence[Job], watch: Callable[[], None] = lambda: None) -> None:
        errors = run_jobs_with_progress(plan, jobs, checkpoint_every, on, gpus_per_job, watch=watch)
        print_errors(errors)

    options: dict[str, Any] = {"seed": seed, "seeds": seeds, "only": None if only is None else only.split(",")}
    with value_errors_as_usage_errors():
        if sampler == "optuna":
            from agscl.experiments.optuna_search import search_with_optuna

            at_once = max(1, _choose_processes(jobs, on) // max(1, seeds))
            tried = search_with_optuna(
                preset,
                method,
                folder,
                run_jobs,
                trials=20 if trials is None else trials,
                at_once=at_once,
                device=device,
                **options,
                **changes,
            )
        elif trials is not None:
            raise UsageError("--trials is for --sampler optuna; the axes decide themselves how many values they try")
        else:
            tried = search_settings(preset, method, folder, run_jobs, device=device, **options, **changes)
    print_trials(tried, get_preset(preset).quantity)
    print_line(f"\nstored in {folder / 'search.json'}")
    best = tried[0]
    if best.valid_accuracy is None:
        print_line("Training diverged with every choice; try a lower learning rate, e.g. --set lr=0.001")
        return FAILED
    words = [pair for pair in set if pair.partition("=")[0] not in best.settings]  # they continue the --set
    words += ["--epochs", str(epochs)] if epochs is not None else []
    words += ["--tasks", tasks] if tasks is not None else []
    words += ["--task-options", *task_options] if task_options else []
    words += ["--device", device] if device != "cpu" else []
    words += ["--fast"] if fast else []
    print_line(f"run the best: {shlex.join([*make_command_with_settings(preset, method, best.settings), *words])}")
    return DONE


def print_trials(trials: Sequence[Trial], quantity: str) -> None:
    """Print the end of `agscl search`: what was tried, the best first."""
    from agscl.cli.console import console
    from agscl.cli.tables import format_mean, make_table
    from agscl.experiments.compare import summarize_values

    settings = list(dict.fromkeys(key for trial in trials for key in trial.settings))
    table = make_table(None, *settings, "average score, %" if quantity == "score" else "average validation accuracy, %")
    for trial in trials:
        if trial.stopped_after is not None:
            score = f"stopped after task {trial.stopped_after}"
        elif trial.valid_accuracy is None:
            score = "diverged"
        else:
            score = format_mean(summarize_values(trial.by_seed), 100, 1)
        table.add_row(*[f"{trial.settings[key]:g}" for key in settings], score)
    console.print()
    console.print(table)


def _choose_processes(jobs: int | None, on: str | None) -> int:
    check_at_least_one("--jobs", jobs)
    if jobs is None and on is not None:
        raise UsageError("--sampler optuna suggests a batch of trials at a time: with --on say how many, --jobs N")
    return jobs or count_cores()
