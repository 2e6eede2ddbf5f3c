"""The command lines that start a run again, continue it, compare methods again, or use what a search found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agscl.experiments.run_config import RunConfig, configure
from agscl.runs import RunError


def make_run_command(config: Mapping[str, Any]) -> str | None:
    """`agscl run …` with exactly this configuration; None where no command gives it."""
    try:
        wanted = RunConfig.from_dict(dict(config))
        words, _ = _list_words(wanted, wanted.as_dict())
    except (RunError, KeyError, TypeError, ValueError, AttributeError):
        return None
    if words is None or not wanted.reference:
        return None
    return shlex.join(["agscl", "run", wanted.preset, "--method", wanted.method, "--seed", str(wanted.seed), *words])


def make_compare_command(configs: Sequence[Mapping[str, Any]]) -> str | None:
    """`agscl compare …` that makes these runs; None where no command does."""
    try:
        wanted = [RunConfig.from_dict(dict(config)) for config in configs]
        methods = list(dict.fromkeys(config.method for config in wanted))
        by_method = {config.method: _list_words(config, config.as_dict()) for config in wanted}
    except (RunError, KeyError, TypeError, ValueError, AttributeError):
        return None
    presets = {config.preset for config in wanted}
    if not wanted or len(presets) > 1 or any(words is None for words, _ in by_method.values()):
        return None
    pairs: list[str] = []
    shared: list[list[str]] = []
    for method, (words, settings) in by_method.items():
        own = [f"{method}.{pair}" for pair in settings]
        pairs += own
        shared.append([word for word in words or [] if word not in settings])
    if any(words != shared[0] for words in shared):
        return None
    seeds = max(config.seed for config in wanted) + 1
    words = ["agscl", "compare", presets.pop(), "--methods", ",".join(methods), "--seeds", str(seeds)]
    return shlex.join([*words, *_add_pairs([word for word in shared[0] if word != "--set"], pairs)])


def make_resume_command(folder: Path) -> str:
    """`agscl run --resume …`, which continues the run in this folder."""
    words = ["agscl", "run", "--resume", folder.name]
    return shlex.join(words if folder.parent == Path("runs") else [*words, "--runs", str(folder.parent)])


def make_command_with_settings(preset: str, method: str, settings: Mapping[str, Any]) -> list[str]:
    """The words of the `agscl run` command with these settings of the method."""
    pairs = [f"{key}={value:.12g}" for key, value in settings.items()]
    return ["agscl", "run", preset, "--method", method, "--set", *pairs]


def _add_pairs(words: list[str], pairs: Sequence[str]) -> list[str]:
    training = [word for word in words if "=" in word and not word.startswith("-")]
    others = [word for word in words if word not in training]
    return [*others, *(["--set", *training, *pairs] if training or pairs else [])]


def _list_words(wanted: RunConfig, stored: Mapping[str, Any]) -> tuple[list[str] | None, list[str]]:
    """The options after preset, method and seed, and those of them that set the method; None where there are none."""
    options: dict[str, Any] = {}
    words: list[str] = []
    if wanted.device != "cpu":
        words += ["--device", wanted.device]
    plain = configure(wanted.preset, method=wanted.method, seed=wanted.seed)
    if wanted.tasks != plain.tasks:
        options["tasks"] = wanted.tasks
        words += ["--tasks", wanted.tasks]
        plain = configure(wanted.preset, method=wanted.method, seed=wanted.seed, tasks=wanted.tasks)
    changed = {
        key: value
        for key, value in wanted.task_options.items()
        if key not in plain.task_options or plain.task_options[key] != value
    }
    if changed:
        options["task_options"] = changed
        words += ["--task-options", *(f"{key}={_format_option(value)}" for key, value in changed.items())]
    usual = plain.as_dict()
    training = {key: value for key, value in stored["training"].items() if usual["training"][key] != value}
    settings = {
        key: value
        for key, value in wanted.settings.items()
        if key not in plain.settings or plain.settings[key] != value
    }
    own = [f"{key}={_format_value(value)}" for key, value in settings.items()]
    if training or own:
        words += ["--set", *(f"{key}={_format_value(value)}" for key, value in training.items()), *own]
    made = configure(
        wanted.preset,
        method=wanted.method,
        seed=wanted.seed,
        reference=wanted.reference,
        hold_out=wanted.hold_out,
        **options,
        **training,
        **settings,
    ).as_dict()
    same = {**made, "device": wanted.device} == dict(stored) and not wanted.hold_out  # which only a search sets
    return (words if same else None), own


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _format_option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
