"""The node map as a picture: for readers without JavaScript, for print, and for a paper."""

from __future__ import annotations

import html

import numpy as np

from agscl.report.charts import FREE_COLOR, MOVED_COLOR, color_tasks, name_task
from agscl.report.node_history import NodeHistory
from agscl.report.vega import FONT, INK

WIDTH = 720
LABEL = 18
"""The height of a layer's name."""


def draw_node_map(history: NodeHistory, task: int | None = None) -> str:
    """An SVG of all nodes after a task, the last one if None: one square for each, in its layer."""
    now = len(history.tasks) - 1 if task is None else task
    colors = color_tasks(len(history.tasks))
    cell = 12 if history.size <= 2000 else 7 if history.size <= 12_000 else 4
    gap = 2 if cell > 6 else 1
    columns = (WIDTH - 8) // (cell + gap)
    moved = np.zeros(history.size, dtype=bool)
    moved[history.moved[now]] = True
    places: dict[str, list[tuple[int, int]]] = {}  # of each colour, the left ends of its cells
    texts, top = [], 4
    for layer in history.layers:
        first = history.first[layer.groups]
        free = int((first > now).sum())
        texts.append(
            f'<text x="4" y="{top + 12}" font-size="12">{html.escape(layer.name)}'
            f'<tspan opacity="0.65">  {len(layer.groups):,} nodes, {free:,} free</tspan></text>'
        )
        top += LABEL
        for number, group in enumerate(layer.groups[np.argsort(first, kind="stable")]):
            since = history.first[group]
            color = FREE_COLOR if since > now else MOVED_COLOR if moved[group] else colors[since]
            x, y = 4 + number % columns * (cell + gap), top + number // columns * (cell + gap)
            places.setdefault(color, []).append((x, y))
        top += -(-len(layer.groups) // columns) * (cell + gap) + 8
    legend, x = [], 4
    shown = list(range(now + 1)) if now < 12 else [0, now // 2, now]
    entries = [*((colors[index], f"since {name_task(history.tasks, index)}") for index in shown), (FREE_COLOR, "free")]
    if moved.any():
        entries.append((MOVED_COLOR, "moved in this task"))
    for color, words in entries:
        wide = 28 + 7 * len(words)
        if x + wide > WIDTH:
            x, top = 4, top + 18
        legend.append(f'<path d="M{x} {top + 2}h10v10h-10z" fill="{color}"/>')
        legend.append(f'<text x="{x + 15}" y="{top + 11}" font-size="11">{html.escape(words)}</text>')
        x += wide
    drawn = "".join(
        f'<path d="{_draw_cells(cells, cell)}" stroke="{color}" stroke-width="{cell}" fill="none"/>'
        for color, cells in places.items()
    )
    height = top + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="{html.escape(FONT)}" fill="{INK}">{"".join(texts)}{drawn}{"".join(legend)}</svg>'
    )


def _draw_cells(cells: list[tuple[int, int]], size: int) -> str:
    """A path of thick short strokes, one for each cell, each from where the last one ended: the shortest text."""
    words, x, y = [], 0, -size // 2
    for left, top in cells:
        words.append(f"m{left - x} {top - y}h{size}")
        x, y = left + size, top
    return "".join(words)
