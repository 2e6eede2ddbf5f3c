"""Several methods at once, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agscl.methods._parts.batches import Batches, make_repeatable
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.task_views import TaskViewMethod
from agscl.methods._parts.weight_method import WeightMethod
from agscl.system.sums import to_sum_dtype

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
        owners = [method.title for method in methods if method.owns_weights]
        if len(owners) > 1:
            raise ValueError(
                f"{' and '.join(owners)} would undo each other's work: each decides which weights are free, and gives "
                "them fresh values. Use one of them."
            )
        if any(method.tasks for method in methods):
            raise ValueError("Methods must be new when they are put together: one has begun a task already.")
        super().__init__(methods[0].model, heads=methods[0].heads.place)
        self.methods = tuple(
            sorted(methods, key=lambda m: (isinstance(m, WeightMethod), type(m).__name__, repr(m))),
        )
        self.knowledge = self.methods[0].knowledge  # tasks and digests of heads, the same for all
        self.min_captured_epochs = max(method.min_captured_epochs for method in self.methods)

    @property
    def task(self) -> str | None:
        under_way = [method.task for method in self.methods if method.task is not None]
        return under_way[0] if under_way else None

    @property
    def capturable(self) -> bool:
        return all(method.capturable for method in self.methods)

    @property
    def end_epoch_capturable(self) -> bool:
        return all(method.end_epoch_capturable for method in self.methods)

    @property
    def plan_version(self) -> int:
        return sum(method.plan_version for method in self.methods)

    @property
    def tasks_need_method(self) -> bool:
        return any(method.tasks_need_method for method in self.methods)

    def begin_task(
        self, task: str, *optimizers: Optimizer, epochs: int | None = None, steps_per_epoch: int | None = None
    ) -> None:
        begun: list[Method] = []
        try:
            for method in self.methods:
                method.begin_task(task, *optimizers, epochs=epochs, steps_per_epoch=steps_per_epoch)
                begun.append(method)
        except BaseException:
            for method in reversed(begun):
                method.cancel_task()
            raise

    def cancel_task(self) -> None:
        self._require_task("cancel_task")
        for method in self.methods:
            method.cancel_task()

    def end_epoch(self) -> None:
        self._require_task("end_epoch")
        for method in self.methods:
            method.end_epoch()

    def clear_moments(self, when: Tensor | None = None) -> None:
        for method in self.methods:
            method.clear_moments(when)

    def end_task(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], forward: Forward | None = None) -> None:
        self._require_task("end_task")
        batches = make_repeatable(Batches(batches))
        for method in self.methods:
            if method.task is not None:  # after an error it has ended already
                method.end_task(batches, forward)
        self._record_outputs(self.tasks[-1])  # once more, now that all are done

    def loss(self, x: Any, output: Any) -> Tensor:
        return torch.stack([method.loss(x, output) for method in self.methods]).sum()

    def penalty(self) -> Tensor:
        return torch.stack([to_sum_dtype(method.penalty()) for method in self.methods]).sum()

    def add_penalty_gradients(self) -> None:
        self._require_task("add_penalty_gradients")
        self.methods[0].add_penalty_gradients()  # the hooks run the plans of all

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        with ExitStack() as stack:
            for method in self.methods:
                stack.enter_context(method.viewing(task))
            yield

    def state_dict_for(self, task: str) -> dict[str, Tensor]:
        """The model's state_dict as `task` sees it, by that of the methods that hides later tasks' weights, if any."""
        method = next((method for method in self.methods if isinstance(method, TaskViewMethod)), None)
        return super().state_dict_for(task) if method is None else method.state_dict_for(task)

    def memory(self) -> dict[str, int]:
        """The sum of what the methods together hold."""
        total: dict[str, int] = {}
        for method in self.methods:
            for purpose, count in method.memory().items():
                total[purpose] = total.get(purpose, 0) + count
        return total

    def statistics(self) -> dict[str, Any]:
        """The statistics of each of the methods together, by its place and name."""
        return {f"{n} {type(m).__name__}": m.statistics() for n, m in enumerate(self.methods, 1)}

    def _default_probe(self) -> tuple[Any, int | None]:
        return next((m._default_probe() for m in self.methods if isinstance(m, NodeMethod)), (None, None))

    def _certified_claims(self) -> dict[str, Any]:
        """Those of the method that certifies nodes, with what the others note."""
        claims = [method._certified_claims() for method in self.methods]
        notes = [note for some in claims for note in some.get("notes", [])]
        uncovered = [clause for some in claims for clause in some.get("uncovered", [])]
        return {**max(claims, key=lambda some: some["layout"].size), "notes": notes, "uncovered": uncovered}

    def state_dict(self) -> dict[str, Any]:
        return {"method": type(self).__name__, "methods": [method.state_dict() for method in self.methods]}

    def load_state_dict(self, state: Mapping[str, Any], *optimizers: Optimizer) -> None:
        kinds = [type(method).__name__ for method in self.methods]
        saved = [method_state["method"] for method_state in state.get("methods", [])]
        if saved != kinds:
            raise ValueError(f"This is the state of {', '.join(saved) or state['method']}, not of {', '.join(kinds)}.")
        for method in self.methods:
            method._drop_plan()
        for method, method_state in zip(self.methods, state["methods"], strict=True):
            method.load_state_dict(method_state, *optimizers)

    def close(self) -> None:
        for method in self.methods:
            method.close()

    def _require_task(self, caller: str) -> None:
        if self.task is None:
            raise RuntimeError(f"{caller} was called outside a task: call begin_task(task, optimizer) first.")

    def __repr__(self) -> str:
        return f"Together({', '.join(map(repr, self.methods))})"
