"""Arrays that take long to compute: computed once, stored on disk, memory-mapped from then on."""

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
"""Raise it whenever the same call would compute a different array."""
CHECKSUM_BYTES = 4
"""Size of the CRC-32 behind the array in its file; numpy ignores it. It is checked at every load: SHA-256 took longer
than everything else in loading a task sequence."""
ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which an unfinished file is taken to be left over by a dead process."""


def cache_folder() -> Path:
    """`AGSCL_CACHE`, or ~/.cache/agscl."""
    return Path(os.environ.get("AGSCL_CACHE") or "~/.cache/agscl").expanduser()


def cached_array(
    name: str, identity: object, state: object, compute: Callable[[], Array], *, warn: bool = True
) -> Array:
    """The array that `compute` returns, loaded from disk if it was stored there before.

    `identity` says which array it is, `state` what its source files look like now: if the state or the stored file's
    checksum differs, it is computed again and replaces the old one. Of several processes that want it at the same
    time, one computes it. If it cannot be stored, there is a warning, unless `warn` is false.
    """
    prefix = f"{name}-{_short_hash((VERSION, identity))}"
    path = cache_folder() / "decoded" / f"{prefix}-{_short_hash(state)}.npy"
    array = _load(path)
    if array is not None:
        return array
    with _lock(path):
        array = _load(path)  # another process may have stored it meanwhile
        return _compute_and_store(name, prefix, path, compute, warn) if array is None else array


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Make other processes that want the same array wait; where no lock file can be written, each computes it."""
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(lock, wait=True))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()  # harmless: whoever locks a new file looks for the array first


def _compute_and_store(name: str, prefix: str, path: Path, compute: Callable[[], Array], warn: bool) -> Array:
    array = compute()
    try:
        _store(path, array)
    except OSError as error:
        if warn:
            warnings.warn(
                f"{name} could not be stored in {path.parent}: {error.strerror or error}. It will be decoded again "
                f"each time; to avoid that, set AGSCL_CACHE to a folder with {math.ceil(array.nbytes / 1e6)} MB free.",
                stacklevel=2,
            )
        return array
    for outdated in path.parent.glob(f"{glob.escape(prefix)}-*.npy"):
        if outdated != path:
            with contextlib.suppress(OSError):
                outdated.unlink()
    return array


def _short_hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _checksum(array: Array) -> bytes:
    return zlib.crc32(np.ascontiguousarray(array).data).to_bytes(CHECKSUM_BYTES, "big")


def _load(path: Path) -> Array | None:
    """The stored array, or None where the file is missing or damaged."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        with open(path, "rb") as file:
            file.seek(-CHECKSUM_BYTES, os.SEEK_END)
            intact = file.read() == _checksum(array)
    except (OSError, ValueError, EOFError):
        return None
    return array if intact else None


def _store(path: Path, array: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in path.parent.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > ABANDONED_AFTER:
                unfinished.unlink()
    temporary = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
            file.write(_checksum(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
