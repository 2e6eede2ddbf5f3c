"""What the runs of a comparison of agents have shown, finished or not, from their event logs.

python benchmarks/agents_so_far.py runs/compare-atari8-short --note "Why it is not finished" --out results/FILE.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from agscl.analysis.metrics import accumulated_rewards
from agscl.experiments.command_lines import make_compare_command
from agscl.experiments.method_entries import REFERENCE
from agscl.runs.events import read_events
from agscl.runs.json_files import read_checked_json

POINTS = 11
"""How many points of each training curve are kept, evenly spaced."""


def read_run(folder: Path) -> dict[str, Any]:
    """All evaluations of a run, and of each task the score in training and what it took of each layer."""
    events = list(read_events(folder / "events.jsonl"))
    evaluations = [event for event in events if event["event"] == "evaluation"]
    iterations: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["event"] == "iteration":
            iterations.setdefault(event["task"], []).append(event)
    training = []
    for task, own in iterations.items():
        positions = sorted({round(number * (len(own) - 1) / (POINTS - 1)) for number in range(POINTS)})
        points = [[own[position]["steps"], own[position]["score"]] for position in positions]
        training.append({"task": task, "steps": own[-1]["steps"], "score": own[-1]["score"], "curve": points})
    ended = [event["statistics"] for event in events if event["event"] == "task ended"]
    capacity = [statistics["capacity"]["layers"] for statistics in ended if "capacity" in statistics]
    keys = ("task", "name", "steps", "scores", "relative", "layers")
    return {
        "seed": read_checked_json(folder / "config.json")["seed"],
        "tasks_learned": len(ended),
        "seconds": sum(_list_seconds(events)),
        "evaluation_seconds": sum(_list_seconds(events, "evaluation")),
        "evaluations": [{key: event[key] for key in keys} for event in evaluations],
        "training": training,
        **({"capacity": capacity} if capacity else {}),
    }


def _list_seconds(events: list[dict[str, Any]], kind: str | None = None) -> Iterator[float]:
    """How long after the one before it each event came, of this kind; pauses between two processes are left out."""
    for before, event in pairwise(events):
        if event["event"] != "environments restarted" and kind in (None, event["event"]):
            yield event["time"] - before["time"]


def add_rewards(runs: dict[str, dict[str, Any]]) -> None:
    """Add to each evaluation the paper's accumulated reward, relative to what fine-tuning has reached so far."""
    reference = runs[REFERENCE]["evaluations"]
    for run in runs.values():
        for one, reward in zip(run["evaluations"], accumulated_rewards(run["evaluations"], reference), strict=True):
            one["accumulated_reward"] = reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--note", default="", help="a sentence to stand under the table")
    parser.add_argument("--gpu", default=None, help="the GPU, where a run was made before runs recorded it")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    folders = sorted(path.parent for path in arguments.folder.glob("*/events.jsonl"))
    configs = [read_checked_json(folder / "config.json") for folder in folders]
    runs = {config["method"]: read_run(folder) for config, folder in zip(configs, folders, strict=True)}
    if len(runs) < len(folders):
        raise SystemExit("one run of each method, please: give a comparison of one seed")
    if REFERENCE in runs:
        add_rewards(runs)
    environments = [read_checked_json(folder / "environment.json") for folder in folders]
    if any(one != environments[0] for one in environments):
        raise SystemExit("the runs were not made by the same code on the same machine: describe them apart")
    environment = environments[0]
    content = {
        "command": make_compare_command(configs),
        "commit": environment["commit"],
        "machine": {
            "gpu": environment.get("gpu", arguments.gpu),
            **{key: environment[key] for key in ("python", "torch", "threads")},
        },
        "note": arguments.note,
        "methods": runs,
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
