"""Methods that show an old task the model without the weights of later ones: left out of the forward pass, not changed.

A call of the model shows the task that it names, `viewing(task)` its own; the newest task sees all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.local_tensors import View, make_key, restore_plain_dicts

__all__ = ["TaskViews", "UsedWeight"]

UsedWeight = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of a parameter in it, and the parameter."""


class TaskViews(Method):
    """A method under which a task is looked at without the weights of later ones, once `start_views` was called."""

    _handles: tuple[Any, ...] = ()

    def start_views(self) -> None:
        for module, key, _ in self.list_viewed_weights():  # now, as what was compiled before would be compiled anew
            make_key(module, "_parameters", key)
        self._viewing, self._pass = View(), View()  # the weights within `viewing`, and of a forward pass under way
        self._handles = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )

    @property
    def tasks_need_method(self) -> bool:
        return bool(self._handles) and len(self.tasks) > 1

    def list_viewed_weights(self) -> Iterable[UsedWeight]:
        """The weights of which tasks may see different parts, wherever they are used."""
        raise NotImplementedError

    def hide_later_weights(self, number: int) -> Iterable[UsedWeight]:
        """The same as task `number` sees them: 0 in place of what later tasks added."""
        raise NotImplementedError

    def state_dict_for(self, task: str) -> dict[str, Tensor]:
        """The model's state_dict as `task` sees it: with it a plain copy of the model runs that task, without a method.

        It shares memory with the model where nothing is hidden.
        """
        with self.viewing(task):  # refuses an unknown task
            state: dict[str, Tensor] = self.model.state_dict()
        if self._handles and task != self.tasks[-1]:
            names: dict[int, list[str]] = {}
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            seen = self.hide_later_weights(self.tasks.index(task))
            for (_, _, own), (_, _, weight) in zip(self.list_viewed_weights(), seen, strict=True):
                state.update(dict.fromkeys(names[id(own)], weight.detach()))
        return state

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        with super().viewing(task):
            if not self._handles:
                yield
                return
            self._show_task(self._viewing, task)
            try:
                yield
            finally:
                self._viewing.clear()
        if (outer := self._viewed_task) is not None:
            self._show_task(self._viewing, outer)

    def _show_task(self, view: View, task: str | None) -> None:
        """Let this thread read what `task` sees. The newest task needs no mask: it sees all that is not zero already,
        or is in training."""
        shown: Iterable[UsedWeight] = ()
        if task is not None and task != self.tasks[-1]:
            shown = self.hide_later_weights(self.tasks.index(task))
        elif self._viewing.is_shown:
            shown = self.list_viewed_weights()
        view.show({make_key(module, "_parameters", key): weight for module, key, weight in shown})

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._show_task(self._pass, self.task_of_call(args, kwargs))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._pass.clear()

    def close(self) -> None:
        super().close()
        if self._handles:
            restore_plain_dicts(module for module, _, _ in self.list_viewed_weights())
        for handle in self._handles:
            handle.remove()
