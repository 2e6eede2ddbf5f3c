"""A run on disk: config, event log, checkpoints, certificates, result."""

from agscl.runs.checkpoints import Checkpoints, digest
from agscl.runs.folder import DifferentConfig, Run, RunError, WrongOptions, is_finished, read_result

__all__ = ["Checkpoints", "DifferentConfig", "Run", "RunError", "WrongOptions", "digest", "is_finished", "read_result"]
