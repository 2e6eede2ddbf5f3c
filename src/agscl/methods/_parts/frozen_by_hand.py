"""What `agscl.freeze` holds, so that a method that prunes weights or gives them fresh ones can refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from agscl.methods._parts.lifecycle import Method

__all__ = ["frozen_by_hand", "refuse_frozen_by_hand"]

frozen_by_hand: list[Callable[[], Iterable[Tensor]]] = []
"""Functions that list the tensors of which entries are frozen now."""


def refuse_frozen_by_hand(method: Method) -> None:
    """Raise an error where entries of the trunk are frozen by hand: this method would change them."""
    frozen = {id(tensor) for list_tensors in frozen_by_hand for tensor in list_tensors()}
    names = [name for name, p in method.heads.list_outside_parameters(method.tasks).items() if id(p) in frozen]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"agscl.freeze holds entries of {names[0]}{more}, and {method.title} prunes weights: the two would undo "
            "each other's work. Call close() of what is frozen. To keep a whole layer as it is, call "
            "requires_grad_(False) of it before the method is made."
        )
