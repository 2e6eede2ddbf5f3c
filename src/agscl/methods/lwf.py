"""LwF: learning without forgetting (Li, Hoiem; ECCV 2016).

While a task is learned, the old heads must go on saying about its inputs what they said before it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Forward, Method

__all__ = ["LwF", "LwFConfig"]


@dataclass(frozen=True, kw_only=True)
class LwFConfig:
    """Settings of LwF; the defaults are those of its paper."""

    temperature: float = 2.0
    """T: both outputs are divided by it before the softmax; above 1 the small probabilities count for more."""
    weight: float = 1.0
    """λ: the weight of the old tasks' term beside the new task's loss."""

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"LwF: temperature must be a finite number above 0, not {self.temperature}.")
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"LwF: weight must be a finite number of at least 0, not {self.weight}.")


class LwF(Method):
    """Old heads keep their answers to new inputs, told by a copy of the trunk as the task began.

    >>> method = LwF(model, temperature=2, weight=1)
    >>> output = model(x, task)
    >>> loss = F.cross_entropy(output, y) + method.loss(x, output)

    The term is λ·Σ over old tasks of −Σ softmax(old/T)·log softmax(new/T), a mean over the batch. The copy answers in
    eval mode. Heads of old tasks stay as they are, as under every method; the trunk alone is taught. The copy is held
    while a task is under way, not in between.
    """

    Config = LwFConfig
    config: LwFConfig

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._copy: dict[str, Tensor] = {}  # parameters and buffers outside the heads, as the task began
        self._features: tuple[Any, Any] | None = None  # what the trunk gave for which input, in the last forward pass
        self._asked = False  # whether `loss` was called in this task
        self._handle = None
        if isinstance(self.model, MultiHead):
            self._handle = self.model.trunk.register_forward_hook(self._remember)

    def _begin(self) -> None:
        self._asked, self._copy = False, {}
        if len(self.tasks) > 1:
            whole = isinstance(self.model, MultiHead) or self.heads.shared
            if not whole and len(inspect.signature(self.model.forward).parameters) < 2:
                raise ValueError(
                    f"LwF asks the old heads about new inputs, but {type(self.model).__name__}.forward takes no task. "
                    "Let it take one, forward(x, task), or wrap its trunk in a MultiHead."
                )
            heads = set() if self.heads.shared else self._head_tensors()
            everything = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            self._copy = {name: t.detach().clone() for name, t in everything.items() if id(t) not in heads}

    def _head_tensors(self) -> set[int]:
        inside = [self.heads.of(task, self.tasks) for task in self.tasks]
        tensors = {id(t) for head in inside for t in (*head.parameters(), *head.buffers())}
        return tensors | {id(p) for p in self.heads.parameters(self.tasks).values()}

    def loss(self, x: Any, output: Any) -> Tensor:
        """The old tasks' term for the inputs `x`, whose output for the task under way is `output`."""
        features, self._features = self._features, None
        if not self._copy:
            return super().loss(x, output)
        self._asked = True
        old = self.tasks[:1] if self.heads.shared else self.tasks[:-1]
        with torch.no_grad():
            said = self._teach(x, old)
        if isinstance(self.model, MultiHead):
            known = features is not None and features[0] is x  # the trunk has just run on x
            now = self._read(features[1] if known and features else self.model.trunk(x), old)
            self._features = None
        else:
            now = [output if self.heads.shared else self._call(x, task) for task in old]
        terms = [self._term(a, b) for was, new in zip(said, now, strict=True) for a, b in _pairs(was, new)]
        return self.config.weight * torch.stack(terms).sum()

    def _term(self, said: Tensor, now: Tensor) -> Tensor:
        target = torch.softmax(said.float() / self.config.temperature, -1)
        return -(target * torch.log_softmax(now.float() / self.config.temperature, -1)).sum(-1).mean()

    def _teach(self, x: Any, old: list[str]) -> list[Any]:
        """What the copy says, in eval mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            if isinstance(self.model, MultiHead):
                trunk = {n.removeprefix("trunk."): t for n, t in self._copy.items() if n.startswith("trunk.")}
                return self._read(functional_call(self.model.trunk, trunk, (x,)), old)
            return [self._call(x, task, lambda *given: functional_call(self.model, self._copy, given)) for task in old]
        finally:
            for module, training in modes:
                module.training = training

    def _read(self, features: Any, old: list[str]) -> list[Any]:
        """What each old head of a `MultiHead` makes of the features."""
        assert isinstance(self.model, MultiHead)
        found: list[Any] = []
        for task in old:
            head = self.model.heads[task]
            parts = head if isinstance(head, nn.ModuleDict) else {"": head}
            said = {name: self.model._read(part, features) for name, part in parts.items()}
            found.append(said if isinstance(head, nn.ModuleDict) else said[""])
        return found

    def _remember(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._copy and torch.is_grad_enabled():
            self._features = (args[0], output) if args else None

    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        if self._copy and self._steps and not self._asked:
            self._warn(
                "loss",
                "method.loss(x, output) was never called in this task, so nothing was held against forgetting. Add it "
                "to the loss: loss = F.cross_entropy(output, y) + method.loss(x, output).",
            )
        elif self._copy and self.config.weight == 0:
            self._warn("weight", "weight is 0, so old tasks are forgotten as in plain fine-tuning. Use weight > 0.")

    def _leave(self) -> None:
        super()._leave()
        self._copy, self._features = {}, None

    def close(self) -> None:
        super().close()
        if self._handle is not None:
            self._handle.remove()

    def memory(self) -> dict[str, int]:
        """The copy of the trunk, while a task from the second on is under way; nothing between tasks."""
        held = sum(tensor.numel() for tensor in self._copy.values())
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._copy.values())
        return {**super().memory(), "anchors": held, "bytes": size}

    def state_dict(self) -> dict[str, Any]:
        copy = {name: tensor.clone() for name, tensor in self._copy.items()}
        return {**super().state_dict(), "copy": copy, "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        super().load_state_dict(state, *optimizers)
        place = next(self.model.parameters()).device
        self._copy = {name: tensor.to(place, copy=True) for name, tensor in state["copy"].items()}
        self._asked = state["asked"]


def _pairs(was: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """The outputs of a head, one by one: a dict head has several."""
    return [(was[name], new[name]) for name in was] if isinstance(was, dict) else [(was, new)]
