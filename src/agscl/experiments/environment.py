"""What decides the last bits of a result besides the configuration: torch's version and the number of CPU threads."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agscl.runs import Run, RunError
from agscl.runs.folder import read_checked_json


def record_environment(run: Run, threads: int | None) -> dict[str, Any]:
    """Set the number of threads and write environment.json. A resumed run keeps what it was started with."""
    path = run.folder / "environment.json"
    if not (path.exists() and run.is_started):
        if threads is not None:
            torch.set_num_threads(threads)
        environment: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        run.write_json(path.name, environment)
    environment = read_checked_json(path, ". Remove it")
    try:
        torch.set_num_threads(environment["threads"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{path} does not say how many threads the run uses: remove it") from error
    return environment


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with this many CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
