"""A line on the terminal while something takes long; nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self


class Bar:
    """`what`: 45 %"""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._shown = time.monotonic()
        self._visible = False

    def __enter__(self) -> Self:
        return self

    def advance(self, by: int) -> None:
        self._done += by
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._began > 1 and now - self._shown > 0.1:
            self._shown, self._visible = now, True
            print(
                f"\r{self._what}: {100 * self._done / max(self._total, 1):.0f} %", end="", file=sys.stderr, flush=True
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._visible:
            print("\r" + " " * (len(self._what) + 8) + "\r", end="", file=sys.stderr, flush=True)
