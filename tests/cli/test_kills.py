"""A hundred SIGKILLs over all methods, comparisons and searches: what was killed ends with the bits of what was not."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agscl.experiments.method_entries import METHODS
from commands import finish_command, start_command
from results import reproducible_part

QUICK = ["digits", "--epochs", "1", "--name", "killed", "--checkpoint-every", "0.05"]
COMMANDS = {
    **{name: ["run", *QUICK, "--method", name, "--batch-size", "32"] for name in METHODS},
    "compare": ["compare", *QUICK, "--methods", ",".join(METHODS), "--seeds", "1", "--jobs", "2"],
    "search": ["search", *QUICK, "--method", "ewc", "--jobs", "2"],
}
KILLS = {name: 8 if name in ("compare", "search") else 6 for name in COMMANDS}
assert sum(KILLS.values()) >= 100


def read_results(folder: Path) -> dict[str, dict]:
    """All results of a command: of its runs, and its table or list of trials."""
    root = folder / "runs" / "killed"
    paths = [*root.rglob("result.json"), root / "comparison.json", root / "search.json"]
    stored = {str(path.relative_to(root)): json.loads(path.read_text()) for path in paths if path.exists()}
    return {name: drop_times(reproducible_part(content)) for name, content in stored.items()}


def drop_times(value: Any) -> Any:
    """The same without the seconds that training took, which a comparison stores for each method."""
    if isinstance(value, dict):
        return {key: drop_times(item) for key, item in value.items() if key != "seconds"}
    return value


def count_written(folder: Path) -> int:
    """The bytes of the event logs: more when training has gone on."""
    return sum(path.stat().st_size for path in folder.rglob("events.jsonl"))


def kill(folder: Path, command: list[str], delay: float, *, with_workers: bool) -> bool:
    """Start or continue a command and kill it so long after it began to train; False if it had ended by then."""
    before = count_written(folder)
    process = start_command(folder, *command, start_new_session=True)
    while count_written(folder) == before and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL) if with_workers else process.kill()
    return finish_command(process)[0] == -signal.SIGKILL


def check_kills(tmp_path: Path, name: str, kills: int, seed: int) -> None:
    command, draw, folders = COMMANDS[name], random.Random(f"{name} {seed}"), 0
    code, output = finish_command(start_command(tmp_path / "never killed", *command), timeout=1800)
    assert code == 0, output
    expected = read_results(tmp_path / "never killed")
    longest = 3.0 if name in ("compare", "search") else 0.6
    while kills:
        folders += 1
        folder = tmp_path / f"killed {folders}"
        while kills and kill(folder, command, draw.uniform(0, longest), with_workers=draw.random() < 0.7):
            kills -= 1
        code, output = finish_command(start_command(folder, *command), timeout=1800)
        assert code == 0, output
        assert "Traceback" not in output
        assert read_results(folder) == expected
        longest *= 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments_a_command_ends_with_the_same_bits(tmp_path, name):
    check_kills(tmp_path, name, KILLS[name], seed=0)
