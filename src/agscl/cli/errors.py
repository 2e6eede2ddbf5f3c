"""Exit codes, the error for a command used wrongly, and how errors are printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DONE, FAILED, WRONG_USE, STOPPED = 0, 1, 2, 130


class UsageError(Exception):
    """The user asked for something impossible; the message says what is possible."""


@contextmanager
def value_errors_as_usage_errors() -> Iterator[None]:
    """Turn a ValueError, raised for an option's value, into a `UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def report_error(error: Exception) -> int:
    """Print an error that a user can do something about, and return its exit code; raise any other again."""
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if isinstance(error, UsageError):
        return _print_error(error, WRONG_USE)

    from agscl.cli.console import print_line
    from agscl.networks import WeightsError
    from agscl.runs import DifferentConfig, RunError, WrongOptions
    from agscl.runs.errors import Interrupted
    from agscl.tasks import DataError

    if isinstance(error, Interrupted):  # of several runs
        print_line("Stopped; checkpoints are stored. The same command continues.")
        return STOPPED
    if isinstance(error, WrongOptions | DifferentConfig | DataError | WeightsError):
        return _print_error(error, WRONG_USE)
    if isinstance(error, RunError):
        return _print_error(error, FAILED)
    if isinstance(error, OSError):  # a folder that cannot be written, a full disk
        path = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{path}{error.strerror or error}", FAILED)
    raise error


def _print_error(error: Exception | str, exit_code: int) -> int:
    print(f"agscl: {error}", file=sys.stderr)
    return exit_code
