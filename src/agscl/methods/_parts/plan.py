"""`Plan`: what one task needs. Built when the task begins, run by the optimizer hooks, dropped when the task ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.state import load_attributes, save_attributes

if TYPE_CHECKING:
    from agscl.methods._parts.lifecycle import Method

__all__ = ["Plan"]


class Plan:
    """One task of a method: its optimizers, what they must not move, and what each step does.

    A method's own plan overrides the phases it needs; `saved` names the attributes that a checkpoint keeps, all else
    is built again. `scale` is the factor that a GradScaler left in a fused optimizer's gradients; `skipped` (1,) is
    above 0 where such an optimizer left the step out on overflow.
    """

    saved: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(
        self,
        method: Method,
        task: str,
        optimizers: tuple[Optimizer, ...],
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.method, self.task, self.optimizers = method, task, optimizers
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.steps = 0  # of the first optimizer, in this task
        self.version = 0  # counts up when what a step does has changed
        self.frozen: list[nn.Parameter] = []  # no step may move them: heads of other tasks, what is excluded
        self._trainable: list[tuple[nn.Parameter, bool]] = []  # what requires_grad was
        self._added: list[tuple[dict[str, Any], nn.Parameter]] = []  # (group, parameter) given to an optimizer

    # The life of a plan ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Hook the optimizers, give them the new head, freeze the other heads."""
        method = self.method
        self._add_head_to_optimizer()
        if not method.heads.is_shared:
            self.freeze(method.heads.other_parameters(self.task, method.tasks))
        for optimizer in self.optimizers:
            StepHooks.attach(optimizer, self)

    def build(self) -> None:
        """Make what the phases need, from the method's knowledge; for a new task and for a resumed one."""

    def start(self) -> None:
        """What happens once, when a new task begins: checks, first values."""

    def detach(self) -> None:
        """Remove the hooks and give back `requires_grad`."""
        for optimizer in self.optimizers:
            StepHooks.detach(optimizer, self)
        for parameter, required in reversed(self._trainable):
            parameter.requires_grad_(required)
        self.frozen, self._trainable = [], []

    def cancel(self) -> None:
        """As `detach`, for a task that could not begin: the optimizers lose the new head too."""
        self.detach()
        for group, parameter in self._added:
            group["params"][:] = [p for p in group["params"] if p is not parameter]

    def _add_head_to_optimizer(self) -> None:
        """Give the head to the group that holds heads already, else to the first group of the first optimizer."""
        heads, tasks = self.method.heads, self.method.tasks
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        known = {id(p) for group in groups for p in group["params"]}
        head_ids = {id(p) for p in heads.parameters(tasks).values()}
        home = next((g for g in groups if any(id(p) in head_ids for p in g["params"])), groups[0])
        for parameter in heads.get_head(self.task, tasks).parameters():
            if id(parameter) not in known:
                home["params"].append(parameter)
                self._added.append((home, parameter))

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let no step of this task move the parameters."""
        plans = [plan for o in self.optimizers if (hooks := StepHooks.get(o)) for plan in hooks.plans]
        earlier = {id(p): required for plan in plans for p, required in plan._trainable}
        for parameter in parameters:  # what another method froze already was trainable before
            self._trainable.append((parameter, earlier.get(id(parameter), parameter.requires_grad)))
            parameter.requires_grad_(False)
            parameter.grad = None
            self.frozen.append(parameter)

    # The phases of a step; each is nothing here ----------------------------------------------------------------------

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def observe_total(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def observe_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def proximal_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def end_epoch(self) -> None: ...

    def count_step(self, optimizer: Optimizer) -> None:
        self.steps += optimizer is self.optimizers[0]

    # Saving, reporting -----------------------------------------------------------------------------------------------

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """Tensors held while the task is under way, by purpose, beside those of the method's knowledge."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        every = dict.fromkeys(name for kind in type(self).__mro__ for name in vars(kind).get("saved", ()))
        plain = {"task": self.task, "epochs": self.epochs, "steps_per_epoch": self.steps_per_epoch}
        return {**plain, **save_attributes(self, every)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [name for name in state if name not in ("task", "epochs")]
        load_attributes(self, {name: state[name] for name in names}, next(self.method.model.parameters()).device)
