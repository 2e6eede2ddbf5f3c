"""Python's garbage collection, kept away from where it must not happen and from where it finds nothing."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """No collection within."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def none_at_exit() -> None:
    """Let this process end without the collections Python makes then: of all that torch imported they take seconds."""
    atexit.register(gc.freeze)
