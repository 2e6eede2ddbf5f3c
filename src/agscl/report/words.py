"""Numbers in words, for the sentences and figures of a page."""

from __future__ import annotations


def percent(share: float | None, digits: int = 1) -> str:
    """A share in words of a page: 12.3 %, or a dash."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def spread(summary: dict[str, float | None], scale: float = 100, digits: int = 1, unit: str = " %") -> str:
    """A mean over seeds in words of a page, with its deviation where there is one."""
    mean, deviation = summary["mean"], summary["deviation"]
    if mean is None:
        return "–"
    wide = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
    return f"{scale * mean:.{digits}f}{wide}{unit}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things in words of a page: 1 task, 2 tasks."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_bytes(number: float) -> str:
    """A number of bytes in words of a page: 1.5 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time in words of a page: 1.5 s, 3 min."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
