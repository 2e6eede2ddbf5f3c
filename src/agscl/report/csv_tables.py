"""The numbers of a report as CSV files: one file for each kind, one row for each number."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agscl.certificate import NEVER
from agscl.report.report_data import Outcome, ReportData, RunData, get_title, measure_outcome
from agscl.system.files import write_atomically

Row = dict[str, Any]


def list_rows(report: ReportData) -> dict[str, list[Row]]:
    """The rows of every CSV file, by its name; files without rows are left out."""
    tables = {
        "accuracies": _list_accuracies(report),
        "metrics": _list_metrics(report),
        "losses": _list_losses(report),
        "evaluations": _list_evaluations(report),
        "memory": _list_memory(report),
        "nodes": _list_nodes(report),
        "moved": _list_moved(report),
    }
    found = {name: list(rows) for name, rows in tables.items()}
    return {name: rows for name, rows in found.items() if rows}


def write_tables(report: ReportData, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in list_rows(report).items():
        text = io.StringIO()
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([{key: _guard(value) for key, value in row.items()} for row in rows])
        path = folder / f"{name}.csv"
        write_atomically(path, text.getvalue().encode())
        written.append(path)
    return written


def _guard(value: Any) -> Any:
    """A name that a spreadsheet would run as a formula gets an apostrophe, as spreadsheets themselves do."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "@", "\t", "\r") else value


def _each(report: ReportData) -> Iterator[tuple[Row, Outcome]]:
    for line in report.lines:
        for seed, outcome in zip(line.seeds, line.outcomes, strict=True):
            yield {"method": line.label, "seed": seed}, outcome


def _head_of(report: ReportData, run: RunData) -> Row:
    """The method and seed of the run whose nodes and certificates are listed, as in the other files."""

    def without_seed(settings: Any) -> Row:
        return {key: value for key, value in settings.items() if key != "seed"} if isinstance(settings, dict) else {}

    settings = without_seed(run.config.get("settings"))
    lines = [line for line in report.lines if line.method == run.method and without_seed(line.settings) == settings]
    return {"method": lines[0].label if lines else get_title(run.method), "seed": run.seed}


def _name(report: ReportData, task: int) -> str:
    return report.tasks[task] if task < len(report.tasks) else f"task {task + 1}"


def _list_accuracies(report: ReportData) -> Iterator[Row]:
    for head, outcome in _each(report):
        for after, row in enumerate(outcome.accuracies):
            for task, accuracy in enumerate(row):
                place = {"after": after + 1, "task": task + 1, "name": _name(report, task)}
                score = {"score": outcome.scores[after][task]} if after < len(outcome.scores) else {}
                yield {**head, **place, "accuracy": accuracy, **score}


def _list_metrics(report: ReportData) -> Iterator[Row]:
    for head, outcome in _each(report):
        if outcome.accuracies:
            names = ("average_accuracy", "forgetting", "plasticity", "stability", "accumulated_reward")
            yield {**head, **{name: measure_outcome(outcome, name) for name in names}, "seconds": outcome.seconds}


def _list_losses(report: ReportData) -> Iterator[Row]:
    for head, outcome in _each(report):
        for kind, rows in (("training", outcome.losses), ("validation", outcome.valid_losses)):
            for task, row in enumerate(rows):
                for epoch, loss in enumerate(row):
                    yield {**head, "kind": kind, "task": task + 1, "epoch": epoch + 1, "loss": loss}


def _list_evaluations(report: ReportData) -> Iterator[Row]:
    for head, outcome in _each(report):
        for one in outcome.evaluations:
            for task, score in enumerate(one.get("scores") or ()):
                learning = {"learning": (one.get("task") or 0) + 1, "steps": one.get("steps")}
                yield {**head, **learning, "task": task + 1, "name": _name(report, task), "score": score}


def _list_memory(report: ReportData) -> Iterator[Row]:
    for head, outcome in _each(report):
        if outcome.memory:
            yield {**head, **outcome.memory}


def _list_nodes(report: ReportData) -> Iterator[Row]:
    """One row for each node: when it became important, how often it moved, its importance after each task."""
    run = report.detail
    if run is None or (history := run.nodes) is None:
        return
    head = _head_of(report, run)
    moves: dict[int, int] = {}
    for moved in history.moved:
        for group in moved:
            moves[int(group)] = moves.get(int(group), 0) + 1
    for layer in history.layers:
        for number, group in enumerate(layer.groups):
            since = int(history.first[group])
            row: Row = {
                **head, "layer": layer.name, "node": number, "important_since": "" if since == NEVER else since + 1,
                "tasks_moved_in": moves.get(int(group), 0),
            }  # fmt: skip
            if history.importance is not None:
                row |= {
                    f"importance_{task + 1}": f"{value:.6g}" for task, value in enumerate(history.importance[:, group])
                }
            yield row


def _list_moved(report: ReportData) -> Iterator[Row]:
    if (run := report.detail) is None:
        return
    head = _head_of(report, run)
    for number, certificate in enumerate(run.certificates):
        yield {
            **head, "task": number + 1, "name": certificate.task, "kind": certificate.kind,
            "important": len(certificate.important), "kept": len(certificate.held), "moved": len(certificate.moved),
            "heads_moved": len(certificate.moved_heads), "outputs_changed": len(certificate.changed_outputs),
        }  # fmt: skip
