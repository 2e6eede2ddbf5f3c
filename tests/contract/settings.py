"""The settings of our methods in each cell of the contract, found by `benchmarks/contract.py --search`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agscl
from agscl.methods._parts.lifecycle import Method

METHODS: dict[str, type[Method]] = {
    name: getattr(agscl, name)
    for name in (
        *("AGSCL", "PaperAGSCL", "EWC", "SI", "RWalk", "MAS", "HAT"),
        *("PackNet", "WSN", "LwF", "L2", "GPM", "TRGP", "SPG", "Frozen"),
    )
}
IDLE: dict[str, dict[str, Any]] = {
    "AGSCL": {"lam": 0.0},
    "PaperAGSCL": {"lam": 0.0},
    "EWC": {"lam": 0.0},
    "SI": {"c": 0.0},
    "RWalk": {"lam": 0.0},
    "MAS": {"lam": 0.0},
    "L2": {"lam": 0.0},
}
STORED = json.loads((Path(__file__).parent / "settings.json").read_text())


def settings_of(method: str, network: str, optimizer: str) -> dict[str, Any]:
    return dict(STORED[method][f"{network}/{optimizer}"])
