"""The options that several commands share, and what they say: --set, --task-options, --fast."""

from __future__ import annotations

import importlib.util
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from agscl.cli.errors import UsageError, value_errors_as_usage_errors


def describe(metavar: str, text: str | None = None, default: str | None = None) -> Any:
    """How an option appears in the help: its value, its text (else from the docstring) and its default."""
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=default)


PRESETS_DEFAULT = "(default: the preset's)"

BatchSize = Annotated[int | None, describe("N", "Examples per training step.", PRESETS_DEFAULT)]
CheckpointEvery = Annotated[
    float,
    describe("SECONDS", "Seconds between checkpoints within a task; one is also written at the end of each task."),
]
Device = Annotated[str, describe("DEVICE", "Device to train on, e.g. cpu or cuda.")]
Epochs = Annotated[int | None, describe("N", "Epochs per task.", PRESETS_DEFAULT)]
Fast = Annotated[
    bool,
    tyro.conf.arg(
        help="Use the fastest settings for the device; results differ by rounding. On a GPU: bf16, channels last, "
        "compiled; on a CPU: channels last."
    ),
]
GpusPerJob = Annotated[
    float | None,
    describe(
        "X", "With --on and --device cuda: the share of a GPU for each run, e.g. 0.25 for four on one.", "(default: 1)"
    ),
]
Jobs = Annotated[
    int | None,
    describe(
        "N",
        "How many runs at the same time; each uses one thread.",
        "(default: one per core; with --on as many as the cluster has CPUs)",
    ),
]
LearningRate = Annotated[float | None, describe("X", "Learning rate at the start of each task.", PRESETS_DEFAULT)]
Log = Annotated[
    tuple[Literal["tensorboard", "mlflow", "wandb"], ...],
    tyro.conf.UseAppendAction,
    describe(
        "tensorboard|mlflow|wandb",
        "Also write losses, accuracies and scores for this logger, for finished runs too; may be given several times.",
        default="",
    ),
]
On = Annotated[
    str | None,
    describe(
        "ADDRESS",
        "Run on a Ray cluster, e.g. 10.0.0.1:6379, whose nodes all see the folder of --runs; local: on Ray here.",
        "(default: processes of this machine)",
    ),
]
Preset = Annotated[str, describe("PRESET", "The experiment, as for agscl run.")]
Runs = Annotated[Path, describe("FOLDER", "The folder that holds all runs.")]
Seeds = Annotated[int, describe("N", "How many seeds: 0, 1, 2, …")]
SetPairs = Annotated[tuple[str, ...], describe("KEY=VALUE ...", default="")]
TaskOptions = Annotated[
    tuple[str, ...],
    describe(
        "KEY=VALUE ...", "Options of the task sequence, e.g. --task-options classes_per_task=5 size=32.", default=""
    ),
]
Tasks = Annotated[
    str | None,
    describe(
        "NAME",
        "Task sequence to use instead of the preset's: a name from `agscl data list`, or your own data as folder:PATH "
        "or hub:NAME.",
        PRESETS_DEFAULT,
    ),
]


def collect_changes(
    by_option: Mapping[str, Any],
    by_set: Mapping[str, Any],
    *,
    preset: str,
    device: str,
    fast: bool,
    tasks: str | None,
    task_options: Sequence[str],
) -> dict[str, Any]:
    """What the options change of a preset: keyword arguments for `configure`.

    --set is stronger than --fast. `by_option` has options with their values, None where one was not used.
    """
    from agscl.experiments.presets import get_fast_settings

    used = {name: value for name, value in by_option.items() if value is not None}
    if twice := [name for name in used if name in by_set]:
        option = f"--{twice[0].replace('_', '-')}"
        raise UsageError(f"{option} and --set {twice[0]}=… set the same thing: use only one of them")
    changes = {**used, **(get_fast_settings(device, preset) if fast else {}), **by_set}
    if tasks is not None:
        changes["tasks"] = tasks
    if task_options:
        changes["task_options"] = parse_task_options(task_options)
    return changes


def parse_settings(method: str, pairs: Sequence[str], preset: str) -> dict[str, Any]:
    """What `--set KEY=VALUE ...` says for a method, each value in the type of its setting."""
    from agscl.experiments.run_config import list_settings

    with value_errors_as_usage_errors():
        types = list_settings(method, preset)
        settings = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise UsageError(f"--set takes KEY=VALUE, e.g. lam=400, not {pair!r}")
            if key not in types:
                raise UsageError(f"{method} has no setting {key!r}. Its settings: {', '.join(types)}")
            settings[key] = parse_setting(types[key], key, text)
    return settings


def parse_settings_of_methods(
    methods: Sequence[str], pairs: Sequence[str], preset: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What `--set` says for several methods: settings of training (KEY=VALUE), and of methods (METHOD.KEY=VALUE)."""
    from agscl.experiments.method_entries import METHODS, REFERENCE
    from agscl.experiments.run_config import list_settings

    method_settings: dict[str, dict[str, Any]] = {}
    training_pairs = []
    for pair in pairs:
        key = pair.partition("=")[0]
        method, dot, _ = key.partition(".")
        if dot:
            if method not in methods:
                raise UsageError(f"--set {pair}: {method!r} is not one of the methods here: {', '.join(methods)}")
            settings = parse_settings(method, [pair.removeprefix(f"{method}.")], preset)
            method_settings.setdefault(method, {}).update(settings)
        else:
            owners = [name for name in methods if key in METHODS[name].settings]
            if owners and key not in list_settings(REFERENCE, preset):
                raise UsageError(f"--set {pair}: name the method, e.g. --set {owners[0]}.{pair}")
            training_pairs.append(pair)
    return parse_settings(REFERENCE, training_pairs, preset), method_settings


def parse_task_options(pairs: Sequence[str]) -> dict[str, Any]:
    """What `--task-options KEY=VALUE ...` says; numbers, true, false and null become values, all else is text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--task-options takes KEY=VALUE, e.g. size=32, not {pair!r}")
        try:
            options[key] = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def check_at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{option} must be at least 1, not {value}")


def check_loggers(names: Sequence[str]) -> None:
    """Raise `UsageError` where the package of a logger, named by the option --log, is missing."""
    titles = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "W&B"}
    for name in names:
        if not importlib.util.find_spec(name):
            raise UsageError(f"{titles[name]} is not installed: pip install 'agscl[{name}]'")


def check_checkpoint_every(seconds: float) -> None:
    if not seconds > 0:
        raise UsageError(f"--checkpoint-every must be above 0 seconds, not {seconds:g}")


def parse_setting(kind: Any, name: str, text: str) -> Any:
    """The value of a setting of type `kind`, as a person wrote it after the option --set."""
    for one in _split_union(kind):
        if typing.get_origin(one) is Literal:
            for value in typing.get_args(one):
                if text == str(value):
                    return value
        elif one is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        elif one is types.NoneType and text.lower() == "none":
            return None
        elif one in (int, float):
            try:
                return one(text)
            except ValueError:
                continue
        elif one is str:
            return text
    raise ValueError(f"{name} is {_describe_type(kind)}, not {text!r}")


def _split_union(kind: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )


def _describe_type(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "none"}
    words = []
    for one in _split_union(kind):
        words += [str(value) for value in typing.get_args(one)] if typing.get_origin(one) is Literal else [names[one]]
    return " or ".join(words)
