"""What a search tries for one setting of a method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FACTORS", "SearchAxis"]

FACTORS = (0.1, 1 / 3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class SearchAxis:
    """One setting and the values to try: these, or the preset's value times these factors."""

    setting: str
    factors: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def list_candidates(self, base: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Settings with each value on the axis: first the base itself, then by distance from it."""
        start = self._get_start(base)
        values = [float(f"{factor * start:.3g}") for factor in self.factors] + list(self.values)
        by_distance = sorted({start, *values}, key=lambda value: (abs(value - start) / (value + start or 1), value))
        return [{**base, self.setting: value} for value in by_distance]

    def extend(self, best: Mapping[str, Any], tried: Collection[float]) -> list[dict[str, Any]]:
        """Extend the axis: one candidate beyond the values tried, if the best is the smallest or largest of them."""
        if not self.factors or best[self.setting] not in (min(tried), max(tried)):
            return []
        outer, inner = self.factors[:2] if best[self.setting] == min(tried) else self.factors[-1:-3:-1]
        return [{**best, self.setting: float(f"{best[self.setting] * outer / inner:.3g}")}]

    def get_range(self, base: Mapping[str, Any], extensions: int) -> tuple[float, float]:
        """The smallest and the largest value on the axis, after so many extensions on either side."""
        start = self._get_start(base)
        if not self.factors:
            return min(start, *self.values), max(start, *self.values)
        low, high = self.factors[0], self.factors[-1]
        low *= (low / self.factors[1]) ** extensions
        high *= (high / self.factors[-2]) ** extensions
        return float(f"{low * start:.3g}"), float(f"{high * start:.3g}")

    def _get_start(self, base: Mapping[str, Any]) -> Any:
        start = base[self.setting]
        if self.factors and start == 0:
            raise ValueError(
                f"{self.setting} is searched by multiplying its start value, which is 0: start above 0, "
                f"e.g. --set {self.setting}=1"
            )
        return start
