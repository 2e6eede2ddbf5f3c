"""Methods that show a task the model without the weights of later ones: left out of the forward pass, not changed.

A call of the model shows the task that it names, `viewing(task)` its own; the task under way sees all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.thread_local_tensors import Key, PerThread, View, make_replaceable, restore_plain_dicts

__all__ = ["TaskViewMethod", "WeightPlace"]

WeightPlace = tuple[nn.Module, str, Tensor]
"""A module, the name of a parameter in it, and the parameter or what is read in its place."""


class TaskViewMethod(Method):
    """A method under which a task is looked at without the weights of later ones, once `start_views` was called."""

    _handles: tuple[Any, ...] = ()
    is_closed = False
    _shows_all = False  # while it is measured who reads whom

    def start_views(self) -> None:
        for module, key, _ in self.list_weight_places():  # now, as what was compiled before would be compiled anew
            make_replaceable(module, "_parameters", key)
        self._context_view, self._call_view = View(), View()  # the weights within `viewing`, and of a call under way
        self._context_task = PerThread()  # whose weights these are
        self._handles = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )

    @property
    def hides_weights(self) -> bool:
        """Whether tasks are shown different weights."""
        return True

    @property
    def tasks_need_method(self) -> bool:
        return self.hides_weights and len(self.tasks) > 1

    def list_weight_places(self) -> Iterable[WeightPlace]:
        """The weights of which tasks may see different parts, wherever they are used."""
        raise NotImplementedError

    def mask_later_weights(self, number: int) -> Iterable[WeightPlace]:
        """Those weights as task `number` sees them: 0 in place of what later tasks added."""
        raise NotImplementedError

    def state_dict_for(self, task: str) -> dict[str, Tensor]:
        """As `Method.state_dict_for`; it shares memory with the model where nothing is hidden."""
        if task not in self.tasks or not self.hides_weights:
            return super().state_dict_for(task)
        state: dict[str, Tensor] = self.model.state_dict()
        if task != self.task:
            names: dict[int, list[str]] = {}
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            seen = self.mask_later_weights(self.tasks.index(task))
            for (_, _, own), (_, _, weight) in zip(self.list_weight_places(), seen, strict=True):
                state.update(dict.fromkeys(names[id(own)], weight.detach()))
        return state

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        try:
            with super().viewing(task):
                self._show_in_context()
                yield
        finally:
            self._show_in_context()  # the task of an outer `viewing`, or none

    def _show_in_context(self) -> None:
        if self._handles:
            task = self._viewed_task
            shown = {} if task is None else self._replace_weights(task)
            self._context_view.show({key: weight.detach() for key, weight in shown.items()})
            self._context_task.set(task)

    def _replace_weights(self, task: str) -> dict[Key, Tensor]:
        """What `task` reads in place of weights. The task under way reads them all."""
        if task == self.task or self._shows_all:
            return {}
        return _by_key(self.mask_later_weights(self.tasks.index(task)))

    @contextmanager
    def _showing_all(self) -> Iterator[None]:
        self._shows_all = True
        try:
            yield
        finally:
            self._shows_all = False

    def _prepare_task(self, task: str) -> None:
        if self.is_closed and self.hides_weights:
            raise RuntimeError(
                f"This {type(self).__name__} was closed: earlier tasks would see what {task!r} changes. Make a new one "
                "and load the state_dict() of this one."
            )
        with self._showing_all():
            super()._prepare_task(task)

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        with self._showing_all():
            super()._load_knowledge(state, task)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        task = self.task_of_call(args, kwargs)
        if task == self._context_task.get() and self._context_view.is_shown:  # masked once, when it was entered
            self._call_view.clear()
            return
        shown = {} if task is None else self._replace_weights(task)
        if not shown and self._context_view.is_shown:  # all weights, within a view of an earlier task
            shown = _by_key(self.list_weight_places())
        self._call_view.show(shown)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._call_view.clear()

    def close(self) -> None:
        super().close()
        self.is_closed = True
        self.stop_views()

    def stop_views(self) -> None:
        if self._handles:
            self._context_view.clear()
            self._call_view.clear()
            restore_plain_dicts(module for module, _, _ in self.list_weight_places())
        for handle in self._handles:
            handle.remove()
        self._handles = ()


def _by_key(places: Iterable[WeightPlace]) -> dict[Key, Tensor]:
    return {make_replaceable(module, "_parameters", name): weight for module, name, weight in places}
