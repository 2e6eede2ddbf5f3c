"""LwF: learning without forgetting (Li, Hoiem; ECCV 2016).

While a task is learned, the outputs of the old heads for its inputs are kept close to what they were before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from agscl.graph.model_state import switch_mode
from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.task_plan import Plan
from agscl.system.describe import describe_value

__all__ = ["LwF", "LwFConfig"]


@dataclass(frozen=True, kw_only=True)
class LwFConfig(Settings):
    """Settings of LwF; the defaults are those of its paper."""

    temperature: float = 2.0
    """T: both outputs are divided by it before the softmax; above 1 the small probabilities count for more."""
    weight: float = 1.0
    """λ: the weight of the old tasks' term beside the new task's loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("temperature", 0, above=True)
        self.require_at_least("weight", 0)


class LwFPlan(Plan):
    """One task of LwF: a copy of the trunk as the task began is the teacher."""

    method: LwF
    saved: ClassVar[tuple[str, ...]] = ("teacher", "loss_called")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.teacher: dict[str, Tensor] = {}  # parameters and buffers outside the heads, as the task began
        self.loss_called = False
        self._features: tuple[Any, Any] | None = None  # input and output of the trunk in the last forward pass
        self._handle: RemovableHandle | None = None

    def build(self) -> None:
        method = self.method
        if len(method.tasks) < 2:
            return
        if not (isinstance(method.model, MultiHead) or method.heads.is_shared or method.heads.takes_task):
            raise ValueError(
                f"LwF runs the old heads on new inputs, but {type(method.model).__name__}.forward takes no task. "
                "Let it take one, forward(x, task), or wrap its trunk in a MultiHead."
            )
        if not self.teacher:
            self.teacher = {name: t.detach().clone() for name, t in self._list_teacher_tensors().items()}
        if isinstance(method.model, MultiHead):
            self._handle = method.model.trunk.register_forward_hook(self._remember_features)

    def _list_teacher_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers outside the heads, or all where tasks share a head, by name."""
        model, heads, tasks = self.method.model, self.method.heads, self.method.tasks
        if heads.is_shared:
            return {**dict(model.named_parameters()), **dict(model.named_buffers())}
        modules = heads.list_trunk_modules(tasks).items()
        buffers = {f"{name}.{key}".lstrip("."): b for name, m in modules for key, b in m._buffers.items()}
        return {**heads.list_outside_parameters(tasks), **{name: b for name, b in buffers.items() if b is not None}}

    def _remember_features(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._features = (args[0], output) if args else None

    def pop_features(self, x: Any) -> Any:
        """The trunk's features of `x`, for LwF's old heads: those of the pass that has just run, or of a new one."""
        remembered, self._features = self._features, None
        assert isinstance(self.method.model, MultiHead)
        features = remembered[1] if remembered and remembered[0] is x else self.method.model.trunk(x)
        self._features = None
        return features

    def detach(self) -> None:
        super().detach()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return {"anchors": list(self.teacher.values())}

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: not the features of a pass that is still to go backward."""
        return {**vars(self), "_features": None}


class LwF(Method):
    """Keep the old heads' outputs for new inputs, distilled from a copy of the trunk as the task began.

    >>> method = LwF(model, temperature=2, weight=1)
    >>> output = model(x, task)
    >>> loss = F.cross_entropy(output, y) + method.loss(x, output)

    The term is λ·Σ over old tasks of −Σ softmax(old/T)·log softmax(new/T), a mean over the batch. The copy runs in
    eval mode. Heads of old tasks stay frozen, as under every method. The copy exists while a task is under way.
    """

    title = "LwF"
    formula = (
        "loss − λ Σ_old tasks Σ softmax(old / T) · log softmax(new / T)",
        "old: the outputs of old heads for this input as the task began; new: those now",
    )
    search = (SearchAxis("weight", FACTORS),)
    Config = LwFConfig
    config: LwFConfig
    Plan = LwFPlan
    plan: LwFPlan | None
    needs = frozenset({"loss"})

    def loss(self, x: Any, output: Any) -> Tensor:
        """LwF's term for the old tasks on the inputs `x`, whose output for the task under way is `output`."""
        if self.plan is None or not self.plan.teacher:
            return super().loss(x, output)
        self.plan.loss_called = True
        old_tasks = self.tasks[:1] if self.heads.is_shared else self.tasks[:-1]
        try:
            with torch.no_grad():
                targets = self._run_teacher(x, old_tasks)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"method.loss(x, output) cannot run the model on x, {describe_value(x)}: give the inputs that the "
                "model was called with."
            ) from error
        if isinstance(self.model, MultiHead):
            outputs = self._run_heads(self.plan.pop_features(x), old_tasks)
        else:
            outputs = [output if self.heads.is_shared else self.call_model(x, task) for task in old_tasks]
        per_task = zip(targets, outputs, strict=True)
        terms = [self._cross_entropy(*pair) for head in per_task for pair in _pair_outputs(*head)]
        return self.config.weight * torch.stack(terms).sum()

    def _cross_entropy(self, target: Tensor, output: Tensor) -> Tensor:
        dtype = torch.promote_types(output.dtype, torch.float32)
        probabilities = torch.softmax(target.to(dtype) / self.config.temperature, -1)
        return -(probabilities * torch.log_softmax(output.to(dtype) / self.config.temperature, -1)).sum(-1).mean()

    def _run_teacher(self, x: Any, old_tasks: list[str]) -> list[Any]:
        """The teacher's outputs for the old tasks, in eval mode."""
        assert self.plan is not None
        teacher = self.plan.teacher
        with switch_mode(self.model):
            if isinstance(self.model, MultiHead):
                trunk = {n.removeprefix("trunk."): t for n, t in teacher.items() if n.startswith("trunk.")}
                return self._run_heads(functional_call(self.model.trunk, trunk, (x,)), old_tasks)
            return [
                self.call_model(x, task, lambda *args: functional_call(self.model, teacher, args)) for task in old_tasks
            ]

    def _run_heads(self, features: Any, tasks: list[str]) -> list[Any]:
        """The output of each task's head of a `MultiHead` for the features."""
        assert isinstance(self.model, MultiHead)
        outputs: list[Any] = []
        for task in tasks:
            head = self.model.heads[task]
            if isinstance(head, nn.ModuleDict):
                outputs.append({name: self.model.run_head(part, features) for name, part in head.items()})
            else:
                outputs.append(self.model.run_head(head, features))
        return outputs

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan = self.plan
        assert plan is not None
        if plan.teacher and plan.steps and not plan.loss_called:
            self.warn_once(
                "loss",
                "method.loss(x, output) was never called in this task, so nothing prevented forgetting. Add it "
                "to the loss: loss = F.cross_entropy(output, y) + method.loss(x, output).",
            )
        elif plan.teacher and self.config.weight == 0:
            self.warn_once("weight", "weight is 0, so old tasks are forgotten as in plain fine-tuning. Use weight > 0.")


def _pair_outputs(target: Any, output: Any) -> list[tuple[Tensor, Tensor]]:
    """Targets and outputs of a head, one by one: a dict head has several."""
    return [(target[name], output[name]) for name in target] if isinstance(target, dict) else [(target, output)]
