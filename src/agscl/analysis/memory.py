"""How many numbers a method keeps between tasks, against methods that keep some for every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Numbers kept between tasks."""

    importances: int
    """What the paper counts: the importances alone."""
    everything: int
    """Importances, anchors, masks and kept statistics; an entry of a mask counts as one number."""


def weight_wise(weights: int) -> dict[str, Held]:
    """What the weight-wise methods keep for a trunk of so many weights."""
    return {
        "EWC": Held(weights, 2 * weights),  # Fisher, anchor
        "SI": Held(weights, 2 * weights),  # Ω, anchor
        "RWALK": Held(2 * weights, 3 * weights),  # Fisher and path score, anchor
        "MAS": Held(weights, 2 * weights),  # Ω, anchor
    }


def held(memory: Mapping[str, int]) -> Held:
    """What a method keeps, from its own `memory()`."""
    kept = {name: count for name, count in memory.items() if name not in ("digests", "bytes")}  # these count bytes
    return Held(kept.get("importances", 0), sum(kept.values()))


def at_most(nodes: int, weights: int) -> Held:
    """What AGS-CL keeps at most, once every node is important: Ω and a mask per node, an anchor per weight."""
    return Held(nodes, 2 * nodes + weights)
