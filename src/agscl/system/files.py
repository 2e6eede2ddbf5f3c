"""Files written so that a dead process or a power cut leaves none of them half written, and locks between processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import IO, Any


def as_json(content: Any, indent: int | None = 2) -> bytes:
    """`content` as strict JSON, for files that people read: infinite floats become strings."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
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


def update(path: Path, data: bytes) -> None:
    """As `write_atomically`, but for a file that holds `data` already: that is not touched."""
    if not path.exists() or path.read_bytes() != data:
        write_atomically(path, data)


def flush_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there, and a rename needs no flush
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take(lock: IO[bytes], *, wait: bool) -> None:
    """Lock an open file, or raise OSError where another process has it and this one does not wait.

    The system lets go of it when the file is closed or this process ends, however it ends.
    """
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError:  # waiting, it gives up after ten seconds
                if not wait:
                    raise
    else:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
