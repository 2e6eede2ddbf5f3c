"""Progress of long work: a line on the terminal, nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self


class Progress(Protocol):
    """A display of the progress of a download or another long work, such as a line; open within a `with` block."""

    def __enter__(self) -> Self: ...

    def advance(self, amount: int) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


MakeProgress = Callable[[str, int], Progress]
"""(what is going on, its total, 0 if unknown) → a display."""


class ProgressLine:
    """Shows a line, "description: 45 %", on stderr, from the second second on."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._started = self._printed = time.monotonic()
        self._visible = False

    def __enter__(self) -> Self:
        return self

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._started > 1 and now - self._printed > 0.1:
            self._printed, self._visible = now, True
            percent = 100 * self._done / max(self._total, 1)
            print(f"\r{self._description}: {percent:.0f} %", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._visible:
            print("\r" + " " * (len(self._description) + 8) + "\r", end="", file=sys.stderr, flush=True)
