"""A run on disk: config, event log, checkpoints, certificates, result."""

from agscl.runs.checkpoints import Checkpoints, digest
from agscl.runs.folder import DifferentConfig, Run, RunError, is_finished

__all__ = ["Checkpoints", "DifferentConfig", "Run", "RunError", "digest", "is_finished"]
