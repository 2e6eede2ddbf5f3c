"""Errors that end a run; each message says what happened and what to do."""

from __future__ import annotations


class RunError(Exception):
    """A run cannot continue."""


class WrongOptions(RunError):
    """Options that do not fit together or to the data, found before any training."""


class DifferentConfig(RunError):
    """The folder holds a run with a different configuration or different data."""


class Interrupted(Exception):
    """The run was asked to stop, and stored a checkpoint."""
