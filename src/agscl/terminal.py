"""What `agscl` prints: live progress, and tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import rich.progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agscl.analysis.memory import Held, at_most, held, weight_wise
from agscl.experiments.methods import METHODS

if TYPE_CHECKING:
    from agscl.experiments.compare import Job
    from agscl.experiments.presets import RunConfig
    from agscl.nodes import NodeGraph

TITLES = {name: listed.title for name, listed in METHODS.items()}
WIDEST_MATRIX = 10
"""With more tasks than that a matrix no longer fits 80 columns."""

# Piped output keeps its lines whole; a terminal gets its own width.
console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=80)


def say(line: str) -> None:
    """Print one line for a person, as it is."""
    console.print(Text(line), soft_wrap=True)


class _Live:
    """Bars on a terminal; nothing elsewhere."""

    def __init__(self, width: int) -> None:
        self._live = rich.progress.Progress(
            f"[bold]{{task.description:<{width}}}",
            rich.progress.BarColumn(bar_width=24),
            "{task.percentage:>3.0f} %",
            rich.progress.TimeRemainingColumn(),
            "{task.fields[note]}",
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()


class Progress(_Live):
    """A bar per method on a terminal; otherwise one line per task."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(12)
        self._epochs = config.training.epochs
        self._bars: dict[str, rich.progress.TaskID] = {}

    def show(self, event: dict[str, Any]) -> None:
        title = TITLES[event["method"]]
        if event["event"] == "task ended":
            accuracies = event["accuracies"]
            average = sum(accuracies) / len(accuracies)
            note = f"task {event['task'] + 1}: {percent(accuracies[-1])}, average {percent(average)}"
            if not console.is_terminal:
                console.print(f"{title:<12} {note}")
        elif event["event"] == "epoch":
            note = f"task {event['task'] + 1}, epoch {event['epoch'] + 1}/{self._epochs}, loss {event['loss']:.3f}"
        else:
            return
        if console.is_terminal:
            if event["method"] not in self._bars:
                self._bars[event["method"]] = self._live.add_task(title, total=1.0, note="")
            self._live.update(self._bars[event["method"]], completed=event["progress"], note=note)


class Comparing(_Live):
    """A bar for all runs of a comparison and one for each under way; a line for each that has ended."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(21)
        self._jobs = jobs
        self._ended = sum(job.finished for job in jobs)
        self._whole = self._live.add_task("all", total=len(jobs), completed=self._ended, note=self._count())
        self._bars: dict[Path, rich.progress.TaskID] = {}  # by the run's folder

    def _count(self) -> str:
        return f"{self._ended} of {len(self._jobs)} runs"

    def ended(self, job: Job, line: str) -> None:
        self._ended += 1
        console.print(Text(f"{job!s:<21} {line}"), soft_wrap=True)

    def show(self, running: list[Job]) -> None:
        if not console.is_terminal:
            return
        under_way = {job.folder: progress for job in running if (progress := job.progress)}
        for folder in [folder for folder in self._bars if folder not in under_way]:
            self._live.remove_task(self._bars.pop(folder))
        for job in running:
            if job.folder in under_way and job.folder not in self._bars:
                self._bars[job.folder] = self._live.add_task(str(job), total=1.0, note="")
        for folder, progress in under_way.items():
            self._live.update(self._bars[folder], completed=progress)
        done = self._ended + sum(under_way.values())
        self._live.update(self._whole, completed=done, note=self._count())


def comparison(compared: Mapping[str, Any]) -> None:
    """The end of `agscl compare`: mean ± standard deviation, methods in the order of the paper's table."""
    seeds = max(len(outcome["seeds"]) for outcome in compared.values())
    table = _table(
        f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed",
        "method",
        "average acc., %",
        "plasticity",
        "stability",
        "forgetting, %",
    )
    for name, outcome in compared.items():
        short = "" if len(outcome["seeds"]) == seeds else f" ({len(outcome['seeds'])} seeds)"
        table.add_row(
            TITLES[name] + short,
            _spread(outcome["average_accuracy"], 100, 1),
            _spread(outcome["plasticity"], 1, 3),
            _spread(outcome["stability"], 1, 3),
            _spread(outcome["forgetting"], 100, 1),
        )
    console.print()
    console.print(table)


def _spread(measured: Mapping[str, Any], scale: float, digits: int) -> str:
    mean, deviation = measured["mean"], measured["deviation"]
    if mean is None:
        return "–"
    return f"{scale * mean:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def methods(memory: Mapping[str, Mapping[str, int]], caption: str) -> None:
    """What `agscl methods` prints: every method in a line, and what it holds."""
    table = _table("Methods", "--method", "")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for name, listed in METHODS.items():
        table.add_row(name, listed.about)
    console.print(table)
    console.print()
    table = _table("Held between tasks", "method", "importances", "all numbers", "bytes")
    for name, kept in memory.items():
        each = held(kept)
        table.add_row(TITLES[name], f"{each.importances:,}", f"{each.everything:,}", f"{kept['bytes']:,}")
    console.print(table)
    say(caption)


def summary(result: dict[str, Any], folder: Path) -> None:
    """The end of `agscl run`."""
    names = [_short(name) for name in result["tasks"]]
    methods = result["methods"]
    for method, outcome in methods.items():
        console.print()
        console.print(_matrix(TITLES[method], names, outcome["accuracies"]))
    console.print()
    console.print(_comparison(methods))
    method, outcome = list(methods.items())[-1]
    if "used_capacity" in outcome["statistics"][-1] and "nodes" in outcome["statistics"][-1]:
        console.print()
        console.print(_capacity(names, outcome["statistics"]))
    if outcome["memory"]["bytes"]:
        console.print()
        console.print(_storage({TITLES[method]: held(outcome["memory"])}, outcome["weights"]))
    console.print()
    if "certificate" in outcome:
        line = Table.grid(padding=(0, 2))
        line.add_row("certificate", Text(outcome["certificate"]))
        console.print(line)
        say(f"check it     agscl verify {folder.name if folder.parent == Path('runs') else folder}")
    seconds = sum(result["seconds"].values())
    say(f"stored in    {folder}/ after {seconds:.0f} s of training")


def storage(graph: NodeGraph) -> None:
    """What each method would store for a model."""
    weights = sum(p.numel() for layer in graph.layers.values() for p in layer.module.parameters())
    weights += sum(p.numel() for norm in graph.norms.values() for p in norm.module.parameters())
    console.print()
    console.print(_storage({"AGS-CL, at most": at_most(graph.size, weights)}, weights))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(name: str, width: int = 12) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", header_style="dim", no_wrap=True)
    return table


def _matrix(title: str, names: list[str], accuracies: list[list[float]]) -> Table:
    if len(names) > WIDEST_MATRIX:
        table = _table(f"{title}: accuracy, %", "task", "just learned", "at the end")
        for task, name in enumerate(names):
            table.add_row(name, f"{100 * accuracies[task][task]:.1f}", f"{100 * accuracies[-1][task]:.1f}")
        return table
    wide = len(names) > 5
    columns = [str(place + 1) if wide else name for place, name in enumerate(names)]
    table = _table(f"{title}: accuracy on each task, %", "after learning", *columns)
    for place, row in enumerate(accuracies):
        label = f"{place + 1} {names[place]}" if wide else names[place]
        table.add_row(label, *[f"{100 * accuracy:.{0 if wide else 1}f}" for accuracy in row])
    return table


def _comparison(methods: dict[str, Any]) -> Table:
    table = _table("At the end", "", *[TITLES[method] for method in methods])
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "average accuracy": lambda outcome: percent(outcome["average_accuracy"]),
        "plasticity (just learned, against fine-tuning)": lambda outcome: (
            "–" if outcome["plasticity"] is None else f"{outcome['plasticity']:.3f}"
        ),
        "stability (kept of the best)": lambda outcome: f"{outcome['stability']:.3f}",
        "forgetting (lost since the best)": lambda outcome: percent(outcome["forgetting"]),
    }
    for label, value in rows.items():
        table.add_row(label, *[value(outcome) for outcome in methods.values()])
    return table


def _capacity(names: list[str], statistics: list[dict[str, Any]]) -> Table:
    table = _table("Nodes after each task", "task", "free (sparsity)", "important", "frozen", "used capacity")
    for name, each in zip(names, statistics, strict=True):
        important = each["nodes"] - each["free"]
        table.add_row(
            name,
            f"{each['free']} of {each['nodes']} ({100 * each['sparsity']:.0f} %)",
            str(important),
            str(each.get("frozen", "")),
            f"{100 * each['used_capacity']:.0f} %",
        )
    return table


def _storage(kept: dict[str, Held], weights: int) -> Table:
    table = _table("Numbers kept between tasks", "method", "importances", "with anchors and masks")
    table.caption = f"the trunk has {weights:,} weights"
    table.caption_justify = "left"
    for method, each in (
        kept | {name: each for name, each in weight_wise(weights).items() if name not in kept}
    ).items():
        table.add_row(method, f"{each.importances:,}", f"{each.everything:,}")
    return table
