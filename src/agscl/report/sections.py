"""The sections of a page in their order: what each says, its charts and its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agscl.experiments.method_entries import METHODS, WEIGHT_WISE
from agscl.methods._agscl.budget import count_kept
from agscl.methods._parts.memory_forecast import Amount, Outline
from agscl.report import charts, words
from agscl.report.node_history import NodeHistory, count_moved, count_taken
from agscl.report.report_data import Line, Outcome, ReportData, RunData, get_title, is_bound
from agscl.report.vega import Spec
from agscl.report.words import format_bytes, format_seconds, percent, spread

MAX_ROWS = 12
"""Rows of a table that stand open on the page."""
MAX_FORECAST = 30


@dataclass
class Table:
    """A table in a section of a page; cells are texts, the first column is left-aligned, others right-aligned."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: tuple[int, ...] = (0,)
    """The columns that hold words, so that they are aligned to the left."""

    @property
    def folded(self) -> bool:
        return len(self.rows) > MAX_ROWS


@dataclass
class Chart:
    name: str
    title: str
    spec: Spec
    alt: str
    """What the chart shows, for somebody who does not see it."""
    width: int = 640
    half: bool = False


@dataclass
class Section:
    name: str
    title: str
    lead: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    folded_tables: bool = True
    """Whether the tables stand behind a line to open them; in print they are open."""
    notes: list[str] = field(default_factory=list)
    has_nodes: bool = False
    media: list[dict[str, str]] = field(default_factory=list)
    code: list[tuple[str, str]] = field(default_factory=list)


def make_sections(report: ReportData) -> list[Section]:
    """All sections that have something to show, in the order of the page."""
    makers: list[Callable[[ReportData], Section | Sequence[Section | None] | None]] = [
        _make_matrices_section,
        _make_average_section,
        _make_node_sections,
        _make_memory_section,
        _make_curves_section,
        _make_studies_sections,
        _make_games_sections,
        _make_provenance_section,
    ]
    made: list[Section] = []
    for make in makers:
        try:
            found = make(report)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
            name = make.__name__.removeprefix("_make_").replace("_sections", "s")
            problem = f"A part of this page ({name}) is left out, as what the run stored of it is damaged: {error!r}."
            report.problems += [problem] if problem not in report.problems else []
            continue
        made += [one for one in (found if isinstance(found, Sequence) else [found]) if one is not None]
    return made


# Accuracies ----------------------------------------------------------------------------------------------------------


def _make_matrices_section(report: ReportData) -> Section | None:
    lines = [line for line in report.lines if line.complete_outcomes]
    if report.kind != "run":
        lines = [line for line in [*report.ranked, *lines] if line in lines]
        lines = list({id(line): line for line in lines}.values())
    else:
        lines = lines[::-1]  # the method before fine-tuning
    if not lines:
        return None
    quantity = "score" if report.is_score else "accuracy"
    section = Section(
        "matrix",
        "What is remembered",
        f"Each row is the state after learning a task, each column the {quantity} on one task. A column that stays "
        "dark to the last row was not forgotten."
        + (" Means over seeds." if any(len(line.complete_outcomes) > 1 for line in lines) else "")
        + (" The runs have different tasks, or another order: tasks are named by number." if report.own_tasks else ""),
    )
    for number, line in enumerate(lines):
        spec = charts.draw_matrix(line, report.tasks, is_score=report.is_score)
        if spec is not None:
            alt = f"{line.label}: {quantity} on every task after every task; the numbers are in the table below."
            section.charts.append(Chart(f"matrix-{number + 1}", line.label, spec, alt, 300, half=len(lines) > 1))
        section.tables.append(_tabulate_matrix(line, report))
    return section


def _tabulate_matrix(line: Line, report: ReportData) -> Table:
    outcomes = line.complete_outcomes
    rows = []
    count = len(outcomes[0].accuracies)
    has_scores = all(len(outcome.scores) == count for outcome in outcomes)
    for after in range(count):
        cells = []
        for task in range(after + 1):
            if has_scores:
                cells.append(charts.format_score(_mean([outcome.scores[after][task] for outcome in outcomes])))
            else:
                cells.append(f"{100 * _mean([outcome.accuracies[after][task] for outcome in outcomes]):.1f}")
        rows.append([charts.name_task(report.tasks, after, 24), *cells, *[""] * (count - after - 1)])
    unit = "score" if has_scores else "accuracy, %"
    columns = ["after learning", *(charts.name_task(report.tasks, task, 10) for task in range(count))]
    return Table(f"{line.label}: {unit}", columns, rows)


def _make_average_section(report: ReportData) -> Section | None:
    spec = charts.draw_average(report)
    if spec is None:
        return None
    seeds = max(len(line.complete_outcomes) for line in report.lines)
    lead = "The average over all tasks learned so far. A method that forgets falls."
    if seeds > 1:
        lead += " Bands are one standard deviation over seeds."
    if len(report.lines) > 2:
        lead += " Click a name in the legend to see it alone."
    quantity = "average score, %" if report.is_score else "average accuracy, %"
    rows = []
    for line in [*(report.ranked or report.lines), *report.unranked]:
        if line.complete_outcomes:
            rows.append(
                [
                    line.label
                    + (f" (after {words.count(line.tasks_learned, 'task')})" if line in report.unranked else ""),
                    _format_settings(line.settings),
                    str(len(line.complete_outcomes)),
                    spread(line.summarize("average_accuracy"), unit=""),
                    spread(line.summarize("forgetting"), unit=""),
                    spread(line.summarize("plasticity"), 1, 3, ""),
                    spread(line.summarize("stability"), 1, 3, ""),
                    _format_time(line.outcomes),
                ]
            )
    columns = ["method", "settings", "seeds", quantity, "forgetting, %", "plasticity", "stability", "time"]
    for line in report.lines:
        if is_bound(line.method) and line.complete_outcomes:
            rows.append(
                [
                    f"{line.label} (a bound)",
                    "",
                    str(len(line.complete_outcomes)),
                    spread(line.summarize("average_accuracy"), unit=""),
                    spread(line.summarize("forgetting"), unit=""),
                    "–",
                    "–",
                    _format_time(line.outcomes),
                ]
            )
    alt = "Average accuracy after each task, a line for each method; the values at the end are in the table below."
    section = Section("average", "Average after each task", lead, [Chart("average", "", spec, alt)])
    section.tables = [
        Table(
            ("At the end" if report.finished else "So far") + (", mean ± standard deviation" if seeds > 1 else ""),
            columns,
            rows,
            (0, 1),
        )
    ]
    section.folded_tables = False
    return section


def _format_settings(settings: Mapping[str, Any]) -> str:
    symbols = {"lam": "λ", "mu": "μ", "rho": "ρ"}
    shown = [f"{symbols.get(key, key)} {value}" for key, value in settings.items() if key != "seed"]
    return ", ".join(shown) or "none"


def _format_time(outcomes: Sequence[Outcome]) -> str:
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return format_seconds(_mean(seconds)) if seconds else "–"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Nodes ---------------------------------------------------------------------------------------------------------------


def _make_node_sections(report: ReportData) -> list[Section | None]:
    run = report.detail
    if run is None:
        return []
    whose = "" if report.kind == "run" else f" Shown for {get_title(run.method)}, seed {run.seed} ({run.path.name})."
    if run.nodes is None:
        reason = (
            f"{get_title(run.method)} does not certify nodes, so there is no node map. It is there for AGS-CL."
            if run.certificates
            else "There is no certificate yet: the node map appears when the first task of the method has ended."
        )
        return [Section("nodes", "The node map", reason + whose)]
    history = run.nodes
    return [
        Section(
            "nodes",
            "The node map",
            f"Every cell is one of {history.size:,} nodes. Move the slider to see the network fill up, task by task; "
            f"click a node to see what it reads and who reads it.{whose}",
            tables=[_tabulate_layers(history)],
            has_nodes=True,
        ),
        _make_moved_section(run, history),
        _make_capacity_section(run, history),
    ]


def _tabulate_layers(history: NodeHistory) -> Table:
    tasks = [charts.name_task(history.tasks, task, 10) for task in range(len(history.tasks))]
    rows = []
    for layer, counts in zip(history.layers, count_taken(history), strict=True):
        reads = ", ".join(history.layers[number].name for number in layer.reads) or "the input"
        rows.append([layer.name, reads, f"{len(layer.groups):,}", *(f"{count:,}" for count in counts)])
    return Table(
        "Nodes of each layer by the task that took them", ["layer", "reads", "nodes", *tasks, "free"], rows, (0, 1)
    )


def _make_moved_section(run: RunData, history: NodeHistory) -> Section | None:
    spec = charts.draw_moved(history)
    rows = []
    for number, certificate in enumerate(run.certificates):
        before = len(certificate.held) + len(certificate.moved)
        changed = [*certificate.moved_heads, *(task for task in certificate.changed_outputs)]
        rows.append(
            [
                charts.name_task(history.tasks, number, 24),
                f"{before:,}",
                f"{len(certificate.held):,}",
                f"{len(certificate.moved):,}",
                str(max(0, len(certificate.heads) - 1 - len(certificate.moved_heads))),
                ", ".join(dict.fromkeys(changed)) or "none",
                "for good" if certificate.kind == "guaranteed" and not certificate.moved else "in this task",
            ]
        )
    table = Table(
        "The certificates",
        [
            "while learning",
            "important before",
            "kept every bit",
            "moved",
            "heads unchanged",
            "outputs changed",
            "holds",
        ],
        rows,
        (0, 5, 6),
    )
    moved = sum(one for row in count_moved(history) for one, _ in row)
    lead = (
        "Each cell counts the nodes of one task that moved while a later task was learned. "
        + ("None did: every cell is 0, bit for bit." if not moved else "Orange cells moved; blue ones kept every bit.")
        if spec is not None
        else "Only one task has been learned so far: nothing could move yet."
    )
    notes = [f"{warning}." for warning in run.certificates[-1].warnings]
    notes += [f"{note}." for note in run.certificates[-1].notes]
    section = Section("moved", "What moved between tasks", lead, tables=[table], folded_tables=False, notes=notes)
    if spec is not None:
        alt = "For the nodes of each task, how many moved while each later task was learned."
        section.charts = [Chart("moved", "", spec, alt)]
    return section


def _make_capacity_section(run: RunData, history: NodeHistory) -> Section:
    outcome = run.outcome
    statistics = [one.get("capacity") for one in outcome.statistics] if outcome else []
    last = statistics[-1] if statistics and isinstance(statistics[-1], dict) else None
    left = (last or {}).get("tasks_left")
    lead = "How much of each layer every task has taken."
    if left is not None:
        more = "no further task" if left == 0 else f"{left} more task{'' if left == 1 else 's'}"
        lead += f" With this budget {more} will find free nodes in every layer."
    else:
        lead += " Without a budget there is no forecast of how many more tasks fit."
    alt = "For each layer, the share of nodes that each task took, and the share still free."
    section = Section(
        "capacity", "Capacity", lead, [Chart("capacity", "Taken by task", charts.draw_capacity(history), alt)]
    )
    budget = _find_budget(run)
    layers = (last or {}).get("layers") or []
    known = [one for one in statistics if isinstance(one, dict)]
    if layers and len(known) == len(statistics):
        curves, forecast = _forecast_free(known, budget)
        spec = charts.draw_forecast(curves, forecast, len(statistics))
        alt = "The share of free nodes after each task, and how it goes on with the budget."
        section.charts.append(
            Chart("forecast", "Free nodes, and the forecast (dotted)" if forecast else "Free nodes", spec, alt)
        )
        rows = [
            [
                str(one["layer"]),
                f"{one['nodes']:,}",
                f"{one['taken']:,}",
                f"{one.get('taken_by_last', 0):,}",
                f"{one['free']:,}",
                "–" if one.get("tasks_left") is None else str(one["tasks_left"]),
            ]
            for one in layers
        ]
        section.tables = [
            Table("Capacity of each layer", ["layer", "nodes", "taken", "by the last task", "free", "more tasks"], rows)
        ]
    return section


def _find_budget(run: RunData) -> int | float | None:
    entry = METHODS.get(run.method)
    if entry is None or entry.is_bound or "budget" not in entry.settings:
        return None
    try:
        settings = {key: float(value) if value == "inf" else value for key, value in run.config["settings"].items()}
        budget: int | float | None = entry.method_class.Config(**settings).budget
        return budget
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _forecast_free(
    capacities: Sequence[Mapping[str, Any]], budget: int | float | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The share of free nodes after each task, of all and of the fullest layer; and how the budget goes on."""
    last = capacities[-1]["layers"]
    fullest = min(range(len(last)), key=lambda number: last[number]["free"] / max(1, last[number]["nodes"]))
    total = sum(layer["nodes"] for layer in last)
    name = f"the fullest layer, {last[fullest]['layer']}"
    curves = {
        "all layers": [1.0, *(sum(layer["free"] for layer in one["layers"]) / total for one in capacities)],
        name: [1.0, *(one["layers"][fullest]["free"] / max(1, one["layers"][fullest]["nodes"]) for one in capacities)],
    }
    forecast: dict[str, list[float]] = {}
    if budget is not None:
        free = [layer["free"] for layer in last]
        steps = [list(free)]
        while any(free) and len(steps) <= MAX_FORECAST:
            free = [one - count_kept(one, budget, len(capacities) + len(steps) - 1) if one else 0 for one in free]
            steps.append(list(free))
        forecast = {
            "all layers": [sum(one) / total for one in steps],
            name: [one[fullest] / max(1, last[fullest]["nodes"]) for one in steps],
        }
    return curves, forecast


# Memory and training -------------------------------------------------------------------------------------------------


def _make_memory_section(report: ReportData) -> Section | None:
    rows: list[dict[str, Any]] = []
    lines = [line for line in report.lines if not is_bound(line.method)]  # a bound keeps whole networks, or all data
    for line in lines:
        if line.complete_outcomes and line.complete_outcomes[0].memory:
            kept = line.complete_outcomes[0].memory.get("bytes", 0)
            rows.append({"method": line.label, "bytes": kept, "label": format_bytes(kept), "kind": "measured"})
    weights = max((outcome.weights for line in report.lines for outcome in line.outcomes), default=0)
    if not rows:
        return None
    if weights:
        outline = Outline(weights=Amount(weights, weights * Outline().default_bytes))
        present = {line.method for line in report.lines}
        for name in WEIGHT_WISE:
            if name not in present:
                kept = METHODS[name].forecast_memory(outline, 1).bytes
                rows.append({"method": get_title(name), "bytes": kept, "label": format_bytes(kept), "kind": "forecast"})
    lead = "What each method must keep from one task to the next, beside the network itself."
    if any(row["kind"] == "forecast" for row in rows):
        lead += " Forecasts are for methods that were not run here, on the same network."
    if report.kind == "comparison":
        rows.sort(key=lambda row: row["bytes"])
    columns = ["method", "importances", "anchors", "masks", "other numbers", "bytes"]
    cells = []
    for line in lines:
        if line.complete_outcomes and (memory := line.complete_outcomes[0].memory):
            known = [memory.get(key, 0) for key in ("importances", "anchors", "masks")]
            skipped = {"importances", "anchors", "masks", "bytes", "digests"}
            other = sum(value for key, value in memory.items() if key not in skipped)
            cells.append(
                [
                    line.label,
                    *(f"{value:,}" if value else "–" for value in [*known, other]),
                    format_bytes(memory.get("bytes", 0)),
                ]
            )
    section = Section("memory", "Memory between tasks", lead)
    section.charts = [Chart("memory", "", charts.draw_memory(rows), "Bytes that each method keeps between tasks.")]
    section.tables = [Table("Numbers kept between tasks", columns, cells)]
    return section


def _make_curves_section(report: ReportData) -> Section | None:
    outcomes: dict[str, Outcome] = {}
    if report.kind == "run":
        outcomes = {line.label: line.outcomes[0] for line in report.lines}
    else:
        outcomes = {line.label: line.outcomes[0] for line in report.lines if line.outcomes[0].losses}
    outcomes = {label: outcome for label, outcome in outcomes.items() if outcome.losses}
    if not outcomes or report.is_score:
        return None
    spec = charts.draw_losses(report, outcomes, charts.color_lines(report.lines))
    if spec is None:
        return None
    lead = "The loss while each task was learned."
    if report.kind != "run":
        lead += " The first seed of each method."
    rows = [
        [label, charts.name_task(report.tasks, task, 24), str(len(row)), f"{row[0]:.3g}", f"{row[-1]:.3g}"]
        for label, outcome in outcomes.items()
        for task, row in enumerate(outcome.losses)
        if row
    ]
    section = Section("curves", "Training", lead)
    section.charts = [Chart("losses", "", spec, "The loss of each method over all epochs of all tasks.")]
    section.tables = [Table("Loss of each task", ["method", "task", "epochs", "first", "last"], rows, (0, 1))]
    return section


# Studies, agents, provenance -----------------------------------------------------------------------------------------

STUDY_TITLES = {
    "aopc": "Do importances show which nodes matter?",
    "reinit": "Without the re-initialisations",
    "tradeoff": "Plasticity and stability over λ",
    "rho": "The share ρ of free nodes with fresh weights",
    "prox": "Without proximal steps",
}


def _make_studies_sections(report: ReportData) -> list[Section]:
    made = []
    for study in report.studies:
        name = str(study.get("study"))
        title = STUDY_TITLES.get(name, f"Study {name}")
        try:
            section = _make_aopc_section(study, title) if name == "aopc" else _make_study_section(study, name, title)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
            section = Section(f"study-{name}", title, f"{name}.json cannot be shown: {error!r}.")
        made.append(section)
    return made


def _make_aopc_section(study: Mapping[str, Any], title: str) -> Section:
    spec = charts.draw_aopc(study)
    lead = (
        "Nodes are pruned one after the other, the most important first, the least important first, or at random. "
        "Where importance is right, pruning the most important first hurts at once."
    )
    section = Section("study-aopc", title, lead)
    if spec is not None:
        section.charts = [Chart("aopc", "", spec, "Accuracy against the share of nodes pruned, in several orders.")]
    rows = []
    for seed, measured in study.get("seeds", {}).items():
        for after, curves in measured["after"].items():
            pruned = curves["pruned"]
            ends = [
                min(range(len(pruned)), key=lambda end: abs(pruned[end] - share * pruned[-1]))
                for share in (0.1, 0.25, 0.5, 1.0)
            ]
            for order, aopc in curves["aopc"].items():
                rows.append([str(order), str(after), str(seed), *(f"{100 * aopc[end]:.1f}" for end in ends)])
    columns = ["pruned first", "after task", "seed", "10 %", "25 %", "50 %", "100 %"]
    section.tables = [Table("AOPC: mean accuracy lost, in points, up to a share of nodes pruned", columns, rows)]
    return section


def _make_study_section(study: Mapping[str, Any], name: str, title: str) -> Section:
    lead = "AGS-CL in its paper's form, whole and with one part changed; the mean over seeds."
    section = Section(f"study-{name}", title, lead)
    if (spec := charts.draw_study(study)) is not None:
        section.charts = [Chart(f"study-{name}", "", spec, f"Average accuracy of each line of the study {name}.")]
    rows = [
        [
            str(line["label"]),
            str(len(line.get("seeds", ()))),
            *(
                spread(_summary(line.get(key)), scale, digits, "")
                for key, scale, digits in (
                    ("average_accuracy", 100, 1),
                    ("forgetting", 100, 1),
                    ("plasticity", 1, 3),
                    ("stability", 1, 3),
                )
            ),
        ]
        for line in study.get("lines", ())
    ]
    columns = ["line", "seeds", "average accuracy, %", "forgetting, %", "plasticity", "stability"]
    section.tables = [Table("Mean ± standard deviation", columns, rows)]
    return section


def _summary(value: Any) -> dict[str, float | None]:
    value = value if isinstance(value, dict) else {}
    return {"mean": value.get("mean"), "deviation": value.get("deviation")}


def _make_games_sections(report: ReportData) -> list[Section]:
    if not report.is_score:
        return []
    section = Section(
        "games",
        "Game by game",
        "The score on every environment at every evaluation. The coloured band is when it was learned; what the curve "
        "does after it is remembering or forgetting."
        + (
            " Thin lines are seeds, thick ones their mean." if any(len(line.seeds) > 1 for line in report.lines) else ""
        ),
    )
    for task in range(len(report.tasks)):
        spec = charts.draw_game(report, task, report.lines)
        if spec is not None:
            name = charts.name_task(report.tasks, task, 40)
            name = f"task {name}" if name.isdecimal() else name
            section.charts.append(Chart(f"game-{task + 1}", name, spec, f"Scores on {name} over all tasks.", 300, True))
    return [section] if section.charts else []


def _make_provenance_section(report: ReportData) -> Section:
    run = report.detail
    section = Section("provenance", "Where this comes from", "Everything needed to run it again, and to check it.")
    rows: list[list[str]] = []
    if report.source:
        machine = report.source.get("machine") or {}
        rows += [["commit", str(report.source.get("commit", "–"))]]
        rows += [[str(key), str(value)] for key, value in machine.items()] if isinstance(machine, dict) else []
        if "command" in report.source:
            section.code.append(("The command", str(report.source["command"])))
    if report.command:
        section.code.append(("The command", report.command))
    if run is not None:
        environment = run.environment
        names = {
            "agscl": "agscl",
            "commit": "commit",
            "torch": "torch",
            "python": "Python",
            "machine": "machine",
            "gpu": "GPU",
            "threads": "CPU threads",
        }
        rows += [[label, str(environment[key])] for key, label in names.items() if environment.get(key) is not None]
        rows += [["device", str(run.config["device"])]] if "device" in run.config else []
        rows += [["seed", str(run.seed)], ["folder", str(run.path)]]
        if run.digest:
            rows.append(["digest", run.digest])
            section.code.append(("Check it", f"agscl verify {run.path.name} --expect {run.digest}"))
        section.code.append(("Configuration", json.dumps(run.config, indent=2, ensure_ascii=False, default=str)))
        if run.verification is not None:
            section.code.append(("What agscl verify said", "\n".join(run.verification["lines"])))
    if rows:
        section.tables = [Table("Versions and machine", ["", ""], rows, (0, 1))]
        section.folded_tables = False
    return section


__all__ = ["Chart", "Section", "Table", "make_sections", "percent"]
