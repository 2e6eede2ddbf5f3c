"""The folder of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from agscl.runs.checkpoints import Checkpoints, NotReadable
from agscl.runs.events import EventLog
from agscl.system.files import as_json, flush_folder, take, write_atomically


class RunError(Exception):
    """A run cannot go on; the message says what happened and what to do."""


DIVERGED = "diverged.json"
"""In a run's folder where training became infinite or NaN, as it would again."""
OWN = ("config.json", "data.json", "environment.json", DIVERGED)
"""What a run stores beside its checkpoints before it is finished."""
RESULT = ("config", "tasks", "methods", "environment", "seconds")
"""What result.json says."""


class WrongOptions(RunError):
    """Settings that cannot be had together, found before anything was trained."""


class DifferentConfig(RunError):
    """The folder holds a run of another configuration."""


class Run:
    """`folder`, held by this process alone until the `with` block ends.

    config.json     everything that determines the result
    data.json       a checksum of each task's data
    events.jsonl    what happened, epoch by epoch
    checkpoints/    the newest two
    certificates/   one per task
    result.json     written last: its presence means the run is finished
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._lock: IO[bytes] | None = None
        self._events: EventLog | None = None
        self._config: str | None = None  # in every checkpoint too, in case config.json is lost

    def __enter__(self) -> Run:
        with self.writing():
            (self.folder / "certificates").mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "ab")
            try:
                take(self._lock, wait=False)
            except OSError as error:
                self._lock.close()
                raise RunError(f"another process is writing {self.folder}; wait for it, or stop it") from error
            self._events = EventLog(self.folder / "events.jsonl")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for held in (self._events, self._lock):
            if held is not None:
                held.close()

    @property
    def events(self) -> EventLog:
        assert self._events is not None, "the run is not open"
        return self._events

    @property
    def begun(self) -> bool:
        """Whether anything that was trained is stored."""
        return bool(self.checkpoints.numbers()) or is_finished(self.folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failing write (full disk, no permission) into a message that says what is still there."""
        try:
            yield
        except OSError as error:
            numbers = self.checkpoints.numbers()
            kept = (
                f"Checkpoint {numbers[-1]} is intact: the same command continues from it once this is mended."
                if numbers
                else "Nothing had been stored yet."
            )
            raise RunError(f"could not write to {self.folder}: {error.strerror or error}. {kept}") from error

    def claim(self, config: dict[str, Any]) -> None:
        """Store `config`, or make sure that it is the one already stored."""
        self.check(config)
        self._config = as_json(config).decode()
        path = self.folder / "config.json"
        if path.exists() and read_json(path) == json.loads(as_json(config)):
            return
        with self.writing():
            for name in () if self.begun else OWN:  # of a run that came to nothing
                (self.folder / name).unlink(missing_ok=True)
            write_atomically(path, as_json(config))

    def check(self, config: dict[str, Any]) -> None:
        """Make sure that what was trained here, if anything was, is a run of `config`."""
        stored = self.stored() if self.begun else None
        if stored is None:
            return
        changed = sorted(differences(stored, json.loads(as_json(config))))
        if changed:
            raise DifferentConfig(
                f"{self.folder} holds a run of another configuration ({'; '.join(changed)}). "
                "Give this one a --name of its own."
            )

    def stored(self) -> dict[str, Any] | None:
        """The configuration of what was trained here, from wherever it is still to be had."""
        if (path := self.folder / "config.json").exists():
            return read_json(path)
        if is_finished(self.folder):
            return read_json(self.folder / "result.json").get("config")
        text = (self.newest() or {}).get("config")
        return None if text is None else json.loads(text)

    def store(self, name: str, content: dict[str, Any]) -> None:
        """Write one of the run's JSON files."""
        with self.writing():
            write_atomically(self.folder / name, as_json(content))

    def log(self, event: dict[str, Any]) -> None:
        with self.writing():
            self.events.append(event)

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint that also knows how long the event log is."""
        with self.writing():
            # Last: a state that was loaded brings those of the checkpoint before.
            self.checkpoints.save({**state, "events": self.events.length(), "config": self._config})

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint; the event log is cut back to where it stood then."""
        state = self.newest()
        with self.writing():
            self.events.cut(state["events"] if state else 0)
            flush_folder(self.folder)
        return state

    def newest(self) -> dict[str, Any] | None:
        """What the newest whole checkpoint holds."""
        try:
            return self.checkpoints.load()
        except NotReadable as error:
            raise RunError(f"a checkpoint cannot be read, so the run was left as it is: {error}") from error


def is_finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def read_json(path: Path, cure: str = "") -> dict[str, Any]:
    """A JSON object from a file; `cure` is what to do where it is damaged."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}{cure}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object{cure}")
    return content


def read_result(folder: Path) -> dict[str, Any]:
    """What a finished run came to."""
    cure = ". Remove it: the same command makes it again from the last checkpoint"
    result = read_json(folder / "result.json", cure)
    if lacking := [key for key in RESULT if key not in result]:
        raise RunError(f"{folder / 'result.json'} is damaged: it does not say {', '.join(lacking)}{cure}")
    return result


def finished_runs(folder: Path, name: str = "*") -> Iterator[tuple[Path, dict[str, Any]]]:
    """The finished runs of such names in a folder, and what they came to; those that cannot be read are left out."""
    for path in sorted(folder.glob(f"{name}/result.json")):
        try:
            result = read_result(path.parent)
        except RunError:  # who asks for it is told
            continue
        yield path.parent, result


def differences(stored: Any, given: Any, name: str = "") -> Iterator[str]:
    """One phrase for every value in which two configurations differ."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in {*stored, *given}:
            yield from differences(stored.get(key), given.get(key), f"{name}.{key}" if name else key)
    elif stored != given:
        yield f"{name} is {json.dumps(stored)} there, {json.dumps(given)} here"
