"""What AGS-CL warns about, once each: settings or loops with which it would do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agscl.methods._parts.proximal import group_norms

if TYPE_CHECKING:
    from agscl.methods.agscl import AGSCLPlan

__all__ = ["check_after_task", "check_before_task", "check_epoch"]


def check_before_task(plan: AGSCLPlan) -> None:
    """Refuse weights that nothing protects; warn about what is never trained and about a penalty that is 0."""
    method, free = plan.method, plan.free_rows
    if unfrozen := plan.graph.find_unfrozen():
        raise RuntimeError(
            f"{', '.join(unfrozen[:3])}: frozen when the graph was built and trained now, so nothing protects it. "
            "Freeze it again, or build a new method on the model."
        )
    if untrained := plan.schedule.rates.untrained:
        method.warn_once(
            "missing",
            f"No optimizer given to begin_task holds the weights of {', '.join(untrained)}: they are never trained. "
            "Freeze them (requires_grad_(False)) or add them to the optimizer.",
        )
    norms = group_norms(free.gather(), free.members) / plan.mu_factors if len(free) else torch.zeros(1)
    plan.start_norms = [float(norms.min()), float(norms.median())]
    if len(method.tasks) < 2:
        return
    if not len(plan.important_rows):
        method.warn_once(
            "penalty",
            "No node is important after the first task, so nothing is held: the penalty is 0. Every node was "
            f"shrunk to zero; use a smaller mu (it is {method.config.mu:g}) or fewer epochs.",
        )
    elif method.config.lam == 0:
        method.warn_once(
            "penalty", "lam is 0, so important nodes are not held and old tasks are forgotten. Use lam > 0."
        )


def check_epoch(plan: AGSCLPlan) -> None:
    """Warn about an epoch without a step."""
    if not (plan.schedule.epoch_steps or plan.schedule.captured):
        plan.method.warn_once(
            "epoch",
            "No step of the optimizer given to begin_task was seen in this epoch, so the method could not act. Was "
            "the optimizer built anew? Then end the task, or keep the optimizer and clear its state instead.",
        )


def check_after_task(plan: AGSCLPlan) -> None:
    """Warn about proximal steps that never ran, a μ without effect, and layers without a free node."""
    method, config, schedule = plan.method, plan.method.config, plan.schedule
    epochs_ended = config.prox_every != "epoch" or not schedule.epoch_steps
    if config.prox and plan.steps and not (schedule.proximal_steps and epochs_ended):
        method.warn_once(
            "prox",
            "end_epoch() was not called after the last steps, or never: the proximal step ran "
            f"{schedule.proximal_steps} times in this task. Call method.end_epoch() after each epoch.",
        )
    if config.prox and config.prox_every != "epoch" and plan.steps and not schedule.steps_per_epoch:
        method.warn_once(
            "length",
            f"prox_every={config.prox_every!r}, but how many steps an epoch has was never told: the proximal "
            "step ran once, at the end of the task. Give begin_task(…, steps_per_epoch=…), or call end_epoch().",
        )
    reach, (smallest, median) = float(schedule.rate_sum), plan.start_norms
    if config.prox and reach and config.mu * reach < smallest:
        method.warn_once(
            "mu",
            "mu is too small to free a node, other than those that never fire: in this task it could take "
            f"{config.mu * reach:.3g} off a node's norm, and the smallest was {smallest:.3g}. Use mu of about "
            f"{median / reach:.3g} or more, or train for more epochs.",
        )
        return
    free = method.knowledge.free.cpu()
    full = [name for name, layer in plan.graph.layers.items() if not bool(free[layer.groups].any())]
    if full:
        method.warn_once(
            "full",
            f"No free node is left in {', '.join(full)}: what later tasks can learn there is limited. Use a larger "
            f"mu (it is {config.mu:g}), a smaller rho (it is {config.rho:g}) or wider layers.",
        )
