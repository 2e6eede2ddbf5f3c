"""One run from start to end, or from where it stopped: first fine-tuning as the reference, then the method."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agscl import tasks
from agscl.analysis import metrics
from agscl.certificate import Certificate, Verdict, verify
from agscl.experiments.presets import RunConfig
from agscl.heads import MultiHead
from agscl.methods.agscl import AGSCL
from agscl.methods.base import Method, NodeMethod
from agscl.methods.finetune import FineTune
from agscl.networks import NETWORKS
from agscl.runs import Run, RunError, digest
from agscl.runs.folder import read_json
from agscl.supervised import Trainer, TrainingFailed
from agscl.supervised.trainer import Event, mixed_seed

METHODS: dict[str, type[Method]] = {"agscl": AGSCL, "finetune": FineTune}
REFERENCE = "finetune"


class Interrupted(Exception):
    """The run was asked to stop, and stored where it stands."""


def methods_of(config: RunConfig) -> list[str]:
    """What is trained, in order; the reference is needed for plasticity."""
    return [REFERENCE] if config.method == REFERENCE else [REFERENCE, config.method]


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

    A checkpoint is written every `checkpoint_every` seconds and at the end of each task; between any two steps `stop`
    is asked whether to store one and raise `Interrupted`.
    """
    run.claim(config.as_dict())
    environment = _recorded_environment(run, threads)
    sequence = tasks.load(config.tasks, seed=config.seed, **config.task_options)
    state = run.load() or {"method": None, "finished": {}, "seconds": {}}
    for number, reason in run.checkpoints.damaged.items():
        note(f"Checkpoint {number} is damaged ({reason}); going back to the one before it.")

    for name in methods_of(config):
        if name in state["finished"]:
            continue
        model, method = build(config, name, sequence[0].train_x[:2])
        trainer = Trainer(model, method, sequence, config.training, seed=config.seed)
        if state["method"] == name:
            trainer.load_state_dict(state["trainer"])
        state["method"] = name
        _train(trainer, state, run, checkpoint_every, stop, watch, certify=name == config.method)

    result = {
        "config": config.as_dict(),
        "tasks": [task.name for task in sequence],
        "methods": state["finished"],
        "environment": environment,
        "seconds": state["seconds"],
    }
    run.store("result.json", result)
    return result


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that is the same, bit for bit, however often the run was interrupted."""
    return {key: value for key, value in result.items() if key not in ("environment", "seconds")}


def verify_run(folder: Path) -> Verdict:
    """Check the certificates of a run against the weights of its newest whole checkpoint."""
    run = Run(folder)
    state = run.checkpoints.load()
    if state is None:
        raise RunError(f"{folder} holds no checkpoint that is whole, so there are no weights to check")
    paths = sorted((folder / "certificates").glob("*.json"))
    config = RunConfig.from_dict(read_json(folder / "config.json"))
    learned = state["trainer"]["task"] if state["method"] == config.method else 0
    if not learned:
        raise RunError(f"{folder} has not learned its first task with {config.method} yet, so nothing is certified")
    if len(paths) < learned:
        raise RunError(f"{folder}/certificates holds {len(paths)} certificates for {learned} learned tasks")
    return verify([Certificate.load(path) for path in paths[:learned]], state["trainer"]["model"])


def build(config: RunConfig, name: str, example_input: Tensor | None = None) -> tuple[MultiHead, Method]:
    """A new model and the method called `name` on it."""
    torch.manual_seed(mixed_seed(config.seed))
    trunk = NETWORKS[config.network](**config.network_options)
    model = MultiHead(trunk, features=trunk.features).to(config.device)
    settings = dict(config.settings) if name == config.method else {}
    if issubclass(METHODS[name], NodeMethod) and example_input is not None:
        settings["example_input"] = example_input.to(config.device)
    return model, METHODS[name](model, **settings)


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
    saved = time.monotonic()

    def emit(event: Event) -> None:
        event = {"method": name, "progress": trainer.progress, **event}
        run.log({**event, "time": time.time()})
        watch(event)

    def save() -> None:
        nonlocal saved
        saved, before = time.monotonic(), saved
        state["seconds"][name] = state["seconds"].get(name, 0.0) + saved - before
        state["trainer"] = trainer.state_dict()
        run.save(state)

    trainer.emit = emit
    learned = trainer.task_index
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
            if time.monotonic() - saved >= checkpoint_every:
                save()
        outcome = _outcome(trainer, state["finished"].get(REFERENCE))
        if certify:
            outcome["certificate"] = str(Certificate.load(_certificate_path(run, learned)))
        state["finished"][name] = outcome
        save()
    except TrainingFailed as error:
        numbers = run.checkpoints.numbers()
        kept = f"The last good checkpoint is number {numbers[-1]}." if numbers else "No checkpoint was written yet."
        raise RunError(f"{name}: {error}. {kept}") from error


def _outcome(trainer: Trainer, reference: dict[str, Any] | None) -> dict[str, Any]:
    accuracies = trainer.accuracies
    return {
        "accuracies": accuracies,
        "average_accuracy": metrics.average_accuracy(accuracies),
        "plasticity": metrics.plasticity(accuracies, reference["accuracies"] if reference else accuracies),
        "stability": metrics.stability(accuracies),
        "forgetting": metrics.forgetting(accuracies),
        "weights": sum(parameter.numel() for parameter in trainer.model.trunk.parameters()),
        "losses": trainer.losses,
        "statistics": trainer.statistics,
        "memory": trainer.method.memory(),
        "weights_sha256": digest(trainer.model.state_dict()),
        "method_sha256": digest(trainer.method.state_dict()),
    }


def _store_certificate(trainer: Trainer, run: Run, learned: int) -> None:
    with run.writing():
        path = _certificate_path(run, learned)
        temporary = path.with_suffix(".tmp")
        trainer.method.certificate().save(temporary)
        os.replace(temporary, path)


def _certificate_path(run: Run, learned: int) -> Path:
    return run.folder / "certificates" / f"{learned:02d}.json"


def _recorded_environment(run: Run, threads: int | None) -> dict[str, Any]:
    """What else decides the last bits of a result. A resumed run keeps the number of threads it was started with."""
    path = run.folder / "environment.json"
    if not path.exists():
        if threads is not None:
            torch.set_num_threads(threads)
        environment: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        run.store(path.name, environment)
    environment = read_json(path)
    torch.set_num_threads(environment["threads"])
    return environment
