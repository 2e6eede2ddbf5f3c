"""What decides the last bits of a result besides the configuration: torch's version, CPU threads, the GPU."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agscl import __version__
from agscl.experiments.presets import PRESETS
from agscl.experiments.run_config import RunConfig
from agscl.runs import DifferentConfig, Run, RunError
from agscl.runs.json_files import read_checked_json


def choose_threads(config: RunConfig) -> int | None:
    """How many CPU threads a run uses; None: torch's default."""
    return PRESETS[config.preset].threads or (1 if config.device.startswith("cuda") else None)


def record_environment(run: Run, device: str, threads: int | None, processes: int = 1) -> dict[str, Any]:
    """Set the number of threads and write environment.json. A resumed run keeps what it was started with."""
    path = run.folder / "environment.json"
    if not (path.exists() and run.is_started):
        if threads is not None:
            torch.set_num_threads(threads)
        environment: dict[str, Any] = {
            "agscl": __version__,
            "commit": find_commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        if device.startswith("cuda") and torch.cuda.is_available():
            environment["gpu"] = torch.cuda.get_device_name(device)
        if processes > 1:
            environment["processes"] = processes
        run.write_json(path.name, environment)
    environment = read_checked_json(path, ". Remove it")
    try:
        torch.set_num_threads(environment["threads"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{path} does not say how many threads the run uses: remove it") from error
    if (started_with := environment.get("processes", 1)) != processes:
        how = f"with torchrun --nproc-per-node {started_with}" if started_with > 1 else "without torchrun"
        raise DifferentConfig(
            f"{run.folder} was started with {started_with} processes and has {processes} now, so its results would "
            f"differ. Continue it {how}, or choose another --name for a new run"
        )
    return environment


@functools.cache
def find_commit() -> str | None:
    """The commit of the source that runs are trained with, or AGSCL_COMMIT; None for an installed package."""
    home = Path(__file__).parents[3]
    if (named := os.environ.get("AGSCL_COMMIT")) or not (home / ".git").exists():
        return named

    def ask_git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(home), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = ask_git("status", "--porcelain", "--untracked-files=no", "--", "src")
        return ask_git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Within the block compute with this many CPU threads, as the environment of a run has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
