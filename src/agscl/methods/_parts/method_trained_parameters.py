"""Steps of parameters that belong to a method, not to the model (HAT's embedding, TRGP's scales).

They join a group of the loop's optimizer, so that `zero_grad` and a GradScaler look after their gradients. The method
takes these away before the step and moves the parameters itself: weight decay would pull them to 0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["compute_method_parameter_step"]


def compute_method_parameter_step(
    optimizer: Optimizer, group: dict[str, Any], gradient: Tensor, moments: list[Tensor], age: int | Tensor
) -> Tensor:
    """What to subtract from a parameter of the method's own: the group's rate times a direction, no weight decay.

    By SGD with the group's momentum if the optimizer is SGD, else by Adam. Updates `moments`, the first and the second;
    `age` counts the steps since they were zero, this one included.
    """
    first, second = moments
    if isinstance(optimizer, SGD):
        first.mul_(group["momentum"]).add_(gradient)
        move = first
    else:
        b1, b2 = group.get("betas", (0.9, 0.999))
        first.lerp_(gradient, 1 - b1)
        second.lerp_(gradient.square(), 1 - b2)
        move = first / (1 - b1**age) / ((second / (1 - b2**age)).sqrt() + 1e-8)
    step: Tensor = move * group["lr"]
    return step
