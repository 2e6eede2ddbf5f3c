"""Results of runs, compared in tests."""

from __future__ import annotations

from typing import Any


def reproducible_part(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that is the same, bit for bit, however often the run was interrupted."""
    return {key: value for key, value in result.items() if key not in ("checksum", "environment", "seconds")}
