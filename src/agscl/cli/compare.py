"""`agscl compare`: methods over several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from agscl.cli.errors import DONE, FAILED, value_errors_as_usage_errors
from agscl.cli.folders import check_group_folder, choose_folder_name
from agscl.cli.jobs import print_errors, print_finished_count, run_jobs_with_progress
from agscl.cli.options import (
    BatchSize,
    CheckpointEvery,
    Device,
    Epochs,
    Fast,
    GpusPerJob,
    Jobs,
    LearningRate,
    Log,
    On,
    Preset,
    Runs,
    SetPairs,
    TaskOptions,
    Tasks,
    check_at_least_one,
    check_loggers,
    collect_changes,
    describe,
    parse_settings_of_methods,
)
from agscl.cli.report import write_page_at_end

if TYPE_CHECKING:
    from rich.table import Table


def compare(
    preset: Preset = "digits",
    /,
    *,
    methods: Annotated[
        str | None, describe("all|NAME,NAME,...", default="(default: the preset's; for digits all)")
    ] = None,
    seeds: Annotated[int | None, describe("N", default="(default: 5; for digits 3)")] = None,
    jobs: Jobs = None,
    on: On = None,
    gpus_per_job: GpusPerJob = None,
    name: Annotated[str | None, describe("NAME", default="(default: made from preset and changes)")] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    set: SetPairs = (),
    tasks: Tasks = None,
    task_options: TaskOptions = (),
    device: Device = "cpu",
    fast: Fast = False,
    log: Log = (),
    runs: Runs = Path("runs"),
    checkpoint_every: CheckpointEvery = 5.0,
) -> int:
    """Compare methods over several seeds: mean ± standard deviation.

    The same command continues where it stopped.

    Finished runs are not repeated, so methods and seeds can be added later.

    Args:
        methods: Names separated by commas, or all; `agscl methods` lists them. Fine-tuning is always included.
        seeds: How many seeds: 0, 1, 2, …
        name: Name of the comparison's folder in --runs.
        set: Settings of training for all, e.g. --set patience=5; or of one method, e.g. --set ewc.lam=400.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.compare import add_finished_runs, collect_comparison, plan_comparison, store_comparison
    from agscl.experiments.method_entries import METHODS, REFERENCE, get_entry
    from agscl.experiments.presets import get_preset

    check_loggers(log)
    with value_errors_as_usage_errors():
        chosen = get_preset(preset)
        if methods is None:
            names = list(chosen.compared or chosen.methods)
        elif methods == "all":
            names = list(METHODS)
        else:
            names = [method for method in methods.split(",") if get_entry(method)]
    seeds = chosen.seeds if seeds is None else seeds
    training_settings, method_settings = parse_settings_of_methods(
        list(dict.fromkeys([*names, REFERENCE])), set, preset
    )
    changes = collect_changes(
        {"epochs": epochs, "batch_size": batch_size, "lr": lr},
        training_settings,
        preset=preset,
        device=device,
        fast=fast,
        tasks=tasks,
        task_options=task_options,
    )
    folder = runs / (name or choose_folder_name(f"compare-{preset}", device, changes | method_settings))
    check_group_folder(folder, runs, "comparison")
    check_at_least_one("--seeds", seeds)
    with value_errors_as_usage_errors():
        plan = plan_comparison(preset, names, seeds, folder, settings=method_settings, device=device, **changes)
    print_finished_count(plan, folder)
    errors = run_jobs_with_progress(plan, jobs, checkpoint_every, on, gpus_per_job, log)
    if collected := collect_comparison(plan):
        print_comparison(collected)
    print_errors(errors)
    stored = store_comparison(folder, preset, collect_comparison(add_finished_runs(plan, folder)), errors)
    print_line(f"\nstored in {stored}")
    write_page_at_end(folder)
    return FAILED if errors else DONE


def print_comparison(collected: Mapping[str, Any]) -> None:
    """Print the end of `agscl compare`: methods in the order of the paper's table."""
    from agscl.cli.console import console, print_line
    from agscl.cli.tables import TITLES, format_mean, make_table

    seeds = max(len(row["seeds"]) for row in collected.values())
    table = make_table(
        f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed",
        "method",
        "average score, %" if any("scores" in row for row in collected.values()) else "average acc., %",
        "plasticity",
        "stability",
        "forgetting, %",
    )
    for name, row in collected.items():
        suffix = "" if len(row["seeds"]) == seeds else f" ({len(row['seeds'])} seeds)"
        table.add_row(
            TITLES[name] + suffix,
            format_mean(row["average_accuracy"], 100, 1),
            format_mean(row["plasticity"], 1, 3),
            format_mean(row["stability"], 1, 3),
            format_mean(row["forgetting"], 100, 1),
        )
    console.print()
    console.print(table)
    if all("accumulated_reward" in row for row in collected.values()):
        console.print()
        console.print(_make_rewards_table(collected))
        if left_out := dict.fromkeys(
            task for row in collected.values() for some in row["not_accumulated"] for task in some
        ):
            print_line(
                f"not in the accumulated reward of a seed where fine-tuning did not learn it: {', '.join(left_out)}"
            )


def _make_rewards_table(collected: Mapping[str, Any]) -> Table:
    from agscl.cli.tables import TITLES, format_mean, make_table

    table = make_table("Agents", "method", "accumulated reward", "forward transfer, %")
    for name, row in collected.items():
        reward, transfer = format_mean(row["accumulated_reward"], 1, 2), format_mean(row["forward_transfer"], 100, 1)
        table.add_row(TITLES[name], reward, transfer)
    return table
