"""`agscl run`: train one method, after fine-tuning as the reference."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from agscl.cli.errors import DONE, FAILED, STOPPED, UsageError, value_errors_as_usage_errors
from agscl.cli.folders import (
    check_run_folder,
    choose_folder_name,
    find_newest_unfinished_run,
    find_run,
    remove_if_refused,
)
from agscl.cli.options import (
    BatchSize,
    CheckpointEvery,
    Device,
    Epochs,
    Fast,
    LearningRate,
    Log,
    Runs,
    SetPairs,
    TaskOptions,
    Tasks,
    check_at_least_one,
    check_checkpoint_every,
    check_loggers,
    collect_changes,
    describe,
    parse_settings,
)
from agscl.cli.report import write_page_at_end
from agscl.cli.signals import catch_stop_signals
from agscl.system.torchrun import find_torchrun_rank

if TYPE_CHECKING:
    from agscl.experiments.run_config import RunConfig
    from agscl.training.ranks import Ranks

NEWEST = "newest"
"""What `--resume` without a name means."""


def run(
    preset: Annotated[
        str,
        describe(
            "PRESET",
            "The experiment: digits (no download); the paper's cifar100, cifar10-100, omniglot, cub200 and eight; or "
            "tinyimagenet32, cifar10-tiny, five, mixed, mixed-small-first, mixed-large-first, omniglot-plain, "
            "omniglot5. `agscl data get` downloads what they need. "
            "Reinforcement learning: control (seconds), the paper's atari8; or atari8-short, atari-smoke.",
        ),
    ] = "digits",
    /,
    *,
    method: Annotated[str, describe("METHOD")] = "agscl",
    seed: Annotated[int, describe("N")] = 0,
    name: Annotated[
        str | None, describe("NAME", default="(default: made from preset, method, seed and changes)")
    ] = None,
    resume: Annotated[str | None, describe("[NAME]", default="")] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    set: SetPairs = (),
    tasks: Tasks = None,
    task_options: TaskOptions = (),
    device: Device = "cpu",
    fast: Fast = False,
    threads: Annotated[int | None, describe("N", default="(default: the preset's; with a GPU 1)")] = None,
    log: Log = (),
    tensorboard: bool = False,
    runs: Runs = Path("runs"),
    checkpoint_every: CheckpointEvery = 5.0,
) -> int:
    """Train fine-tuning and a method on a task sequence, and compare them.

    The same command continues an interrupted run.

    Args:
        method: The method to compare with fine-tuning; `agscl methods` lists them. finetune trains fine-tuning alone.
        seed: Seed of the tasks, the initial weights and the order of batches.
        name: Name of the run's folder in --runs.
        resume: Continue the run of this name with its stored settings; without NAME, the newest unfinished run.
        set: Settings of the method or of training, given after PRESET, e.g. --set mu=20 lam=inf patience=5.
        threads: CPU threads. A resumed run keeps the number it was started with.
        tensorboard: The same as --log tensorboard.
    """
    from agscl.experiments.run_config import configure
    from agscl.training.ranks import join_ranks

    if find_torchrun_rank():
        return _follow_first_rank()
    check_checkpoint_every(checkpoint_every)
    check_at_least_one("--threads", threads)
    log = (*log, "tensorboard") if tensorboard else log
    check_loggers(log)
    changes = collect_changes(
        {"epochs": epochs, "batch_size": batch_size, "lr": lr},
        parse_settings(method, set, preset),
        preset=preset,
        device=device,
        fast=fast,
        tasks=tasks,
        task_options=task_options,
    )
    if resume is None:
        with value_errors_as_usage_errors():
            config = configure(preset, method=method, seed=seed, device=device, **changes)
        folder = runs / (name or choose_folder_name(f"{preset}-{method}-seed{seed}", device, changes))
        check_run_folder(folder, runs)
    else:
        folder = find_newest_unfinished_run(runs) if resume == NEWEST else find_run(runs, resume)
        config = _load_config(folder)
        repeated = {
            "preset": (preset, "digits"),
            "method": (method, "agscl"),
            "seed": (seed, 0),
            "device": (device, "cpu"),
        }
        unused = [key for key, (value, default) in repeated.items() if value not in (default, getattr(config, key))]
        unused += [*changes, *(["name"] if name else [])]
        if unused:
            raise UsageError(f"--resume takes all settings from {folder}/config.json: leave out {', '.join(unused)}")

    if config.device.startswith("cuda:") and find_torchrun_rank() is not None:
        raise UsageError(f"torchrun gives each process a GPU of its own: use --device cuda, not {config.device}")
    with join_ranks() as ranks:
        return _run_here(config, folder, runs, ranks, checkpoint_every, threads, log)


def _run_here(
    config: RunConfig,
    folder: Path,
    runs: Path,
    ranks: Ranks,
    checkpoint_every: float,
    threads: int | None,
    log: Sequence[str],
) -> int:
    from agscl.cli.console import print_line
    from agscl.cli.progress import RunProgress
    from agscl.cli.run_summary import print_run_summary
    from agscl.experiments.run import execute_run
    from agscl.experiments.run_environment import choose_threads
    from agscl.runs import Run, is_finished, read_result
    from agscl.runs.errors import Interrupted
    from agscl.runs.loggers import Loggers

    loggers = Loggers(log, folder, config.as_dict(), print_line)
    if is_finished(folder):
        Run(folder).check_config(config.as_dict())
        result = read_result(folder)
        loggers.update()
        loggers.close()
        print_line(f"{folder} is finished already; nothing to do. Its result:")
        ranks.broadcast(None)  # there is nothing to train
        print_run_summary(result, folder)
        if not (folder / "report.html").exists():
            write_page_at_end(folder)
        return DONE

    def show_event(event: dict[str, Any]) -> None:
        progress.show_event(event)
        loggers.update()  # from the event log, which holds this event

    with (
        remove_if_refused(folder),
        Run(folder) as current,
        catch_stop_signals() as should_stop,
        RunProgress(config) as progress,
    ):
        if current.checkpoints.list_numbers():
            print_line(f"Continuing {folder}.")
        try:
            result = execute_run(
                config,
                current,
                checkpoint_every=checkpoint_every,
                threads=threads or choose_threads(config),
                should_stop=should_stop,
                on_event=show_event,
                on_message=print_line,
            )
        except Interrupted:
            progress.close()
            print_line(
                f"Stopped; a checkpoint is stored. Continue with: {_make_resume_command(folder, runs, ranks.size)}"
            )
            return STOPPED
        finally:
            loggers.close()
    print_run_summary(result, folder)
    write_page_at_end(folder)
    return DONE


def fill_in_bare_resume(arguments: list[str]) -> list[str]:
    """The command's arguments, with a name after a `--resume` of `agscl run` that has none."""
    for index, argument in enumerate(arguments):
        is_bare = index + 1 == len(arguments) or arguments[index + 1].startswith("-")
        if argument == "--resume" and is_bare:
            return [*arguments[: index + 1], NEWEST, *arguments[index + 1 :]]
    return arguments


def _load_config(folder: Path) -> RunConfig:
    from agscl.experiments.run_config import RunConfig, check_device
    from agscl.runs import Run

    config = RunConfig.from_dict(Run(folder).read_config() or {})
    try:
        check_device(config.device)
    except ValueError as error:
        raise UsageError(
            f"{error}. This run was started on that device: resume it on a machine that has one"
        ) from error
    return config


def _make_resume_command(folder: Path, runs: Path, processes: int) -> str:
    name = folder.relative_to(runs) if folder.is_relative_to(runs) else folder
    launcher = ["torchrun", "--nproc-per-node", str(processes), "-m", "agscl"] if processes > 1 else ["agscl"]
    words = [*launcher, "run", "--resume", str(name)]
    return shlex.join(words if runs == Path("runs") else [*words, "--runs", str(runs)])


def _follow_first_rank() -> int:
    """What all processes but the first do, where `torchrun` started several."""
    from agscl.experiments.run import follow_run
    from agscl.runs.errors import Interrupted
    from agscl.training import TrainingFailed
    from agscl.training.ranks import join_ranks

    warnings.simplefilter("ignore")  # the first process prints them
    with catch_stop_signals() as should_stop, join_ranks():
        try:
            follow_run(should_stop)
        except Interrupted:
            return STOPPED
        except (TrainingFailed, FloatingPointError):  # the first process says why, and does not wait for the others
            os._exit(FAILED)
    return DONE
