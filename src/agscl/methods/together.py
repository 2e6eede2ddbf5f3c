"""Several methods at once, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods._parts.penalties import WeightMethod

__all__ = ["Together"]


class Together(Method):
    """Methods on one model that act together; the order in which they are given makes no difference.

    >>> method = Together(EWC(model, lam=400), SI(model, c=0.1))

    Each phase of an optimizer step runs for all of them before the next phase. When a task ends, methods that may
    change weights finish first; then the weight-wise ones measure and take their anchors.
    """

    def __init__(self, *methods: Method) -> None:
        if len(methods) < 2:
            raise ValueError("Together takes two methods or more.")
        if any(isinstance(method, Together) for method in methods):
            raise ValueError("Together does not hold another Together: give all methods to one.")
        if any(method.model is not methods[0].model for method in methods):
            raise ValueError("Methods that act together must be given the same model.")
        if any(method.tasks for method in methods):
            raise ValueError("Methods must be new when they are put together: one has begun a task already.")
        super().__init__(methods[0].model, heads=methods[0].heads.place)
        self.methods = tuple(
            sorted(methods, key=lambda m: (isinstance(m, WeightMethod), type(m).__name__, repr(m))),
        )

    @property
    def capturable(self) -> bool:
        return all(method.capturable for method in self.methods)

    @property
    def same_every_epoch(self) -> bool:
        return all(method.same_every_epoch for method in self.methods)

    @property
    def version(self) -> int:
        return sum(method.version for method in self.methods)

    def begin_task(
        self, task: str, *optimizers: Optimizer, epochs: int | None = None, steps_per_epoch: int | None = None
    ) -> None:
        begun: list[Method] = []
        try:
            for method in self.methods:
                method.begin_task(task, *optimizers, epochs=epochs, steps_per_epoch=steps_per_epoch)
                begun.append(method)
        except BaseException:
            for method in begun:
                method._leave()
                method.tasks, method.task = method.tasks[:-1], None
            raise
        self.tasks, self.task, self._optimizers = [*self.tasks, task], task, optimizers

    def end_epoch(self) -> None:
        self._under_way("end_epoch")
        for method in self.methods:
            method.end_epoch()

    def clear_moments(self, when: Tensor | None = None) -> None:
        for method in self.methods:
            method.clear_moments(when)

    def end_task(self, batches: Iterable[Any], forward: Forward | None = None) -> None:
        self._under_way("end_task")
        if iter(batches) is batches:  # can be walked through only once
            batches = list(batches)
        for method in self.methods:
            if method.task is not None:  # after an error it has ended already
                method.end_task(batches, forward)
        self._head_digests = dict(self.methods[0]._head_digests)
        self.task, self._optimizers = None, ()

    def loss(self, x: Any, output: Any) -> Tensor:
        return torch.stack([method.loss(x, output) for method in self.methods]).sum()

    def penalty(self) -> Tensor:
        return torch.stack([method.penalty().double() for method in self.methods]).sum()

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        with ExitStack() as stack:
            for method in self.methods:
                stack.enter_context(method.viewing(task))
            yield

    def memory(self) -> dict[str, int]:
        """The sum of what the methods hold."""
        total: dict[str, int] = {}
        for method in self.methods:
            for purpose, count in method.memory().items():
                total[purpose] = total.get(purpose, 0) + count
        return total

    def statistics(self) -> dict[str, Any]:
        """Each method's own, by its place and name."""
        return {f"{n} {type(m).__name__}": m.statistics() for n, m in enumerate(self.methods, 1)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "methods": [method.state_dict() for method in self.methods]}

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        kinds = [type(method).__name__ for method in self.methods]
        saved = [one["method"] for one in state.get("methods", [])]
        if saved != kinds:
            raise ValueError(f"This is the state of {', '.join(saved) or state['method']}, not of {', '.join(kinds)}.")
        for method in self.methods:
            method._leave()
        for method, one in zip(self.methods, state["methods"], strict=True):
            method.load_state_dict(one, *optimizers)
        self.tasks, self.task = list(state["tasks"]), state["task"]
        self._head_digests = dict(state["heads"])
        self._optimizers = optimizers if self.task is not None else ()

    def close(self) -> None:
        for method in self.methods:
            method.close()
        self.task, self._optimizers = None, ()

    def __repr__(self) -> str:
        return f"Together({', '.join(map(repr, self.methods))})"
