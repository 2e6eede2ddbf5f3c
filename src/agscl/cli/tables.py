"""The tables that commands print; all fit 80 columns."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from agscl.analysis.memory import COMMON_PURPOSES, WEIGHT_WISE, Amount, Memory, Outline, forecast_memory
from agscl.cli.console import console, print_line
from agscl.experiments.compare import summarize_values
from agscl.experiments.methods import METHODS

if TYPE_CHECKING:
    from agscl.experiments.search import Trial

TITLES = {name: listed.title for name, listed in METHODS.items()}
OTHER_PURPOSES = {
    "bases": "bases",
    "scales": "scale matrices",
    "start": "initial weights",
    "statistics": "BatchNorm statistics of each task",
}
"""What a method may store besides importances, anchors, masks and embeddings."""
MAX_MATRIX_TASKS = 10
"""An accuracy matrix of more tasks does not fit 80 columns."""
MAX_NAMED_TASKS = 5
"""With more tasks, columns are headed by numbers."""
AOPC_SHARES = (0.1, 0.25, 0.5, 1.0)
"""The shares of nodes pruned for which a study shows the AOPC."""


# agscl run -----------------------------------------------------------------------------------------------------------


def print_run_summary(result: dict[str, Any], folder: Path) -> None:
    """The end of `agscl run`."""
    tasks = [_shorten(name) for name in result["tasks"]]
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
        console.print(_make_memory_table("Numbers stored between tasks", _compare_run_memory(method, outcome)))
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
        table.add_row(_shorten(layer["layer"], 24), str(layer["nodes"]), *[f"{share:.0f}" for share in shares])
    return table


def _make_capacity_table(capacity: Mapping[str, Any]) -> Table:
    left = capacity["tasks_left"]
    fits = "" if left is None else f": room for {left} more task{'' if left == 1 else 's'}"
    table = make_table(f"Capacity{fits}", "layer", "nodes", "taken", "by the last task", "free", "more tasks")
    for layer in capacity["layers"]:
        more = "–" if layer["tasks_left"] is None else layer["tasks_left"]
        figures = (layer["nodes"], layer["taken"], layer["taken_by_last"], layer["free"], more)
        table.add_row(_shorten(layer["layer"], 24), *map(str, figures))
    return table


def _compare_run_memory(method: str, outcome: Mapping[str, Any]) -> dict[str, Memory]:
    """What a run's method stored, and what the weight-wise methods would store for the same trunk, by title."""
    default_bytes = Outline().default_bytes
    outline = Outline(weights=Amount(outcome["weights"], outcome["weights"] * default_bytes))
    others = {TITLES[name]: forecast_memory(name, outline, 1) for name in WEIGHT_WISE if name != method}
    return {TITLES[method]: Memory(outcome["memory"]), **others}


# agscl compare, search, study ----------------------------------------------------------------------------------------


def print_comparison(collected: Mapping[str, Any]) -> None:
    """The end of `agscl compare`: methods in the order of the paper's table."""
    seeds = max(len(row["seeds"]) for row in collected.values())
    table = make_table(
        f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed",
        "method",
        "average score, %" if any("scores" in row for row in collected.values()) else "average acc., %",
        "plasticity",
        "stability",
        "forgetting, %",
    )
    for name, row in collected.items():
        suffix = "" if len(row["seeds"]) == seeds else f" ({len(row['seeds'])} seeds)"
        table.add_row(
            TITLES[name] + suffix,
            format_mean(row["average_accuracy"], 100, 1),
            format_mean(row["plasticity"], 1, 3),
            format_mean(row["stability"], 1, 3),
            format_mean(row["forgetting"], 100, 1),
        )
    console.print()
    console.print(table)
    if all("accumulated_reward" in row for row in collected.values()):
        console.print()
        console.print(_make_rewards_table(collected))
        if left_out := dict.fromkeys(
            task for row in collected.values() for some in row["not_accumulated"] for task in some
        ):
            print_line(
                f"not in the accumulated reward of a seed where fine-tuning did not learn it: {', '.join(left_out)}"
            )


def _make_rewards_table(collected: Mapping[str, Any]) -> Table:
    table = make_table("Agents", "method", "accumulated reward", "forward transfer, %")
    for name, row in collected.items():
        reward, transfer = format_mean(row["accumulated_reward"], 1, 2), format_mean(row["forward_transfer"], 100, 1)
        table.add_row(TITLES[name], reward, transfer)
    return table


def print_trials(trials: Sequence[Trial], quantity: str) -> None:
    """The end of `agscl search`: what was tried, the best first."""
    settings = list(dict.fromkeys(key for trial in trials for key in trial.settings))
    table = make_table(None, *settings, "average score, %" if quantity == "score" else "average validation accuracy, %")
    for trial in trials:
        if trial.stopped_after is not None:
            score = f"stopped after task {trial.stopped_after}"
        elif trial.valid_accuracy is None:
            score = "diverged"
        else:
            score = format_mean(summarize_values(trial.by_seed), 100, 1)
        table.add_row(*[f"{trial.settings[key]:g}" for key in settings], score)
    console.print()
    console.print(table)


def print_study(lines: Sequence[Mapping[str, Any]], quantity: str) -> None:
    """The end of `agscl study`: metrics, and the shares of free and of unchanged nodes after the last task."""
    if not lines:
        return
    seeds = max(len(line["seeds"]) for line in lines)
    title = f"Average {quantity} and nodes at the end{f', mean ± deviation over {seeds} seeds' if seeds > 1 else ''}"
    has_nodes = any("sparsity" in line["curves"] for line in lines)
    node_columns = ["free, %", "unchanged, %"] if has_nodes else []
    table = make_table(
        title, "", "score, %" if quantity == "score" else "acc., %", "plasticity", "stability", *node_columns
    )
    table.padding = (0, 1, 0, 0)
    for line in lines:
        shares = [line["curves"].get(figure, [None])[-1] for figure in ("sparsity", "used_capacity")]
        table.add_row(
            line["label"],
            format_mean(line["average_accuracy"], 100, 1),
            format_mean(line["plasticity"], 1, 2),
            format_mean(line["stability"], 1, 2),
            *["–" if share is None else f"{100 * share:.0f}" for share in shares if has_nodes],
        )
    console.print()
    console.print(table)


def print_aopc(seeds: Mapping[str, Any]) -> None:
    """The end of `agscl study aopc`: the area over the curve up to some shares of the nodes."""
    table = make_table(
        "AOPC: mean accuracy loss in points, by share of nodes pruned",
        "after task",
        "seed",
        "order",
        *[f"{100 * share:.0f} %" for share in AOPC_SHARES],
    )
    for seed, measured in seeds.items():
        for after, curves in measured["after"].items():
            pruned = curves["pruned"]
            ends = [
                min(range(len(pruned)), key=lambda end: abs(pruned[end] - share * pruned[-1])) for share in AOPC_SHARES
            ]
            for order, aopc in curves["aopc"].items():
                table.add_row(after, seed, order, *[f"{100 * aopc[end]:.1f}" for end in ends])
    console.print()
    console.print(table)


# agscl methods, inspect ----------------------------------------------------------------------------------------------


def print_methods(memory: Mapping[str, Mapping[str, int]], caption: str) -> None:
    """What `agscl methods` prints: a line for each method, and what it stores."""
    table = make_table("Methods", "--method", "")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for name, listed in METHODS.items():
        table.add_row(name, listed.about)
    console.print(table)
    console.print()
    by_title = {TITLES[name]: Memory(counts) for name, counts in memory.items()}
    console.print(_make_memory_table("Numbers stored between tasks", by_title))
    for line in (caption, *_list_memory_notes(by_title)):
        print_line(line)


def print_memory(forecasts: Mapping[str, Memory], tasks: int, run: tuple[str, Memory] | None = None) -> None:
    """What `agscl inspect` prints: what every method stores for a model, and AGS-CL compared with EWC.

    `run` is a run's method and what it reported itself.
    """
    by_title = {TITLES[name]: memory for name, memory in forecasts.items()}
    if run is not None:
        by_title = {"this run": run[1], **by_title}
    console.print()
    title = f"Numbers stored between tasks, after {tasks} task{'s' if tasks > 1 else ''}"
    console.print(_make_memory_table(title, by_title))
    if run is not None:
        print_line(f"this run: {TITLES[run[0]]}, as it reported itself at its end")
    for line in _list_memory_notes(by_title):
        print_line(line)
    agscl = run[1] if run and run[0] == "agscl" else forecasts["agscl"]
    if not agscl.counts.get("start"):
        count = forecasts["agscl"].counts["anchors"]
        print_line(f"with reinit_from=start AGS-CL also stores {count:,} initial weights")
    console.print()
    console.print(_make_ewc_comparison(forecasts["ewc"], agscl))


def _make_memory_table(title: str, by_title: Mapping[str, Memory]) -> Table:
    """Numbers by purpose, with ≤ before upper bounds; numbers are shortened where the table would be too wide."""

    def format_row(memory: Memory, format_count: Callable[[int], str]) -> dict[str, str]:
        def format_purposes(purposes: Sequence[str]) -> str:
            number = sum(memory.counts.get(purpose, 0) for purpose in purposes)
            is_bound = any(memory.counts.get(purpose) for purpose in memory.upper_bounds.intersection(purposes))
            return ("≤" if is_bound else "") + format_count(number) if number else "–"

        row = {purpose: format_purposes([purpose]) for purpose in COMMON_PURPOSES}
        row["other"] = format_purposes(list(memory.other_counts))
        bound = "≤" if "bytes" in memory.upper_bounds else ""
        row["bytes"] = bound + _format_bytes(memory.bytes) if memory.bytes else "–"
        return row

    def make(format_count: Callable[[int], str], padding: int) -> Table:
        rows = {name: format_row(memory, format_count) for name, memory in by_title.items()}
        columns = [
            column
            for column in (*COMMON_PURPOSES, "other", "bytes")
            if any(row[column] != "–" for row in rows.values())
        ]
        table = make_table(title, "method", *columns)
        table.padding = (0, padding, 0, 0)
        for name, row in rows.items():
            table.add_row(name, *[row[column] for column in columns])
        return table

    for format_count, padding in (("{:,}".format, 2), ("{:,}".format, 1), (_shorten_number, 2)):
        table = make(format_count, padding)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    return table


def _list_memory_notes(by_title: Mapping[str, Memory]) -> list[str]:
    """What a reader of the memory table must know."""
    notes = []
    others: dict[str, list[str]] = {}
    for title, memory in by_title.items():
        for purpose in memory.other_counts:
            others.setdefault(OTHER_PURPOSES.get(purpose, purpose), []).append(title)
    if others:
        notes.append(f"other: {'; '.join(f'{purpose} ({_join_titles(titles)})' for purpose, titles in others.items())}")
    if any(memory.counts.get(purpose) for memory in by_title.values() for purpose in memory.upper_bounds):
        notes.append("≤: an upper bound, the number depends on training; all others are exact")
    if any(memory.counts.get("digests") for memory in by_title.values()):
        notes.append("a mask entry counts as one number; bytes include the digests of certificates")
    return notes


def _join_titles(titles: Sequence[str]) -> str:
    return ", ".join(title for title in titles if title != "this run" or len(titles) == 1)


def _make_ewc_comparison(ewc: Memory, agscl: Memory) -> Table:
    """What the paper's text counts, what its figure must count, and everything stored."""
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


# What tables share ---------------------------------------------------------------------------------------------------


class TitledTable(Table):
    """A table without lines; its title wraps at the width of the terminal, not at that of a narrow table."""

    def __init__(self, title: str | None) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        self._title = Text(title or "", style="bold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield self._title
        yield from super().__rich_console__(console, options)


def make_table(title: str | None, *columns: str) -> Table:
    """A table without lines, whose first column is left-aligned and all others right-aligned."""
    table = TitledTable(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", header_style="dim", no_wrap=True)
    return table


def make_plain_table(title: str, columns: int) -> Table:
    """A table without lines and headings, whose cells may wrap."""
    table = make_table(title)
    for _ in range(columns):
        table.add_column(overflow="fold")
    table.show_header = False
    return table


def format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def format_mean(summary: Mapping[str, Any], scale: float, digits: int) -> str:
    """Mean ± deviation."""
    mean, deviation = summary["mean"], summary["deviation"]
    if mean is None:
        return "–"
    return f"{scale * mean:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def _shorten(name: str, width: int = 12) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _shorten_number(number: int) -> str:
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.1f} M"


def _format_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
