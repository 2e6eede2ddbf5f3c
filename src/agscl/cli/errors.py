"""Exit codes, and the error for a command used wrongly."""

from __future__ import annotations

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
