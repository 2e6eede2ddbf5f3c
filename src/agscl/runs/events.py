"""The event log: one JSON object per line, appended to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agscl.runs.json_files import encode_json

TAIL = 2**16
"""Bytes read from the end of a log to get its last event; an event is much shorter."""


class EventLog:
    """Appends events to a file, which is truncated to an earlier length when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Open as long as the run. Unbuffered: what a full disk refused must not be written again on closing.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def append(self, event: dict[str, Any]) -> None:
        line = memoryview(encode_json(event, indent=None))
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> int:
        """Flush the event log to disk and return its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def truncate(self, length: int) -> None:
        """Drop the events logged after `length`: a resumed run logs them again."""
        self._file.truncate(min(length, self.path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log, without damaged lines and without a last line cut short by a killed process."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and (event := parse_event(line)) is not None:
                yield event


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it is damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def read_last_event(path: Path) -> dict[str, Any] | None:
    """The last complete event of a log that another process may be writing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            complete = file.read().rpartition(b"\n")[0]
    except OSError:
        return None
    return parse_event(complete.rpartition(b"\n")[2])


def hash_log(path: Path, length: int) -> str:
    """sha256 of the first `length` bytes of an event log, or of all of a shorter one."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def is_log_intact(path: Path, state: dict[str, Any]) -> bool:
    """Whether the event log begins with the bytes it had when the checkpoint `state` was written."""
    return hash_log(path, state["events"]) == state.get("events_sha256")
