"""When a task's free nodes are pruned, and how far: in a few steps along a cubic curve."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["FIRST_PRUNING_STEP", "MIN_EPOCHS", "Due", "PruningSchedule", "pruned_share_at"]

PRUNINGS = 4
"""How often a task is pruned."""
PRUNING_SPAN = (0.3, 0.7)
"""The shares of a task at which it is first and last pruned."""
MIN_EPOCHS = 10
"""Tasks of fewer epochs are pruned between steps too, but where steps are captured; others at the ends of epochs."""
FIRST_PRUNING_STEP = 64
"""Where a task's length is not known: the step at which it is first pruned; then at twice as many, and so on."""


class Due(NamedTuple):
    """A pruning that is due."""

    share: float
    """Of the nodes that must go, how much is to be gone."""
    steps_left: float
    """In the task, as far as that is known; else 0."""


class PruningSchedule:
    """When a task is pruned. Its length is known from `epochs`, or guessed from the task before it.

    `told_share`: how much of its told length the last task ran; `last_steps`: how many steps it had, 0 for none.
    """

    def __init__(self, epochs: int | None, told_share: float, last_steps: int) -> None:
        self.epochs, self.told_share, self.last_steps = epochs, told_share, last_steps

    def find_due_after_epoch(self, epoch: int, steps_per_epoch: int | None, *, captured: bool) -> Due | None:
        """What is due at the end of this epoch, counted from 1, of a task whose epochs were told."""
        if not self.epochs:
            return None
        length = self.epochs * self.told_share
        if captured and epoch >= length:  # no step is left: the end of the task prunes gently
            return None
        return Due(pruned_share_at(epoch / length, *PRUNING_SPAN), (length - epoch) * (steps_per_epoch or 0))

    def find_due_after_step(self, steps: int, steps_per_epoch: int | None) -> Due | None:
        """What is due after so many steps, in a task of few epochs or of a number that was not told."""
        if (self.epochs or 0) >= MIN_EPOCHS:
            return None
        if self.epochs and steps_per_epoch:
            length = self.epochs * steps_per_epoch * self.told_share
        elif self.epochs is None or self.epochs == 1:
            length = self.last_steps
        else:  # how many steps an epoch has is still being counted
            return None
        if length:
            return Due(pruned_share_at(steps / length, *PRUNING_SPAN), length - steps)
        if steps >= FIRST_PRUNING_STEP and steps & (steps - 1) == 0:  # each time the task has become twice as long
            return Due(1 - FIRST_PRUNING_STEP / (2 * steps), 0)
        return None


def pruned_share_at(progress: float, first: float, last: float) -> float:
    """Of the nodes that must go, the share that is gone at this point of the task: a cubic curve, in steps.

    `progress`, and the shares of the task at which it is `first` and `last` pruned, run from 0 to 1.
    """
    spacing = (last - first) / (PRUNINGS - 1)
    done = min(PRUNINGS, max(0, math.floor((progress - first) / spacing + 1e-9) + 1))
    return 1 - (1 - done / PRUNINGS) ** 3
