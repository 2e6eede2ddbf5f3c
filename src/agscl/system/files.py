"""Files written so that a dead process or a power cut leaves none of them half written, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """`path` holds either what it held before or all of `data`, also after a power cut.

    Without `flush` it may be either until the folder is flushed, as the next call for a file in it does.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open_for_writing(temporary) as file:
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


def open_for_writing(path: Path, *, append: bool = False) -> BinaryIO:
    """Open a file of ours; a symbolic link in its place is removed, since it may lead to a file elsewhere."""
    if path.is_symlink():
        path.unlink()

    def open_without_following(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(path, "ab" if append else "wb", opener=open_without_following)


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises OSError for devices, pipes and longer files."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
    return content


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
def lock_file(path: Path, *, wait: bool | float) -> Iterator[None]:
    """Hold a lock on the file `path`, made where it is missing, until the block ends.

    While another process or thread holds it: wait, or raise BlockingIOError if `wait` is false, or after so many
    seconds. The operating system releases the lock when the process ends, however it ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait is True else float(wait))
    except Timeout as error:
        raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", str(path)) from error
    try:
        yield
    finally:
        lock.release()
