"""The table of what methods store between tasks, as `agscl run`, `methods` and `inspect` print it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from agscl.cli.console import console
from agscl.cli.tables import make_table
from agscl.methods._parts.memory_forecast import COMMON_PURPOSES, Memory

OTHER_PURPOSES = {
    "bases": "bases",
    "scales": "scale matrices",
    "start": "initial weights",
    "statistics": "BatchNorm statistics of each task",
}
"""What a method may store besides importances, anchors, masks and embeddings."""


def make_memory_table(title: str, by_title: Mapping[str, Memory]) -> Table:
    """The table of memory: numbers by purpose, ≤ before upper bounds; shortened where it would be too wide."""

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


def list_memory_notes(by_title: Mapping[str, Memory]) -> list[str]:
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


def _shorten_number(number: int) -> str:
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.1f} M"


def _format_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
