"""Why layers cannot be part of the graph: all of them in one error, with one `exclude=` that leaves them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NodeGraphError", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """A layer that cannot be part of the graph."""

    layer: str
    reason: str
    remedy: str = ""  # what to do about it, beside leaving modules out
    exclude: tuple[str, ...] = ()  # modules to leave out instead; none: that would not help
    is_consequence: bool = False  # it is refused only because another layer was


class NodeGraphError(ValueError):
    """Layers that cannot be part of the graph. `layer` is the first; the message says of all why and what to do."""

    def __init__(self, *refusals: Refusal, exclude: Sequence[str] | None = None, note: str = "") -> None:
        """`exclude` lists all that must be left out, by default what the refusals say; `note` is a last sentence."""
        self.refusals, self.layer = refusals, refusals[0].layer
        if exclude is None:
            exclude = list(dict.fromkeys(name for refusal in refusals for name in refusal.exclude))
        self.exclude = list(exclude) if all(refusal.exclude for refusal in refusals) else []
        separator = " " if len(refusals) == 1 else "\n"
        super().__init__(separator.join(filter(None, [self._describe(), self._advise(), note])))

    def _describe(self) -> str:
        layers: dict[tuple[str, str], list[str]] = {}
        for refusal in self.refusals:
            layers.setdefault((refusal.reason, refusal.remedy), []).append(refusal.layer)
        lines = [
            f"{_shorten(names)}: {' '.join(filter(None, [reason, remedy]))}"
            for (reason, remedy), names in layers.items()
        ]
        if len(self.refusals) == 1:
            return lines[0]
        return "\n  ".join([f"{len(self.refusals)} layers cannot be part of the graph:", *lines])

    def _advise(self) -> str:
        if not self.exclude:
            return ""
        if len(self.refusals) > 1:
            return f"Leave them out of the nodes with exclude={self.exclude!r}, or change the network."
        ending = "." if self.refusals[0].remedy else ", or change the network."
        beginning = "Or leave" if self.refusals[0].remedy else "Leave"
        return f"{beginning} it out of the nodes with exclude={self.exclude!r}{ending}"


def _shorten(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
