"""Verifying a run: its certificates against its stored weights, and the outputs on the probe as a second check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agscl.certificate import Certificate, ProbeOutputs, Verdict, verify
from agscl.experiments.build import build_model
from agscl.experiments.config import RunConfig, check_device
from agscl.experiments.environment import use_threads
from agscl.runs import Run, RunError, is_finished
from agscl.system.tf32 import tf32_for
from agscl.training.trainer import place_model


def list_certificates(folder: Path) -> list[Path]:
    """The certificate of each task, in the order of the tasks."""
    paths = [path for path in (folder / "certificates").glob("*.json") if path.stem.isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem))


def verify_run(folder: Path) -> Verdict:
    """Check a run's certificates against the weights of its newest intact checkpoint; the last line is the verdict."""
    run = Run(folder)
    config = RunConfig.from_dict(run.read_config() or {})
    if config.method == "joint":
        raise RunError(f"{folder} is a run of joint, which trains every head on every task, so nothing is certified")
    state = run.load_checkpoint()
    if state is None:
        raise RunError(f"{folder} has no intact checkpoint, so there are no weights to check")
    trainer_state = state["trainer"]
    learned = trainer_state["task"] if state["method"] == config.method else 0
    if not learned:
        raise RunError(f"{folder} has not finished its first task with {config.method} yet, so nothing is certified")
    if trainer_state["optimizer"] is not None:
        raise RunError(
            f"{folder} is in the middle of task {learned + 1}, and certificates hold at the end of a task. "
            f"Finish the run first: agscl run --resume {folder.name}"
        )
    paths = list_certificates(folder)
    if len(paths) < learned:
        raise RunError(f"{folder}/certificates has {len(paths)} certificates, expected one for each of {learned} tasks")
    try:
        certificates = [Certificate.load(path) for path in paths[:learned]]
    except ValueError as error:
        raise RunError(f"{error} Without it the run's weights cannot be checked.") from error

    verdict = verify(certificates, trainer_state["model"])
    failures = [line for line in verdict.lines if line.startswith("FAILED")]
    lines = [line for line in verdict.lines if line not in failures]
    if not certificates[-1].layout.size:
        lines = [f"{learned} heads checked; {certificates[-1].method} guarantees nothing about the nodes"]
    for number, reason in run.checkpoints.damaged.items():
        failures.append(f"FAILED: checkpoint {number} is damaged: {reason}")
    if is_finished(folder) and len(paths) > learned:
        failures.append(f"FAILED: the weights after the last {len(paths) - learned} of {len(paths)} tasks are lost")
    probe_lines, probe_failures = _check_probe_outputs(config, certificates, trainer_state)
    failures += [f"FAILED: {line}" for line in probe_failures]
    last_line = _summarize_verdict(certificates, len(failures))
    return Verdict(not failures, [*lines, *probe_lines, *failures, last_line])


def _summarize_verdict(certificates: Sequence[Certificate], failures: int) -> str:
    if failures:
        return f"FAILED: {failures} certified claim{' does' if failures == 1 else 's do'} not hold"
    if all(certificate.kind == "guaranteed" for certificate in certificates):
        return f"OK: everything guaranteed after each of {len(certificates)} tasks is unchanged, bit for bit"
    return f"OK: the weights are those certified after the last of {len(certificates)} tasks, bit for bit"


def _check_probe_outputs(
    config: RunConfig, certificates: Sequence[Certificate], trainer_state: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare the outputs on the probe with those in each certificate; returns lines and failures."""
    last = certificates[-1]
    if last.probe is None or last.probe.seed is None:
        return ["the certificates have no probe that can be drawn again, so outputs were not compared"], []
    lines, failures = [], []
    with use_threads(int(last.probe.environment["threads"])), tf32_for(config.training.precision):
        batch, outputs = _compute_probe_outputs(config, last.probe, last.probe.seed, trainer_state)
        here, there = ProbeOutputs.describe_environment(batch), last.probe.environment
        for certificate in certificates:
            if certificate.probe is None:
                continue
            differences = certificate.probe.compare(batch, outputs)
            difference = differences[certificate.task]
            change = "bit-identical to" if difference == 0 else f"up to {difference:.2g} away from"
            lines.append(f"{certificate.task}: outputs on the probe are {change} those right after learning it")
            # With other zero rules, or with layers excluded from the nodes, later nodes may reach old outputs.
            exact = certificate.kind == "guaranteed" and certificate.zero_rule == "paper" and not certificate.notes
            if certificate.probe.same_environment(batch) and (exact or certificate is last):
                failures += [
                    f"outputs of task {task!r} on the probe differ by up to {difference:.2g} from those certified "
                    f"after task {certificate.task!r}"
                    for task, difference in differences.items()
                    if difference != 0
                ]
    changed = [f"{key} {there.get(key)} then, {here[key]} now" for key in here if there.get(key) != here[key]]
    if changed:
        lines.append(f"computed in a different environment ({'; '.join(changed)}): a bit mismatch is inconclusive")
    return lines, failures


def _compute_probe_outputs(
    config: RunConfig, probe: ProbeOutputs, seed: int, trainer_state: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The probe, drawn again from its seed, and the outputs of all heads on it."""
    try:
        check_device(device := config.device)
    except ValueError:
        device = "cpu"
    with torch.random.fork_rng(devices=[]):
        batch = ProbeOutputs.draw_batch(probe.shape, seed).to(device)
        model, method = build_model(config, config.method, batch[:2], device)
        for task, output in probe.outputs.items():
            model.add_head(task, output["shape"][1])
        place_model(model, device, config.training).load_state_dict(trainer_state["model"])
        method.load_state_dict(trainer_state["method"])
        return batch, method.head_outputs(batch)
