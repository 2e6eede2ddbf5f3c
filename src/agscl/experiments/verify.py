"""Checking a finished run again: its certificates against its weights, and the outputs on the probe as a witness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agscl.certificate import Certificate, Probe, Verdict, verify
from agscl.experiments.execute import build
from agscl.experiments.presets import RunConfig, check_device
from agscl.runs import Run, RunError, is_finished
from agscl.system.tf32 import tf32_for
from agscl.training.trainer import placed


def certificates_of(folder: Path) -> list[Path]:
    """One for each task, in their order."""
    found = (folder / "certificates").glob("*.json")
    return sorted((path for path in found if path.stem.isdecimal()), key=lambda path: int(path.stem))


def verify_run(folder: Path) -> Verdict:
    """Check a run's certificates against the weights of its newest whole checkpoint; the last line is the verdict."""
    run = Run(folder)
    config = RunConfig.from_dict(run.read_config() or {})
    if config.method == "joint":
        raise RunError(f"{folder} is of joint, where each task trains every head, so nothing is certified")
    state = run.load_checkpoint()
    if state is None:
        raise RunError(f"{folder} holds no checkpoint that is whole, so there are no weights to check")
    trained = state["trainer"]
    learned = trained["task"] if state["method"] == config.method else 0
    if not learned:
        raise RunError(f"{folder} has not learned its first task with {config.method} yet, so nothing is certified")
    if trained["optimizer"] is not None:
        raise RunError(
            f"{folder} is in the middle of task {learned + 1}, and certificates are about the end of a task. "
            f"Let it finish first: agscl run --resume {folder.name}"
        )
    paths = certificates_of(folder)
    if len(paths) < learned:
        raise RunError(f"{folder}/certificates holds {len(paths)} certificates for {learned} learned tasks")
    try:
        certificates = [Certificate.load(path) for path in paths[:learned]]
    except ValueError as error:
        raise RunError(f"{error} Without it there is nothing to check the run's weights against.") from error

    found = verify(certificates, trained["model"])
    failed = [line for line in found.lines if line.startswith("FAILED")]
    lines = [line for line in found.lines if line not in failed]
    if not certificates[-1].layout.size:
        lines = [f"{learned} heads checked; {certificates[-1].method} promises nothing about the nodes"]
    failed += [
        f"FAILED: checkpoint {number} is damaged: {reason}" for number, reason in run.checkpoints.damaged.items()
    ]
    if is_finished(folder) and len(paths) > learned:
        failed.append(f"FAILED: the weights after the last {len(paths) - learned} of {len(paths)} tasks are lost")
    seen, wrong = _outputs(config, certificates, trained)
    failed += [f"FAILED: {line}" for line in wrong]
    return Verdict(not failed, [*lines, *seen, *failed, _verdict(certificates, len(failed))])


def _verdict(certificates: Sequence[Certificate], failures: int) -> str:
    if failures:
        return f"FAILED: {failures} of the things certified {'is' if failures == 1 else 'are'} not so"
    if all(certificate.kind == "guaranteed" for certificate in certificates):
        return f"OK: all that is guaranteed since each of {len(certificates)} tasks is in place, bit for bit"
    return f"OK: the weights are those certified after the last of {len(certificates)} tasks, bit for bit"


def _outputs(
    config: RunConfig, certificates: Sequence[Certificate], trained: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """What the final weights answer to the probe, against what each certificate holds: lines, and failures."""
    last = certificates[-1]
    if last.probe is None or last.probe.seed is None:
        return ["the certificates hold no outputs on a probe that could be drawn again"], []
    lines, failed = [], []
    with _threads(int(last.probe.environment["threads"])), tf32_for(config.training.precision):
        batch, outputs = _answers(config, last.probe, last.probe.seed, trained)
        here, there = Probe.environment_of(batch), last.probe.environment
        for certificate in certificates:
            if certificate.probe is None:
                continue
            differences = certificate.probe.compare(batch, outputs)
            own = differences[certificate.task]
            words = "the same bits as" if own == 0 else f"up to {own:.2g} away from"
            lines.append(f"{certificate.task}: outputs on the probe, {words} when it was learned")
            # Other zero rules, and layers left out of the nodes, let later nodes reach old outputs.
            safe = certificate.kind == "guaranteed" and certificate.zero_rule == "paper" and not certificate.notes
            if certificate.probe.same_environment(batch) and (safe or certificate is last):
                failed += [
                    f"outputs of task {task!r} on the probe differ by up to {difference:.2g} from those certified "
                    f"after task {certificate.task!r}"
                    for task, difference in differences.items()
                    if difference != 0
                ]
    changed = [f"{key} {there.get(key)} then, {here[key]} now" for key in here if there.get(key) != here[key]]
    if changed:
        lines.append(f"computed otherwise than the certificates ({'; '.join(changed)}): other bits prove nothing")
    return lines, failed


def _answers(config: RunConfig, probe: Probe, seed: int, trained: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The probe drawn again, and the outputs of all heads on it."""
    try:
        check_device(device := config.device)
    except ValueError:
        device = "cpu"
    with torch.random.fork_rng(devices=[]):
        batch = Probe.draw(probe.shape, seed).to(device)
        model, method = build(config, config.method, batch[:2], device)
        for task, output in probe.outputs.items():
            model.add_head(task, output["shape"][1])
        placed(model, device, config.training).load_state_dict(trained["model"])
        method.load_state_dict(trained["method"])
        return batch, method.outputs(batch)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
