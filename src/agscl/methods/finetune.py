"""Fine-tuning: learn each task with nothing done against forgetting. Every comparison starts here."""

from __future__ import annotations

from agscl.methods._parts.lifecycle import Method

__all__ = ["FineTune"]


class FineTune(Method):
    """Plain training of a multi-head model, task after task. The heads of other tasks stay untouched."""

    title = "fine-tuning"
    formula = ("the task's loss alone",)
    protects = False
