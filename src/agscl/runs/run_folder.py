"""The folder of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from agscl.runs.checkpoints import Checkpoints, UnreadableCheckpoint
from agscl.runs.errors import DifferentConfig, RunError
from agscl.runs.events import EventLog, hash_log, is_log_intact
from agscl.runs.json_files import encode_json, encode_json_with_checksum, read_checked_json
from agscl.system.files import flush_folder, lock_file, write_atomically

DIVERGED = "diverged.json"
"""Written where training became infinite or NaN: with the same configuration it would again."""
START_FILES = ("config.json", "data.json", "environment.json", DIVERGED)
"""What a run writes before its first checkpoint."""
RESULT_KEYS = ("config", "tasks", "methods", "environment", "seconds", "chain", "digest")
CONFIG_ADVICE = ". Remove it: each checkpoint of the run holds the configuration too"


class Run:
    """The folder of one run. Within a `with` block this process alone may write it.

    config.json     everything that determines the result
    data.json       a checksum of each task's data
    events.jsonl    what happened, epoch by epoch
    checkpoints/    the newest two
    certificates/   one per task
    nodes/          one per task: importances of nodes, for the report
    result.json     written last: it exists once the run is finished

    The JSON files hold a checksum of their content, which is compared whenever they are read.
    """

    def __init__(self, folder: Path, wait_for_lock: float = 0.0) -> None:
        self.folder = folder
        self._wait_for_lock = wait_for_lock  # seconds that another process gets to end
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._lock = ExitStack()
        self._events: EventLog | None = None
        self._config: str | None = None  # stored in every checkpoint too, in case config.json is lost

    def __enter__(self) -> Run:
        with self.explain_write_errors():
            (self.folder / "certificates").mkdir(parents=True, exist_ok=True)
            try:
                self._lock.enter_context(lock_file(self.folder / "lock", wait=self._wait_for_lock))
            except BlockingIOError as error:
                raise RunError(f"another process is writing {self.folder}; wait for it, or stop it") from error
            self._events = EventLog(self.folder / "events.jsonl")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._events is not None:
            self._events.close()
        self._lock.close()

    @property
    def events(self) -> EventLog:
        assert self._events is not None, "the run is not open"
        return self._events

    @property
    def is_started(self) -> bool:
        """Whether any training is stored in the run's folder."""
        return bool(self.checkpoints.list_numbers()) or is_finished(self.folder)

    @contextmanager
    def explain_write_errors(self) -> Iterator[None]:
        """Turn a failing write to the run's folder (full disk, say) into a message that says what is stored."""
        try:
            yield
        except OSError as error:
            numbers = self.checkpoints.list_numbers()
            stored = (
                f"Checkpoint {numbers[-1]} is intact: fix this, and the same command continues from there."
                if numbers
                else "Nothing was stored yet."
            )
            raise RunError(f"could not write to {self.folder}: {error.strerror or error}. {stored}") from error

    def store_config(self, config: dict[str, Any]) -> None:
        """Write the run's config.json, or check that it already holds `config`."""
        self.check_config(config)
        self._config = encode_json(config).decode()
        path = self.folder / "config.json"
        if path.exists() and read_checked_json(path, CONFIG_ADVICE) == json.loads(encode_json(config)):
            return
        with self.explain_write_errors():
            if not self.is_started:  # remove what an earlier attempt left before its first checkpoint
                for name in START_FILES:
                    (self.folder / name).unlink(missing_ok=True)
            write_atomically(path, encode_json_with_checksum(config))

    def check_config(self, config: dict[str, Any]) -> None:
        """Raise `DifferentConfig` if training with another configuration is stored in the run's folder."""
        stored = self.read_config() if self.is_started else None
        if stored is None:
            return
        changed = sorted(describe_differences(stored, json.loads(encode_json(config))))
        if changed:
            raise DifferentConfig(
                f"{self.folder} holds a run with a different configuration ({'; '.join(changed)}). "
                "Choose another --name for this run."
            )

    def read_config(self) -> dict[str, Any] | None:
        """The configuration in the run's folder: from config.json, or else from the result or the newest checkpoint."""
        if (path := self.folder / "config.json").exists():
            return read_checked_json(path, CONFIG_ADVICE)
        if is_finished(self.folder):
            config: dict[str, Any] = read_result(self.folder)["config"]
            return config
        text = (self.load_checkpoint() or {}).get("config")
        return None if text is None else json.loads(text)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file into the run's folder, with its checksum."""
        with self.explain_write_errors():
            write_atomically(self.folder / name, encode_json_with_checksum(content))

    def log_event(self, event: dict[str, Any]) -> None:
        with self.explain_write_errors():
            self.events.append(event)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write a checkpoint into the run's folder, with the current length and hash of the event log."""
        with self.explain_write_errors():
            length = self.events.sync()
            log = {"events": length, "events_sha256": hash_log(self.events.path, length)}
            # These keys come last: a `state` that was loaded still holds those of its own checkpoint.
            self.checkpoints.save({**state, **log, "config": self._config})

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest intact checkpoint in the run's folder, or None; raises `RunError` for one that cannot be read."""
        try:
            return self.checkpoints.load()
        except UnreadableCheckpoint as error:
            raise RunError(f"cannot read a checkpoint, so the run was left unchanged: {error}") from error

    def resume(self) -> dict[str, Any] | None:
        """Resume the run: load the newest intact checkpoint and truncate the event log to where it was then.

        Raises `DifferentConfig` for a checkpoint with another configuration than that given to `store_config`.
        """
        state = self.load_checkpoint()
        if state is not None and self._config is not None:
            self.check_checkpoint_config(state, json.loads(self._config))
        path = self.events.path
        if state is not None and path.stat().st_size and not is_log_intact(path, state):
            raise RunError(f"{path} is damaged or was edited. Remove it: the run continues without its earlier events")
        with self.explain_write_errors():
            self.events.truncate(state["events"] if state else 0)
            flush_folder(self.folder)
        return state

    def check_checkpoint_config(self, state: dict[str, Any], config: dict[str, Any]) -> None:
        """Raise `DifferentConfig` if the checkpoint `state` in the run's folder is of another configuration."""
        stored = json.loads(state.get("config") or "null")
        if changed := sorted(describe_differences(stored, json.loads(encode_json(config)), "" if stored else "config")):
            raise DifferentConfig(
                f"the checkpoints in {self.checkpoints.folder} are of a run with a different configuration "
                f"({'; '.join(changed)}). Restore the checkpoints and config.json of this run, or choose another "
                "--name for a new run"
            )


def is_finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def read_result(folder: Path) -> dict[str, Any]:
    """The result in the folder of a finished run, whose configuration must be that in config.json."""
    path, advice = folder / "result.json", ". Remove it: the same command writes it again from the last checkpoint"
    result = read_checked_json(path, advice)
    if missing := [key for key in RESULT_KEYS if key not in result]:
        raise RunError(f"{path} is damaged: it lacks {', '.join(missing)}{advice}")
    config_path = folder / "config.json"
    config = read_checked_json(config_path, CONFIG_ADVICE) if config_path.exists() else result["config"]
    if changed := sorted(describe_differences(result["config"], config)):
        raise RunError(f"{path} is the result of another run ({'; '.join(changed)}){advice}")
    return result


def read_finished_runs(folder: Path, pattern: str = "*") -> Iterator[tuple[Path, dict[str, Any]]]:
    """The finished runs in a folder whose names match, each with its result; unreadable ones are skipped."""
    for path in sorted(folder.glob(f"{pattern}/result.json")):
        try:
            result = read_result(path.parent)
        except RunError:
            continue
        yield path.parent, result


def describe_differences(stored: Any, requested: Any, name: str = "") -> Iterator[str]:
    """One phrase for every value in which the configuration in a run's folder and the one asked for differ."""
    if isinstance(stored, dict) and isinstance(requested, dict):
        for key in {*stored, *requested}:
            yield from describe_differences(stored.get(key), requested.get(key), f"{name}.{key}" if name else key)
    elif stored != requested:
        yield f"{name} is {json.dumps(stored)} there, {json.dumps(requested)} here"
