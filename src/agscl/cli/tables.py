"""What the tables of all commands share; all fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from agscl.experiments.method_entries import METHODS

TITLES = {name: listed.title for name, listed in METHODS.items()}


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
    """A share in percent, for a table."""
    return f"{100 * share:.1f} %"


def format_mean(summary: Mapping[str, Any], scale: float, digits: int) -> str:
    """Mean ± deviation, for a table."""
    mean, deviation = summary["mean"], summary["deviation"]
    if mean is None:
        return "–"
    return f"{scale * mean:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def shorten(name: str, width: int = 12) -> str:
    """A name of at most `width` letters, for a column of a table."""
    return name if len(name) <= width else name[: width - 1] + "…"
