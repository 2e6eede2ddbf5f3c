"""Locks between processes, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from agscl.system.files import lock_file, write_atomically, write_if_changed

HOLD = """
import sys, time
from pathlib import Path
from agscl.system.files import lock_file
with lock_file(Path(sys.argv[1]), wait=True):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock `tmp_path/lock`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_without_waiting_a_held_lock_is_an_error_that_names_the_file(holder, tmp_path):
    with (
        pytest.raises(BlockingIOError, match=r"another process holds the lock: '.*lock'"),
        lock_file(tmp_path / "lock", wait=False),
    ):
        pass


def test_a_killed_process_releases_its_lock(holder, tmp_path):
    holder.kill()
    holder.wait()
    with lock_file(tmp_path / "lock", wait=False):
        pass


def test_waiting_ends_when_the_lock_is_released(tmp_path):
    order = []

    def wait() -> None:
        with lock_file(tmp_path / "lock", wait=True):
            order.append("second")

    with lock_file(tmp_path / "lock", wait=False):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_is_released_after_an_error_in_its_block(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_file(tmp_path / "lock", wait=False):
        _ = 1 / 0
    with lock_file(tmp_path / "lock", wait=False):
        pass


def test_a_file_that_holds_the_same_already_is_not_written_again(tmp_path):
    path = tmp_path / "file"
    write_if_changed(path, b"one")
    os.utime(path, (1, 1))
    write_if_changed(path, b"one")
    assert path.stat().st_mtime == 1
    write_if_changed(path, b"two")
    assert path.read_bytes() == b"two"


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def no_space(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
