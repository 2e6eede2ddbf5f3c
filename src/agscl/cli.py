"""The command `agscl`: run, verify, inspect.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

with contextlib.suppress(ImportError):  # `main` says what is missing
    import tyro

if TYPE_CHECKING:
    from agscl.experiments.presets import RunConfig

DONE, FAILED, WRONG_USE, STOPPED = 0, 1, 2, 130
NEWEST = "newest"


class WrongUse(Exception):
    """The user asked for something that cannot be; the message says what can."""


def _shown(value: str, default: str | None = None) -> Any:
    """How an option's value and default appear in the help text."""
    return tyro.conf.arg(metavar=value, help_behavior_hint=default)


def run(
    preset: Annotated[str, _shown("PRESET")] = "digits",
    /,
    *,
    method: Literal["agscl", "finetune"] = "agscl",
    seed: Annotated[int, _shown("N")] = 0,
    name: Annotated[str | None, _shown("NAME", "(default: made from preset, method, seed and changes)")] = None,
    resume: Annotated[str | None, _shown("[NAME]", "")] = None,
    epochs: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    batch_size: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    lr: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    mu: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    lam: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    rho: Annotated[float | None, _shown("X", "(default: the preset's)")] = None,
    device: Annotated[str, _shown("DEVICE")] = "cpu",
    threads: Annotated[int | None, _shown("N", "(default: the preset's)")] = None,
    runs: Annotated[Path, _shown("FOLDER")] = Path("runs"),
    checkpoint_every: Annotated[float, _shown("SECONDS")] = 5.0,
) -> int:
    """Learn a task sequence twice, with plain fine-tuning and with a method, and compare them.

    The same command continues a run that was interrupted, at the step where it stood.

    Args:
        preset: The experiment: digits (5 tasks of 2 digits, no download) or omniglot5 (needs AGSCL_DATA).
        method: What is compared with fine-tuning; finetune runs the reference alone.
        seed: Draws the tasks, the first weights and the order of the batches.
        name: The run's folder under --runs.
        resume: Continue the run of this name with the settings stored in it; alone, the newest unfinished run.
        epochs: Epochs per task.
        batch_size: Examples per step.
        lr: Learning rate at the start of each task.
        mu: AGS-CL: how strongly free nodes are drawn to zero.
        lam: AGS-CL: how strongly important nodes are held; inf freezes them for good.
        rho: AGS-CL: share of the free nodes that start anew after each task.
        device: Where to train, e.g. cpu or cuda.
        threads: CPU threads; a resumed run keeps the number it was started with.
        runs: The folder that holds all runs.
        checkpoint_every: Seconds between two checkpoints within a task; one is always written at its end.
    """
    from agscl.experiments.execute import Interrupted, execute
    from agscl.experiments.presets import PRESETS, RunConfig
    from agscl.runs import Run, is_finished
    from agscl.runs.folder import read_json
    from agscl.terminal import Progress, say, summary

    overrides = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "mu": mu, "lam": lam, "rho": rho}
    changed = {key: value for key, value in overrides.items() if value is not None}
    if resume is None:
        config = _configure(preset, method, seed, device, changed)
        folder = runs / (name or _default_name(config, changed))
    else:
        folder = _resumable(runs, resume)
        config = RunConfig.from_dict(read_json(folder / "config.json"))
        asked = {"preset": (preset, "digits"), "method": (method, "agscl"), "seed": (seed, 0)}
        ignored = [key for key, (value, default) in asked.items() if value not in (default, getattr(config, key))]
        if ignored or changed or name:
            raise WrongUse(
                f"--resume takes every setting from {folder}/config.json; "
                f"leave out {', '.join([*ignored, *changed, *(['name'] if name else [])])}"
            )
    if folder.name in ("", ".", "..") or folder.parent != runs:
        raise WrongUse(f"a run's name is a plain folder name, not {name!r}")

    if is_finished(folder):
        with Run(folder) as finished:
            finished.claim(config.as_dict())
        say(f"{folder} is finished; nothing to do. Its result:")
        summary(read_json(folder / "result.json"), folder)
        return DONE

    with Run(folder) as current, _signals() as stopped, Progress(config) as progress:
        if current.checkpoints.numbers():
            say(f"Continuing {folder}.")
        try:
            result = execute(
                config,
                current,
                checkpoint_every=checkpoint_every,
                threads=threads or PRESETS[config.preset].threads,
                stop=stopped,
                watch=progress.show,
                note=say,
            )
        except Interrupted:
            elsewhere = "" if runs == Path("runs") else f" --runs {runs}"
            progress.close()
            say(f"Stopped; a checkpoint is stored. Continue with: agscl run --resume {folder.name}{elsewhere}")
            return STOPPED
    summary(result, folder)
    return DONE


def verify(run: Annotated[str, _shown("RUN")], /, *, runs: Annotated[Path, _shown("FOLDER")] = Path("runs")) -> int:
    """Check a run's certificates against its stored weights: has anything that was to stay put moved?

    Exit code 0 when all that is guaranteed is still in place, 1 when something moved.

    Args:
        run: The run's name, or the path of its folder.
        runs: The folder that holds all runs.
    """
    from agscl.experiments.execute import verify_run
    from agscl.terminal import say

    verdict = verify_run(_existing(runs, run))
    for line in verdict.lines:
        say(line)
    return DONE if verdict.ok else FAILED


def inspect(
    factory: Annotated[str, _shown("MODULE:FACTORY")],
    /,
    *,
    input_shape: Annotated[tuple[int, ...], _shown("N ...", "")] = (),
    heads: Annotated[str | None, _shown("MODULE", "")] = None,
    exclude: Annotated[tuple[str, ...], _shown("LAYER ...", "")] = (),
) -> int:
    """Print the nodes of a model, who reads each of them, and what each method would store for it.

    A model that is no MultiHead is taken as a trunk and gets a head of two outputs, unless --heads names its own.

    Args:
        factory: Where to get the model, e.g. mymodels:make; called without arguments, it returns the model, or the
            model and an example input.
        input_shape: Shape of the example input without the batch, e.g. 3 32 32, where the factory gives none.
        heads: Where the model's own heads are: the name of the module, e.g. classifier.
        exclude: Layers to leave out of the nodes.
    """
    from agscl.nodes import NodeGraph, NodeGraphError
    from agscl.terminal import say, storage

    model, example = _build(factory, input_shape)
    model, example = _with_a_head(model, example, heads)
    try:
        graph = NodeGraph(model, example, heads=heads, exclude=exclude)
    except NodeGraphError as error:
        raise WrongUse(str(error)) from error
    except Exception as error:  # whatever the user's own model raises
        raise WrongUse(f"the model's nodes could not be found: {type(error).__name__}: {error}") from error
    say(str(graph))
    storage(graph)
    return DONE


def main(arguments: list[str] | None = None) -> int:
    """The console command."""
    missing = [name for name in ("tyro", "rich", "safetensors", "sklearn") if not importlib.util.find_spec(name)]
    if missing:
        print(f"agscl: the command needs {', '.join(missing)}: pip install 'agscl[cli]'", file=sys.stderr)
        return WRONG_USE

    from agscl.runs import DifferentConfig, RunError
    from agscl.tasks import DataMissing
    from agscl.terminal import say

    commands: dict[str, Callable[..., Any]] = {"run": run, "verify": verify, "inspect": inspect}
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"Note: {message}")
            return int(
                tyro.extras.subcommand_cli_from_dict(
                    commands,
                    prog="agscl",
                    description="Continual learning you can verify. Start with: agscl run",
                    args=_allow_bare_resume(sys.argv[1:] if arguments is None else arguments),
                )
            )
    except (WrongUse, DifferentConfig, DataMissing) as error:
        return _complain(error, WRONG_USE)
    except RunError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return STOPPED


def _complain(error: Exception, code: int) -> int:
    print(f"agscl: {error}", file=sys.stderr)
    return code


def _allow_bare_resume(arguments: list[str]) -> list[str]:
    """`--resume` without a name means the newest unfinished run."""
    for place, argument in enumerate(arguments):
        alone = place + 1 == len(arguments) or arguments[place + 1].startswith("-")
        if argument == "--resume" and alone:
            return [*arguments[: place + 1], NEWEST, *arguments[place + 1 :]]
    return arguments


def _configure(preset: str, method: str, seed: int, device: str, changed: dict[str, Any]) -> RunConfig:
    import torch

    from agscl.experiments.execute import build
    from agscl.experiments.presets import PRESETS, RunConfig

    if preset not in PRESETS:
        known = "; ".join(f"{name} ({each.about})" for name, each in PRESETS.items())
        raise WrongUse(f"no preset is called {preset!r}. There are: {known}")
    if seed < 0:
        raise WrongUse(f"a seed is 0 or more, not {seed}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {device!r} is not to be had here: {str(error).splitlines()[0]}") from error
    chosen = PRESETS[preset]
    settings = dict(chosen.methods[method])
    if method == "agscl":
        settings["seed"] = seed
    training = {key: value for key, value in changed.items() if key in ("epochs", "batch_size", "lr")}
    for key in ("mu", "lam", "rho"):
        if key in changed:
            if key not in settings:
                raise WrongUse(f"--{key} is a setting of agscl, not of {method}")
            settings[key] = changed[key]
    try:
        config = RunConfig(
            preset=preset,
            method=method,
            seed=seed,
            device=device,
            tasks=chosen.tasks,
            task_options=chosen.task_options,
            network=chosen.network,
            network_options=chosen.network_options,
            training=replace(chosen.training, **training),
            settings=settings,
        )
        build(config, method)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    return config


def _default_name(config: RunConfig, changed: dict[str, Any]) -> str:
    name = f"{config.preset}-{config.method}-seed{config.seed}"
    if config.device != "cpu":
        name += f"-{config.device.replace(':', '')}"
    if changed:
        name += "-" + hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]
    return name


def _existing(runs: Path, name: str) -> Path:
    for folder in (runs / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    known = sorted(path.parent.name for path in runs.glob("*/config.json"))
    there = f"There are: {', '.join(known)}" if known else "There is none; start one with: agscl run"
    raise WrongUse(f"no run is called {name!r} in {runs}/. {there}")


def _resumable(runs: Path, name: str) -> Path:
    if name != NEWEST:
        return _existing(runs, name)
    unfinished = [path for path in runs.glob("*/config.json") if not (path.parent / "result.json").exists()]
    if not unfinished:
        raise WrongUse(f"there is no unfinished run in {runs}/")
    return max(unfinished, key=lambda path: (path.parent / "events.jsonl").stat().st_mtime).parent


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT and SIGTERM ask the run to stop; a second one stops it at once."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build(factory: str, input_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The model and an example input (None where there is no telling)."""
    import torch
    from torch import nn

    module_name, colon, function_name = factory.partition(":")
    if not (module_name and colon and function_name):
        raise WrongUse(f"expected module:function, e.g. mymodels:make_resnet, not {factory!r}")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise WrongUse(f"no module is called {error.name!r} (looked in this folder and in the environment)") from error
    except AttributeError as error:
        raise WrongUse(f"{module_name} has no {function_name!r}") from error
    except Exception as error:  # whatever the user's own module raises while it is imported
        raise WrongUse(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise WrongUse(f"{factory} is a {type(function).__name__}, not a function that returns a model")
    try:
        made = function()
    except Exception as error:  # whatever the user's own function raises
        raise WrongUse(f"{factory}() failed: {type(error).__name__}: {error}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise WrongUse(f"{factory}() returned {type(model).__name__}; expected a model, or (model, example input)")
    if input_shape:
        example = torch.zeros(2, *input_shape)
    if example is None:
        first = next(
            (layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)), None
        )
        if not isinstance(first, nn.Linear):
            raise WrongUse("the shape of the input cannot be told from this model: give it, e.g. --input-shape 3 32 32")
        example = torch.zeros(2, first.in_features)
    return model, example


def _with_a_head(model: Any, example: Any, heads: str | None) -> tuple[Any, Any]:
    """The model with at least one head, and the arguments of its forward pass."""
    from agscl.heads import MultiHead

    if heads is not None:
        return model, example
    if not isinstance(model, MultiHead):
        model = MultiHead(model)
    if not model.heads:
        model.add_head("example", 2)
    if isinstance(example, tuple):
        return model, example
    return model, (example, next(iter(model.heads)))


if __name__ == "__main__":
    sys.exit(main())
