"""Frozen features: the first task trains the whole network, every later one its own head alone."""

from __future__ import annotations

from agscl.methods._parts.frozen_parts import FrozenPartsMethod

__all__ = ["Frozen"]


class Frozen(FrozenPartsMethod):
    """Nothing is forgotten, and nothing new is learned below the heads: the bound every method must beat.

    >>> method = Frozen(model)

    From the second task on all of the trunk, BatchNorm statistics included, keeps its bits.
    """

    title = "frozen"
    formula = ("from the second task on: Δθ = 0 below the heads",)

    def is_frozen(self, name: str) -> bool:
        return True
