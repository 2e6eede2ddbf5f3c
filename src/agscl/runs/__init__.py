"""A run on disk: its folder, configuration, event log, checkpoints and result."""

from agscl.runs.checkpoints import Checkpoints
from agscl.runs.errors import DifferentConfig, Interrupted, RunError, WrongOptions
from agscl.runs.nested_state import hash_state
from agscl.runs.run_folder import Run, is_finished, read_finished_runs, read_result

__all__ = [
    "Checkpoints",
    "DifferentConfig",
    "Interrupted",
    "Run",
    "RunError",
    "WrongOptions",
    "hash_state",
    "is_finished",
    "read_finished_runs",
    "read_result",
]
