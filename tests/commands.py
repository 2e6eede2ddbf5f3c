"""`agscl` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

QUICK = ["run", "digits", "--epochs", "2", "--batch-size", "64", "--name", "quick", "--checkpoint-every", "0.1"]
"""A run of a few seconds."""


def start_command(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "agscl", *(arguments or QUICK)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish_command(process: subprocess.Popen[str], timeout: float = 200) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def start_training(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start or continue the run `quick` and wait until it writes its first event (or has ended)."""
    log = folder / "runs" / "quick" / "events.jsonl"
    before = _modified_ns(log)
    process = start_command(folder, *arguments)
    while _modified_ns(log) == before and process.poll() is None:
        time.sleep(0.001)
    return process


def _modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() and path.stat().st_size else 0
