"""A run on disk: config, event log, checkpoints, certificates, result."""

from agscl.runs.checkpoints import Checkpoints, digest
from agscl.runs.folder import DifferentConfig, Run, RunError, WrongOptions, finished_runs, is_finished, read_result

__all__ = [
    "Checkpoints",
    "DifferentConfig",
    "Run",
    "RunError",
    "WrongOptions",
    "digest",
    "finished_runs",
    "is_finished",
    "read_result",
]
