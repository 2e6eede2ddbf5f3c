"""The command `agscl`: run, compare, search, study, verify, inspect, methods, data.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

with contextlib.suppress(ImportError):  # `main` says what is missing
    import tyro

if TYPE_CHECKING:
    from agscl.experiments.config import RunConfig
    from agscl.experiments.jobs import Job

DONE, FAILED, WRONG_USE, STOPPED = 0, 1, 2, 130
NEWEST = "newest"


class WrongUse(Exception):
    """The user asked for something that cannot be; the message says what can."""


def _shown(value: str, default: str | None = None) -> Any:
    """How an option's value and default appear in the help text."""
    return tyro.conf.arg(metavar=value, help_behavior_hint=default)


def run(
    preset: Annotated[str, _shown("PRESET")] = "digits",
    /,
    *,
    method: Annotated[str, _shown("METHOD")] = "agscl",
    seed: Annotated[int, _shown("N")] = 0,
    name: Annotated[str | None, _shown("NAME", "(default: made from preset, method, seed and changes)")] = None,
    resume: Annotated[str | None, _shown("[NAME]", "")] = None,
    epochs: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    batch_size: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    lr: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    set: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    tasks: Annotated[str | None, _shown("NAME", "(default: the preset's)")] = None,
    task_options: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    device: Annotated[str, _shown("DEVICE")] = "cpu",
    fast: bool = False,
    threads: Annotated[int | None, _shown("N", "(default: the preset's; with a GPU 1)")] = None,
    tensorboard: bool = False,
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
    checkpoint_every: Annotated[float, _shown("SECONDS")] = 5.0,
) -> int:
    """Learn a task sequence twice, with fine-tuning and with a method, and compare.

    The same command continues a run that was interrupted, where it stood.

    Args:
        preset: The experiment: digits (no download); the paper's cifar100, cifar10-100, omniglot, cub200 and eight; or
            tinyimagenet32, cifar10-tiny, five, omniglot-plain, omniglot5. `agscl data` gets what they need.
        method: What is compared with fine-tuning; `agscl methods` lists them. finetune runs the reference alone.
        seed: Draws the tasks, the first weights and the order of the batches.
        name: The run's folder under --runs.
        resume: Continue the run of this name with the settings stored in it; alone, the newest unfinished run.
        epochs: Epochs per task.
        batch_size: Examples per step.
        lr: Learning rate at the start of each task.
        set: Settings of the method or of training, after PRESET, e.g. --set mu=20 lam=inf patience=5.
        tasks: Other tasks than the preset's: `agscl data list` names them; folder:PATH and hub:NAME are your own.
        task_options: Options of the tasks, e.g. --task-options classes_per_task=5 size=32.
        device: Where to train, e.g. cpu or cuda.
        fast: Train as fast as the device can, in other arithmetic: on a GPU bf16, channels last, compiled.
        threads: CPU threads; one is enough beside a GPU. A resumed run keeps the number it was started with.
        tensorboard: Also write losses and accuracies for TensorBoard, into the run's folder; a finished run's too.
        runs: The folder that holds all runs.
        checkpoint_every: Seconds between two checkpoints within a task; one is always written at its end.
    """
    from agscl.cli.terminal import Progress, say, summary
    from agscl.experiments.config import RunConfig, check_device, choose_threads, configure
    from agscl.experiments.run import Interrupted, execute_run
    from agscl.runs import Run, is_finished, read_result
    from agscl.runs.tensorboard import TensorBoardLog

    _check_numbers(checkpoint_every, threads)
    if tensorboard and not importlib.util.find_spec("tensorboard"):
        raise WrongUse("TensorBoard is not installed: pip install 'agscl[tensorboard]'")
    changed = _once(_given(epochs=epochs, batch_size=batch_size, lr=lr), _settings(method, set), _speed(device, fast))
    changed |= _tasks(tasks, task_options)
    if resume is None:
        with _as_wrong_use():
            config = configure(preset, method=method, seed=seed, device=device, **changed)
        folder = runs / (name or _default_name(config, changed))
    else:
        folder = _resumable(runs, resume)
        config = RunConfig.from_dict(Run(folder).read_config() or {})
        with _as_wrong_use():
            check_device(config.device)
        asked = {
            "preset": (preset, "digits"),
            "method": (method, "agscl"),
            "seed": (seed, 0),
            "device": (device, "cpu"),
        }
        ignored = [key for key, (value, default) in asked.items() if value not in (default, getattr(config, key))]
        if ignored or changed or name:
            raise WrongUse(
                f"--resume takes every setting from {folder}/config.json; "
                f"leave out {', '.join([*ignored, *changed, *(['name'] if name else [])])}"
            )
    if resume is None:
        _check_name(folder, runs)
        if any(folder.glob("*/config.json")):
            raise WrongUse(
                f"{folder} is a comparison, a search or a study, not a run: give this one a --name of its own"
            )

    if is_finished(folder):
        Run(folder).check_config(config.as_dict())
        result = read_result(folder)
        if tensorboard:
            TensorBoardLog(folder, config.training.epochs).close()
        say(f"{folder} is finished; nothing to do. Its result:")
        summary(result, folder)
        return DONE

    boards: list[TensorBoardLog] = []

    def show(event: dict[str, Any]) -> None:
        progress.show(event)
        if boards:
            boards[0].write_event(event)
        elif tensorboard:
            boards.append(TensorBoardLog(folder, config.training.epochs))  # with all that the log holds, this event too

    with _gone_if_wrong(folder), Run(folder) as current, _signals() as stopped, Progress(config) as progress:
        if current.checkpoints.list_numbers():
            say(f"Continuing {folder}.")
        try:
            result = execute_run(
                config,
                current,
                checkpoint_every=checkpoint_every,
                threads=threads or choose_threads(config),
                should_stop=stopped,
                on_event=show,
                on_message=say,
            )
        except Interrupted:
            known_as = folder.relative_to(runs) if folder.is_relative_to(runs) else folder
            words = ["agscl", "run", "--resume", str(known_as)]
            words += [] if runs == Path("runs") else ["--runs", str(runs)]
            progress.close()
            say(f"Stopped; a checkpoint is stored. Continue with: {shlex.join(words)}")
            return STOPPED
        finally:
            for board in boards:
                board.close()
    summary(result, folder)
    return DONE


def compare(
    preset: Annotated[str, _shown("PRESET")] = "digits",
    /,
    *,
    methods: Annotated[str | None, _shown("all|NAME,NAME,...", "(default: the preset's; digits: all)")] = None,
    seeds: Annotated[int | None, _shown("N", "(default: 5; digits: 3)")] = None,
    jobs: Annotated[int | None, _shown("N", "(default: one per core)")] = None,
    name: Annotated[str | None, _shown("NAME", "(default: made from preset and changes)")] = None,
    epochs: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    batch_size: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    lr: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    set: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    tasks: Annotated[str | None, _shown("NAME", "(default: the preset's)")] = None,
    task_options: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    device: Annotated[str, _shown("DEVICE")] = "cpu",
    fast: bool = False,
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
    checkpoint_every: Annotated[float, _shown("SECONDS")] = 5.0,
) -> int:
    """Compare methods over seeds, side by side: mean ± standard deviation.

    The same command goes on where it was stopped or killed.

    Finished runs are not repeated: with more methods or seeds, only those run.

    Args:
        preset: The experiment, as for agscl run.
        methods: Names separated by commas, or all; `agscl methods` lists them. Fine-tuning is always among them.
        seeds: How many seeds: 0, 1, 2, …
        jobs: Runs at a time; each takes one thread.
        name: The comparison's folder under --runs.
        epochs: Epochs per task.
        batch_size: Examples per step.
        lr: Learning rate at the start of each task.
        set: Settings of training for all, e.g. --set patience=5; or of one method, e.g. --set ewc.lam=400.
        tasks: Other tasks than the preset's: `agscl data list` names them; folder:PATH and hub:NAME are your own.
        task_options: Options of the tasks, e.g. --task-options classes_per_task=5 size=32.
        device: Where to train, e.g. cpu or cuda.
        fast: Train as fast as the device can, in other arithmetic: on a GPU bf16, channels last, compiled.
        runs: The folder that holds all runs.
        checkpoint_every: Seconds between two checkpoints of a run.
    """
    from agscl.cli.terminal import comparison, say
    from agscl.experiments import compare as comparing
    from agscl.experiments.methods import METHODS, REFERENCE, listed
    from agscl.experiments.presets import get_preset

    with _as_wrong_use():
        table = get_preset(preset)
        every = list(METHODS) if methods == "all" else list(table.compared or table.methods)
        names = every if methods in (None, "all") else [each for each in methods.split(",") if listed(each)]
    seeds = table.seeds if seeds is None else seeds
    common, own = _settings_for([*dict.fromkeys([*names, REFERENCE])], set)
    changed = _once(_given(epochs=epochs, batch_size=batch_size, lr=lr), common, _speed(device, fast))
    changed |= _tasks(tasks, task_options)
    folder = runs / (name or _named(f"compare-{preset}", device, changed | own))
    _check_group(folder, runs, "comparison")
    if seeds < 1:
        raise WrongUse("--seeds must be at least 1")
    with _as_wrong_use():
        plan = comparing.plan_comparison(preset, names, seeds, folder, settings=own, device=device, **changed)
    _tell_finished(plan, folder)
    failed = _side_by_side(plan, jobs, checkpoint_every)
    compared = comparing.collect_comparison(plan)
    if compared:
        comparison(compared)
    for job, reason in failed.items():
        say(f"FAILED {job}: {reason}")
    everything = comparing.collect_comparison(comparing.add_finished_runs(plan, folder))
    say(f"\nstored in {comparing.store_comparison(folder, preset, everything, failed)}")
    return FAILED if failed else DONE


def search(
    preset: Annotated[str, _shown("PRESET")],
    /,
    *,
    method: Annotated[str, _shown("METHOD")] = "agscl",
    seed: Annotated[int, _shown("N")] = 1000,
    seeds: Annotated[int, _shown("N")] = 1,
    jobs: Annotated[int | None, _shown("N", "(default: one per core)")] = None,
    name: Annotated[str | None, _shown("NAME", "(default: made from preset, method and changes)")] = None,
    epochs: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    only: Annotated[str | None, _shown("NAME,NAME,...", "(default: all that can be)")] = None,
    set: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    tasks: Annotated[str | None, _shown("NAME", "(default: the preset's)")] = None,
    task_options: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    device: Annotated[str, _shown("DEVICE")] = "cpu",
    fast: bool = False,
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
    checkpoint_every: Annotated[float, _shown("SECONDS")] = 5.0,
) -> int:
    """Search a method's settings for a preset, judged on validation data.

    AGS-CL: λ, then μ, then ρ; the others: their one strength.

    The same command goes on where it was stopped.

    Args:
        preset: The experiment, as for agscl run.
        method: Whose settings; `agscl methods` lists them.
        seed: Draws tasks, weights and batches; best one that no comparison uses.
        seeds: Try each choice on so many, from --seed on; the mean decides. One alone may mislead by a point or two.
        jobs: Runs at a time; each takes one thread.
        name: The search's folder under --runs.
        epochs: Epochs per task.
        only: The settings to search, e.g. lam.
        set: Settings that stay as given, e.g. --set eta=0.8; a searched one starts there.
        tasks: Other tasks than the preset's: `agscl data list` names them; folder:PATH and hub:NAME are your own.
        task_options: Options of the tasks, e.g. --task-options classes_per_task=5 size=32.
        device: Where to train, e.g. cpu or cuda.
        fast: Train as fast as the device can, in other arithmetic: on a GPU bf16, channels last, compiled.
        runs: The folder that holds all runs.
        checkpoint_every: Seconds between two checkpoints of a run.
    """
    from agscl.cli.terminal import say, searched
    from agscl.experiments import search as searching

    with _as_wrong_use():
        changed = _once(_given(epochs=epochs), _settings(method, set), _speed(device, fast))
        changed |= _tasks(tasks, task_options)
    folder = runs / (name or _named(f"search-{preset}-{method}", device, changed))
    _check_group(folder, runs, "search")

    def run_jobs(plan: Sequence[Job]) -> None:
        for job, reason in _side_by_side(plan, jobs, checkpoint_every).items():
            say(f"FAILED {job}: {reason}")

    with _as_wrong_use():
        wanted = only.split(",") if only is not None else None
        found = searching.search_settings(
            preset, method, folder, run_jobs, seed=seed, seeds=seeds, only=wanted, device=device, **changed
        )
    searched(found)
    if found[0].valid_accuracy is None:
        say(f"\nstored in {folder / 'search.json'}\nTraining diverged with every choice; a lower --set lr=… may help.")
        return FAILED
    best = found[0].settings
    words = [pair for pair in set if pair.partition("=")[0] not in best]  # they follow those of --set
    words += ["--epochs", str(epochs)] if epochs is not None else []
    words += ["--tasks", tasks] if tasks is not None else []
    words += ["--task-options", *task_options] if task_options else []
    words += ["--device", device] if device != "cpu" else []
    words += ["--fast"] if fast else []
    command = shlex.join([*searching.make_run_command(preset, method, best), *words])
    say(f"\nstored in {folder / 'search.json'}\n{command}")
    return DONE


def study(
    study: Annotated[str, _shown("STUDY")],
    preset: Annotated[str, _shown("PRESET")] = "digits",
    /,
    *,
    seeds: Annotated[int, _shown("N")] = 1,
    jobs: Annotated[int | None, _shown("N", "(default: one per core)")] = None,
    name: Annotated[str | None, _shown("NAME", "(default: made from preset and changes)")] = None,
    epochs: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    set: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    tasks: Annotated[str | None, _shown("NAME", "(default: the preset's)")] = None,
    task_options: Annotated[tuple[str, ...], _shown("KEY=VALUE ...", "")] = (),
    device: Annotated[str, _shown("DEVICE")] = "cpu",
    fast: bool = False,
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
    checkpoint_every: Annotated[float, _shown("SECONDS")] = 5.0,
) -> int:
    """Look into AGS-CL as the paper does: what each of its parts is for.

    The same command goes on where it was stopped. Studies share their runs.

    Args:
        study: reinit: without the re-initialisations; tradeoff: plasticity and stability over λ, MAS and EWC beside it;
            rho: ρ from 0.1 to 0.5; prox: without proximal steps; aopc: do importances tell which nodes matter?
        preset: The experiment, as for agscl run.
        seeds: How many seeds: 0, 1, 2, …
        jobs: Runs at a time; each takes one thread.
        name: The folder of the studies' runs under --runs.
        epochs: Epochs per task.
        set: Settings of training for all, e.g. --set patience=5; or of one method, e.g. --set agscl.lam=1000.
        tasks: Other tasks than the preset's: `agscl data list` names them; folder:PATH and hub:NAME are your own.
        task_options: Options of the tasks, e.g. --task-options classes_per_task=5 size=32.
        device: Where to train, e.g. cpu or cuda.
        fast: Train as fast as the device can, in other arithmetic: on a GPU bf16, channels last, compiled.
        runs: The folder that holds all runs.
        checkpoint_every: Seconds between two checkpoints of a run.
    """
    from agscl.cli.terminal import perturbed, say, studied
    from agscl.experiments import aopc, studies

    with _as_wrong_use():
        common, own = _settings_for(studies.list_methods(study), set)
        changed = _once(_given(epochs=epochs), common, _speed(device, fast))
        changed |= _tasks(tasks, task_options)
    folder = runs / (name or _named(f"study-{preset}", device, changed | own))
    _check_group(folder, runs, "study")
    if seeds < 1:
        raise WrongUse("--seeds must be at least 1")
    with _as_wrong_use():
        lines = studies.plan_study(preset, study, seeds, folder, settings=own, device=device, **changed)
    plan = [job for line in lines for job in line.jobs]
    _tell_finished(plan, folder)
    failed = _side_by_side(plan, jobs, checkpoint_every)
    done = [job for job in plan if job.is_finished]
    if study == "aopc":
        try:
            known = aopc.measure_perturbations(folder, preset, done, say)
        except KeyboardInterrupt:
            say("Stopped; what was measured is stored. The same command continues.")
            return STOPPED
        perturbed({str(job.config.seed): known[str(job.config.seed)] for job in done})
        content: dict[str, Any] = {"seeds": known}
    else:
        studied(studies.collect_study(lines))
        content = {"lines": studies.collect_study(studies.add_finished_runs(lines, folder))}
    for job, reason in failed.items():
        say(f"FAILED {job}: {reason}")
    say(f"\nstored in {studies.store_study(folder, preset, study, content, failed)}")
    return FAILED if failed else DONE


def _side_by_side(plan: Sequence[Job], jobs: int | None, checkpoint_every: float) -> dict[str, str]:
    """Run jobs, several at a time, and show how far they are; returns why some failed."""
    from agscl.cli.terminal import Comparing, percent, say
    from agscl.experiments import jobs as running
    from agscl.experiments import search as searching
    from agscl.experiments.build import load_tasks
    from agscl.experiments.methods import METHODS
    from agscl.experiments.run import Interrupted, check_data_unchanged
    from agscl.runs import read_result

    _check_numbers(checkpoint_every)
    failed: dict[str, str] = {}
    notes: dict[str, str] = {}
    if jobs is not None and jobs < 1:
        raise WrongUse("--jobs must be at least 1")
    processes = _cores() if jobs is None else jobs
    on_gpu = [job for job in plan if job.config.device.startswith("cuda") and not job.is_finished]
    if min(processes, len(on_gpu)) > 1 and _mps_is_off():
        say("Runs at the same time share a GPU better under NVIDIA's MPS; it starts with: nvidia-cuda-mps-control -d")
    left = [job for job in plan if not job.is_finished]
    if left:
        load_tasks(left[0].config)  # once, before several processes would, and to see that it can be
        finished = {job.config.seed: job for job in plan if job.is_finished and ":" in job.config.tasks}
        for job in finished.values():  # what is new must not be compared with what learned something else
            check_data_unchanged(job.folder, job.config)

    with _held(plan), _signals() as stopped, Comparing(plan) as progress:

        def ended(job: running.Job, outcome: running.JobOutcome) -> None:
            title = METHODS[job.config.method].title
            for note in outcome.warnings:  # much the same for each seed
                notes.setdefault(f"{title} {re.sub('[0-9.e-]+', '', note)}", f"Note on {job}: {note}")
            if outcome.error is not None:
                failed[str(job)] = outcome.error
                progress.ended(job, "failed")
                return
            if job.config.hold_out:  # of a search
                progress.ended(job, f"average validation accuracy {percent(searching.score_job(job) or 0.0)}")
                return
            result = read_result(job.folder)
            average = result["methods"][job.config.method]["average_accuracy"]
            progress.ended(job, f"average accuracy {percent(average)}")

        try:
            running.run_jobs(
                plan,
                processes=processes,
                checkpoint_every=checkpoint_every,
                should_stop=stopped,
                on_progress=progress.show,
                on_job_end=ended,
            )
        except Interrupted:
            progress.close()
            raise
    for note in notes.values():
        say(note)
    return failed


def _tell_finished(plan: Sequence[Job], folder: Path) -> None:
    from agscl.cli.terminal import say

    if finished := sum(job.is_finished for job in plan):
        say(f"{finished} of {len(plan)} runs in {folder} are finished already.")


@contextlib.contextmanager
def _held(plan: Sequence[Job]) -> Iterator[None]:
    """Keep other commands from the same runs, where there are some to be run."""
    from agscl.system.files import lock_file

    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(job.folder.parent for job in plan if not job.is_finished):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock_file(folder / "lock", wait=False))
            except BlockingIOError as error:
                raise WrongUse(f"another command is at work on {folder}; wait for it, or stop it") from error
        yield


def _mps_is_off() -> bool:
    """Whether NVIDIA's service for processes that share a GPU is there and could be started."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return shutil.which("nvidia-cuda-mps-control") is not None and not (pipes / "control").exists()


def methods() -> int:
    """List every method: what it does, and what it holds in memory between tasks."""
    import torch

    from agscl.cli.terminal import methods as show
    from agscl.experiments.build import measure_memory
    from agscl.experiments.methods import METHODS

    torch.set_num_threads(1)  # so small a network is faster on one core
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an epoch is too short for most of them, which is no matter here
        memory = {name: measure_memory("digits", name) for name, listed in METHODS.items() if not listed.bound}
    show(memory, "after the 5 tasks of digits, one epoch each")
    return DONE


def verify(run: Annotated[str, _shown("RUN")], /, *, runs: Annotated[Path, _shown("FOLDER")] = Path("runs")) -> int:
    """Check a run's certificates against its stored weights: has anything moved?

    Outputs of all heads on the certificates' probe are a second witness.

    The last line says OK or FAILED; exit code 0 when all is in place, else 1.

    Args:
        run: The run's name, or the path of its folder.
        runs: The folder that holds all runs.
    """
    from agscl.cli.terminal import say
    from agscl.experiments.verify import verify_run

    verdict = verify_run(_existing(runs, run))
    for line in verdict.lines:
        say(line)
    return DONE if verdict.ok else FAILED


def inspect(
    what: Annotated[str, _shown("MODULE:FACTORY|NETWORK|RUN")],
    /,
    *,
    tasks: Annotated[int | None, _shown("N", "(default: 10; the run's own)")] = None,
    input_shape: Annotated[tuple[int, ...], _shown("N ...", "")] = (),
    heads: Annotated[str | None, _shown("MODULE", "")] = None,
    exclude: Annotated[tuple[str, ...], _shown("LAYER ...", "")] = (),
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
) -> int:
    """Print a model's nodes, who reads each, and the memory each method takes.

    Of a finished run: also what its method really held.

    A model that is no MultiHead is a trunk that gets a head, unless --heads says.

    Args:
        what: A model of yours, e.g. mymodels:make: called without arguments, it returns the model, or the model and an
            example input. Or one of our networks, e.g. alexnet; or the name of a finished run.
        tasks: After how many tasks the memory is counted.
        input_shape: Shape of the example input without the batch, e.g. 3 32 32, where the factory gives none.
        heads: Where the model's own heads are: the name of the module, e.g. classifier.
        exclude: Layers to leave out of the nodes.
        runs: The folder that holds all runs.
    """
    from agscl.analysis.memory import FORECASTS, Memory, Outline, forecast_memory
    from agscl.cli.terminal import memory, say
    from agscl.graph.nodes import NodeGraph, NodeGraphError

    if tasks is not None and tasks < 1:
        raise WrongUse("--tasks must be at least 1")
    bare, given, result = _model(what, input_shape, heads, runs)
    if result is not None and tasks is not None:
        raise WrongUse(f"{what} has learned {len(result['tasks'])} tasks, and is shown after these: leave out --tasks")
    model, example = _with_a_head(bare, given, heads)
    try:
        graph = NodeGraph(model, example, heads=heads, exclude=exclude)
        outline = Outline.from_graph(graph, example if isinstance(example, tuple) else (example,))
    except NodeGraphError as error:
        hint = _about_the_output_layer(what, input_shape, bare, given, error.layer)
        raise WrongUse(hint or str(error)) from error
    except Exception as error:  # whatever the user's own model raises
        raise WrongUse(f"the model's nodes could not be found: {type(error).__name__}: {error}") from error
    say(str(graph))
    if result is None:
        memory({name: forecast_memory(name, outline, tasks or 10) for name in FORECASTS}, tasks or 10)
        return DONE
    method, settings = result["config"]["method"], _settings_of(result["config"])
    learned = len(result["tasks"])
    foretold = {name: forecast_memory(name, outline, learned, settings.get(name)) for name in FORECASTS}
    if method in FORECASTS:
        memory(foretold, learned, (method, Memory(result["methods"][method]["memory"])))
    else:
        memory(foretold, learned)
        say(f"The run is of {method}, a bound: it keeps all data, or a network for each task.")
    return DONE


def data(
    action: Annotated[Literal["list", "get", "check"], _shown("list|get|check")] = "list",
    names: Annotated[tuple[str, ...], _shown("NAME ...", "")] = (),
    /,
) -> int:
    """List task sequences and their datasets, download them, or check them.

    Datasets are looked for in the folder AGSCL_DATA, then in ~/.cache/agscl/data.

    Args:
        action: list what there is; get what is missing, going on after an interruption; check reads everything.
        names: Task sequences or datasets, e.g. cifar100 mnist. check without a name takes all that are there.
    """
    from agscl.cli.data import data as manage

    with _as_wrong_use():
        return DONE if manage(action, names) else FAILED


def main(arguments: list[str] | None = None) -> int:
    """The console command."""
    missing = [name for name in ("tyro", "rich", "safetensors", "sklearn") if not importlib.util.find_spec(name)]
    if missing:
        print(f"agscl: the command needs {', '.join(missing)}: pip install 'agscl[cli]'", file=sys.stderr)
        return WRONG_USE

    from agscl import __version__
    from agscl.cli.terminal import say
    from agscl.experiments.run import Interrupted
    from agscl.networks import WeightsError
    from agscl.runs import DifferentConfig, RunError, WrongOptions
    from agscl.system.process import skip_gc_at_exit, tune_malloc
    from agscl.tasks import DataError

    commands: dict[str, Callable[..., Any]] = {
        "run": run,
        "compare": compare,
        "search": search,
        "study": study,
        "verify": verify,
        "inspect": inspect,
        "methods": methods,
        "data": data,
    }
    skip_gc_at_exit()
    tune_malloc()
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a terminal knows no λ
    if given == ["--version"]:
        say(f"agscl {__version__}")
        return DONE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"Note: {message}")
            return int(
                tyro.extras.subcommand_cli_from_dict(
                    commands,
                    prog="agscl",
                    description="Continual learning you can verify. Start with: agscl run",
                    args=_allow_bare_resume(given),
                )
            )
    except (WrongUse, WrongOptions, DifferentConfig, DataError, WeightsError) as error:
        return _complain(error, WRONG_USE)
    except RunError as error:
        return _complain(error, FAILED)
    except Interrupted:  # of several runs
        say("Stopped; checkpoints are stored. The same command continues.")
        return STOPPED
    except BrokenPipeError:  # whoever read what this prints has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a folder that cannot be written, a full disk
        where = f"{error.filename}: " if error.filename else ""
        return _complain(RunError(f"{where}{error.strerror or error}"), FAILED)
    except KeyboardInterrupt:
        return STOPPED


def _complain(error: Exception, code: int) -> int:
    print(f"agscl: {error}", file=sys.stderr)
    return code


def _allow_bare_resume(arguments: list[str]) -> list[str]:
    """`--resume` without a name means the newest unfinished run."""
    for place, argument in enumerate(arguments):
        alone = place + 1 == len(arguments) or arguments[place + 1].startswith("-")
        if argument == "--resume" and alone:
            return [*arguments[: place + 1], NEWEST, *arguments[place + 1 :]]
    return arguments


@contextlib.contextmanager
def _as_wrong_use() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _settings(method: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """What `--set` says, each value in the type of its setting."""
    from agscl.experiments.config import list_settings
    from agscl.experiments.methods import read_setting

    with _as_wrong_use():
        kinds = list_settings(method)
        found = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise WrongUse(f"--set takes KEY=VALUE, e.g. lam=400, not {pair!r}")
            if key not in kinds:
                raise WrongUse(f"{method} has no setting {key!r}. Its settings: {', '.join(kinds)}")
            found[key] = read_setting(kinds[key], key, text)
    return found


def _once(given: dict[str, Any], by_set: dict[str, Any], speed: dict[str, Any]) -> dict[str, Any]:
    """All that changes training; --set is stronger than --fast, but nothing may be said twice."""
    if twice := [name for name in given if name in by_set]:
        raise WrongUse(f"--{twice[0].replace('_', '-')} and --set {twice[0]}=… say the same: leave one out")
    return {**given, **speed, **by_set}


def _settings_for(methods: Sequence[str], pairs: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a comparison's `--set` says: settings of training, and those of each method (METHOD.KEY=VALUE)."""
    from agscl.experiments.config import list_settings
    from agscl.experiments.methods import METHODS

    own: dict[str, dict[str, Any]] = {}
    common = []
    for pair in pairs:
        method, dot, _ = pair.partition("=")[0].partition(".")
        if dot:
            if method not in methods:
                raise WrongUse(f"--set {pair}: {method!r} is not among the methods compared: {', '.join(methods)}")
            own[method] = own.get(method, {}) | _settings(method, (pair.removeprefix(f"{method}."),))
        else:
            key = pair.partition("=")[0]
            owners = [name for name in methods if key in METHODS[name].settings]
            if owners and key not in list_settings("finetune"):
                raise WrongUse(f"--set {pair}: say whose setting it is, e.g. --set {owners[0]}.{pair}")
            common.append(pair)
    return _settings("finetune", tuple(common)), own


def _tasks(tasks: str | None, options: tuple[str, ...]) -> dict[str, Any]:
    """What --tasks and --task-options say."""
    found: dict[str, Any] = {}
    for pair in options:
        key, equals, text = pair.partition("=")
        if not equals:
            raise WrongUse(f"--task-options takes KEY=VALUE, e.g. size=32, not {pair!r}")
        try:
            found[key] = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except json.JSONDecodeError:
            found[key] = text
    return _given(tasks=tasks, task_options=found or None)


def _speed(device: str, fast: bool) -> dict[str, Any]:
    from agscl.experiments.config import get_fast_settings

    return get_fast_settings(device) if fast else {}


def _check_group(folder: Path, runs: Path, kind: str) -> None:
    _check_name(folder, runs)
    if (folder / "config.json").exists():
        raise WrongUse(f"{folder} is a run, not a {kind}: give this one a --name of its own")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_numbers(checkpoint_every: float, threads: int | None = None) -> None:
    if not checkpoint_every > 0:
        raise WrongUse(f"--checkpoint-every takes seconds above 0, not {checkpoint_every:g}")
    if threads is not None and threads < 1:
        raise WrongUse(f"--threads must be at least 1, not {threads}")


def _check_name(folder: Path, runs: Path) -> None:
    if folder.name in ("", ".", "..") or folder.parent != runs:
        raise WrongUse(f"a run's name is a plain folder name, not {os.path.relpath(folder, runs)!r}")


def _default_name(config: RunConfig, changed: dict[str, Any]) -> str:
    return _named(f"{config.preset}-{config.method}-seed{config.seed}", config.device, changed)


def _named(name: str, device: str, changed: dict[str, Any]) -> str:
    if device != "cpu":
        name += f"-{device.replace(':', '')}"
    if changed:
        name += "-" + hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]
    return name


def _existing(runs: Path, name: str) -> Path:
    from agscl.runs import Run

    for folder in (runs / name, Path(name)):
        if (folder / "config.json").is_file() or Run(folder).is_started:
            return folder
    known = sorted(path.parent.name for path in runs.glob("*/config.json"))
    there = f"There are: {', '.join(known)}" if known else "There is none; start one with: agscl run"
    raise WrongUse(f"no run is called {name!r} in {runs}/. {there}")


def _resumable(runs: Path, name: str) -> Path:
    if name != NEWEST:
        return _existing(runs, name)
    begun = [log for log in runs.glob("*/events.jsonl") if log.stat().st_size]
    unfinished = [log for log in begun if not (log.parent / "result.json").exists()]
    if not unfinished:
        raise WrongUse(f"there is no unfinished run in {runs}/")
    return max(unfinished, key=lambda log: log.stat().st_mtime).parent


@contextlib.contextmanager
def _gone_if_wrong(folder: Path) -> Iterator[None]:
    """What was made for a run that cannot be, as its options or data are wrong, is removed again."""
    from agscl.runs import Run, WrongOptions
    from agscl.tasks import DataError

    new = not folder.exists()
    try:
        yield
    except (WrongOptions, DataError):
        if new and not Run(folder).is_started:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT and SIGTERM ask the run to stop. A second one stops it at once; so does the first, as long as
    nobody has asked, while data is read, say."""
    received: list[int] = []
    asked = False

    def receive(number: int, frame: object) -> None:
        if received or not asked:
            raise KeyboardInterrupt
        received.append(number)

    def stopped() -> bool:
        nonlocal asked
        asked = True
        return bool(received)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _model(
    what: str, input_shape: tuple[int, ...], heads: str | None, runs: Path
) -> tuple[Any, Any, dict[str, Any] | None]:
    """What `inspect` is asked about: the model, an example input and, of a run, its result."""
    import torch

    from agscl.networks import NETWORKS
    from agscl.runs import is_finished, read_result

    if ":" in what:
        return *_build(what, input_shape), None
    network, options, result = what, {}, None
    if what not in NETWORKS:
        if not any((folder / "config.json").is_file() for folder in (runs / what, Path(what))):
            raise WrongUse(
                f"{what!r} is no network ({', '.join(NETWORKS)}) and no run in {runs}/; for a model of yours expected "
                "module:function, e.g. mymodels:make_resnet"
            )
        folder = _existing(runs, what)
        if not is_finished(folder):
            raise WrongUse(f"{folder} is not finished: agscl run --resume {folder.name} finishes it")
        result = read_result(folder)
        network = result["config"]["network"]
        options = {key: value for key, value in result["config"]["network_options"].items() if key != "weights"}
    if input_shape or heads:
        raise WrongUse(f"--input-shape and --heads are for models of yours; those of {what} are known")
    trunk = NETWORKS[network](**options)
    return trunk, torch.zeros(2, *trunk.input_shape), result


def _settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of each method: the run's own, and its preset's for the others."""
    from agscl.experiments.presets import PRESETS

    preset = PRESETS.get(config["preset"])
    return {**(preset.methods if preset else {}), config["method"]: config["settings"]}


def _build(factory: str, input_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The model and an example input (None where there is no telling)."""
    import torch
    from torch import nn

    module_name, colon, function_name = factory.partition(":")
    if not (module_name and colon and function_name):
        raise WrongUse(f"expected module:function, e.g. mymodels:make_resnet, not {factory!r}")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise WrongUse(f"no module is called {error.name!r} (looked in this folder and in the environment)") from error
    except AttributeError as error:
        raise WrongUse(f"{module_name} has no {function_name!r}") from error
    except Exception as error:  # whatever the user's own module raises while it is imported
        raise WrongUse(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise WrongUse(f"{factory} is a {type(function).__name__}, not a function that returns a model")
    try:
        made = function()
    except Exception as error:  # whatever the user's own function raises
        raise WrongUse(f"{factory}() failed: {type(error).__name__}: {error}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise WrongUse(f"{factory}() returned {type(model).__name__}; expected a model, or (model, example input)")
    if input_shape:
        example = torch.zeros(2, *input_shape)
    if example is None:
        first = next(
            (layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)), None
        )
        if not isinstance(first, nn.Linear):
            raise WrongUse("the shape of the input cannot be told from this model: give it, e.g. --input-shape 3 32 32")
        example = torch.zeros(2, first.in_features)
    return model, example


def _with_a_head(model: Any, example: Any, heads: str | None) -> tuple[Any, Any]:
    """The model with at least one head, and the arguments of its forward pass."""
    from agscl.heads import MultiHead

    if heads is not None:
        return model, example
    if not isinstance(model, MultiHead):
        model = MultiHead(model)
    if not model.heads:
        model.add_head("example", 2)
    if isinstance(example, tuple):
        return model, example
    return model, (example, next(iter(model.heads)))


def _about_the_output_layer(factory: str, input_shape: tuple[int, ...], model: Any, example: Any, layer: str) -> str:
    """How to call `inspect` where the layer that was refused gives the model's own output; otherwise nothing."""
    import torch

    name, outputs = layer.removeprefix("trunk."), []
    if not layer.startswith("trunk.") or name not in dict(model.named_modules()):
        return ""
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            final = model(*example) if isinstance(example, tuple) else model(example)
    finally:
        handle.remove()
    if not (outputs and isinstance(final, torch.Tensor) and final is outputs[-1]):
        return ""
    shape = f" --input-shape {' '.join(map(str, input_shape))}" if input_shape else ""
    return (
        f"{name} is the model's output layer, with no ReLU after it: not a layer of nodes but a head. "
        f"Say so: agscl inspect {factory}{shape} --heads {name}"
    )


if __name__ == "__main__":
    sys.exit(main())
