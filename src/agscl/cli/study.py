"""`agscl study`: what each part of AGS-CL's paper form contributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from agscl.cli.errors import DONE, FAILED, STOPPED, value_errors_as_usage_errors
from agscl.cli.folders import check_group_folder, choose_folder_name
from agscl.cli.jobs import print_errors, print_finished_count, run_jobs_with_progress
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
    Seeds,
    SetPairs,
    TaskOptions,
    Tasks,
    check_at_least_one,
    collect_changes,
    describe,
    parse_settings_of_methods,
)

AOPC_SHARES = (0.1, 0.25, 0.5, 1.0)
"""The shares of nodes pruned for which a study shows the AOPC."""


def study(
    study: Annotated[
        str,
        describe(
            "STUDY",
            "reinit: without the re-initialisations; tradeoff: plasticity and stability over λ, also for MAS and EWC; "
            "rho: ρ from 0.1 to 0.5; prox: without proximal steps; aopc: do importances show which nodes matter?",
        ),
    ],
    preset: Preset = "digits",
    /,
    *,
    seeds: Seeds = 1,
    jobs: Jobs = None,
    on: On = None,
    gpus_per_job: GpusPerJob = None,
    name: Annotated[str | None, describe("NAME", default="(default: made from preset and changes)")] = None,
    epochs: Epochs = None,
    set: SetPairs = (),
    tasks: Tasks = None,
    task_options: TaskOptions = (),
    device: Device = "cpu",
    fast: Fast = False,
    runs: Runs = Path("runs"),
    checkpoint_every: CheckpointEvery = 5.0,
) -> int:
    """Study what each part of AGS-CL contributes, in the form of its paper.

    The same command continues where it stopped. Studies share their runs.

    Args:
        name: Name of the folder in --runs that holds the runs of the studies.
        set: Settings of training for all, e.g. --set patience=5; or of one method, e.g. --set paper-agscl.lam=1000.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.aopc import measure_perturbations
    from agscl.experiments.presets import get_preset
    from agscl.experiments.studies import add_finished_runs, collect_study, list_methods, plan_study, store_study

    with value_errors_as_usage_errors():
        methods = list_methods(study)
    training_settings, method_settings = parse_settings_of_methods(methods, set, preset)
    changes = collect_changes(
        {"epochs": epochs},
        training_settings,
        preset=preset,
        device=device,
        fast=fast,
        tasks=tasks,
        task_options=task_options,
    )
    folder = runs / (name or choose_folder_name(f"study-{preset}", device, changes | method_settings))
    check_group_folder(folder, runs, "study")
    check_at_least_one("--seeds", seeds)
    with value_errors_as_usage_errors():
        lines = plan_study(preset, study, seeds, folder, settings=method_settings, device=device, **changes)
    plan = [job for line in lines for job in line.jobs]
    print_finished_count(plan, folder)
    errors = run_jobs_with_progress(plan, jobs, checkpoint_every, on, gpus_per_job)
    finished = [job for job in plan if job.is_finished]
    if study == "aopc":
        try:
            measured = measure_perturbations(folder, preset, finished, print_line)
        except KeyboardInterrupt:
            print_line("Stopped; what was measured is stored. The same command continues.")
            return STOPPED
        print_aopc({str(job.config.seed): measured[str(job.config.seed)] for job in finished})
        content: dict[str, Any] = {"seeds": measured}
    else:
        print_study(collect_study(lines), get_preset(preset).quantity)
        content = {"lines": collect_study(add_finished_runs(lines, folder))}
    print_errors(errors)
    print_line(f"\nstored in {store_study(folder, preset, study, content, errors)}")
    return FAILED if errors else DONE


def print_study(lines: Sequence[Mapping[str, Any]], quantity: str) -> None:
    """Print the end of `agscl study`: metrics, and the shares of free and unchanged nodes after the last task."""
    from agscl.cli.console import console
    from agscl.cli.tables import format_mean, make_table

    if not lines:
        return
    seeds = max(len(line["seeds"]) for line in lines)
    title = f"Average {quantity} and nodes at the end{f', mean ± deviation over {seeds} seeds' if seeds > 1 else ''}"
    has_nodes = any("sparsity" in line["curves"] for line in lines)
    node_columns = ["free, %", "unchanged, %"] if has_nodes else []
    table = make_table(
        title, "", "score, %" if quantity == "score" else "acc., %", "plasticity", "stability", *node_columns
    )
    table.padding = (0, 1, 0, 0)
    for line in lines:
        shares = [line["curves"].get(figure, [None])[-1] for figure in ("sparsity", "used_capacity")]
        table.add_row(
            line["label"],
            format_mean(line["average_accuracy"], 100, 1),
            format_mean(line["plasticity"], 1, 2),
            format_mean(line["stability"], 1, 2),
            *["–" if share is None else f"{100 * share:.0f}" for share in shares if has_nodes],
        )
    console.print()
    console.print(table)


def print_aopc(seeds: Mapping[str, Any]) -> None:
    """Print the end of `agscl study aopc`: the area over the curve up to some shares of the nodes."""
    from agscl.cli.console import console
    from agscl.cli.tables import make_table

    table = make_table(
        "AOPC: mean accuracy loss in points, by share of nodes pruned",
        "after task",
        "seed",
        "order",
        *[f"{100 * share:.0f} %" for share in AOPC_SHARES],
    )
    for seed, measured in seeds.items():
        for after, curves in measured["after"].items():
            pruned = curves["pruned"]
            ends = [
                min(range(len(pruned)), key=lambda end: abs(pruned[end] - share * pruned[-1])) for share in AOPC_SHARES
            ]
            for order, aopc in curves["aopc"].items():
                table.add_row(after, seed, order, *[f"{100 * aopc[end]:.1f}" for end in ends])
    console.print()
    console.print(table)
