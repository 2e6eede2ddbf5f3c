"""One run from start to end, or from where it stopped: first fine-tuning as the reference, then the method."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agscl import tasks
from agscl.analysis import metrics
from agscl.certificate import Certificate, Probe
from agscl.experiments.methods import METHODS, REFERENCE
from agscl.experiments.presets import RunConfig, configure
from agscl.experiments.protocols import Joint, Separate, all_heads
from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Method, NodeMethod
from agscl.methods.finetune import FineTune
from agscl.networks import NETWORKS
from agscl.runs import DifferentConfig, Run, RunError, WrongOptions, hash_state
from agscl.runs.folder import DIVERGED, read_json
from agscl.system.tf32 import tf32_for
from agscl.tasks import TaskSequence
from agscl.training import CompileFailed, Trainer, TrainingFailed
from agscl.training.trainer import Event, mixed_seed

SPACING = 20.0
"""A checkpoint comes no sooner than so many times what the last one took to write: a twentieth of the time at most."""
SHOWN = 0.5
"""Seconds between two looks at how far an epoch is."""
HOLD_OUT = 0.1
"""Share of the training examples that validates where a run or a search needs some and the sequence sets none apart."""
PROBED = 16
"""Random inputs on which a certificate keeps the outputs of all heads."""


class Interrupted(Exception):
    """The run was asked to stop, and stored where it stands."""


def methods_of(config: RunConfig) -> list[str]:
    """What is trained, in order."""
    return [REFERENCE, config.method] if config.reference and config.method != REFERENCE else [config.method]


def execute(
    config: RunConfig,
    run: Run,
    *,
    checkpoint_every: float,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Event], None] = lambda event: None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train what is not trained yet and return the result, also stored as result.json.

    A checkpoint is written every `checkpoint_every` seconds, less often where that takes long, and at the end of each
    task; between any two steps `stop` is asked whether to store one and raise `Interrupted`.
    """
    run.store_config(config.as_dict())
    environment = _recorded_environment(run, threads)
    if environment["torch"] != torch.__version__:
        note(f"This run was begun with torch {environment['torch']}, and goes on with {torch.__version__}.")
    sequence = load_tasks(config)
    state = run.resume() or {"method": None, "finished": {}, "seconds": {}}
    state["data"] = _check_data(run, sequence, state.get("data"))
    damaged = run.checkpoints.damaged
    for number, reason in damaged.items():
        none = state["method"] is None and number == min(damaged)
        before = "there is none before it, so it starts anew" if none else "going back to the one before it"
        note(f"Checkpoint {number} is damaged ({reason}); {before}.")

    left = [name for name in methods_of(config) if name not in state["finished"]]
    for later in left[1:]:
        make_trainer(config, later, sequence)  # what cannot be is said before anything is trained
    for name in left:
        with tf32_for(config.training.precision):  # of certificates too
            trainer = make_trainer(config, name, sequence)
            if state["method"] == name:
                trainer.load_state_dict(state["trainer"])
            state["method"] = name
            certify = name == config.method and name != "joint"
            _train(trainer, state, run, checkpoint_every, stop, watch, certify)

    result = {
        "config": config.as_dict(),
        "tasks": [task.name for task in sequence],
        "methods": state["finished"],
        "environment": environment,
        "seconds": state["seconds"],
    }
    run.write_json("result.json", result)
    return result


def load_tasks(config: RunConfig) -> TaskSequence:
    """The task sequence of a run."""
    try:
        sequence = tasks.load(config.tasks, seed=config.seed, **config.task_options)
    except (ValueError, TypeError) as error:  # an option that there is not, or a value that cannot be
        raise WrongOptions(f"{config.tasks}: {error}") from error
    without = config.training.validates and any(task.valid_x is None for task in sequence)
    if without and not config.hold_out and ":" in config.tasks:
        raise WrongOptions(
            f"{config.tasks} has no validation examples, which epochs are chosen by: set some apart with "
            "--task-options validation=0.1, or use --set patience=none restore_best=false"
        )
    share = config.hold_out or (HOLD_OUT if without else 0.0)
    return tuple(task.with_validation(share, config.seed) for task in sequence)


def _check_data(run: Run, sequence: TaskSequence, known: dict[str, int] | None) -> dict[str, int]:
    """Note what the data is, or make sure that it is what the run was begun with: as noted, or else as `known`."""
    path = run.folder / "data.json"
    now = {task.name: task.checksum() for task in sequence}
    before = (read_json(path, ". Remove it") if path.exists() else None) or known or now
    if changed := [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]:
        raise DifferentConfig(
            f"the data is not what {run.folder} was begun with: {', '.join(changed)} changed. Put it back as it was, "
            "or give this run a --name of its own"
        )
    if not path.exists():
        run.write_json(path.name, now)
    return now


def check_finished(folder: Path, config: RunConfig) -> None:
    """Make sure that the data of a finished run is still what it learned."""
    if (folder / "data.json").exists():
        _check_data(Run(folder), load_tasks(config), None)


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that is the same, bit for bit, however often the run was interrupted."""
    return {key: value for key, value in result.items() if key not in ("environment", "seconds")}


def make_trainer(config: RunConfig, name: str, sequence: TaskSequence) -> Trainer:
    """A new trainer of what is called `name`, on a new model."""
    first = sequence[0]
    example = first.inputs(first.train_x[:2])
    model, method = build(config, name, example)
    wanted: Sequence[int] = getattr(model.trunk, "input_shape", ())
    for task in sequence if wanted else ():
        shape = tuple(task.inputs(task.train_x[:1]).shape[1:])
        if shape != tuple(wanted):
            own = ":" in config.tasks and len(wanted) == 3
            given = f"--task-options size={wanted[-1]} channels={wanted[0]}"
            advice = f"Have them read so: {given}" if own else "Use a preset with another network"
            raise WrongOptions(
                f"the network {config.network} reads inputs of {_sides(wanted)}; those of {config.tasks}, task "
                f"{task.name!r}, are {_sides(shape)}. {advice}"
            )
    kind = Joint if name == "joint" else Trainer
    try:
        return kind(model, method, sequence, config.training, seed=config.seed, device=config.device)
    except ValueError as error:
        raise WrongOptions(str(error)) from error


def _sides(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def build(
    config: RunConfig, name: str, example_input: Tensor | None = None, device: str | None = None
) -> tuple[MultiHead, Method]:
    """A new model and the method called `name` on it; a bound is fine-tuning, with other data or another model."""
    torch.manual_seed(mixed_seed(config.seed))
    device = device or config.device
    make_trunk = partial(NETWORKS[config.network], **config.network_options)
    if name == "separate":
        model: MultiHead = Separate(make_trunk)
        return model, FineTune(model)
    trunk = make_trunk()
    model = MultiHead(trunk, features=trunk.features).to(device)
    if name == "joint":
        return model, FineTune(model, heads=all_heads)
    settings, kind = dict(config.settings) if name == config.method else {}, METHODS[name].load()
    if issubclass(kind, NodeMethod) and example_input is not None:
        settings["example_input"] = example_input.to(device)
    return model, kind(model, **settings)


def memory_after(preset: str, name: str) -> dict[str, int]:
    """What a method holds after all tasks of a preset, each learned for one epoch."""
    config = configure(preset, method=name, epochs=1)
    sequence = load_tasks(config)
    trainer = make_trainer(config, name, sequence)
    while trainer.advance():
        pass
    return trainer.method.memory()


def _train(
    trainer: Trainer,
    state: dict[str, Any],
    run: Run,
    checkpoint_every: float,
    stop: Callable[[], bool],
    watch: Callable[[Event], None],
    certify: bool,
) -> None:
    """Train one method to its end and put its outcome into `state`, which is what a checkpoint holds."""
    name: str = state["method"]
    saved, took, shown = time.monotonic(), 0.0, time.monotonic()

    def emit(event: Event) -> None:
        event = {"method": name, "progress": trainer.progress, **event}
        run.log_event({**event, "time": time.time()})
        watch(event)

    def save() -> None:
        nonlocal saved, took
        saved, before = time.monotonic(), saved
        state["seconds"][name] = state["seconds"].get(name, 0.0) + saved - before
        state["trainer"] = trainer.state_dict()
        run.save_checkpoint(state)
        took = time.monotonic() - saved

    trainer.emit = emit
    learned = trainer.task_index
    stop()  # from here on a signal is a request
    try:
        while trainer.advance():
            if trainer.task_index > learned:
                learned = trainer.task_index
                if certify:
                    _store_certificate(trainer, run, learned)
                if not trainer.done:
                    save()
            if stop():
                save()
                raise Interrupted
            if time.monotonic() - saved >= max(checkpoint_every, SPACING * took):
                save()
            if time.monotonic() - shown >= SHOWN:
                shown = time.monotonic()
                watch({"event": "step", "method": name, "progress": trainer.progress})
        outcome = _outcome(trainer, name, state["finished"].get(REFERENCE))
        if certify:
            outcome["certificate"] = _in_a_line(Certificate.load(_certificate_path(run, learned)))
        state["finished"][name] = outcome
        save()
    except CompileFailed as error:
        raise RunError(f"{name}: {error}") from error
    except (TrainingFailed, FloatingPointError) as error:  # the latter from a method that looks at activations
        run.write_json(DIVERGED, {"reason": str(error)})
        numbers = run.checkpoints.list_numbers()
        kept = f"The last good checkpoint is number {numbers[-1]}." if numbers else "No checkpoint was written yet."
        raise RunError(f"{name}: {error}. {kept}") from error


def _outcome(trainer: Trainer, name: str, reference: dict[str, Any] | None) -> dict[str, Any]:
    accuracies = trainer.accuracies
    compared = accuracies if name == REFERENCE else reference and reference["accuracies"]
    return {
        "accuracies": accuracies,
        "valid_accuracies": trainer.valid_accuracies,
        "average_accuracy": metrics.average_accuracy(accuracies),
        "plasticity": metrics.plasticity(accuracies, compared) if compared else None,
        "stability": metrics.stability(accuracies),
        "forgetting": metrics.forgetting(accuracies),
        "weights": sum(parameter.numel() for parameter in trainer.model.trunk.parameters()),
        "losses": trainer.losses,
        "statistics": trainer.statistics,
        "memory": trainer.method.memory(),
        "weights_sha256": hash_state(trainer.model.state_dict()),
        "method_sha256": hash_state(trainer.method.state_dict()),
    }


def _store_certificate(trainer: Trainer, run: Run, learned: int) -> None:
    made = trainer.method.certificate()
    if made.probe is None:
        first = trainer.tasks[0]
        shape = first.inputs(first.train_x[:1]).shape[1:]
        batch = Probe.draw([PROBED, *shape], seed=0).to(trainer.device)
        made = replace(made, probe=Probe.of(batch, trainer.method.outputs(batch), 0))
    with run.explain_write_errors():
        made.save(_certificate_path(run, learned))


def _in_a_line(certificate: Certificate) -> str:
    if certificate.layout.size:
        return str(certificate)
    return f"after task {certificate.task!r}: {len(certificate.heads) - 1} earlier heads unmoved; no node is certified"


def _certificate_path(run: Run, learned: int) -> Path:
    return run.folder / "certificates" / f"{learned:02d}.json"


def _recorded_environment(run: Run, threads: int | None) -> dict[str, Any]:
    """What else decides the last bits of a result. A resumed run keeps the number of threads it was started with."""
    path = run.folder / "environment.json"
    if not (path.exists() and run.is_started):
        if threads is not None:
            torch.set_num_threads(threads)
        environment: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        run.write_json(path.name, environment)
    environment = read_json(path, ". Remove it")
    try:
        torch.set_num_threads(environment["threads"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{path} does not say how many threads the run has: remove it") from error
    return environment
