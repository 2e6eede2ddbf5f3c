"""What SI and RWALK share: they follow the path of the weights, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.methods._parts.weight_method import Tensors, WeightMethod, WeightPlan

__all__ = ["PathMethod", "PathPlan"]


class ObservedStep(NamedTuple):
    """What was observed on the path before a step, for each weight with a gradient."""

    parameters: list[Tensor]
    before: list[Tensor]
    gradients: list[Tensor]
    tables: list[list[Tensor]]


class PathPlan(WeightPlan):
    """Observes, at each step, the gradient there and the step that was taken."""

    method: PathMethod
    acts_in_first_task = True
    saved: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.path: Tensors = {}  # the sum along the path of this task
        self._steps: dict[int, ObservedStep] = {}  # per optimizer, observed and not yet taken
        self._buffers: tuple[Tensors, Tensors] = ({}, {})  # weights before a step, and gradients

    def build(self) -> None:
        protected = self.method.find_protected()
        self._buffers = (
            {name: torch.empty_like(p) for name, p in protected.items()},
            {name: torch.empty_like(p) for name, p in protected.items()},
        )
        super().build()

    def add_weights(self, protected: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in protected.items():
            if name not in self.path:
                self.path[name] = torch.zeros_like(parameter)
        super().add_weights(protected)

    def tables(self) -> list[Mapping[str, Tensor] | None]:
        return [*super().tables(), *self._buffers, *self.path_tables()]

    def path_tables(self) -> list[Mapping[str, Tensor]]:
        """The tables that `integrate` updates."""
        return [self.path]

    def start_step(self, optimizer: Optimizer) -> None:
        self._steps.pop(self.optimizers.index(optimizer), None)  # of a step that raised

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        super().observe_gradients(optimizer, scale)
        if self.method.path_gradient == "task":
            self._observe(optimizer, scale)

    def observe_total(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.method.path_gradient == "total":
            self._observe(optimizer, scale)

    def _observe(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Remember where the weights are, and the gradient there."""
        optimizer_number = self.optimizers.index(optimizer)
        if optimizer_number in self._steps:  # a closure that is called several times: the step starts at the first
            return
        selected = self.protected_by(optimizer).select_with_gradient()
        gradients, parameters, (_, _, before, gradient_copies, *tables) = selected
        if not gradients:
            return
        assert before is not None
        assert gradient_copies is not None
        torch._foreach_copy_(before, parameters)
        torch._foreach_copy_(gradient_copies, gradients)
        if scale is not None:
            torch._foreach_div_(gradient_copies, scale)
        self._steps[optimizer_number] = ObservedStep(
            parameters, before, gradient_copies, [table for table in tables if table is not None]
        )

    def observe_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        step = self._steps.pop(self.optimizers.index(optimizer), None)
        if step is None:
            return
        parameters, negative_step, gradients, tables = step
        if skipped is not None:  # on overflow nothing moved, and the gradients are not finite
            skipped = skipped.reshape(()) > 0
            for gradient in gradients:
                gradient.masked_fill_(skipped, 0.0)
        torch._foreach_sub_(negative_step, parameters)
        self.integrate(gradients, negative_step, skipped, *tables)

    def integrate(
        self, gradients: list[Tensor], negative_step: list[Tensor], skipped: Tensor | None, *tables: Any
    ) -> None:
        """Add one step to the path: `negative_step` is −Δθ, `skipped` whether the optimizer left it out."""
        raise NotImplementedError

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return {"importances": list(self.path.values())}


class PathMethod(WeightMethod):
    """A weight-wise method whose importances come from the path of the weights, not from data."""

    Plan: ClassVar[type[PathPlan]] = PathPlan
    plan: PathPlan | None

    @property
    def path_gradient(self) -> str:
        """The gradient that is followed: of the task's loss alone, or the total that the optimizer gets."""
        return str(self.config.gradient)  # type: ignore[attr-defined]
