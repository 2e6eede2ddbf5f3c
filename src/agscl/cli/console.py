"""The console that everything is printed to."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

console = Console(highlight=False)
if not console.is_terminal:  # a pipe or a file: 80 columns, whatever COLUMNS says
    console = Console(highlight=False, width=80)


def print_line(line: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(Text(line), soft_wrap=True)
