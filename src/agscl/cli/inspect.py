"""`agscl inspect`: a model's nodes, and the memory that each method needs for it."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from agscl.cli.errors import DONE, UsageError
from agscl.cli.folders import find_run
from agscl.cli.options import Runs, check_at_least_one, describe

if TYPE_CHECKING:
    from rich.table import Table

    from agscl.methods._parts.memory_forecast import Memory


def inspect(
    what: Annotated[
        str,
        describe(
            "MODULE:FACTORY|NETWORK|RUN",
            "Your own model, as the function that makes it, e.g. mymodels:make: called without arguments, it returns "
            "the model, or the model and an example input. Or a network of this library, e.g. alexnet. Or the name of "
            "a finished run.",
        ),
    ],
    /,
    *,
    tasks: Annotated[int | None, describe("N", default="(default: 10; for a run, as many as it has)")] = None,
    input_shape: Annotated[tuple[int, ...], describe("N ...", default="")] = (),
    heads: Annotated[str | None, describe("MODULE", default="")] = None,
    exclude: Annotated[tuple[str, ...], describe("LAYER ...", default="")] = (),
    runs: Runs = Path("runs"),
) -> int:
    """Show a model's nodes, which layers read them, and what each method stores.

    For a finished run: also what its method did store.

    Your model is taken as a trunk and gets a head, unless --heads names its own.

    Its module is imported and its function called: their code runs.

    Args:
        tasks: Count the memory after this many tasks.
        input_shape: Shape of the example input without the batch, e.g. 3 32 32, if the function returns none.
        heads: Name of the module that holds your model's own heads, e.g. classifier.
        exclude: Names of layers to leave out of the nodes.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.method_entries import METHODS
    from agscl.graph.nodes import NodeGraph, NodeGraphError
    from agscl.methods import find_methods
    from agscl.methods._parts.memory_forecast import Memory, Outline

    check_at_least_one("--tasks", tasks)
    model, example, result = _load_model(what, input_shape, heads, runs)
    if result is not None and tasks is not None:
        raise UsageError(
            f"{what} has learned {len(result['tasks'])} tasks, and its memory is counted after them: leave out --tasks"
        )
    with_head, arguments = _add_head(model, example, heads)
    try:
        graph = NodeGraph(with_head, arguments, heads=heads, exclude=exclude)
        outline = Outline.from_graph(graph, arguments if isinstance(arguments, tuple) else (arguments,))
    except NodeGraphError as error:
        layers = [refusal.layer for refusal in error.refusals]
        advice = (_advise_on_output_layer(what, input_shape, model, example, layer) for layer in layers)
        raise UsageError(next(filter(None, advice), "") or write_exclude_as_option(str(error))) from error
    except Exception as error:  # whatever the user's own model raises
        if ":" in what and isinstance(error, ValueError) and error.__cause__ is not None:  # it does not run
            shape = " ".join(map(str, input_shape))
            given = f"--input-shape {shape}: the model cannot run on such a batch" if shape else ""
            raise UsageError(
                f"{given or f'{what}: the model cannot run on the example that it returned'}: {error.__cause__}"
            ) from error
        raise UsageError(
            f"could not find the model's nodes: {type(error).__name__}: {write_exclude_as_option(str(error))}"
        ) from error
    print_line(str(graph))
    if result is None:
        print_memory(
            {name: METHODS[name].forecast_memory(outline, tasks or 10) for name in find_methods()}, tasks or 10
        )
        return DONE
    method, settings = result["config"]["method"], _list_settings(result["config"])
    learned = len(result["tasks"])
    forecasts = {name: METHODS[name].forecast_memory(outline, learned, settings.get(name)) for name in find_methods()}
    if method in find_methods():
        print_memory(forecasts, learned, (method, Memory(result["methods"][method]["memory"])))
    else:
        print_memory(forecasts, learned)
        print_line(f"The run is of {method}, a bound: it keeps all data, or one network per task.")
    return DONE


def write_exclude_as_option(message: str) -> str:
    """A message written for Python, with `exclude=['a', 'b']` as the option `--exclude a b`."""

    def write_option(match: re.Match[str]) -> str:
        return " ".join(["--exclude", *re.findall(r"[^'\", ]+", match[1])])

    message = re.sub(r"\bexclude=[\[(]([^\])]*)[\])]", write_option, message)
    return re.sub(r"\b(exclude|heads)=", r"--\1", message)


def _load_model(
    what: str, input_shape: tuple[int, ...], heads: str | None, runs: Path
) -> tuple[Any, Any, dict[str, Any] | None]:
    """The model, an example input and, for a run, its result."""
    import torch

    from agscl.experiments.command_lines import make_resume_command
    from agscl.networks import NETWORKS
    from agscl.runs import is_finished, read_result

    if ":" in what:
        return *_load_own_model(what, input_shape), None
    network, options, result = what, {}, None
    if what not in NETWORKS:
        if not any((folder / "config.json").is_file() for folder in (runs / what, Path(what))):
            raise UsageError(
                f"{what!r} is neither a network ({', '.join(NETWORKS)}) nor a run in {runs}/. For your own model give "
                "module:function, e.g. mymodels:make_resnet"
            )
        folder = find_run(runs, what)
        if not is_finished(folder):
            raise UsageError(f"{folder} is not finished. Finish it with: {make_resume_command(folder)}")
        result = read_result(folder)
        network = result["config"]["network"]
        options = {key: value for key, value in result["config"]["network_options"].items() if key != "weights"}
    if input_shape or heads:
        raise UsageError(f"--input-shape and --heads are only for your own models; those of {what} are known")
    trunk = NETWORKS[network](**options)
    return trunk, torch.zeros(2, *trunk.input_shape), result


def _list_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of each method: the run's for its own method, its preset's for the others."""
    from agscl.experiments.presets import PRESETS

    preset = PRESETS.get(config["preset"])
    return {**(preset.methods if preset else {}), config["method"]: config["settings"]}


def _load_own_model(factory: str, input_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The model that a function of the user's own module returns, and an example input."""
    import torch
    from torch import nn

    module_name, colon, function_name = factory.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"expected module:function, e.g. mymodels:make_resnet, not {factory!r}")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {error.name!r} in this folder or in the environment") from error
    except AttributeError as error:
        raise UsageError(f"{module_name} has no {function_name!r}") from error
    except Exception as error:  # whatever the user's own module raises
        raise UsageError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{factory} is a {type(function).__name__}, not a function that returns a model")
    try:
        returned = function()
    except Exception as error:  # whatever the user's own function raises
        raise UsageError(f"{factory}() failed: {type(error).__name__}: {error}") from error
    model, example = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{factory}() returned {type(model).__name__}; expected a model, or (model, example input)")
    if input_shape:
        example = torch.zeros(2, *input_shape)
    if example is None:
        first = next(
            (layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)), None
        )
        if not isinstance(first, nn.Linear):
            raise UsageError("cannot tell the shape of this model's input: give it, e.g. --input-shape 3 32 32")
        example = torch.zeros(2, first.in_features)
    return model, example


def _add_head(model: Any, example: Any, heads: str | None) -> tuple[Any, Any]:
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


def _advise_on_output_layer(factory: str, input_shape: tuple[int, ...], model: Any, example: Any, layer: str) -> str:
    """How to call `inspect` if the refused layer is the model's own output layer; otherwise empty."""
    import torch

    name, outputs = layer.removeprefix("trunk."), []
    if not layer.startswith("trunk.") or name not in dict(model.named_modules()):
        return ""
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            final = model(*example) if isinstance(example, tuple) else model(example)
    finally:
        handle.remove()
    if not (outputs and isinstance(final, torch.Tensor) and final is outputs[-1]):
        return ""
    shape = f" --input-shape {' '.join(map(str, input_shape))}" if input_shape else ""
    return (
        f"{name} is the model's output layer, without a ReLU after it: it is a head, not a layer of nodes. "
        f"Name it so: agscl inspect {factory}{shape} --heads {name}"
    )


def print_memory(forecasts: Mapping[str, Memory], tasks: int, run: tuple[str, Memory] | None = None) -> None:
    """Print what `agscl inspect` shows of memory: what every method stores for a model, and AGS-CL beside EWC.

    `run` is a run's method and what it reported itself.
    """
    from agscl.cli.console import console, print_line
    from agscl.cli.memory_table import list_memory_notes, make_memory_table
    from agscl.cli.tables import TITLES

    by_title = {TITLES[name]: memory for name, memory in forecasts.items()}
    if run is not None:
        by_title = {"this run": run[1], **by_title}
    console.print()
    title = f"Numbers stored between tasks, after {tasks} task{'s' if tasks > 1 else ''}"
    console.print(make_memory_table(title, by_title))
    if run is not None:
        print_line(f"this run: {TITLES[run[0]]}, as it reported itself at its end")
    for line in list_memory_notes(by_title):
        print_line(line)
    agscl = run[1] if run and run[0] == "agscl" else forecasts["agscl"]
    if not agscl.counts.get("start"):
        count = forecasts["agscl"].counts["anchors"]
        print_line(f"with reinit_from=start AGS-CL also stores {count:,} initial weights")
    console.print()
    console.print(_make_ewc_comparison(forecasts["ewc"], agscl))


def _make_ewc_comparison(ewc: Memory, agscl: Memory) -> Table:
    """What the paper's text counts, what its figure must count, and everything stored."""
    from agscl.cli.tables import make_table

    is_bound = "anchors" in agscl.upper_bounds
    table = make_table("AGS-CL compared with EWC", "", "EWC", "AGS-CL", "")
    for label, ewc_count, agscl_count, at_least in (
        ("importances", ewc.importances, agscl.importances, False),
        ("importances, with EWC's anchors", ewc.total, agscl.importances, False),
        ("everything stored", ewc.total, agscl.total, is_bound),
    ):
        ratio = ewc_count / max(1, agscl_count)
        rounded_down = f"{ratio:,.0f}" if ratio >= 10 else f"{math.floor(100 * ratio) / 100:.2f}"
        bound = "≤" if at_least else ""
        times = f"{'≥ ' if at_least else ''}{rounded_down} ×"
        table.add_row(label, f"{ewc_count:,}", f"{bound}{agscl_count:,}", times)
    return table
