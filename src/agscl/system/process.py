"""The whole process: Python's garbage collector, the C memory allocator, and its exit."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run without garbage collections in this process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def skip_gc_at_exit() -> None:
    """Skip the garbage collections when the process ends, which take seconds over all that torch imported."""
    atexit.register(gc.freeze)


def exit_at_once(code: int) -> None:
    """Exit without Python's clean-up: a thread of gloo that is still busy then would abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tune_malloc() -> None:
    """Let glibc keep memory that the process frees instead of returning it to the system.

    Else large tensors are returned after every use and come back page by page: a fifth of a training step on a CPU.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, top_pad, mmap_max = -1, -2, -4  # their numbers in <malloc.h>
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(top_pad, 2**28)
