"""Arrays that take long to make, made once, kept on disk and memory-mapped."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import math
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from agscl.data.examples import Array
from agscl.system.files import lock_file

VERSION = 2
"""To be raised whenever the same call would make another array."""
DIGEST = 4
"""Bytes of CRC-32 behind the array; numpy reads the file all the same. It is looked at every time: SHA-256 took
longer than all else when a task sequence is loaded."""
ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished file is no other process's work any more."""


def home() -> Path:
    """Where arrays are kept: `AGSCL_CACHE`, or ~/.cache/agscl."""
    return Path(os.environ.get("AGSCL_CACHE") or "~/.cache/agscl").expanduser()


def cached(name: str, identity: object, state: object, make: Callable[[], Array], *, warn: bool = True) -> Array:
    """The array that `make` makes, from disk where it was made before.

    `identity` says what it is, `state` what its sources look like now: with another state it is made anew and replaces
    the old one. So it is when its file is damaged. Of several processes that ask for it at once, one makes it. Where it
    cannot be kept there is a warning, unless `warn` is false.
    """
    kind = f"{name}-{_short((VERSION, identity))}"
    path = home() / "decoded" / f"{kind}-{_short(state)}.npy"
    array = _open(path)
    if array is not None:
        return array
    with _alone(path):
        array = _open(path)  # another process may have made it meanwhile
        return _made(name, kind, path, make, warn) if array is None else array


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let other processes wait that want the same array; where no lock can be had, all of them make it."""
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(lock, wait=True))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()  # whoever waits looks for the array first, so that a lock made anew does no harm


def _made(name: str, kind: str, path: Path, make: Callable[[], Array], warn: bool) -> Array:
    array = make()
    try:
        _store(path, array)
    except OSError as error:
        if warn:
            warnings.warn(
                f"{name} could not be kept in {path.parent}: {error.strerror or error}. It is decoded anew each time; "
                f"to avoid that, set AGSCL_CACHE to a folder with {math.ceil(array.nbytes / 1e6)} MB to spare.",
                stacklevel=2,
            )
        return array
    for stale in path.parent.glob(f"{glob.escape(kind)}-*.npy"):
        if stale != path:
            with contextlib.suppress(OSError):
                stale.unlink()
    return array


def _short(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _digest(array: Array) -> bytes:
    return zlib.crc32(np.ascontiguousarray(array).data).to_bytes(DIGEST, "big")


def _open(path: Path) -> Array | None:
    """The whole array, or nothing where the file is not there or not what was written."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        with open(path, "rb") as file:
            file.seek(-DIGEST, os.SEEK_END)
            whole = file.read() == _digest(array)
    except (OSError, ValueError, EOFError):
        return None
    return array if whole else None


def _store(path: Path, array: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    temporary = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
            file.write(_digest(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
