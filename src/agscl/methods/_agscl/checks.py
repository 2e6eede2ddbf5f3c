"""What AGS-CL warns about, once each: settings or loops with which it would do nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agscl.methods._agscl.budget import BUDGET_RULE, is_budget
from agscl.methods._agscl.proximal import group_norms
from agscl.methods._parts.frozen_by_hand import refuse_frozen_by_hand

if TYPE_CHECKING:
    from agscl.methods.agscl import AGSCLConfig, AGSCLPlan

__all__ = [
    "check_activations",
    "check_after_task",
    "check_before_task",
    "check_epoch",
    "check_settings",
    "find_unused_settings",
]

LATE_SHARE = 0.02
"""Pruning a larger share of all nodes than this when a task ends is worth a warning."""
_USE_BUDGET = "A budget needs no tuning: AGSCL(model, example_input)"


def check_settings(config: AGSCLConfig) -> None:
    """Refuse settings of AGS-CL that are out of range, or do not go together."""
    require, at_least = config.require, config.require_at_least
    require(config.budget is None or is_budget(config.budget), f"budget must be {BUDGET_RULE}, not {config.budget!r}")
    at_least("mu", 0)
    at_least("tau", 0)
    require(config.lam >= 0, f"lam must be at least 0 (math.inf freezes for good), not {config.lam}")
    require(0 < config.rho <= 1, f"rho must be above 0 and at most 1, not {config.rho} (off: rand_init=False)")
    at_least("eta", 0, above=True)
    ablation = "prox=False adds the gradients of penalties: it takes budget=None and a finite lam"
    require(config.prox or (config.budget is None and math.isfinite(config.lam)), ablation)
    count = isinstance(config.prox_every, int) and not isinstance(config.prox_every, bool) and config.prox_every >= 1
    require(count or config.prox_every in ("epoch", "step"), "prox_every is 'epoch', 'step' or a step count")
    require(config.zero_init != "earlier_tasks" or config.freezes, "zero_init='earlier_tasks' needs lam=math.inf")
    require(0 <= config.min_activity < 1, f"min_activity is at least 0 and below 1, not {config.min_activity}")


def find_unused_settings(config: AGSCLConfig) -> dict[str, str]:
    """Check which settings of AGS-CL have no effect, each with the reason.

    Not those that rand_init=False turns off: presets name them, and studies leave out the re-initialisation.
    """
    unused = {}
    holds_by_importance = 0 < config.lam < math.inf
    if config.prox and not holds_by_importance:
        unused["eta"] = f"importances count only with a finite lam above 0, and lam is {config.lam:g}"
    if config.prox:
        unused["tau"] = "it is for prox=False"
    scales_mu = config.by_layer in ("mu", "both") and config.mu > 0
    scales_lam = config.by_layer in ("lam", "both") and holds_by_importance
    if not (scales_mu or scales_lam):
        unused["by_layer"] = f"it scales mu and a finite lam, and mu is {config.mu:g} and lam {config.lam:g}"
    return unused


def check_before_task(plan: AGSCLPlan) -> None:
    """Refuse weights that nothing protects; warn about what is never trained and about a penalty that is 0."""
    method, free = plan.method, plan.free_rows
    plan.refuse_unfrozen()
    refuse_frozen_by_hand(method)
    _check_unchanged(plan)
    if untrained := plan.schedule.rates.untrained:
        method.warn_once(
            "missing",
            f"No optimizer given to begin_task holds the weights of {', '.join(untrained)}. If another one trains "
            "them, give begin_task that one too; if none does, add them to one, or freeze them: requires_grad_(False).",
        )
    norms = group_norms(free.gather(), free.members) / plan.mu_factors if len(free) else torch.zeros(1)
    plan.start_norm = float(norms.min())
    if len(method.tasks) < 2:
        return
    if plan.graph.excluded == "freeze" and plan.graph.excluded_readers:
        method.warn_once(
            "excluded",
            f"{_join(sorted(plan.graph.excluded_readers))} is left out of the nodes (exclude=) and reads nodes that "
            "this task trains, so what it passes on for earlier tasks changes and they may be forgotten. PackNet and "
            "WSN need no nodes and keep old outputs; or leave out the layers before it, too.",
        )
    if not len(plan.important_rows):
        method.warn_once(
            "penalty",
            f"No node was active when task {method.tasks[-2]!r} ended, so none is important and nothing is held. "
            + (
                f"Were all shrunk to zero? Use a smaller mu (it is {method.config.mu:g}). {_USE_BUDGET}."
                if method.config.mu
                else "Did training collapse (a learning rate that is too high, ReLUs that never fire)?"
            ),
        )
    elif method.config.lam == 0:
        method.warn_once(
            "penalty", "lam is 0, so important nodes are not held and old tasks are forgotten. Use lam > 0."
        )


def _check_unchanged(plan: AGSCLPlan) -> None:
    """Warn where frozen nodes changed between two tasks, when no plan protects them."""
    method, knowledge = plan.method, plan.method.knowledge
    converted = "dtype" in knowledge.warned  # which changes the bits of everything, and was warned about
    if not math.isinf(method.config.lam) or knowledge.digests is None or len(method.tasks) < 2 or converted:
        return
    if changed := knowledge.digests.find_changed(knowledge.first_task):
        method.warn_once(
            "between",
            f"{len(changed)} frozen nodes changed after task {method.tasks[-2]!r} ended and before {plan.task!r} "
            "began, when nothing protects them. Between end_task and begin_task load no earlier or averaged weights "
            "(do so before end_task), take no optimizer step, and run a model with BatchNorm in eval mode only: in "
            "training it updates its statistics. To undo it, load the weights that the last task ended with.",
        )


def check_epoch(plan: AGSCLPlan) -> None:
    """Warn about an epoch in which AGS-CL saw no step."""
    if not (plan.schedule.epoch_steps or plan.schedule.captured):
        plan.method.warn_once(
            "epoch",
            "No step of the optimizer given to begin_task was seen in this epoch, so the method could not act. Was "
            "the optimizer built anew? Then end the task, or keep the optimizer and clear its state instead.",
        )


def check_activations(plan: AGSCLPlan, activations: Tensor) -> None:
    """Refuse to end a task whose activations are not finite."""
    if not bool(activations.isfinite().all()):
        raise FloatingPointError(
            f"Activations of task {plan.task!r} are not finite: training diverged. The task was not ended; "
            "go back to the last good weights, or lower the learning rate."
        )


def check_after_task(plan: AGSCLPlan, active: Tensor, important: int, unmoved: int) -> None:
    """Warn about what of AGS-CL could not act, did harm or will run out.

    `active` (groups,) are the groups that fired; `unmoved` of the groups that were `important` before did not move.
    """
    method, config = plan.method, plan.method.config
    if important and not unmoved and config.lam and plan.steps and not math.isinf(config.lam):
        method.warn_once(
            "held",
            f"None of the {important} important nodes kept its weights in task {plan.task!r}: lam ({config.lam:g}) "
            "times the learning rate is too small to hold them. Use lam=math.inf, which freezes them at any rate.",
        )
    if config.prox and plan.steps and (config.mu or not math.isinf(config.lam)):
        _check_proximal_steps(plan)
    if config.budget is not None:
        _check_pruning(plan)
    elif config.mu * float(plan.schedule.rate_sum) < plan.start_norm and config.prox and plan.steps:
        method.warn_once(
            "mu",
            f"mu ({config.mu:g}) is too small to free a node, other than those that never fire: in this task it could "
            f"take {config.mu * float(plan.schedule.rate_sum):.3g} off a node's norm, and the smallest was "
            f"{plan.start_norm:.3g}. {_USE_BUDGET}. Or search for mu: too large a value ruins the task.",
        )
        return
    _check_layers(plan, active.cpu())


def _check_proximal_steps(plan: AGSCLPlan) -> None:
    """Warn about proximal steps that never ran, or without their full thresholds."""
    config, schedule = plan.method.config, plan.schedule
    epochs_ended = config.prox_every != "epoch" or not schedule.epoch_steps
    if not (schedule.proximal_steps and epochs_ended):
        plan.method.warn_once(
            "prox",
            "end_epoch() was not called after the last steps, or never: the proximal step ran "
            f"{schedule.proximal_steps} times in this task. Call method.end_epoch() after each epoch.",
        )
    if config.prox_every != "epoch" and not schedule.steps_per_epoch:
        plan.method.warn_once(
            "length",
            f"prox_every={config.prox_every!r}, but how many steps an epoch has was never told: the proximal "
            "step ran once, at the end of the task. Give begin_task(…, steps_per_epoch=…), or call end_epoch().",
        )


def _check_pruning(plan: AGSCLPlan) -> None:
    """Warn about nodes that were pruned too late for the others to make up for them."""
    pruner = plan.pruner
    if pruner.revived:
        plan.method.warn_once(
            "woken",
            f"{pruner.revived} nodes that were pruned in task {plan.task!r} had weights again when it ended: the loop "
            "went back to weights from before a pruning, or to an average with them, or stepped with an optimizer that "
            "begin_task was not given. They were pruned again, and the others could not make up for them. Where a loop "
            "keeps its best weights or averages them, let it start over each time method.plan_version has changed.",
        )
    if plan.steps and pruner.pruned_at_end > LATE_SHARE * plan.graph.size:
        if plan.epochs is None:
            reason = (
                "its length was not told, and nothing was known of it. Give begin_task(…, epochs=…, steps_per_epoch=…)"
            )
        elif not pruner.epoch:
            reason = "end_epoch() was never called. Call it after each epoch, or give begin_task(…, steps_per_epoch=…)"
        elif pruner.epoch < plan.epochs:
            reason = (
                f"it ended after {pruner.epoch} of the {plan.epochs} epochs that were told. Give begin_task(…, "
                "epochs=…) a number that the loop reaches: with early stopping the smallest that is likely, for a task "
                "may be longer than told"
            )
        else:
            reason = f"it had {plan.steps} steps. Train for more, or give begin_task(…, steps_per_epoch=…)"
        plan.method.warn_once(
            "late pruning",
            f"{pruner.pruned_at_end} nodes were pruned at the very end of task {plan.task!r}, so the others could not "
            f"make up for them, and {pruner.above_budget} more than its budget were kept: {reason}.",
        )


def _check_layers(plan: AGSCLPlan, active: Tensor) -> None:
    """Warn about layers in which hardly a node fires, and about those without free nodes."""
    method, config, graph = plan.method, plan.method.config, plan.graph
    dead = [name for name, layer in graph.layers.items() if 10 * int(active[layer.groups].sum()) < layer.size]
    if dead and config.mu and config.prox:
        method.warn_once(
            "dead",
            f"Fewer than one node in ten fires in {_join(dead)} after task {plan.task!r}: mu ({config.mu:g}) has "
            f"shrunk nearly all of them to 0, and the task is hardly learned. Use a smaller mu. {_USE_BUDGET}.",
        )
    silent = [name for name in dead if not bool(active[graph.layers[name].groups].any())]
    if silent and not config.mu and plan.steps:
        method.warn_once(
            "dead",
            f"No node fires in {_join(silent)} after task {plan.task!r}, so nothing passes there: did training "
            "collapse (a learning rate that is too high, ReLUs that never fire)?",
        )
    capacity = method.capacity()
    full = [layer.layer for layer in capacity.layers if not layer.free]
    if full and config.budget is None:
        method.warn_once(
            "full",
            f"No free node is left in {_join(full)}: later tasks can train only what other layers have, and their "
            f"heads. {_USE_BUDGET}.",
        )
    elif config.budget is not None and "full" not in method.knowledge.warned and (capacity.tasks_left or 0) <= 1:
        scarce = [layer for layer in capacity.layers if layer.tasks_left == capacity.tasks_left]
        when = "No task" if full else "One more task"
        if any(layer.count_above(config.budget) for layer in scarce):
            advice = "Tasks kept more than their budget, as they were pruned late: first mend what was warned of then"
        else:
            less = "smaller share" if isinstance(config.budget, float) else "larger number of tasks"
            advice = f"Use wider layers, or a {less} as budget (it is {config.budget}) from the first task on"
        method.warn_once(
            "full",
            f"{when} will find a free node in {_join([layer.layer for layer in scarce])} after task {plan.task!r}: "
            f"later tasks can train only what other layers have, and their heads. {advice}; method.capacity() shows "
            "what is free.",
        )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more layers" if len(names) > 5 else "")
