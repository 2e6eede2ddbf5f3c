"""The charts of a page, as Vega-Lite specifications: plain dicts, data included."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from agscl.report.node_history import NodeHistory, count_moved, count_taken
from agscl.report.report_data import Line, Outcome, ReportData
from agscl.report.vega import INK, Spec

METHOD_COLORS = {"agscl": "#0072b2", "paper-agscl": "#3aa0d8", "finetune": "#d55e00", "joint": "#6b7280"}
OTHER_COLORS = (
    "#009e73",
    "#cc79a7",
    "#c98500",
    "#5d3a9b",
    "#8c564b",
    "#117733",
    "#882255",
    "#44aa99",
    "#999933",
    "#7f7f7f",
)
DASHES = ([1, 0], [5, 3], [2, 2])
HEAT = ["#f6e7d8", "#c4d5e3", "#7fadd0", "#3d7fb5", "#0d4a80"]
"""From light to dark in print too; sand to blue is told apart by colour-blind people."""
TASK_RAMP = ("#5b3f99", "#4d5aa8", "#3f74ae", "#3089ad", "#279da4", "#2fb08f", "#53c26f", "#8fcf4d", "#f2d93b")
"""Even steps from dark to light, for tasks in their order."""
FREE_COLOR = "#d9dce1"
MOVED_COLOR = "#d55e00"
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MAX_LABELLED = 12
"""Matrices of more tasks have no numbers in their cells."""
MAX_POINTS = 400
"""Points of a curve of training; longer ones are averaged."""


def make_spec(height: int, values: Sequence[Mapping[str, Any]], **parts: Any) -> Spec:
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)},
        **parts,
    }


def color_tasks(count: int) -> list[str]:
    """A colour for each task, from dark to light: perceptually even, told apart by colour-blind people."""
    if count == 1:
        return [TASK_RAMP[2]]
    colors = []
    for index in range(count):
        position = index / (count - 1) * (len(TASK_RAMP) - 1)
        low = min(int(position), len(TASK_RAMP) - 2)
        colors.append(_mix(TASK_RAMP[low], TASK_RAMP[low + 1], position - low))
    return colors


def _mix(first: str, second: str, share: float) -> str:
    def read(color: str) -> list[int]:
        return [int(color[start : start + 2], 16) for start in (1, 3, 5)]

    mixed = [round(a + (b - a) * share) for a, b in zip(read(first), read(second), strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def color_lines(lines: Sequence[Line]) -> dict[str, str]:
    """A colour for each label: the same method has the same colour on every page."""
    colors: dict[str, str] = {}
    free = list(OTHER_COLORS)
    for line in lines:
        color = METHOD_COLORS.get(line.method)
        if color is None or color in colors.values():
            unused = [color for color in free if color not in colors.values()]
            color = unused[0] if unused else free[len(colors) % len(free)]
        colors[line.label] = color
    return colors


def _line_scale(labels: Sequence[str], colors: Mapping[str, str]) -> dict[str, Any]:
    legend = {"orient": "bottom", "title": None, "columns": 4, "symbolOpacity": 1} if len(labels) > 1 else None
    dashes = [DASHES[min(number // 8, len(DASHES) - 1)] for number in range(len(labels))]
    return {
        "color": {
            "field": "line",
            "type": "nominal",
            "sort": list(labels),
            "legend": legend,
            "scale": {"domain": list(labels), "range": [colors[label] for label in labels]},
        },
        "strokeDash": {
            "field": "line",
            "type": "nominal",
            "sort": list(labels),
            "legend": legend,
            "scale": {"domain": list(labels), "range": dashes},
        },
    }


PICK = {"name": "pick", "select": {"type": "point", "fields": ["line"]}, "bind": "legend"}
FADE = {"condition": {"param": "pick", "value": 1}, "value": 0.12}


# Accuracies ----------------------------------------------------------------------------------------------------------


def draw_matrix(line: Line, tasks: Sequence[str], *, is_score: bool) -> Spec | None:
    """The accuracy on each task after each task, the mean over seeds, as a heat map."""
    outcomes = line.complete_outcomes
    if not outcomes:
        return None
    count, values = len(outcomes[0].accuracies), []
    for after in range(count):
        for task in range(after + 1):
            accuracy = statistics.mean(outcome.accuracies[after][task] for outcome in outcomes)
            row = {
                "task": name_task(tasks, task),
                "after": name_task(tasks, after),
                "value": round(accuracy, 5),
                "label": f"{100 * accuracy:.0f}",
            }
            if all(len(outcome.scores) > after for outcome in outcomes):
                score = statistics.mean(outcome.scores[after][task] for outcome in outcomes)
                row["score"], row["label"] = format_score(score), _shorten_score(score)
            values.append(row)
    names = [name_task(tasks, task) for task in range(count)]
    labels_on = count <= MAX_LABELLED
    quantity = "relative score" if is_score else "accuracy"
    tooltip = [
        {"field": "after", "title": "after learning"},
        {"field": "task", "title": "on task"},
        {"field": "value", "title": quantity, "format": ".1%"},
        *([{"field": "score", "title": "score"}] if "score" in values[0] else []),
    ]
    cells: Spec = {
        "mark": {"type": "rect", "stroke": "#ffffff", "strokeWidth": 1 if labels_on else 0, "strokeOpacity": 0.6},
        "encoding": {
            "color": {
                "field": "value",
                "type": "quantitative",
                "legend": None,
                "scale": {"domain": [0, 1], "range": HEAT, "clamp": True, "interpolate": "rgb"},
            },
            "tooltip": tooltip,
        },
    }
    layers: list[Spec] = [cells]
    if labels_on:
        layers.append(
            {
                "mark": {"type": "text", "fontSize": 12 if count <= (6 if is_score else 8) else 10},
                "encoding": {
                    "text": {"field": "label"},
                    "color": {"condition": {"test": "datum.value > 0.55", "value": "#ffffff"}, "value": "#10202e"},
                },
            }
        )
    height = max(90, min(420, count * (34 if count <= 6 else 26 if count <= MAX_LABELLED else 8)))
    return make_spec(
        height,
        values,
        encoding={
            "x": {
                "field": "task",
                "type": "nominal",
                "sort": names,
                "title": f"{quantity} on task",
                "axis": _name_columns(names),
            },
            "y": {
                "field": "after",
                "type": "nominal",
                "sort": names,
                "title": "after learning",
                "axis": _name_rows(names),
            },
        },
        layer=layers,
    )


def draw_average(report: ReportData) -> Spec | None:
    """The average accuracy after each task; bands are one standard deviation over seeds."""
    values: list[dict[str, Any]] = []
    labels = []
    for line in report.lines:
        outcomes = line.complete_outcomes
        if not outcomes:
            continue
        labels.append(line.label)
        for after in range(len(outcomes[0].accuracies)):
            averages = [statistics.mean(outcome.accuracies[after]) for outcome in outcomes]
            mean = statistics.mean(averages)
            wide = statistics.stdev(averages) if len(averages) > 1 else 0.0
            values.append(
                {
                    "line": line.label,
                    "task": after + 1,
                    "name": name_task(report.tasks, after),
                    "mean": round(mean, 5),
                    "low": round(max(0.0, mean - wide), 5),
                    "high": round(min(mean + wide, max(1.0, mean)), 5),
                    "seeds": len(outcomes),
                }
            )
    if not values:
        return None
    quantity = "average relative score" if report.is_score else "average accuracy"
    x = {
        "field": "task",
        "type": "quantitative",
        "title": "tasks learned",
        "axis": {"values": _choose_ticks(max(row["task"] for row in values)), "format": "d", "grid": False},
        "scale": {"nice": False, "padding": 8},
    }
    lowest, highest = min(row["low"] for row in values), max(row["high"] for row in values)
    y_scale = {"domain": [math.floor(lowest * 10) / 10, math.ceil(highest * 10) / 10 if highest <= 1 else highest]}
    y = {"type": "quantitative", "axis": {"format": ".0%", "tickCount": 6}, "scale": y_scale}
    scales = _line_scale(labels, color_lines(report.lines))
    layers: list[Spec] = []
    if any(row["seeds"] > 1 for row in values):
        layers.append(
            {
                "mark": {"type": "area", "opacity": 0.16},
                "encoding": {
                    "x": x,
                    "y": {**y, "field": "low", "title": quantity},
                    "y2": {"field": "high"},
                    "color": scales["color"],
                    "opacity": {**FADE, "condition": {"param": "pick", "value": 0.16}, "value": 0.03},
                },
            }
        )
    layers.append(
        {
            "params": [PICK],
            "mark": {"type": "line", "strokeWidth": 2.2, "point": {"filled": True, "size": 36}},
            "encoding": {
                "x": x,
                "y": {**y, "field": "mean", "title": quantity},
                **scales,
                "opacity": FADE,
                "tooltip": [
                    {"field": "line", "title": "method"},
                    {"field": "name", "title": "after task"},
                    {"field": "mean", "title": quantity, "format": ".1%"},
                    {"field": "seeds", "title": "seeds"},
                ],
            },
        }
    )
    return make_spec(300, values, layer=layers)


# Nodes ---------------------------------------------------------------------------------------------------------------


def draw_moved(history: NodeHistory) -> Spec | None:
    """For the nodes of each task, how many each later task changed."""
    values = []
    for later, row in enumerate(count_moved(history)):
        for since, (moved, total) in enumerate(row):
            if total:
                values.append(
                    {
                        "since": name_task(history.tasks, since),
                        "while": name_task(history.tasks, later),
                        "moved": moved,
                        "total": total,
                        "share": round(moved / total, 5),
                        "label": str(moved) if moved else "0",
                        "kept": total - moved,
                    }
                )
    if not values:
        return None
    count = len(history.tasks)
    names = [name_task(history.tasks, task) for task in range(count)]
    layers: list[Spec] = [
        {
            "mark": {
                "type": "rect",
                "stroke": "#ffffff",
                "strokeWidth": 1 if count <= MAX_LABELLED else 0,
                "strokeOpacity": 0.6,
            },
            "encoding": {
                "color": {
                    "field": "share",
                    "type": "quantitative",
                    "legend": None,
                    "scale": {"domain": [0, 0.001, 1], "range": ["#cfe3f1", "#fbd9b5", MOVED_COLOR]},
                },
                "tooltip": [
                    {"field": "since", "title": "nodes important since"},
                    {"field": "while", "title": "while learning"},
                    {"field": "kept", "title": "kept every bit"},
                    {"field": "moved", "title": "moved"},
                    {"field": "total", "title": "of"},
                ],
            },
        }
    ]
    if count <= MAX_LABELLED:
        layers.append(
            {
                "mark": {"type": "text"},
                "encoding": {
                    "text": {"field": "label"},
                    "color": {"condition": {"test": "datum.share > 0.6", "value": "#ffffff"}, "value": "#1b3a52"},
                },
            }
        )
    height = max(80, min(420, (count - 1) * (34 if count <= 6 else 26 if count <= MAX_LABELLED else 8)))
    return make_spec(
        height,
        values,
        encoding={
            "x": {
                "field": "while",
                "type": "nominal",
                "sort": names[1:],
                "title": "while learning task",
                "axis": _name_columns(names),
            },
            "y": {
                "field": "since",
                "type": "nominal",
                "sort": names[:-1],
                "title": "nodes since task",
                "axis": _name_rows(names),
            },
        },
        layer=layers,
    )


def draw_capacity(history: NodeHistory) -> Spec:
    """What each task has taken of each layer, and what is free."""
    values = []
    tasks = [name_task(history.tasks, task) for task in range(len(history.tasks))]
    for layer, counts in zip(history.layers, count_taken(history), strict=True):
        for number, count in enumerate(counts):
            owner = tasks[number] if number < len(tasks) else "free"
            if count:
                values.append(
                    {
                        "layer": layer.name,
                        "owner": owner,
                        "order": number,
                        "nodes": count,
                        "share": count / len(layer.groups),
                        "of": len(layer.groups),
                    }
                )
    domain, colors = [*tasks, "free"], [*color_tasks(len(tasks)), FREE_COLOR]
    few = len(tasks) <= MAX_LABELLED
    return make_spec(
        (26 if len(history.layers) <= 24 else 12) * len(history.layers),
        values,
        mark={"type": "bar", "stroke": "#ffffff", "strokeWidth": 0.6 if few else 0},
        encoding={
            "y": {
                "field": "layer",
                "type": "nominal",
                "sort": [layer.name for layer in history.layers],
                "title": None,
                "axis": {"ticks": False, "domain": False, "labelLimit": 130},
            },
            "x": {
                "field": "share",
                "type": "quantitative",
                "stack": "zero",
                "title": "share of the layer's nodes",
                "axis": {"format": ".0%", "tickCount": 5},
                "scale": {"domain": [0, 1], "nice": False},
            },
            "order": {"field": "order"},
            "color": {
                "field": "owner",
                "type": "nominal",
                "sort": domain,
                "scale": {"domain": domain, "range": colors},
                "legend": {
                    "orient": "bottom",
                    "title": None,
                    "columns": 6,
                    "symbolType": "square",
                    "symbolStrokeWidth": 0,
                }
                if few
                else None,
            },
            "tooltip": [
                {"field": "layer"},
                {"field": "owner", "title": "taken by"},
                {"field": "nodes"},
                {"field": "of", "title": "of"},
            ],
        },
    )


def draw_forecast(curves: Mapping[str, Sequence[float]], forecast: Mapping[str, Sequence[float]], learned: int) -> Spec:
    """The share of free nodes after each task: measured, then what the budget leaves."""
    values: list[Spec] = [
        {"line": name, "task": learned - len(curve) + 1 + index, "free": round(share, 5), "kind": "measured"}
        for name, curve in curves.items()
        for index, share in enumerate(curve)
    ]
    values += [
        {"line": name, "task": learned + index, "free": round(share, 5), "kind": "forecast"}
        for name, curve in forecast.items()
        for index, share in enumerate(curve)
    ]
    labels = list(curves)
    colors = dict(zip(labels, ("#0072b2", "#c98500"), strict=False))
    return make_spec(
        220,
        values,
        mark={"type": "line", "strokeWidth": 2.2, "point": {"size": 30}},
        encoding={
            "x": {
                "field": "task",
                "type": "quantitative",
                "title": "tasks learned",
                "axis": {"values": _choose_ticks(max(row["task"] for row in values), 0), "format": "d", "grid": False},
                "scale": {"nice": False, "padding": 8},
            },
            "y": {
                "field": "free",
                "type": "quantitative",
                "title": "nodes still free",
                "axis": {"format": ".0%", "tickCount": 5},
                "scale": {"domain": [0, 1]},
            },
            "color": {
                "field": "line",
                "type": "nominal",
                "sort": labels,
                "legend": {"orient": "bottom", "title": None, "columns": 2},
                "scale": {"domain": labels, "range": [colors[label] for label in labels]},
            },
            "strokeDash": {
                "field": "kind",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": ["measured", "forecast"], "range": [[1, 0], [4, 3]]},
            },
            "tooltip": [
                {"field": "line", "title": "where"},
                {"field": "task", "title": "tasks learned"},
                {"field": "free", "format": ".1%"},
                {"field": "kind", "title": ""},
            ],
        },
    )


# Memory and training -------------------------------------------------------------------------------------------------


def draw_memory(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """Bytes that methods keep between tasks; rows have method, bytes, label and kind."""
    names = [row["method"] for row in rows]
    kinds = [kind for kind in ("measured", "forecast") if any(row["kind"] == kind for row in rows)]
    return make_spec(
        26 * len(rows),
        rows,
        encoding={
            "y": {
                "field": "method",
                "type": "nominal",
                "sort": names,
                "title": None,
                "axis": {"ticks": False, "domain": False},
            },
            "x": {
                "field": "bytes",
                "type": "quantitative",
                "title": "kept between tasks",
                "axis": {"labelExpr": "format(datum.value, '~s') + 'B'", "tickCount": 5},
                "scale": {"domainMax": 1.35 * max(1, *(row["bytes"] for row in rows))},
            },
            "tooltip": [{"field": "method"}, {"field": "label", "title": "kept"}, {"field": "kind", "title": ""}],
        },
        layer=[
            {
                "mark": {"type": "bar", "height": 16, "cornerRadiusEnd": 3},
                "encoding": {
                    "color": {
                        "field": "kind",
                        "type": "nominal",
                        "sort": ["measured", "forecast"],
                        "legend": {"orient": "bottom", "title": None, "symbolType": "square", "symbolStrokeWidth": 0},
                        "scale": {"domain": kinds, "range": ["#0072b2", "#9aa7b4"][: len(kinds)]},
                    }
                },
            },
            {"mark": {"type": "text", "align": "left", "dx": 5}, "encoding": {"text": {"field": "label"}}},
        ],
    )


def draw_losses(report: ReportData, outcomes: Mapping[str, Outcome], colors: Mapping[str, str]) -> Spec | None:
    """The training loss over all tasks, one after the other."""
    values = []
    for label, outcome in outcomes.items():
        for kind, rows in (("training", outcome.losses), ("validation", outcome.valid_losses)):
            for task, row in enumerate(rows):
                for position, loss in shorten_curve(row, max(2, MAX_POINTS // max(1, len(rows)))):
                    values.append(
                        {
                            "line": label,
                            "kind": kind,
                            "x": round(task + position, 4),
                            "loss": max(1e-6, float(f"{loss:.4g}")),
                            "task": name_task(report.tasks, task),
                        }
                    )
    if not values:
        return None
    count = max(len(outcome.losses) for outcome in outcomes.values())
    labels = list(outcomes)
    scales = _line_scale(labels, colors)
    del scales["strokeDash"]
    has_validation = any(row["kind"] == "validation" for row in values)
    if has_validation:
        scales["strokeDash"] = {
            "field": "kind",
            "type": "nominal",
            "legend": {"orient": "bottom", "title": None, "symbolStrokeColor": "#7d8590"},
            "scale": {"domain": ["training", "validation"], "range": [[1, 0], [3, 3]]},
        }
    return make_spec(
        260,
        values,
        params=[PICK],
        mark={"type": "line", "strokeWidth": 1.5, "interpolate": "linear"},
        encoding={
            "x": _task_axis(count, report.tasks),
            "y": {
                "field": "loss",
                "type": "quantitative",
                "title": "loss, on a logarithmic scale",
                "scale": {"type": "log"},
                "axis": {"tickCount": 5, "format": "~g"},
            },
            "detail": [{"field": "task"}, {"field": "kind"}],
            **scales,
            "opacity": FADE,
            "tooltip": [
                {"field": "line", "title": "method"},
                {"field": "task"},
                {"field": "kind", "title": ""},
                {"field": "loss", "format": ".3g"},
            ],
        },
    )


def shorten_curve(row: Sequence[float], points: int) -> list[tuple[float, float]]:
    """A curve in a chart: positions within the task (0 to 1) and values; a long one is averaged in `points` parts."""
    if len(row) <= points:
        return [((index + 1) / len(row), value) for index, value in enumerate(row)]
    bounds = [round(index * len(row) / points) for index in range(points + 1)]
    return [(end / len(row), statistics.mean(row[start:end])) for start, end in itertools.pairwise(bounds)]


def _task_axis(count: int, tasks: Sequence[str]) -> Spec:
    """An axis on which task t lies from t to t + 1, with its name or number in the middle."""
    every = max(1, math.ceil(count / 12))
    names = [name_task(tasks, task) for task in range(count)]
    names = names if _fit_below(names) else [str(task + 1) for task in range(count)]
    labels = " : ".join(
        [*(f"datum.value == {task + 0.5} ? {_quote(names[task])}" for task in range(0, count, every)), "''"]
    )
    return {
        "field": "x",
        "type": "quantitative",
        "title": "task being learned",
        "scale": {"domain": [0, count], "nice": False},
        "axis": {
            "values": [*range(count + 1), *(task + 0.5 for task in range(0, count, every))],
            "labelExpr": labels,
            "grid": True,
            "ticks": False,
            "labelOverlap": False,
            "labelFlush": False,
            "gridOpacity": {"condition": {"test": "datum.value % 1 == 0", "value": 0.22}, "value": 0},
        },
    }


def _quote(text: str) -> str:
    """A string of Vega's expression language."""
    return (
        "'"
        + "".join(
            character
            if character.isalnum() or character in " ._-"
            else f"\\u{ord(character):04x}"
            if ord(character) < 0x10000
            else "?"
            for character in text
        )
        + "'"
    )


def draw_game(report: ReportData, task: int, lines: Sequence[Line]) -> Spec | None:
    """The score on one environment at every evaluation, over all tasks; the band is when it was learned."""
    values = []
    for line in lines:
        for seed, outcome in zip(line.seeds, line.outcomes, strict=True):
            longest = max((float(one.get("steps") or 0) for one in outcome.evaluations), default=0) or 1
            for one in outcome.evaluations:
                scores = one.get("scores") or []
                if task < len(scores) and isinstance(one.get("task"), int):
                    values.append(
                        {
                            "line": line.label,
                            "x": round(one["task"] + (one.get("steps") or 0) / longest, 4),
                            "score": scores[task],
                            "seed": str(seed),
                        }
                    )
    if not values:
        return None
    labels = [line.label for line in lines]
    scales = _line_scale(labels, color_lines(report.lines))
    del scales["strokeDash"]
    count = len(report.tasks)
    y = {"field": "score", "type": "quantitative", "title": "score", "scale": {"zero": False}, "axis": {"tickCount": 4}}
    several = any(len(line.seeds) > 1 for line in lines)
    layers: list[Spec] = [
        {
            "data": {"values": [{"from": task, "to": task + 1}]},
            "mark": {"type": "rect", "color": "#c98500", "opacity": 0.14},
            "encoding": {"x": {**_task_axis(count, report.tasks), "field": "from"}, "x2": {"field": "to"}},
        },
        {
            "mark": {"type": "line", "strokeWidth": 1 if several else 1.8, "opacity": 0.35 if several else 1},
            "encoding": {
                "x": _task_axis(count, report.tasks),
                "y": y,
                "detail": {"field": "seed"},
                **scales,
                "tooltip": [{"field": "line", "title": "method"}, {"field": "seed"}, {"field": "score"}],
            },
        },
    ]
    if several:
        layers.append(
            {
                "mark": {"type": "line", "strokeWidth": 2.4},
                "encoding": {"x": _task_axis(count, report.tasks), "y": {**y, "aggregate": "mean"}, **scales},
            }
        )
    return make_spec(150, values, layer=layers)


# Studies -------------------------------------------------------------------------------------------------------------


def draw_aopc(study: Mapping[str, Any]) -> Spec | None:
    """Accuracy against the share of nodes pruned, in the order of importance and in others; the mean over seeds."""
    sums: dict[tuple[str, str, float], list[float]] = {}
    for seed in study.get("seeds", {}).values():
        for after, curves in seed.get("after", {}).items():
            pruned = curves["pruned"]
            for order, scores in curves["scores"].items():
                for count, score in zip(pruned, scores, strict=False):
                    sums.setdefault((f"after task {after}", order, round(count / pruned[-1], 4)), []).append(score)
    values: list[Spec] = [
        {"after": after, "line": order, "pruned": pruned, "accuracy": round(statistics.mean(scores), 5)}
        for (after, order, pruned), scores in sums.items()
    ]
    if not values:
        return None
    last = values[-1]["after"]
    values = [row for row in values if row["after"] == last]
    labels = list(dict.fromkeys(row["line"] for row in values))
    colors = dict(zip(labels, ("#0072b2", "#d55e00", "#3aa0d8", "#c98500", "#7f7f7f"), strict=False))
    return make_spec(
        260,
        values,
        params=[PICK],
        mark={"type": "line", "strokeWidth": 2},
        encoding={
            "x": {
                "field": "pruned",
                "type": "quantitative",
                "title": f"share of nodes pruned, {last}",
                "axis": {"format": ".0%", "grid": False},
            },
            "y": {"field": "accuracy", "type": "quantitative", "title": "average accuracy", "axis": {"format": ".0%"}},
            **_line_scale(labels, {**dict.fromkeys(labels, INK), **colors}),
            "opacity": FADE,
            "tooltip": [
                {"field": "line", "title": "pruned first"},
                {"field": "pruned", "format": ".0%"},
                {"field": "accuracy", "format": ".1%"},
            ],
        },
    )


def draw_study(study: Mapping[str, Any]) -> Spec | None:
    """Average accuracy of each line of a study, with one standard deviation."""
    values = []
    for line in study.get("lines", ()):
        summary = line.get("average_accuracy", {})
        if (mean := summary.get("mean")) is not None:
            wide = summary.get("deviation") or 0.0
            values.append({"line": line.get("label"), "mean": mean, "low": mean - wide, "high": mean + wide})
    if not values:
        return None
    y = {
        "field": "line",
        "type": "nominal",
        "sort": [row["line"] for row in values],
        "title": None,
        "axis": {"ticks": False, "domain": False, "labelLimit": 220},
    }
    x = {"type": "quantitative", "title": "average accuracy", "axis": {"format": ".0%"}, "scale": {"zero": False}}
    return make_spec(
        24 * len(values),
        values,
        layer=[
            {
                "mark": {"type": "rule", "strokeWidth": 2, "color": "#9aa7b4"},
                "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70, "color": "#0072b2"},
                "encoding": {
                    "y": y,
                    "x": {**x, "field": "mean"},
                    "tooltip": [{"field": "line", "title": ""}, {"field": "mean", "format": ".1%"}],
                },
            },
        ],
    )


def _choose_ticks(count: int, first: int = 1) -> list[int]:
    """The numbers of tasks that an axis names: all, or every second, fifth, …"""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**6) if count / step <= 16)
    return [number for number in range(first, count + 1) if number % step == 0 or number == first]


def _name_columns(names: Sequence[str]) -> Spec:
    """The axis below a matrix: tasks by name, or by number where the names would overlap."""
    axis: Spec = {"labelAngle": 0, "labelOverlap": True, "domain": False, "ticks": False, "orient": "bottom"}
    return axis if _fit_below(names) else axis | {"labelExpr": NUMBER_ONLY}


def _name_rows(names: Sequence[str]) -> Spec:
    axis: Spec = {"labelOverlap": True, "domain": False, "ticks": False}
    return axis if len(names) <= MAX_LABELLED else axis | {"labelExpr": NUMBER_ONLY}


NUMBER_ONLY = "split(datum.label, ':')[0]"


def _fit_below(names: Sequence[str]) -> bool:
    """Whether the names of all tasks fit side by side below a narrow chart."""
    return len(names) <= MAX_LABELLED and sum(map(len, names)) <= 30


# Words in charts -----------------------------------------------------------------------------------------------------


def name_task(tasks: Sequence[str], index: int, width: int = 14) -> str:
    """A task's number and name as charts label it; a generic name stands alone."""
    name = tasks[index] if index < len(tasks) else ""
    if not name or name == f"task {index + 1}":
        return str(index + 1)
    return f"{index + 1}: {name if len(name) <= width else name[: width - 1] + '…'}"


def format_score(score: float) -> str:
    return f"{score:.0f}" if abs(score) >= 100 or score == int(score) else f"{score:.1f}"


def _shorten_score(score: float) -> str:
    """A score in at most four characters and a sign, for the cells of a heat map: 10.4k as 10k."""
    size = abs(score)
    if size >= 999_500:
        return f"{score / 1e6:.{0 if size >= 9.95e6 else 1}f}M"
    if size >= 999.5:
        return f"{score / 1e3:.{0 if size >= 9950 else 1}f}k"
    return f"{score:.{0 if size >= 9.95 or score == int(score) else 1}f}"
