"""The pair of hooks on an optimizer through which all methods act on weights.

A step of the optimizer runs through fixed phases, whatever methods are attached and in whatever order:

    before   average gradients that DistributedDataParallel does not → observe the task's gradient → add every
             penalty's gradient → observe the total → hide frozen gradients
    after    observe the optimizer's change → restore masks and gates → proximal step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from agscl.methods._parts.task_plan import Plan

__all__ = ["StepHooks"]

_ATTRIBUTE = "_agscl_hooks"  # on the optimizer, so that it is freed with it


class StepHooks:
    """The hooks on one optimizer; they run the plans of all methods attached to it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.plans: list[Plan] = []
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._penalties_added = False
        self._handles = (
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        )

    @staticmethod
    def get(optimizer: Optimizer) -> StepHooks | None:
        """The hooks on `optimizer`, if a method is attached to it."""
        return getattr(optimizer, _ATTRIBUTE, None)

    @classmethod
    def attach(cls, optimizer: Optimizer, plan: Plan) -> None:
        hooks = cls.get(optimizer)
        if hooks is None:
            hooks = cls(optimizer)
            setattr(optimizer, _ATTRIBUTE, hooks)
        hooks.plans = sorted([*hooks.plans, plan], key=lambda p: (type(p.method).__name__, repr(p.method)))

    @classmethod
    def detach(cls, optimizer: Optimizer, plan: Plan) -> None:
        hooks = cls.get(optimizer)
        if hooks is None:
            return
        hooks.plans = [other for other in hooks.plans if other is not plan]
        if not hooks.plans:
            for handle in hooks._handles:
                handle.remove()
            delattr(optimizer, _ATTRIBUTE)

    # Before the step -------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._unhide_gradients()  # hidden by a step that raised
        if not self._penalties_added:
            for plan in self.plans:
                plan.start_step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare_gradients(optimizer)
            return None

        def closure_then_penalty() -> Any:  # torch runs this hook before the closure, when gradients are still stale
            self._penalties_added = False
            with torch.enable_grad():
                loss = closure()
            self._prepare_gradients(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_penalty, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_penalty}

    @torch.no_grad()
    def add_penalties(self, optimizer: Optimizer) -> None:
        """Let the hooks add every penalty's gradient now; at the next step they will not."""
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer's gradients are still scaled
        for plan in self.plans:
            plan.average_gradients(optimizer)
        for plan in self.plans:
            plan.observe_gradients(optimizer, scale)
        for plan in self.plans:
            plan.add_penalty(optimizer, scale)
        self._penalties_added = True

    @torch.no_grad()
    def _prepare_gradients(self, optimizer: Optimizer) -> None:
        if not self._penalties_added:
            self.add_penalties(optimizer)
        self._penalties_added = False
        for plan in self.plans:
            plan.observe_total(optimizer, getattr(optimizer, "grad_scale", None))
        for plan in self.plans:
            for parameter in plan.frozen:
                if parameter.grad is not None:  # with a zero gradient, momentum and weight decay would still move it
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _unhide_gradients(self) -> None:
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden.clear()

    # After the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unhide_gradients()
        skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer's hooks run on overflow too
        for plan in self.plans:
            plan.count_step(optimizer)
        for plan in self.plans:
            plan.observe_step(optimizer, skipped)
        for plan in self.plans:
            plan.restore(optimizer, skipped)
        for plan in self.plans:
            plan.proximal_step(optimizer, skipped)
