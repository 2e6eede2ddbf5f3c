"""`Plan`: what one task needs. Built when the task begins, run by the optimizer hooks, dropped when the task ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from agscl.methods._parts.batchnorm import StatisticsFreezer
from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.knowledge import load_attributes, save_attributes
from agscl.methods._parts.optimizer_heads import OptimizerHeads, remove_parameter

if TYPE_CHECKING:
    from agscl.methods._parts.lifecycle import Method

__all__ = ["Plan"]


@dataclass
class SinceCopy:
    """What a plan had counted when it was copied, and the epochs that have ended since."""

    steps: int
    writes: int
    epochs: int = 0


class Plan(OptimizerHeads):
    """One task of a method: its optimizers, the parameters they must not change, and what each step does.

    A method's own plan overrides the phases it needs; `saved` names the attributes that a checkpoint holds; all others
    are built again. `scale` is the factor that a GradScaler left in a fused optimizer's gradients; `skipped` (1,) is
    above 0 where such an optimizer skipped the step on overflow.
    """

    saved: ClassVar[tuple[str, ...]] = ("steps", "version")

    def __init__(
        self,
        method: Method,
        task: str,
        optimizers: tuple[Optimizer, ...],
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.method, self.task, self.optimizers = method, task, optimizers
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.main_optimizer = optimizers[0]  # whose steps are counted
        self.steps = 0  # of the main optimizer, in this task
        self.version = 0  # counts up when what a step does has changed
        self.head_parameters: Mapping[str, nn.Parameter] = {}  # of all heads, by name
        self.frozen: list[nn.Parameter] = []  # no step may change them: heads of other tasks, excluded modules
        self._trainable_before: list[nn.Parameter] = []  # those of them that will require gradients again
        self._norms_of_others: StatisticsFreezer | None = None  # of the BatchNorms in heads of other tasks
        self._since_copy: SinceCopy | None = None  # of a copy, until its optimizer steps

    # The life of a plan ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the plan: hook the optimizers, give them the new head, freeze the other heads and their BatchNorms."""
        method = self.method
        order = self._name_parameters()
        self._add_head_to_optimizer(order)
        self._average_head()
        method.knowledge.parameter_order = order
        if not method.heads.is_shared:
            own_head = {id(p) for p in method.heads.get_head(self.task, method.tasks).parameters()}
            self.freeze([p for p in self.head_parameters.values() if id(p) not in own_head])
            self._norms_of_others = StatisticsFreezer(method.heads.list_norms_of_others(self.task, method.tasks))
        for optimizer in self.optimizers:
            StepHooks.attach(optimizer, self)

    def build(self) -> None:
        """Build what the plan's phases need from the method's knowledge; runs for a new task and for a resumed one."""

    def start(self) -> None:
        """Start the plan: run checks and set first values, once, when a new task begins; not when one is resumed."""

    def detach(self) -> None:
        """Detach the plan: remove its hooks and restore `requires_grad`."""
        if self._norms_of_others is not None:
            self._norms_of_others.close()
        for optimizer in self.optimizers:
            StepHooks.detach(optimizer, self)
        for parameter in self._trainable_before:
            parameter.requires_grad = True
        self.frozen, self._trainable_before = [], []

    def cancel(self) -> None:
        """Cancel the plan of a task that could not begin: as `detach`, and the optimizers lose the new head too."""
        self.detach()
        for group, parameter in self._added_parameters:
            remove_parameter(group, parameter)
        if self._added_parameters:
            self.method.knowledge.parameter_order = self._list_parameter_order()
            self.restart_lbfgs()

    def reconnect_copy(self) -> None:
        """Hook the optimizers copied with this plan: torch copies no hooks.

        Runs once the method, too, is whole; where one refers to the other, either may be copied first.
        """
        for optimizer in self.optimizers:
            if hasattr(optimizer, "param_groups"):  # else it refers to the method, and is not whole yet
                StepHooks.attach(optimizer, self)
        self._since_copy = SinceCopy(self.steps, self._count_writes())

    def find_lost_copy(self, *, epochs: int) -> bool:
        """Whether the plan is a copy whose optimizers do not step though training goes on; `epochs` have ended now."""
        since = self._since_copy
        if since is None or self.steps > since.steps:
            self._since_copy = None
            return False
        since.epochs += epochs
        return since.epochs > 1 or self._count_writes() != since.writes  # one may have been all but over

    def _count_writes(self) -> int:
        """Writes to what the optimizers hold, by whomever, as torch counts them."""
        groups = [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]
        return sum(p._version for group in groups for p in group["params"])

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if getattr(self.method, "plan", None) is self:
            self.reconnect_copy()

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Freeze parameters until the end of the plan's task."""
        # a lazy one is of a head that no forward pass has run yet
        parameters = [p for p in parameters if type(p) is nn.Parameter or not is_lazy(p)]
        trainable = [p for p in parameters if p.requires_grad]
        if len(trainable) < len(parameters):
            earlier = self._list_frozen_earlier()
            self._trainable_before += [p for p in parameters if id(p) in earlier]
        for parameter in trainable:
            parameter.requires_grad = False
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        self._trainable_before += trainable
        self.frozen += parameters

    def _list_frozen_earlier(self) -> set[int]:
        """Ids of what plans of these optimizers have frozen and will free again."""
        plans = [plan for o in self.optimizers if (hooks := StepHooks.get(o)) for plan in hooks.plans]
        return {id(p) for plan in plans for p in plan._trainable_before}

    # The phases of a step; empty unless overridden -------------------------------------------------------------------

    def start_step(self, optimizer: Optimizer) -> None: ...
    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def observe_total(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def observe_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def proximal_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def end_epoch(self) -> None: ...

    def count_step(self, optimizer: Optimizer) -> None:
        self.steps += optimizer is self.main_optimizer

    # Saving, reporting -----------------------------------------------------------------------------------------------

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """Tensors that the plan holds while its task is under way, by purpose, beside those of the knowledge."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        names = dict.fromkeys(name for plan_class in type(self).__mro__ for name in vars(plan_class).get("saved", ()))
        arguments = {"task": self.task, "epochs": self.epochs, "steps_per_epoch": self.steps_per_epoch}
        return {**arguments, **save_attributes(self, names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [name for name in state if name not in ("task", "epochs")]
        load_attributes(self, {name: state[name] for name in names}, next(self.method.model.parameters()).device)
