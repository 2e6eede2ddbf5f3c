"""The folders of runs: how they are named, checked and found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agscl.cli.errors import UsageError


def choose_folder_name(prefix: str, device: str, changes: Mapping[str, Any]) -> str:
    """The default name of a command's folder: `prefix`, a device other than cpu, a hash of the changed settings."""
    name = prefix
    if device != "cpu":
        name += f"-{device.replace(':', '')}"
    if changes:
        name += "-" + hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:6]
    return name


def check_run_folder(folder: Path, runs: Path) -> None:
    """Raise `UsageError` where `folder` cannot be the folder of a single run."""
    _check_folder_name(folder, runs)
    if any(folder.glob("*/config.json")):
        raise UsageError(f"{folder} holds a comparison, a search or a study, not a run: choose another --name")


def check_group_folder(folder: Path, runs: Path, kind: str) -> None:
    """Raise `UsageError` where `folder` cannot hold the runs of a comparison, a search or a study."""
    _check_folder_name(folder, runs)
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} is a run, not a {kind}: choose another --name")


def _check_folder_name(folder: Path, runs: Path) -> None:
    if folder.name in ("", ".", "..") or folder.parent != runs:
        raise UsageError(f"--name must be a plain folder name, not {os.path.relpath(folder, runs)!r}")


def find_run(runs: Path, name: str) -> Path:
    """The folder that a command's RUN stands for: that of the run of this name, or at this path."""
    from agscl.runs import Run

    for folder in (runs / name, Path(name)):
        if (folder / "config.json").is_file() or Run(folder).is_started:
            return folder
    known = sorted(path.parent.name for path in runs.glob("*/config.json"))
    available = f"Available: {', '.join(known)}" if known else "There are none yet; start one with: agscl run"
    raise UsageError(f"no run {name!r} in {runs}/. {available}")


def find_newest_unfinished_run(runs: Path) -> Path:
    logs = [log for log in runs.glob("*/events.jsonl") if log.stat().st_size]
    unfinished = [log for log in logs if not (log.parent / "result.json").exists()]
    if not unfinished:
        raise UsageError(f"no unfinished run in {runs}/")
    return max(unfinished, key=lambda log: log.stat().st_mtime).parent


@contextlib.contextmanager
def remove_if_refused(folder: Path) -> Iterator[None]:
    """Remove a new folder again if its run is refused because of its options or missing data."""
    from agscl.runs import Run, WrongOptions
    from agscl.tasks import DataError

    is_new = not folder.exists()
    try:
        yield
    except (WrongOptions, DataError):
        if is_new and not Run(folder).is_started:
            shutil.rmtree(folder, ignore_errors=True)
        raise
