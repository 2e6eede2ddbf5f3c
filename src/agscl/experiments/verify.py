"""Verifying a run: all of its files against each other, its certificates against its stored weights, and the outputs
on the probe as a second check.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agscl.certificate import Certificate, Verdict, verify
from agscl.experiments.build import build_model, list_outputs
from agscl.experiments.certificate_chain import (
    certificate_path,
    compute_digest,
    compute_run_id,
    hash_file,
    list_certificates,
    load_certificate,
    node_record_path,
)
from agscl.experiments.command_lines import make_resume_command
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run_config import RunConfig, check_device
from agscl.experiments.run_environment import use_threads
from agscl.probe_outputs import ProbeOutputs
from agscl.runs import Run, RunError, hash_state, is_finished, read_result
from agscl.runs.events import is_log_intact
from agscl.runs.json_files import encode_json, read_checked_json
from agscl.runs.run_folder import describe_differences
from agscl.system.tf32 import tf32_for
from agscl.training.trainer import place_model

NOT_COVERED = "not covered: nothing is signed; who rewrites all files of a run can forge it"


def verify_run(folder: Path, expected_digest: str | None = None) -> Verdict:
    """Check all files of a run against each other; the last line is the verdict.

    With `expected_digest`, the run must also have this digest, which was kept elsewhere.
    """
    run = Run(folder)
    config = RunConfig.from_dict(run.read_config() or {})
    if config.method == "joint":
        raise RunError(f"{folder} is a run of joint, which trains every head on every task, so nothing is certified")
    state = run.load_checkpoint()
    if state is not None:
        _check_config(folder, config, state)
    if lost := _describe_lost_checkpoint(folder, run, config, state):
        return Verdict(False, [f"FAILED: {lost}"])  # everything else would differ from the checkpoint before it
    if state is None:
        raise RunError(f"{folder} has no checkpoint yet, so there are no weights to check")
    trainer_state = state["trainer"]
    learned = trainer_state["task"] if state["method"] == config.method else 0
    if not learned:
        raise RunError(f"{folder} has not finished its first task with {config.method} yet, so nothing is certified")
    if trainer_state["optimizer"] is not None:
        raise RunError(
            f"{folder} is in the middle of task {learned + 1}, and certificates hold at the end of a task. "
            f"Finish the run first: {make_resume_command(folder)}"
        )
    if len(state.get("chain", ())) != learned:
        raise RunError(f"{folder} was started by an older version of agscl, whose certificates form no chain")

    certificates: list[Certificate] = []
    lines: list[str] = []
    failures = list(_check_chain(folder, config, state))
    if not failures:
        certificates = [load_certificate(certificate_path(folder, number + 1)) for number in range(learned)]
        lines, certificate_failures = _check_certificates(config, certificates, trainer_state)
        failures += certificate_failures
    failures += _check_stored_state(folder, config, state)
    failures += _check_other_files(folder, run, state)
    if not is_finished(folder) and config.method not in state["finished"]:
        lines.append("the run is not finished, so there is no result to check")
    digest = compute_digest(config, state)
    lines.append(f"digest: {digest}")
    if expected_digest is not None and expected_digest != digest:
        failures.append(f"the digest is not the expected {expected_digest}")
    lines.append(NOT_COVERED)
    lines.append(
        "             (the expected digest rules that out)"
        if expected_digest
        else "             (keep the digest elsewhere, and compare it: --expect DIGEST)"
    )
    last_line = _summarize_verdict(certificates, len(failures))
    return Verdict(not failures, [*lines, *[f"FAILED: {failure}" for failure in failures], last_line])


def _check_config(folder: Path, config: RunConfig, state: Mapping[str, Any]) -> None:
    stored = json.loads(state.get("config") or "{}")
    if changed := sorted(describe_differences(stored, json.loads(encode_json(config.as_dict())))):
        raise RunError(
            f"{folder}/config.json and {folder}/checkpoints are of different runs ({'; '.join(changed)}, where there "
            "is the checkpoint and here config.json), so nothing can be checked"
        )


def _describe_lost_checkpoint(folder: Path, run: Run, config: RunConfig, state: Mapping[str, Any] | None) -> str | None:
    """What is wrong with the newest checkpoint, and what to do; `state` is what was loaded in its place."""
    if damaged := run.checkpoints.damaged:
        number, reason = max(damaged.items())
        problem = f"checkpoint {number} is damaged ({reason})"
    elif is_finished(folder) and (state is None or config.method not in state["finished"]):
        problem = "the last checkpoint is missing"
    else:
        return None
    first = f"remove {folder}/result.json, then " if is_finished(folder) else ""
    return (
        f"{problem}, so the weights of {folder} cannot be checked. Restore it from a copy, or train what is lost "
        f"again: {first}{make_resume_command(folder)}"
    )


def _check_chain(folder: Path, config: RunConfig, state: Mapping[str, Any]) -> Iterator[str]:
    """Compare each certificate with its entry in the chain, and each entry with the one before."""
    run_id, previous = compute_run_id(config, state["data"]), None
    for number, entry in enumerate(state["chain"], start=1):
        path = certificate_path(folder, number)
        if entry["run"] != run_id:
            yield f"the certificate of task {entry['task']!r} is of a run with another configuration or other data"
        if entry["previous"] != previous:
            yield f"the certificate of task {entry['task']!r} does not follow the one before it"
        if not path.is_file():
            yield f"{path} is missing"
        elif hash_file(path) != entry["certificate"]:
            yield f"{path} is not the certificate that the run wrote after task {entry['task']!r}"
        if entry.get("nodes"):  # older versions did not tie node records to the chain
            record = node_record_path(folder, number)
            if not record.is_file():
                yield f"{record} is missing"
            elif hash_file(record) != entry["nodes"]:
                yield f"{record} is not the record of nodes that the run wrote after task {entry['task']!r}"
        previous = hash_state(entry)
    known = {certificate_path(folder, number).name for number in range(1, len(state["chain"]) + 1)}
    extra = [path.name for path in list_certificates(folder) if path.name not in known]
    if extra and is_finished(folder):
        yield f"the weights after the last {len(extra)} of {len(extra) + len(known)} tasks are lost"


def _check_certificates(
    config: RunConfig, certificates: Sequence[Certificate], trainer_state: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare the certificates with each other, the weights and the outputs on the probe; returns lines, failures."""
    try:
        verdict = verify(certificates, trainer_state["model"])
        probe_lines, probe_failures = _check_probe_outputs(config, certificates, trainer_state)
    except (ValueError, KeyError, RuntimeError) as error:
        return [], [f"the certificates do not fit the weights: {error}"]
    failures = [line.removeprefix("FAILED: ") for line in verdict.lines if line.startswith("FAILED")]
    lines = [line for line in verdict.lines if not line.startswith("FAILED")]
    if not certificates[-1].layout.size:
        heads = f"{len(certificates)} heads unchanged: all that {METHODS[config.method].title} certifies"
        lines = [heads, *(line for line in lines if "NOT GUARANTEED" in line or line.startswith("note: "))]
    return lines + probe_lines, failures + probe_failures


def _check_stored_state(folder: Path, config: RunConfig, state: Mapping[str, Any]) -> Iterator[str]:
    """Compare all weights, the method's state and the result with what was recorded when they were made."""
    last, trainer_state = state["chain"][-1], state["trainer"]
    if hash_state(trainer_state["model"]) != last["weights"]:
        yield f"the weights are not those at the end of task {last['task']!r}"
    if hash_state(trainer_state["method"]) != last["method"]:
        yield f"the method's state (importances, masks, anchors) is not that at the end of task {last['task']!r}"
    if not is_finished(folder):
        if config.method in state["finished"]:
            yield f"{folder}/result.json is missing; it is written again by: {make_resume_command(folder)}"
        return
    try:
        result = read_result(folder)
    except RunError as error:
        yield str(error)
        return
    expected = {
        "config": config.as_dict(),
        "tasks": [entry["task"] for entry in state["chain"]],
        "methods": state["finished"],
        "seconds": state["seconds"],
        "chain": state["chain"],
        "digest": compute_digest(config, dict(state)),
    }
    for key, value in json.loads(encode_json(expected)).items():
        if result[key] != value:
            yield f"{folder}/result.json has other {key} than the last checkpoint"
    outcome = state["finished"].get(config.method, {})
    recorded = {"weights_sha256": last["weights"], "method_sha256": last["method"]}
    recorded["accuracies"] = trainer_state["accuracies"]
    for key, value in recorded.items():
        if outcome.get(key) != value:
            yield f"{folder}/result.json has other {key} than the weights were stored with"


def _check_other_files(folder: Path, run: Run, state: Mapping[str, Any]) -> Iterator[str]:
    """Check the checksums of all other files."""
    for number, reason in run.checkpoints.find_damaged().items():
        yield f"checkpoint {number} is damaged: {reason}"
    contents: dict[str, Any] = {}
    for name in ("config.json", "data.json", "environment.json"):
        if (folder / name).exists():
            try:
                contents[name] = read_checked_json(folder / name)
            except RunError as error:
                yield str(error)
        elif is_finished(folder):
            yield f"{folder / name} is missing"
    if "data.json" in contents and contents["data.json"].get("tasks") != state["data"]:
        yield f"{folder}/data.json is not that of the last checkpoint"
    if "environment.json" in contents and is_finished(folder):
        try:
            if read_result(folder)["environment"] != contents["environment.json"]:
                yield f"{folder}/environment.json is not that of result.json"
        except RunError:  # said already
            pass
    for path in sorted((folder / "nodes").glob("*.json")):  # runs of older versions have none
        try:
            read_checked_json(path)
        except RunError as error:
            yield str(error)
    log = folder / "events.jsonl"
    if not log.is_file():
        yield f"{log} is missing"
    elif not is_log_intact(log, dict(state)) or (is_finished(folder) and log.stat().st_size != state["events"]):
        yield f"{log} is not the event log that the run wrote"


def _summarize_verdict(certificates: Sequence[Certificate], failures: int) -> str:
    if failures:
        return f"FAILED: {failures} check{'' if failures == 1 else 's'} of the run did not hold"
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
        batch, outputs, model = _compute_probe_outputs(config, last.probe, last.probe.seed, trainer_state)
        here, there = ProbeOutputs.describe_environment(batch, model), last.probe.environment
        for certificate in certificates:
            if certificate.probe is None:
                continue
            differences = certificate.probe.compare(batch, outputs)
            difference = differences[certificate.task]
            change = "have not changed by a bit" if difference == 0 else f"changed by up to {difference:.2g}"
            lines.append(f"{certificate.task}: outputs on a random batch {change} since it was learned")
            exact = certificate.guarantees_outputs or certificate is last
            if certificate.probe.same_environment(batch, model) and exact:
                failures += [
                    f"outputs of task {task!r} on the probe differ by up to {difference:.2g} from those certified "
                    f"after task {certificate.task!r}"
                    for task, difference in differences.items()
                    if difference != 0
                ]
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    changed = [f"{key} {there.get(key, 'default')} then, {here.get(key, 'default')} now" for key in keys]
    if changed:
        lines.append(f"computed in a different environment ({'; '.join(changed)}): a bit mismatch is inconclusive")
    return lines, failures


def _compute_probe_outputs(
    config: RunConfig, probe: ProbeOutputs, seed: int, trainer_state: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], nn.Module]:
    """The probe, drawn again from its seed, the outputs of all heads on it, and the model."""
    try:
        check_device(device := config.device)
    except ValueError:
        device = "cpu"
    with torch.random.fork_rng(devices=[]):
        batch = ProbeOutputs.draw_batch(probe.shape, seed).to(device)
        # Pretrained weights would be replaced at once, and a foreign config.json must not make us download anything.
        options = {name: value for name, value in config.network_options.items() if name != "weights"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when the run began
            model, method = build_model(replace(config, network_options=options), config.method, batch[:2], device)
        for task, output in probe.outputs.items():
            model.add_head(task, list_outputs(config, output["shape"][1]))
        place_model(model, device, config.training).load_state_dict(trainer_state["model"])
        method.load_state_dict(trainer_state["method"])
        return batch, method.head_outputs(batch), model
