"""`MultiHead`: any trunk with one head per task; `Heads`: where the heads of any model are."""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from agscl.system.describe import describe_value

__all__ = ["HeadPlace", "Heads", "MultiHead", "check_task_name", "list_parameters", "make_task_names"]

Outputs = int | nn.Module | Mapping[str, int | nn.Module]
HeadPlace = str | Callable[[nn.Module, str], nn.Module]


def check_task_name(task: str) -> None:
    """Raise ValueError for a string that cannot name a task: its head becomes an attribute of a module."""
    if not isinstance(task, str) or not task or "." in task:
        raise ValueError(f"A task's name must be a non-empty string without dots, not {task!r}.")
    if hasattr(nn.ModuleDict(), task):
        raise ValueError(
            f"{task!r} cannot be a task's name: torch modules have an attribute of that name. Choose another."
        )


def make_task_names(names: Iterable[str]) -> list[str]:
    """Valid, distinct names of tasks, and so of heads, close to the given strings, which may be anything."""
    valid: list[str] = []
    for name in names:
        base = name.encode(errors="backslashreplace").decode().replace(".", "_") or "unnamed"
        if hasattr(nn.ModuleDict(), base):
            base += "_"
        number = next(number for number in count(1) if _add_number(base, number) not in valid)
        valid.append(_add_number(base, number))
    return valid


def _add_number(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def list_parameters(module: nn.Module, *, skip: nn.Module | None = None) -> dict[str, nn.Parameter]:
    """As `dict(module.named_parameters())`, which takes longer for hundreds of heads, but for those within `skip`."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
        for name, child in module._modules.items():
            if child is not None and child is not skip:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


class MultiHead(nn.Module):
    """A trunk and, for each task, a head of its own that reads the trunk's features.

    >>> model = MultiHead(trunk)
    >>> model.add_head("birds", 20)                       # a linear layer with 20 outputs
    >>> model.add_head("pong", {"actor": 6, "critic": 1})  # model(x, "pong") then returns a dict
    >>> logits = model(x, "birds")

    A linear head that is added before the first forward pass gets its number of inputs there. The trunk gets one input,
    as it is: several come in a list, a tuple or a dict, `model([x1, x2], "birds")`.
    """

    def __init__(self, trunk: nn.Module, *, features: int | None = None) -> None:
        super().__init__()
        if not isinstance(trunk, nn.Module):
            raise TypeError(f"MultiHead(trunk) needs a torch module, got {describe_value(trunk)}.")
        self.trunk = trunk
        self.heads = nn.ModuleDict()
        self.features = features
        self.loaded_heads: set[str] = set()  # tasks whose heads came by load_state_dict, learned elsewhere perhaps
        self.register_load_state_dict_post_hook(_note_loaded_heads)  # type: ignore[no-untyped-call]

    def add_head(self, task: str, outputs: Outputs) -> nn.Module:
        """Add the head of a new task: a number of outputs, a module, or a dict of either."""
        check_task_name(task)
        if task in self.heads:
            raise ValueError(f"Task {task!r} has a head already. Tasks with a head: {', '.join(self.heads)}.")
        if isinstance(outputs, Mapping):
            if not outputs:
                raise ValueError(f"The head of task {task!r} has no outputs: the dict is empty.")
            head: nn.Module = nn.ModuleDict({name: self._make_layer(task, part) for name, part in outputs.items()})
        else:
            head = self._make_layer(task, outputs)
        self.heads[task] = head
        return head

    def _make_layer(self, task: str, outputs: int | nn.Module) -> nn.Module:
        if isinstance(outputs, nn.Module):
            return outputs
        if isinstance(outputs, bool) or not isinstance(outputs, numbers.Integral) or outputs < 1:
            raise ValueError(f"The head of task {task!r} needs a positive number of outputs, not {outputs!r}.")
        outputs = int(outputs)
        like = next(self.trunk.parameters(), torch.empty(0))
        if self.features is None:
            return nn.LazyLinear(outputs, device=like.device, dtype=like.dtype)
        return nn.Linear(self.features, outputs, device=like.device, dtype=like.dtype)

    def forward(self, x: Any, task: str, *others: Any) -> Any:
        if others:
            raise TypeError(
                f"MultiHead takes one input and the task, model(x, task); got {2 + len(others)} arguments. Put several "
                "inputs in a list or a dict, which the trunk gets as it is: model([x1, x2], task) calls "
                "trunk([x1, x2])."
            )
        try:
            head = self.heads[task]
        except KeyError:
            if not isinstance(task, str):
                got = describe_value(task)
                raise TypeError(f"model(x, task) needs the task's name as its second argument, got {got}.") from None
            known = ", ".join(self.heads) or "none yet"
            raise KeyError(f"Task {task!r} has no head: call add_head first. Tasks with a head: {known}.") from None
        features = self.trunk(x)
        if isinstance(head, nn.ModuleDict):
            return {name: self.run_head(part, features) for name, part in head.items()}
        return self.run_head(head, features)

    def run_head(self, head: nn.Module, features: Tensor) -> Any:
        """The output of a head, or of one part of a dict head, for the trunk's features."""
        if isinstance(head, nn.Linear):
            if not hasattr(features, "flatten"):
                raise TypeError(
                    f"A linear head reads one tensor of features; the trunk returned {describe_value(features)}. Give "
                    "MultiHead a trunk that returns the features alone, or add_head a module that takes all of it."
                )
            features = features.flatten(1)
            self.features = features.shape[1]
        return head(features)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of every module; the heads of the saved model must have been added before."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            tasks = dict.fromkeys(key.split(".")[1] for key in state_dict if key.startswith("heads."))
            if not (absent := [task for task in tasks if task not in self.heads]):
                raise
            raise RuntimeError(
                f"The model has no head for {', '.join(absent)}: call model.add_head(task, outputs) for each before "
                f"load_state_dict.\n{error}"
            ) from None


def find_task_parameter(model: nn.Module) -> tuple[int, str] | None:
    """Which parameter of a model with heads is the task, by position and name: "task", or the second if required."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    for position, parameter in enumerate(parameters):
        if parameter.name == "task":
            return position, "task"
    second = parameters[1] if len(parameters) > 1 else None
    if second is None or second.kind is not second.POSITIONAL_OR_KEYWORD or second.default is not second.empty:
        return None
    return 1, second.name


def _note_loaded_heads(model: nn.Module, incompatible: Any) -> None:
    assert isinstance(model, MultiHead)
    missing = [key for key in incompatible.missing_keys if "heads." in key]
    model.loaded_heads = {task for task in model.heads if not any(f"heads.{task}." in key for key in missing)}


class Heads:
    """Where the heads of a model are, which belongs to which task, and how a model with heads is called for a task.

    `place` is None for a `MultiHead`; otherwise the name of an `nn.ModuleList` (one head per task, in the order
    in which tasks begin), of an `nn.ModuleDict` (by task name), of a single module that all tasks share, or a
    function `(model, task) -> module`.
    """

    def __init__(self, model: nn.Module, place: HeadPlace | None = None) -> None:
        self.model, self.place = model, place
        self._task_parameter = find_task_parameter(model)  # as it is now: a timer, say, may wrap the forward pass later
        self._container: nn.Module | None = None  # of the heads; None where `place` is a function
        self._seen_heads: dict[str, nn.Module] = {}  # and their parameters, by name
        self._seen_parameters: dict[str, nn.Parameter] = {}
        self._seen_names: dict[int, str] = {}  # by id of the parameter
        self._seen_norms: dict[str, _BatchNorm] = {}
        if place is None:
            if not isinstance(model, MultiHead):
                raise ValueError(
                    f"{type(model).__name__} is not a MultiHead, so its heads are not known. Wrap its trunk "
                    "(MultiHead(trunk)), or say where they are: heads='name.of.module.list', the name of the output "
                    "layer that all tasks share, or a function (model, task) -> module."
                )
            self._container, self.prefix = model.heads, "heads"
        elif isinstance(place, str):
            try:
                self._container, self.prefix = model.get_submodule(place), place
            except AttributeError:
                raise ValueError(
                    f"heads={place!r}: {type(model).__name__} has no such module. "
                    f"It has: {', '.join(name for name, _ in model.named_children())}."
                ) from None
        elif not callable(place):
            raise ValueError(
                f"heads must be the name of a module or a function (model, task) -> module, not {place!r}."
            )

    @property
    def is_shared(self) -> bool:
        """Whether all tasks share one head (which no method can protect)."""
        return self._container is not None and not isinstance(self._container, nn.ModuleList | nn.ModuleDict)

    @property
    def is_list(self) -> bool:
        """Whether heads are an `nn.ModuleList`, so that a model may be called with a task's number."""
        return isinstance(self._container, nn.ModuleList)

    @property
    def existing_tasks(self) -> list[str]:
        """Names of the tasks that have a head, where these are known: those of an `nn.ModuleDict`."""
        return list(self._container) if isinstance(self._container, nn.ModuleDict) else []

    def get_head(self, task: str, tasks: Sequence[str]) -> nn.Module:
        """The head of `task`, one of `tasks` (in the order in which they began)."""
        container = self._container
        if container is None:
            head = self.place(self.model, task)  # type: ignore[operator,misc]
            if not isinstance(head, nn.Module):
                raise ValueError(f"heads(model, {task!r}) returned {type(head).__name__}, not a module.")
            return head
        if isinstance(container, nn.ModuleDict):
            if task not in container:
                known = ", ".join(container) or "none"
                if task in tasks[:-1]:  # its head was there
                    raise ValueError(
                        f"Task {task!r} was learned, and its head is gone: the heads of learned tasks must stay in the "
                        f"model, since what was learned is checked against them. Put it back. Heads: {known}."
                    )
                raise ValueError(f"Task {task!r} has no head: call model.add_head({task!r}, …) first. Heads: {known}.")
            return container[task]
        if isinstance(container, nn.ModuleList):
            position = list(tasks).index(task)
            if position >= len(container):
                raise ValueError(
                    f"Task {task!r} is number {position + 1}, but {self.prefix!r} holds {len(container)} heads."
                )
            return container[position]
        return container

    def initialise_head(self, task: str) -> None:
        """Give a linear head of a `MultiHead` its weights, if its number of inputs was not known when it was added."""
        if isinstance(self.model, MultiHead) and self.model.features is not None:
            head = self.model.heads[task]
            for layer in head.values() if isinstance(head, nn.ModuleDict) else [head]:
                if isinstance(layer, nn.LazyLinear) and layer.has_uninitialized_params():
                    weight = layer.weight
                    layer(torch.zeros(1, self.model.features, dtype=weight.dtype, device=weight.device))

    def parameters(self, tasks: Sequence[str]) -> dict[str, nn.Parameter]:
        """Parameters of all heads, also of tasks that have not begun, by their name in the model."""
        if self._container is not None:
            return {f"{self.prefix}.{name}": p for name, p in list_parameters(self._container).items()}
        ids = {id(p) for task in tasks for p in self.get_head(task, tasks).parameters()}
        return {name: p for name, p in list_parameters(self.model).items() if id(p) in ids}

    def recall_parameters(
        self, tasks: Sequence[str], *, again: bool = False
    ) -> tuple[dict[str, nn.Parameter], dict[int, str]]:
        """As `parameters` and `list_names_by_id`, without a look into heads seen before: there may be hundreds.

        With `again`, all are looked into.
        """
        if not isinstance(self._container, nn.ModuleDict | nn.ModuleList):
            found = self.parameters(tasks)
            return found, self.list_names_by_id(found)
        modules = self._container._modules
        if again or not self._seen_heads.items() <= modules.items():  # one was replaced
            self._forget_heads()
        for key in [key for key in modules if key not in self._seen_heads]:
            head = self._seen_heads[key] = self._container.get_submodule(key)
            for name, module in head.named_modules():
                if isinstance(module, _BatchNorm):
                    self._seen_norms[f"{self.prefix}.{key}.{name}"] = module
            for name, parameter in list_parameters(head).items():
                self._seen_parameters[f"{self.prefix}.{key}.{name}"] = parameter
                self._seen_names[id(parameter)] = f"{self.prefix}.{key}.{name}"
        trunk = {id(p): name for name, p in self.list_trunk_parameters().items()}
        return self._seen_parameters.copy(), {**self._seen_names, **trunk}

    def find_shared(self) -> list[tuple[str, str]]:
        """Pairs of names of one parameter that the heads of two tasks share, as far as heads were looked into."""
        if len(self._seen_parameters) == len(self._seen_names):
            return []
        own_names = self._seen_names
        return [(own_names[id(p)], name) for name, p in self._seen_parameters.items() if own_names[id(p)] != name]

    def list_norms_of_others(self, task: str, tasks: Sequence[str]) -> dict[str, _BatchNorm]:
        """The BatchNorms in the heads of other tasks, as far as heads were looked into."""
        own = f"{self._find_prefix(task, tasks)}." if self._seen_norms else ""
        return {name: norm for name, norm in self._seen_norms.items() if not name.startswith(own)}

    def _forget_heads(self) -> None:
        self._seen_heads, self._seen_parameters, self._seen_names, self._seen_norms = {}, {}, {}, {}

    def list_trunk_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters outside the module that holds the heads, by name; all where that is not known."""
        return list_parameters(self.model, skip=self._container)

    def other_parameters(self, task: str, tasks: Sequence[str]) -> Iterator[nn.Parameter]:
        """Parameters of the heads of every other task."""
        own_head = {id(p) for p in self.get_head(task, tasks).parameters()}
        return (p for p in self.parameters(tasks).values() if id(p) not in own_head)

    def list_trunk_modules(self, tasks: Sequence[str]) -> dict[str, nn.Module]:
        """Modules outside the heads of `tasks`, by name."""
        found: dict[str, nn.Module] = {}
        seen = {id(self._container)} if self._container is not None else self.modules(tasks)

        def visit(module: nn.Module, name: str) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            found[name] = module
            for key, child in module._modules.items():
                if child is not None:
                    visit(child, f"{name}.{key}" if name else key)

        visit(self.model, "")
        return found

    def list_task_parameters(self, task: str, tasks: Sequence[str]) -> dict[str, nn.Parameter]:
        """Parameters of the trunk and of the head of `task`, by name: what a task may train. Old heads are not visited,
        of which there may be hundreds; where heads are a function of the task, all parameters are listed."""
        found = self.list_trunk_parameters()
        if self._container is not None:
            prefix, head = self._find_prefix(task, tasks), self.get_head(task, tasks)
            known = {id(p) for p in found.values()}
            own = list_parameters(head).items()
            found.update({f"{prefix}.{name}": p for name, p in own if id(p) not in known})
        return found

    def list_outside_parameters(self, tasks: Sequence[str]) -> dict[str, nn.Parameter]:
        """Parameters outside the heads of `tasks`, by name; a weight that the newest head shares is the head's."""
        if self._container is None:
            inside = {id(p) for p in self.parameters(tasks).values()}
        else:
            inside = {id(p) for task in tasks[-1:] for p in self.get_head(task, tasks).parameters()}
        return {name: p for name, p in self.list_trunk_parameters().items() if id(p) not in inside}

    def list_names_by_id(self, heads: Mapping[str, nn.Parameter]) -> dict[int, str]:
        """The name of each parameter of heads and trunk, by its id; `heads` are those that `parameters` lists."""
        return {id(p): name for name, p in {**heads, **self.list_trunk_parameters()}.items()}

    def _find_prefix(self, task: str, tasks: Sequence[str]) -> str:
        """The name of the head of `task` in the model."""
        if isinstance(self._container, nn.ModuleDict):
            return f"{self.prefix}.{task}"
        if isinstance(self._container, nn.ModuleList):
            return f"{self.prefix}.{list(tasks).index(task)}"
        if self._container is not None:
            return self.prefix
        head = self.get_head(task, tasks)
        prefix: str = next(name for name, module in self.model.named_modules() if module is head)
        return prefix

    def modules(self, tasks: Sequence[str]) -> set[int]:
        """Ids of all modules within the heads of `tasks`."""
        return {id(module) for task in tasks for module in self.get_head(task, tasks).modules()}

    def tensor_names(self, task: str, tasks: Sequence[str]) -> list[str]:
        """Names, in the model's state_dict, of the tensors of the head of `task`."""
        prefix = self._find_prefix(task, tasks)
        return [f"{prefix}.{name}" for name in self.get_head(task, tasks).state_dict()]

    # Calling the model for a task ------------------------------------------------------------------------------------

    @property
    def task_position(self) -> int | None:
        """Which argument is the task when a model with heads is called."""
        return None if self._task_parameter is None else self._task_parameter[0]

    @property
    def takes_task(self) -> bool:
        """Whether a model with heads is called with the task as an argument."""
        return self.task_position is not None

    def split_arguments(self, inputs: Any) -> tuple[Any, ...]:
        """The arguments beside the task with which a model with heads is called: those in a tuple, else one.

        A tuple with tensors where the forward pass has its task, as (x1, x2) for a `MultiHead`, is one argument too.
        """
        if not isinstance(inputs, tuple):
            return (inputs,)
        position = len(inputs) if self.task_position is None else self.task_position
        leaves = tree_leaves(inputs[position : position + 1])
        return (inputs,) if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves) else inputs

    def call_model(self, inputs: Any, task: str, tasks: Sequence[str], model: Callable[..., Any] | None = None) -> Any:
        """Run the model with these heads (or `model`, called alike) for `task`, on `inputs` as for `split_arguments`.

        That is `model(x, task)`, `model(x, number of the task)` for a list of heads, or `model(x)` without a task.
        """
        model = model or self.model
        arguments, position = self.split_arguments(inputs), self.task_position
        if position is None:
            return self._select_output(model(*arguments), task, tasks)
        before, after = arguments[:position], arguments[position + 1 :]
        try:
            return model(*before, task, *after)
        except (TypeError, KeyError, IndexError):
            if self.is_list:
                return model(*before, list(tasks).index(task), *after)
            raise

    def _select_output(self, output: Any, task: str, tasks: Sequence[str]) -> Any:
        """Of a model that knows of no task and returns the outputs of all its heads, that of one."""
        heads = self._container
        if isinstance(heads, nn.ModuleList) and isinstance(output, list | tuple) and len(output) == len(heads):
            return output[list(tasks).index(task)]
        if isinstance(heads, nn.ModuleDict) and isinstance(output, dict) and output.keys() == heads._modules.keys():
            return output[task]
        return output

    def run_on_features(self, x: Any, tasks: Sequence[str]) -> dict[str, Any] | None:
        """Outputs of the heads of `tasks`, with the trunk run once; None where each needs a pass of the whole model.

        That is so but for a `MultiHead` on which nothing acts (gates, masks), whose heads are linear layers.
        """
        model = self.model
        if type(model) is not MultiHead or "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks:
            return None
        heads = {task: self.get_head(task, tasks) for task in tasks}
        parts = {
            task: list(head.values()) if isinstance(head, nn.ModuleDict) else [head] for task, head in heads.items()
        }
        if isinstance(x, tuple) or not all(type(part) is nn.Linear for some in parts.values() for part in some):
            return None
        features = model.trunk(x)
        outputs = {task: [model.run_head(part, features) for part in some] for task, some in parts.items()}
        return {
            task: dict(zip(head, outputs[task], strict=True)) if isinstance(head, nn.ModuleDict) else outputs[task][0]
            for task, head in heads.items()
        }

    def task_of_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tasks: Sequence[str], default: Callable[[], str | None]
    ) -> str | None:
        """The task, one of `tasks`, that a call of a model with heads is for: `default()` where it names none."""
        position, name = self._task_parameter or (len(args), "task")
        argument: Any = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(argument, str):
            return argument if argument in tasks else None
        try:
            number = operator.index(argument)  # an int, also of numpy or torch
        except TypeError:
            return default()
        if self.is_list:
            number += len(self._container) if number < 0 else 0  # type: ignore[arg-type]
            return tasks[number] if 0 <= number < len(tasks) else None
        return str(number) if str(number) in tasks else default()
