"""`agscl search`: a method's best settings on a preset."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from agscl.cli.errors import DONE, FAILED, value_errors_as_usage_errors
from agscl.cli.folders import check_group_folder, choose_folder_name
from agscl.cli.jobs import print_errors, run_jobs_with_progress
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
    collect_changes,
    describe,
    parse_settings,
)

if TYPE_CHECKING:
    from agscl.experiments.jobs import Job


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

    AGS-CL: λ, then μ, then ρ. Other methods: their main setting.

    The same command continues where it stopped.

    Args:
        method: The method whose settings are searched; `agscl methods` lists them.
        seed: First seed of tasks, initial weights and batches; choose one that no comparison uses.
        seeds: Try each choice on this many seeds and take the mean; one seed alone may be off by a point or two.
        name: Name of the search's folder in --runs.
        only: The settings to search, e.g. lam.
        set: Fixed settings, e.g. --set eta=0.8; for a searched setting, its start value.
    """
    from agscl.cli.console import print_line
    from agscl.cli.tables import print_trials
    from agscl.experiments.presets import get_preset
    from agscl.experiments.search import make_run_command, search_settings

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

    def run_jobs(plan: Sequence[Job]) -> None:
        print_errors(run_jobs_with_progress(plan, jobs, checkpoint_every, on, gpus_per_job))

    with value_errors_as_usage_errors():
        trials = search_settings(
            preset,
            method,
            folder,
            run_jobs,
            seed=seed,
            seeds=seeds,
            only=None if only is None else only.split(","),
            device=device,
            **changes,
        )
    print_trials(trials, get_preset(preset).quantity)
    print_line(f"\nstored in {folder / 'search.json'}")
    best = trials[0]
    if best.valid_accuracy is None:
        print_line("Training diverged with every choice; try a lower learning rate, e.g. --set lr=0.001")
        return FAILED
    words = [pair for pair in set if pair.partition("=")[0] not in best.settings]  # they continue the --set
    words += ["--epochs", str(epochs)] if epochs is not None else []
    words += ["--tasks", tasks] if tasks is not None else []
    words += ["--task-options", *task_options] if task_options else []
    words += ["--device", device] if device != "cpu" else []
    words += ["--fast"] if fast else []
    print_line(f"run the best: {shlex.join([*make_run_command(preset, method, best.settings), *words])}")
    return DONE
