"""What `agscl run` prints at its end: accuracies, metrics, nodes, capacity, memory, certificate and digest."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agscl.cli.console import console, print_line
from agscl.cli.memory_table import make_memory_table
from agscl.cli.tables import TITLES, format_percent, make_table, shorten
from agscl.experiments.method_entries import METHODS, WEIGHT_WISE
from agscl.methods._parts.memory_forecast import Amount, Memory, Outline

MAX_MATRIX_TASKS = 10
"""An accuracy matrix of more tasks does not fit 80 columns."""
MAX_NAMED_TASKS = 5
"""With more tasks, columns are headed by numbers."""


def print_run_summary(result: dict[str, Any], folder: Path) -> None:
    """Print the end of `agscl run`."""
    tasks = [shorten(name) for name in result["tasks"]]
    methods = result["methods"]
    for method, outcome in methods.items():
        console.print()
        scores = outcome.get("scores")
        console.print(
            _make_accuracy_matrix(TITLES[method], tasks, outcome["accuracies"])
            if scores is None
            else _make_score_matrix(TITLES[method], tasks, scores)
        )
    console.print()
    console.print(_make_metrics_table(methods))
    method, outcome = list(methods.items())[-1]
    if left_out := outcome.get("not_accumulated"):
        print_line(f"not in the accumulated reward, as fine-tuning did not learn it: {', '.join(left_out)}")
    if "used_capacity" in outcome["statistics"][-1] and "nodes" in outcome["statistics"][-1]:
        console.print()
        console.print(_make_nodes_table(tasks, outcome["statistics"]))
        print_line("frozen: important nodes whose weights did not change in this task")
        print_line("unchanged: all nodes whose weights did not change in this task, free ones too")
    if any("layers" in one for one in outcome.get("evaluations", ())):
        console.print()
        console.print(_make_dormant_table(TITLES[method], tasks, outcome["evaluations"]))
        print_line("dormant: mean activation at most 0.025 of the layer's; as each task was learned")
    if "capacity" in outcome["statistics"][-1]:
        console.print()
        console.print(_make_capacity_table(outcome["statistics"][-1]["capacity"]))
    if outcome["memory"]["bytes"]:
        console.print()
        console.print(make_memory_table("Numbers stored between tasks", _compare_run_memory(method, outcome)))
    console.print()
    if "certificate" in outcome:
        line = Table.grid(padding=(0, 2))
        line.add_row("certificate", Text(outcome["certificate"]))
        console.print(line)
        name = folder.name if folder.parent == Path("runs") else str(folder)
        print_line(f"check it     agscl verify {shlex.quote(name)}")
    print_line(f"digest       {result['digest']}")
    print_line(f"stored in    {folder}/ after {sum(result['seconds'].values()):.0f} s of training")


def _make_accuracy_matrix(title: str, tasks: list[str], accuracies: list[list[float]]) -> Table:
    if len(tasks) > MAX_MATRIX_TASKS:
        table = make_table(f"{title}: accuracy, %", "task", "just learned", "at the end")
        for index, task in enumerate(tasks):
            table.add_row(task, f"{100 * accuracies[index][index]:.1f}", f"{100 * accuracies[-1][index]:.1f}")
        return table
    digits = 0 if len(tasks) > MAX_NAMED_TASKS else 1
    return _make_matrix(f"{title}: accuracy on each task, %", tasks, accuracies, lambda a: f"{100 * a:.{digits}f}")


def _make_score_matrix(title: str, tasks: list[str], scores: list[list[float]]) -> Table:
    def write_score(score: float) -> str:
        return f"{score:.{0 if abs(score) >= 100 else 1}f}"

    return _make_matrix(f"{title}: score on each task", tasks, scores, write_score)


def _make_matrix(title: str, tasks: list[str], rows: list[list[float]], write: Callable[[float], str]) -> Table:
    """A row for what each task left; with many tasks their numbers head the columns."""
    is_wide = len(tasks) > MAX_NAMED_TASKS
    columns = [str(index + 1) if is_wide else task for index, task in enumerate(tasks)]
    table = make_table(title, "after learning", *columns)
    for index, row in enumerate(rows):
        label = f"{index + 1} {tasks[index]}" if is_wide else tasks[index]
        table.add_row(label, *map(write, row))
    return table


def _make_metrics_table(methods: dict[str, Any]) -> Table:
    is_score = any("scores" in outcome for outcome in methods.values())
    quantity = "score" if is_score else "accuracy"
    table = make_table("At the end", "", *[TITLES[method] for method in methods])
    table.columns[0].no_wrap = False  # on a narrow terminal the labels wrap, and no figure is cut
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        f"average {quantity}": lambda outcome: format_percent(outcome["average_accuracy"]),
        "plasticity (just learned, relative to fine-tuning)": lambda outcome: (
            "–" if outcome["plasticity"] is None else f"{outcome['plasticity']:.3f}"
        ),
        "stability (at the end, relative to the best)": lambda outcome: f"{outcome['stability']:.3f}",
        f"forgetting ({quantity} lost since the best)": lambda outcome: format_percent(outcome["forgetting"]),
    }
    if is_score:
        rows["accumulated reward (sum of scores, relative to fine-tuning's best)"] = lambda outcome: (
            f"{outcome['accumulated_rewards'][-1]:.2f}" if "accumulated_rewards" in outcome else "–"
        )
    for label, format_value in rows.items():
        table.add_row(label, *[format_value(outcome) for outcome in methods.values()])
    return table


def _make_nodes_table(tasks: list[str], statistics: list[dict[str, Any]]) -> Table:
    table = make_table("Nodes after each task", "task", "free", "important", "frozen", "unchanged")
    for task, figures in zip(tasks, statistics, strict=True):
        table.add_row(
            task,
            f"{figures['free']} of {figures['nodes']} ({100 * figures['sparsity']:.0f} %)",
            str(figures["nodes"] - figures["free"]),
            str(figures.get("frozen", "")),
            f"{100 * figures['used_capacity']:.0f} %",
        )
    return table


def _make_dormant_table(title: str, tasks: list[str], evaluations: list[dict[str, Any]]) -> Table:
    last = [[one for one in evaluations if one["task"] == task][-1] for task in range(len(tasks))]
    columns = tasks if len(tasks) <= 5 else [str(number + 1) for number in range(len(tasks))]
    table = make_table(f"{title}: dormant nodes, %", "layer", "nodes", *columns)
    for number, layer in enumerate(last[0]["layers"]):
        shares = [100 * one["layers"][number]["dormant"] / layer["nodes"] for one in last]
        table.add_row(shorten(layer["layer"], 24), str(layer["nodes"]), *[f"{share:.0f}" for share in shares])
    return table


def _make_capacity_table(capacity: Mapping[str, Any]) -> Table:
    left = capacity["tasks_left"]
    fits = "" if left is None else f": room for {left} more task{'' if left == 1 else 's'}"
    table = make_table(f"Capacity{fits}", "layer", "nodes", "taken", "by the last task", "free", "more tasks")
    for layer in capacity["layers"]:
        more = "–" if layer["tasks_left"] is None else layer["tasks_left"]
        figures = (layer["nodes"], layer["taken"], layer["taken_by_last"], layer["free"], more)
        table.add_row(shorten(layer["layer"], 24), *map(str, figures))
    return table


def _compare_run_memory(method: str, outcome: Mapping[str, Any]) -> dict[str, Memory]:
    """What a run's method stored, and what the weight-wise methods would store for the same trunk, by title."""
    default_bytes = Outline().default_bytes
    outline = Outline(weights=Amount(outcome["weights"], outcome["weights"] * default_bytes))
    others = {TITLES[name]: METHODS[name].forecast_memory(outline, 1) for name in WEIGHT_WISE if name != method}
    return {TITLES[method]: Memory(outcome["memory"]), **others}
