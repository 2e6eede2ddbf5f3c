"""Python's garbage collection, kept away from where it must not happen and from where it finds nothing; and memory that
a process had, kept for what comes next."""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
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


def keep_memory() -> None:
    """Let this process keep what it frees, where glibc allocates: large tensors would else go back to the system after
    every use and come again page by page, which takes a fifth of a training step on a CPU."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, top_pad, mmap_max = -1, -2, -4  # as <malloc.h> numbers them
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(top_pad, 2**28)
