"""What `agscl` prints: live progress, and tables that fit 80 columns."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import rich.progress
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agscl.analysis.memory import COMMON_PURPOSES, WEIGHT_WISE, Amount, Memory, Outline, forecast_memory
from agscl.experiments.methods import METHODS

if TYPE_CHECKING:
    from agscl.experiments.config import RunConfig
    from agscl.experiments.jobs import Job
    from agscl.experiments.search import Trial

TITLES = {name: listed.title for name, listed in METHODS.items()}
OTHERS = {"bases": "bases", "start": "starting weights", "statistics": "BatchNorm statistics of each task"}
"""What a method may hold beside importances, anchors, masks and embeddings, in words."""
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
            speed_estimate_period=24 * 3600.0,  # an epoch may take long, and two are needed to tell
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
        if event["event"] == "step":  # within an epoch; not in the log
            if event["method"] in self._bars:
                self._live.update(self._bars[event["method"]], completed=event["progress"])
            return
        if event["event"] == "task ended":
            accuracies = event["accuracies"]
            average = sum(accuracies) / len(accuracies)
            note = f"task {event['task'] + 1}: {percent(accuracies[-1])}, average {percent(average)}"
            if not console.is_terminal:
                console.print(f"{title:<12} {note}")
        elif event["event"] == "epoch":
            note = f"task {event['task'] + 1}, epoch {event['epoch'] + 1}/{self._epochs}, loss {event['loss']:.3f}"
        else:
            note = f"task {event['task'] + 1}, {event['name']}"
        if console.is_terminal:
            if event["method"] not in self._bars:
                self._bars[event["method"]] = self._live.add_task(title, total=1.0, note="")
            self._live.update(self._bars[event["method"]], completed=event["progress"], note=note)


class Comparing(_Live):
    """A bar for all runs of a comparison and one for each under way; a line for each that has ended."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(21)
        self._jobs = jobs
        self._ended = sum(job.is_finished for job in jobs)
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


def searched(tried: Sequence[Trial]) -> None:
    """The end of `agscl search`: what was tried, the best first."""
    from agscl.experiments.compare import summarize_values

    settings = list(dict.fromkeys(key for one in tried for key in one.settings))
    table = _table(None, *settings, "average validation accuracy, %")
    for one in tried:
        values = [f"{one.settings[key]:g}" for key in settings]
        table.add_row(
            *values, "diverged" if one.valid_accuracy is None else _spread(summarize_values(one.by_seed), 100, 1)
        )
    console.print()
    console.print(table)


def studied(lines: Sequence[Mapping[str, Any]]) -> None:
    """The end of `agscl study`: a line for each form, with the nodes free (sparsity) and used after the last task."""
    if not lines:
        return
    seeds = max(len(line["seeds"]) for line in lines)
    title = f"Average accuracy and nodes at the end{f', mean ± deviation over {seeds} seeds' if seeds > 1 else ''}"
    nodes = any("sparsity" in line["curves"] for line in lines)
    table = _table(title, "", "acc., %", "plasticity", "stability", *(["free, %", "used, %"] if nodes else []))
    table.padding = (0, 1, 0, 0)
    for line in lines:
        last = [line["curves"].get(figure, [None])[-1] for figure in ("sparsity", "used_capacity")]
        table.add_row(
            line["label"],
            _spread(line["average_accuracy"], 100, 1),
            _spread(line["plasticity"], 1, 2),
            _spread(line["stability"], 1, 2),
            *["–" if share is None else f"{100 * share:.0f}" for share in last if nodes],
        )
    console.print()
    console.print(table)


def perturbed(seeds: Mapping[str, Any]) -> None:
    """The end of `agscl study aopc`: the area over the curve when this share of the nodes had been taken away."""
    shares = (0.1, 0.25, 0.5, 1.0)
    table = _table(
        "Accuracy lost in points, on average up to so many nodes taken away (AOPC)",
        "after task",
        "seed",
        "order",
        *[f"{100 * share:.0f} %" for share in shares],
    )
    for seed, of_seed in seeds.items():
        for after, curves in of_seed["after"].items():
            ends = [_nearest(curves["pruned"], share) for share in shares]
            for order, aopc in curves["aopc"].items():
                table.add_row(after, seed, order, *[f"{100 * aopc[end]:.1f}" for end in ends])
    console.print()
    console.print(table)


def _nearest(pruned: Sequence[int], share: float) -> int:
    return min(range(len(pruned)), key=lambda place: abs(pruned[place] - share * pruned[-1]))


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
    kept = {TITLES[name]: Memory(counts) for name, counts in memory.items()}
    console.print(_held("Numbers held between tasks", kept))
    for line in (caption, *_notes(kept)):
        say(line)


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
        console.print(_held("Numbers held between tasks", _beside(method, outcome["memory"], outcome["weights"])))
    console.print()
    if "certificate" in outcome:
        line = Table.grid(padding=(0, 2))
        line.add_row("certificate", Text(outcome["certificate"]))
        console.print(line)
        say(f"check it     agscl verify {shlex.quote(folder.name if folder.parent == Path('runs') else str(folder))}")
    seconds = sum(result["seconds"].values())
    say(f"stored in    {folder}/ after {seconds:.0f} s of training")


def memory(foretold: Mapping[str, Memory], tasks: int, run: tuple[str, Memory] | None = None) -> None:
    """What every method holds for a model, and what a run held; then AGS-CL against EWC, as the paper counts and in
    full. `run` is a run's method and its own count."""
    kept = {TITLES[name]: each for name, each in foretold.items()}
    if run is not None:
        kept = {"this run": run[1], **kept}
    console.print()
    console.print(_held(f"Numbers held between tasks, after {tasks} task{'s' if tasks > 1 else ''}", kept))
    if run is not None:
        say(f"this run: {TITLES[run[0]]}, as it counted itself at its end")
    for line in _notes(kept):
        say(line)
    ours = run[1] if run and run[0] == "agscl" else foretold["agscl"]
    if not ours.counts.get("start"):
        say(f"with fresh=start AGS-CL holds {foretold['agscl'].counts['anchors']:,} starting weights besides")
    console.print()
    console.print(_against(foretold["ewc"], ours))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(name: str, width: int = 12) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _table(title: str | None, *columns: str) -> Table:
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


def _beside(method: str, counts: Mapping[str, int], weights: int) -> dict[str, Memory]:
    """What a run's method held, and what the weight-wise ones hold for its trunk, by title."""
    outline = Outline(weights=Amount(weights, weights * torch.get_default_dtype().itemsize))
    others = {TITLES[name]: forecast_memory(name, outline, 1) for name in WEIGHT_WISE if name != method}
    return {TITLES[method]: Memory(counts), **others}


def _held(title: str, kept: Mapping[str, Memory]) -> Table:
    """What is held by purpose; ≤ before what depends on training."""

    def cells(each: Memory, count: Callable[[int], str]) -> dict[str, str]:
        def shown(purposes: Sequence[str]) -> str:
            number = sum(each.counts.get(purpose, 0) for purpose in purposes)
            bound = any(each.counts.get(purpose) for purpose in each.upper_bounds.intersection(purposes))
            return ("≤" if bound else "") + count(number) if number else "–"

        bound = "≤" if each.bytes and "bytes" in each.upper_bounds else ""
        found = {purpose: shown([purpose]) for purpose in COMMON_PURPOSES} | {"other": shown(list(each.other_counts))}
        return found | {"bytes": bound + _bytes(each.bytes) if each.bytes else "–"}

    def made(count: Callable[[int], str], padding: int) -> Table:
        rows = {name: cells(each, count) for name, each in kept.items()}
        used = [
            column
            for column in (*COMMON_PURPOSES, "other", "bytes")
            if any(row[column] != "–" for row in rows.values())
        ]
        table = _table(title, "method", *used)
        table.padding = (0, padding, 0, 0)
        for name, row in rows.items():
            table.add_row(name, *[row[column] for column in used])
        return table

    for count, padding in (("{:,}".format, 2), ("{:,}".format, 1), (_short_number, 2)):
        table = made(count, padding)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    return table


def _notes(kept: Mapping[str, Memory]) -> list[str]:
    """What a reader of `_held` must know."""
    lines = []
    others: dict[str, list[str]] = {}
    for name, each in kept.items():
        for purpose in each.other_counts:
            others.setdefault(OTHERS.get(purpose, purpose), []).append(name)
    if others:
        lines.append(f"other: {'; '.join(f'{what} ({_and(who)})' for what, who in others.items())}")
    if any(each.upper_bounds & {p for p, count in each.counts.items() if count} for each in kept.values()):
        lines.append("≤: depends on training, and cannot be more; all else is exact")
    if any(each.counts.get("digests") for each in kept.values()):
        lines.append("an entry of a mask is a number; bytes include the digests of certificates")
    return lines


def _and(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if name != "this run" or len(names) == 1)


def _against(theirs: Memory, ours: Memory) -> Table:
    """What the paper's text counts, what its figure must count, and all that is held."""
    whole, bound = theirs.total, "anchors" in ours.upper_bounds
    table = _table("AGS-CL against EWC", "", "EWC", "AGS-CL", "")
    for label, one, other, least in (
        ("importances", theirs.importances, ours.importances, False),
        ("importances; EWC's anchors too", whole, ours.importances, False),
        ("all that each holds", whole, ours.total, bound),
    ):
        times = one / max(1, other)
        ratio = f"{times:,.0f}" if times >= 10 else f"{math.floor(100 * times) / 100:.2f}"  # never more than it is
        row = [label, f"{one:,}", ("≤" if least else "") + f"{other:,}", f"{'≥ ' if least else ''}{ratio} ×"]
        table.add_row(*row)
    return table


def _short_number(number: int) -> str:
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.1f} M"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
