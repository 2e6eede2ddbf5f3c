"""Results are data: figures with the command, commit and machine that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HOME = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record(path: Path, figures: dict[str, Any]) -> None:
    """Write figures to `path` as JSON, with what anyone needs to repeat them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command(), "commit": commit(), "machine": machine(), **figures}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path}")


def command() -> str:
    """How this program was called, less where its output went and how long it was given."""
    words = [os.path.relpath(sys.argv[0]), *sys.argv[1:]]
    for option in ("--out", "--runs", "--deadline"):
        if option in words:
            at = words.index(option)
            words = words[:at] + words[at + 2 :]
    return shlex.join(["python", *words])


def commit() -> str:
    """The commit measured; AGSCL_COMMIT names it where the code was copied without its history."""
    if named := os.environ.get("AGSCL_COMMIT"):
        return named

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def short(commit: str) -> str:
    """Ten digits of a commit, and whether there were changes."""
    number, *changes = commit.split(" ", 1)
    return " ".join([number[:10], *changes])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
