"""One run from start to end, or from where it stopped: first fine-tuning as the reference, then the method."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agscl.analysis import metrics
from agscl.analysis.node_record import make_node_record
from agscl.experiments.build import AnySequence, AnyTrainer, build_trainer, load_tasks
from agscl.experiments.certificate_chain import (
    certificate_path,
    compute_digest,
    load_certificate,
    make_chain_entry,
    node_record_path,
)
from agscl.experiments.method_entries import METHODS, REFERENCE
from agscl.experiments.run_config import RunConfig
from agscl.experiments.run_environment import record_environment
from agscl.probe_outputs import ProbeOutputs
from agscl.runs import DifferentConfig, Interrupted, Run, RunError, hash_state
from agscl.runs.json_files import read_checked_json
from agscl.runs.run_folder import DIVERGED
from agscl.system.tf32 import tf32_for
from agscl.training import CompileFailed, TrainingFailed
from agscl.training.ranks import Ranks
from agscl.training.trainer import Event

CHECKPOINT_SPACING = 20.0
"""Time between two checkpoints, at least, in multiples of the time one takes to write: a twentieth of the total."""
PROGRESS_INTERVAL = 0.5
"""Seconds between two reports of the progress within an epoch."""
PROBE_SIZE = 16
"""Random inputs for which a certificate stores the outputs of all heads."""


def execute_run(
    config: RunConfig,
    run: Run,
    *,
    checkpoint_every: float,
    threads: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_event: Callable[[Event], None] = lambda event: None,
    on_message: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train what is not trained yet, write result.json and return its content.

    A checkpoint is written every `checkpoint_every` seconds, less often where writing takes long, and at the end of
    each task. `should_stop` is called between any two steps; when it returns True, a checkpoint is written and
    `Interrupted` raised. `on_event` gets the events of training, `on_message` lines for a person.
    """
    ranks = Ranks.current()
    should_stop = ranks.agree_to_stop(should_stop)
    ranks.broadcast(config)
    run.store_config(config.as_dict())
    environment = record_environment(run, config.device, threads, ranks.size)
    if environment["torch"] != torch.__version__:
        on_message(f"This run was started with torch {environment['torch']} and continues with {torch.__version__}.")
    sequence = load_tasks(config)
    state = run.resume() or {"method": None, "finished": {}, "seconds": {}}
    state.setdefault("chain", [])  # an entry for each certificate
    state["data"] = _check_data(run, sequence, state.get("data"))
    ranks.broadcast((state, environment["threads"]))
    damaged = run.checkpoints.damaged
    for number, reason in damaged.items():
        none_left = state["method"] is None and number == min(damaged)
        next_step = "no earlier one is left: starting from the beginning" if none_left else "using the one before it"
        on_message(f"Checkpoint {number} is damaged ({reason}); {next_step}.")

    with tf32_for(config.training.precision):  # for certificates too
        for trainer in _build_trainers(config, sequence, state):
            certify = state["method"] == config.method != "joint"
            _train_method(config, trainer, state, run, checkpoint_every, should_stop, on_event, certify)

    result = {
        "config": config.as_dict(),
        "tasks": [task.name for task in sequence],
        "methods": state["finished"],
        "environment": environment,
        "seconds": state["seconds"],
        "chain": state["chain"],
        "digest": compute_digest(config, state),
    }
    run.write_json("result.json", result)
    return result


def follow_run(should_stop: Callable[[], bool]) -> None:
    """Train along with the first rank, which runs `execute_run` and writes all files, until it has nothing to do."""
    ranks = Ranks.current()
    should_stop = ranks.agree_to_stop(should_stop)
    config: RunConfig | None = ranks.broadcast()
    if config is None:
        return
    sequence = load_tasks(config)
    state, threads = ranks.broadcast()
    torch.set_num_threads(threads)
    if state["data"] != {task.name: task.checksum() for task in sequence}:
        raise RunError(f"the data that process {ranks.rank} reads is not that of the first process")
    with tf32_for(config.training.precision):
        for trainer in _build_trainers(config, sequence, state):
            should_stop()
            while trainer.advance():
                if should_stop():
                    raise Interrupted
            state["finished"][state["method"]] = None


def _build_trainers(config: RunConfig, sequence: AnySequence, state: dict[str, Any]) -> Iterator[AnyTrainer]:
    """One after the other, the trainers of methods that are not finished; the first may go on from a checkpoint."""
    remaining = [name for name in list_trained_methods(config) if name not in state["finished"]]
    for later in remaining[1:]:
        build_trainer(config, later, sequence)  # so that wrong options are reported before any training
    for number, name in enumerate(remaining):
        with warnings.catch_warnings():
            if number:
                warnings.simplefilter("ignore")  # said when it was built above
            trainer = build_trainer(config, name, sequence)
        if state["method"] == name:
            trainer.load_state_dict(state["trainer"])
        state["method"] = name
        yield trainer


def list_trained_methods(config: RunConfig) -> list[str]:
    """The methods that a run trains, in order."""
    return [REFERENCE, config.method] if config.reference and config.method != REFERENCE else [config.method]


def check_data_unchanged(folder: Path, config: RunConfig) -> None:
    """Raise `DifferentConfig` if the data of a finished run changed since."""
    if (folder / "data.json").exists():
        _check_data(Run(folder), load_tasks(config), None)


def _check_data(run: Run, sequence: AnySequence, in_checkpoint: dict[str, int] | None) -> dict[str, int]:
    """Compare the data's checksums with those in data.json, or else in the checkpoint; store them for a new run."""
    path = run.folder / "data.json"
    checksums = {task.name: task.checksum() for task in sequence}
    in_file = read_checked_json(path, ". Remove it").get("tasks") if path.exists() else None
    stored: dict[str, int] = in_file or in_checkpoint or checksums
    if changed := [name for name in dict.fromkeys([*stored, *checksums]) if stored.get(name) != checksums.get(name)]:
        raise DifferentConfig(
            f"the data of {run.folder} changed since it was started (tasks: {', '.join(changed)}). Restore the data, "
            "or choose another --name for a new run"
        )
    if not path.exists():
        run.write_json(path.name, {"tasks": checksums})
    return checksums


def _train_method(
    config: RunConfig,
    trainer: AnyTrainer,
    state: dict[str, Any],
    run: Run,
    checkpoint_every: float,
    should_stop: Callable[[], bool],
    on_event: Callable[[Event], None],
    certify: bool,
) -> None:
    """Train one method to its end and put its outcome into `state`, which is what a checkpoint holds."""
    name: str = state["method"]
    last_save, save_seconds, last_report = time.monotonic(), 0.0, time.monotonic()

    def log_event(event: Event) -> None:
        event = {"method": name, "progress": trainer.progress, **event}
        run.log_event({**event, "time": time.time()})
        on_event(event)

    def save_checkpoint() -> None:
        nonlocal last_save, save_seconds
        last_save, before = time.monotonic(), last_save
        state["seconds"][name] = state["seconds"].get(name, 0.0) + last_save - before
        state["trainer"] = trainer.state_dict()
        run.save_checkpoint(state)
        save_seconds = time.monotonic() - last_save

    trainer.emit = log_event
    tasks_learned = trainer.task_index
    should_stop()  # from this first call on, a signal no longer interrupts but asks to stop
    try:
        while trainer.advance():
            if trainer.task_index > tasks_learned:
                tasks_learned = trainer.task_index
                if certify:
                    path = _store_certificate(trainer, name, run, tasks_learned)
                    record = _store_node_record(trainer, run, tasks_learned)
                    entry = make_chain_entry(config, state, trainer, path, record, tasks_learned)
                    state["chain"] = [*state["chain"][: tasks_learned - 1], entry]
                if not trainer.done:
                    save_checkpoint()
            if should_stop():
                save_checkpoint()
                raise Interrupted
            if time.monotonic() - last_save >= max(checkpoint_every, CHECKPOINT_SPACING * save_seconds):
                save_checkpoint()
            if time.monotonic() - last_report >= PROGRESS_INTERVAL:
                last_report = time.monotonic()
                on_event({"event": "step", "method": name, "progress": trainer.progress, **trainer.describe_position()})
        outcome = _summarize_outcome(trainer, name, state["finished"].get(REFERENCE))
        if certify:
            certificate = load_certificate(certificate_path(run.folder, tasks_learned))
            outcome["certificate"] = str(certificate)
        state["finished"][name] = outcome
        save_checkpoint()
    except CompileFailed as error:
        raise RunError(f"{name}: {error}") from error
    except (TrainingFailed, FloatingPointError) as error:  # the latter from a method that checks activations
        run.write_json(DIVERGED, {"reason": str(error)})
        numbers = run.checkpoints.list_numbers()
        stored = f"The last good checkpoint is number {numbers[-1]}." if numbers else "No checkpoint was written yet."
        raise RunError(f"{name}: {error}. {stored}") from error


def _summarize_outcome(trainer: AnyTrainer, name: str, reference: dict[str, Any] | None) -> dict[str, Any]:
    accuracies = trainer.accuracies
    reference_accuracies = accuracies if name == REFERENCE else reference and reference["accuracies"]
    extra = trainer.extra_results()
    if "evaluations" in extra and (name == REFERENCE or reference):
        compared = (reference or extra)["evaluations"]
        extra["accumulated_rewards"] = metrics.accumulated_rewards(extra["evaluations"], compared)
        extra["not_accumulated"] = [trainer.tasks[task].name for task in metrics.find_unlearned(compared)]
    return {
        "accuracies": accuracies,
        "valid_accuracies": trainer.valid_accuracies,
        "average_accuracy": metrics.average_accuracy(accuracies),
        "plasticity": metrics.plasticity(accuracies, reference_accuracies) if reference_accuracies else None,
        "stability": metrics.stability(accuracies),
        "forgetting": metrics.forgetting(accuracies),
        "weights": sum(parameter.numel() for parameter in trainer.model.trunk.parameters()),
        "losses": trainer.losses,
        "statistics": trainer.statistics,
        "memory": trainer.method.memory(),
        "weights_sha256": hash_state(trainer.model.state_dict()),
        "method_sha256": hash_state(trainer.method.state_dict()),
        **extra,
    }


def _store_certificate(trainer: AnyTrainer, name: str, run: Run, tasks_learned: int) -> Path:
    certificate = trainer.method.certificate()
    if METHODS[name].is_bound:  # trained by FineTune, with another model
        certificate = replace(certificate, method=METHODS[name].title)
    if certificate.probe is None:
        batch = ProbeOutputs.draw_batch([PROBE_SIZE, *trainer.input_shape], seed=0).to(trainer.device)
        certificate = replace(
            certificate, probe=ProbeOutputs.from_outputs(batch, trainer.method.head_outputs(batch), 0, trainer.model)
        )
    path = certificate_path(run.folder, tasks_learned)
    with run.explain_write_errors():
        certificate.save(path)
    return path


def _store_node_record(trainer: AnyTrainer, run: Run, tasks_learned: int) -> Path | None:
    """Store what the report shows of every node, beside the certificate. Training does not read it."""
    record = make_node_record(trainer.method)
    if record is None:
        return None
    path = node_record_path(run.folder, tasks_learned)
    with run.explain_write_errors():
        path.parent.mkdir(exist_ok=True)
    run.write_json(str(path.relative_to(run.folder)), record)
    return path
