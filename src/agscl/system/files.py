"""Files written so that a dead process or a power cut leaves none of them half written, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def encode_json(content: Any, indent: int | None = 2) -> bytes:
    """`content` as strict JSON, for files that people read: infinite floats become strings."""
    return json.dumps(_stringify_infinite(content), indent=indent, allow_nan=False).encode() + b"\n"


def _stringify_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stringify_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stringify_infinite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """`path` holds either what it held before or all of `data`, also after a power cut.

    Without `flush` it may be either until the folder is flushed, as the next call for a file in it does.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if flush:
            flush_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


def write_if_changed(path: Path, data: bytes) -> None:
    """As `write_atomically`, but a file that already holds `data` is not touched."""
    if not path.exists() or path.read_bytes() != data:
        write_atomically(path, data)


def flush_folder(folder: Path) -> None:
    """Make the creation and renaming of files in `folder` survive a power cut."""
    if os.name == "nt":  # a folder cannot be opened there, and a rename needs no flush
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock on the file `path`, made where it is missing, until the block ends.

    While another process or thread holds it: wait, or raise BlockingIOError if `wait` is false. The operating system
    releases the lock when the process ends, however it ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout as error:
        raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", str(path)) from error
    try:
        yield
    finally:
        lock.release()
