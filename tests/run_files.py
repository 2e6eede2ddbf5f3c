"""The files of a run, edited in tests as somebody would who knows their format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agscl.experiments.certificate_chain import certificate_path, compute_digest, hash_file
from agscl.experiments.run_config import RunConfig
from agscl.runs import Checkpoints, hash_state
from agscl.runs.json_files import encode_json_with_checksum, read_checked_json

Edit = Callable[[dict[str, Any]], Any]


def edit_json(path: Path, edit: Edit) -> None:
    """Edit a JSON file of a run and give it a checksum that matches."""
    content = read_checked_json(path)
    edit(content)
    path.write_bytes(encode_json_with_checksum(content))


def edit_checkpoint(run: Path, edit: Edit) -> None:
    """Write an edited copy of the newest checkpoint as the newest."""
    checkpoints = Checkpoints(run / "checkpoints")
    state = checkpoints.load()
    assert state is not None
    edit(state)
    checkpoints.save(state)


def edit_certificate(run: Path, number: int, edit: Edit) -> None:
    """Edit a certificate, leaving the chain as it is."""
    path = certificate_path(run, number)
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def forge_chain(run: Path) -> None:
    """Make the chain, the digest and the result fit the certificates in the folder, as a forger of all files would."""
    config = RunConfig.from_dict(read_checked_json(run / "config.json"))

    def forge(state: dict[str, Any]) -> None:
        previous = None
        for number, entry in enumerate(state["chain"], start=1):
            entry["previous"] = previous
            entry["certificate"] = hash_file(certificate_path(run, number))
            previous = hash_state(entry)
        forged.update(chain=state["chain"], digest=compute_digest(config, state))

    forged: dict[str, Any] = {}
    edit_checkpoint(run, forge)
    edit_json(run / "result.json", lambda result: result.update(forged))
