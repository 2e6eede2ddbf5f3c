"""What the integrations share: a task begins, or continues with the optimizers that a framework has made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from agscl.methods._parts.lifecycle import Method
from agscl.methods.ewc import EWC
from agscl.methods.mas import MAS
from agscl.system.describe import describe_value

__all__ = ["begin_or_continue", "check_method", "check_model", "differentiates_logits", "follow_optimizers"]


def check_method(method: object, caller: str) -> None:
    if not isinstance(method, Method):
        raise TypeError(f"{caller}(method, …) needs a method, e.g. AGSCL(model, …), got {describe_value(method)}.")


def check_model(method: Method, trained: nn.Module) -> None:
    if all(module is not method.model for module in trained.modules()):
        kind = type(trained).__name__
        raise ValueError(
            f"The method was made of a {type(method.model).__name__} that is no part of this {kind}. Make it of the "
            f"model that is trained, or that the {kind} holds: e.g. AGSCL(module.model, example_input)."
        )


def begin_or_continue(
    method: Method, task: str, optimizers: Sequence[Optimizer], *, epochs: int | None, steps_per_epoch: int | None
) -> None:
    """In a framework's loop begin `task`; where it is under way, left by a loop that was interrupted, continue it."""
    if method.task == task:
        follow_optimizers(method, optimizers)
    else:
        method.begin_task(task, *optimizers, epochs=epochs, steps_per_epoch=steps_per_epoch)


def follow_optimizers(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Hook the optimizers in place of those the method knows, where the framework has made new ones."""
    assert method.plan is not None
    if [id(one) for one in method.plan.optimizers] != [id(one) for one in optimizers]:
        method.load_state_dict(method.state_dict(), *optimizers)


def differentiates_logits(method: Method) -> bool:
    """Whether a method attached to a framework derives importances from a model's logits, not from its loss."""
    return isinstance(method, MAS) or (isinstance(method, EWC) and method.config.fisher in ("estimated", "exact"))
