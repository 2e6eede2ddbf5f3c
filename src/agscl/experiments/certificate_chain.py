"""The chain of a run's certificates: where they are, and what ties each to its run, weights and the one before it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agscl.certificate import Certificate
from agscl.experiments.run_config import RunConfig
from agscl.runs import RunError, hash_state
from agscl.runs.json_files import encode_json

if TYPE_CHECKING:
    from agscl.experiments.build import AnyTrainer


def certificate_path(folder: Path, tasks_learned: int) -> Path:
    return folder / "certificates" / f"{tasks_learned:02d}.json"


def node_record_path(folder: Path, tasks_learned: int) -> Path:
    return folder / "nodes" / f"{tasks_learned:02d}.json"


def list_certificates(folder: Path) -> list[Path]:
    """The files of a run's certificates, in the order of the tasks."""
    paths = [path for path in (folder / "certificates").glob("*.json") if path.stem.isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem))


def load_certificate(path: Path) -> Certificate:
    """A run's certificate; a damaged one is a `RunError` with its name."""
    try:
        return Certificate.load(path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        name = "" if str(path) in str(error) else f"{path} is not a certificate: "
        raise RunError(f"{name}{error} Without it the run's weights cannot be checked.") from error


def compute_run_id(config: RunConfig, data: dict[str, int]) -> str:
    """The hash of a run's configuration and data, by which the entries of its chain name it."""
    return hash_state({"config": json.loads(encode_json(config.as_dict())), "data": data})


def make_chain_entry(
    config: RunConfig, state: dict[str, Any], trainer: AnyTrainer, path: Path, record: Path | None, tasks_learned: int
) -> dict[str, Any]:
    """What ties a certificate to its run, to the one before it, and to everything stored at the end of its task."""
    stored = trainer.state_dict()
    return {
        "run": compute_run_id(config, state["data"]),
        "previous": hash_state(state["chain"][tasks_learned - 2]) if tasks_learned > 1 else None,
        "task": trainer.tasks[tasks_learned - 1].name,
        "certificate": hash_file(path),
        "nodes": hash_file(record) if record else None,
        "weights": hash_state(stored["model"]),
        "method": hash_state(stored["method"]),
    }


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compute_digest(config: RunConfig, state: dict[str, Any]) -> str:
    """The digest of a run, one hash over its chain: configuration, data, certificates, weights, method state, results.

    Times and the environment are left out: the same run on the same machine has the same digest.
    """
    return hash_state(
        {"run": compute_run_id(config, state["data"]), "chain": state["chain"], "finished": state["finished"]}
    )
