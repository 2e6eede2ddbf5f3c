"""The life cycle of every method, and the one pair of optimizer hooks through which methods act on weights.

A step of the optimizer runs through fixed phases, whatever methods are attached and in whatever order:

    before   observe the task's gradient → add every penalty's gradient → observe the total
    after    observe the optimizer's change → restore masks and gates → proximal step
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.certificate import Certificate, Layout, Probe, digest
from agscl.graph.nodes import NodeGraph
from agscl.graph.probing import undisturbed
from agscl.heads import HeadPlace, Heads, MultiHead

__all__ = ["Method", "NodeMethod", "SelfCheckWarning"]

Forward = Callable[[Any], Any]


class SelfCheckWarning(UserWarning):
    """A method that seems to do nothing, the cause it suspects and the value that would do."""


class _Hooks:
    """The pair of hooks on one optimizer, shared by all methods attached to it."""

    _of: ClassVar[WeakKeyDictionary[Optimizer, _Hooks]] = WeakKeyDictionary()

    @classmethod
    def attach(cls, optimizer: Optimizer, method: Method) -> None:
        hooks = cls._of.get(optimizer) or cls._of.setdefault(optimizer, cls(optimizer))
        hooks.methods = sorted([*hooks.methods, method], key=lambda m: (type(m).__name__, repr(m)))

    @classmethod
    def detach(cls, optimizer: Optimizer, method: Method) -> None:
        hooks = cls._of.get(optimizer)
        if hooks is None:
            return
        hooks.methods = [m for m in hooks.methods if m is not method]
        if not hooks.methods:
            for handle in hooks.handles:
                handle.remove()
            del cls._of[optimizer]

    def __init__(self, optimizer: Optimizer) -> None:
        self.methods: list[Method] = []
        self.hidden: list[tuple[nn.Parameter, Tensor]] = []
        self.prepared = False
        self.handles = (
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        )

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.gradients_ready(optimizer)
            return None

        def closure_then_penalty() -> Any:  # the hook runs before the closure's backward: gradients are stale here
            self.prepared = False
            with torch.enable_grad():
                loss = closure()
            self.gradients_ready(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_penalty, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_penalty}

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if not self.prepared:
            self.add_penalties(optimizer)
        self.prepared = False
        with torch.no_grad():
            for method in self.methods:
                method._observe_total(optimizer, getattr(optimizer, "grad_scale", None))
        for method in self.methods:
            for parameter in method._still:
                if parameter.grad is not None:  # also a zero gradient would let momentum and weight decay move it
                    self.hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    @torch.no_grad()
    def add_penalties(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer's gradients are still scaled
        for method in self.methods:
            method._observe_gradients(optimizer, scale)
        for method in self.methods:
            method._add_penalty(optimizer, scale)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden.clear()
        skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer's hooks run on overflow too
        for method in self.methods:
            method._count_step(optimizer)
        for phase in ("_observe_step", "_restore", "_proximal"):
            for method in self.methods:
                getattr(method, phase)(optimizer, skipped)


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """A method with nothing to set."""


class Method:
    """A continual-learning method, joined to any training loop. See `docs/architecture.md` for its seams.

    `heads` says where the heads of a model that is not a `MultiHead` are: the name of an `nn.ModuleList` or
    `nn.ModuleDict`, or a function `(model, task) -> module`. `settings` are the fields of the method's `Config`.
    """

    Config: ClassVar[type[Any]] = NoSettings

    def __init__(self, model: nn.Module, *, heads: HeadPlace | None = None, **settings: Any) -> None:
        known = [field.name for field in fields(self.Config)]
        if unknown := [name for name in settings if name not in known]:
            kind = type(self).__name__
            raise TypeError(f"{kind} has no setting {unknown[0]!r}. It has: {', '.join(known) or 'none'}.")
        self.config = self.Config(**settings)
        self.model = _bare(model)
        self.heads = Heads(self.model, heads)
        self.tasks: list[str] = []
        self.task: str | None = None
        self._viewed: str | None = None  # the task that `viewing` looks at
        self._optimizers: tuple[Optimizer, ...] = ()
        self._still: list[nn.Parameter] = []  # parameters no step may move: heads of other tasks, what is excluded
        self._requires: list[tuple[nn.Parameter, bool]] = []
        self._rates: dict[int, list[float | Tensor]] = {}  # per optimizer, the rate of each group at its last step
        self._steps = 0  # optimizer steps in this task
        self._version = 0
        self._warned: set[str] = set()
        self._head_digests: dict[str, str] = {}
        self._epochs: int | None = None
        self._steps_per_epoch: int | None = None

    # For whoever captures steps as CUDA graphs, or wants to be quick --------------------------------------------------

    @property
    def capturable(self) -> bool:
        """Whether a graph may hold a step: nothing is counted in Python from step to step."""
        return True

    @property
    def same_every_epoch(self) -> bool:
        """Whether `end_epoch` does the same work each time, so that a graph may hold it."""
        return True

    @property
    def batch_size_matters(self) -> bool:
        """Whether `end_task` measures something else if the same data comes in larger batches, rounding aside."""
        return True

    @property
    def version(self) -> int:
        """Counts up when what a step does has changed: a captured one is out of date then."""
        return self._version

    # The seams -----------------------------------------------------------------------------------------------------

    def begin_task(
        self,
        task: str,
        *optimizers: Optimizer,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Start learning `task`: hook the optimizers, add the new head to them, hold the other heads still."""
        if self.task is not None:
            raise RuntimeError(f"Task {self.task!r} is still under way: call end_task before begin_task({task!r}).")
        if task in self.tasks:
            raise ValueError(f"Task {task!r} was learned already. A second part of it needs a name of its own.")
        self._check_optimizers(optimizers)
        tasks = [*self.tasks, task]
        self.heads.of(task, tasks)  # an error here leaves everything as it was
        self.tasks, self.task = tasks, task
        self._steps, self._epochs, self._steps_per_epoch = 0, epochs, steps_per_epoch
        self._rates.clear()
        try:
            self._join(optimizers)
            self._begin()
            self._begun()
        except BaseException:
            self._leave()
            self.tasks, self.task = tasks[:-1], None
            raise

    def end_epoch(self) -> None:
        """Tell the method that an epoch is over."""
        self._under_way("end_epoch")
        self._end_epoch()

    def clear_moments(self, when: Tensor | None = None) -> None:
        """For a loop that clears an optimizer's state within a task, or does so where `when` is true.

        What a method moves by itself, as an optimizer does, then starts anew too.
        """

    def end_task(self, batches: Iterable[Any], forward: Forward | None = None) -> None:
        """Finish the task: `batches` of its training data (`x` or `(x, y)`) serve to measure importances.

        `forward(batch)` runs the model and returns what is differentiated; by default the cross-entropy of
        `model(x, task)`, or the output itself where there are no labels.
        """
        self._under_way("end_task")
        if self._steps == 0:
            self._warn(
                "steps",
                "The optimizer given to begin_task never stepped in this task, so the method could not act. "
                "Is another optimizer object doing the steps? Give that one to begin_task.",
            )
        self._end(batches, forward or self._forward)
        self._leave()
        assert self.task is not None
        tensors = self.model.state_dict()
        self._head_digests[self.task] = digest(tensors, self.heads.names(self.task, self.tasks))
        self.task = None

    def loss(self, x: Any, output: Any) -> Tensor:
        """A term to add to the task's loss; 0 for methods that need none."""
        return next(self.model.parameters()).new_zeros(())

    def penalty(self) -> Tensor:
        """The value now of what the method adds to the loss through gradients alone, to report or to validate by."""
        return next(self.model.parameters()).new_zeros(())

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        """Look at the model as it was for `task` (gates, masks). A `MultiHead` tells by itself."""
        if task not in self.tasks:
            raise ValueError(f"Task {task!r} has not begun. Tasks so far: {', '.join(self.tasks) or 'none'}.")
        self._viewed, before = task, self._viewed
        try:
            yield
        finally:
            self._viewed = before

    def add_penalty_gradients(self) -> None:
        """Add the penalties' gradients now, before the loop clips gradients; the next step will not add them again."""
        self._under_way("add_penalty_gradients")
        for optimizer in self._optimizers:
            hooks = _Hooks._of[optimizer]
            hooks.add_penalties(optimizer)
            hooks.prepared = True

    def state_dict(self) -> dict[str, Any]:
        """All that the method knows: tensors and plain values. The model and optimizers are saved by the loop."""
        return {
            "method": type(self).__name__,
            "settings": asdict(self.config),
            "tasks": list(self.tasks),
            "task": self.task,
            "steps": self._steps,
            "epochs": self._epochs,
            "steps_per_epoch": self._steps_per_epoch,
            "warned": sorted(self._warned),
            "heads": dict(self._head_digests),
            "rates": [[_number(rate) for rate in self._rates.get(id(o), [])] for o in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        """Take up a saved state; in the middle of a task, hook the optimizers again.

        The model must have its heads and its saved weights by now.
        """
        if state["method"] != type(self).__name__:
            raise ValueError(f"This is the state of {state['method']}, not of {type(self).__name__}.")
        if state["task"] is not None:
            self._check_optimizers(optimizers)
        mine, stored = asdict(self.config), state.get("settings", {})
        if other := [key for key in mine if stored.get(key, mine[key]) != mine[key]]:
            changes = ", ".join(f"{key} {stored[key]!r} → {mine[key]!r}" for key in other)
            _warn_user(f"The state was saved with other settings: {changes}. What follows uses the new ones.")
        self._leave()
        self.tasks, self.task = list(state["tasks"]), state["task"]
        self._steps, self._epochs, self._steps_per_epoch = state["steps"], state["epochs"], state["steps_per_epoch"]
        self._warned, self._head_digests = set(state["warned"]), dict(state["heads"])
        if self.task is not None:
            self._join(optimizers)
            self._rates = {id(o): rates for o, rates in zip(optimizers, state["rates"], strict=False) if rates}

    def close(self) -> None:
        """Take all hooks away and give back what was changed; the weights stay as they are."""
        self._leave()
        self.task = None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self.config).items())
        return f"{type(self).__name__}({settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a method does; each is nothing here -------------------------------------------------------------------------

    def _begin(self) -> None: ...
    def _begun(self) -> None: ...
    def _end_epoch(self) -> None: ...
    def _end(self, batches: Iterable[Any], forward: Forward) -> None: ...
    def _observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def _add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def _observe_total(self, optimizer: Optimizer, scale: Tensor | None) -> None: ...
    def _observe_step(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def _restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...
    def _proximal(self, optimizer: Optimizer, skipped: Tensor | None) -> None: ...

    # What it reports ------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """What the method holds between tasks: numbers by purpose, and `bytes` in all.

        Every method reports these purposes, and its own where it has more.
        """
        return {"importances": 0, "anchors": 0, "masks": 0, "embeddings": 0, "bytes": 0}

    def statistics(self) -> dict[str, Any]:
        """Figures on the last task."""
        return {}

    def certificate(self, probe: Tensor | None = None) -> Certificate:
        """What is certain at the end of the last task; `probe` is a batch to run the heads on as a second witness."""
        if self.task is not None:
            raise RuntimeError(f"Task {self.task!r} is under way: a certificate is made after end_task.")
        if not self.tasks:
            raise RuntimeError("No task has been learned yet, so there is nothing to certify.")
        claims = self._claims()
        witness = None
        if probe is not None:
            witness = Probe.of(probe, self.outputs(probe), None)
        names = {task: self.heads.names(task, self.tasks) for task in self.tasks}
        tensors = self.model.state_dict()
        notes = list(claims.pop("notes", []))
        if self.heads.shared:
            names, notes = {}, [*notes, "all tasks share one head, which every task trains"]
        strayed = [task for task in names if digest(tensors, names[task]) != self._head_digests[task]]
        return Certificate(
            moved_heads=strayed,
            method=type(self).__name__,
            task=self.tasks[-1],
            index=len(self.tasks) - 1,
            heads={task: self._head_digests[task] for task in names},
            head_tensors=names,
            notes=notes,
            probe=witness,
            **claims,
        )

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        """The output of every learned task's head on `x`, in eval mode; a dict head's parts are laid side by side."""
        found = {}
        with undisturbed(self.model):
            for task in self.tasks:
                with self.viewing(task):
                    output = self._call(x, task)
                parts = output.values() if isinstance(output, dict) else [output]
                found[task] = torch.cat([part.flatten(1) for part in parts], 1)
        return found

    def _claims(self) -> dict[str, Any]:
        return {
            "kind": "held",
            "zero_rule": "off",
            "layout": Layout(0, {}, {}, {}),
            "first": [],
            "digests": [],
            "held": [],
            "moved": [],
        }

    # Shared machinery -----------------------------------------------------------------------------------------------

    def _check_optimizers(self, optimizers: Sequence[Any]) -> None:
        if not optimizers:
            raise ValueError("Give the optimizer that trains the model: begin_task(task, optimizer).")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"Expected a torch.optim optimizer, got {type(optimizer).__name__}.")
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        if not any(id(p) in held for p in self.model.parameters()):
            raise ValueError("The optimizer holds none of the model's parameters. Was the model copied or moved since?")

    def _join(self, optimizers: tuple[Optimizer, ...]) -> None:
        assert self.task is not None
        self._optimizers = optimizers
        self._add_head()
        if not self.heads.shared:
            self._hold_still(self.heads.others(self.task, self.tasks))
        for optimizer in optimizers:
            _Hooks.attach(optimizer, self)

    def _add_head(self) -> None:
        """Put the head's parameters into the optimizer that has heads already, or into the first group of the first."""
        assert self.task is not None
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(p) for group in groups for p in group["params"]}
        missing = [p for p in self.heads.of(self.task, self.tasks).parameters() if id(p) not in held]
        old = {id(p) for p in self.heads.parameters(self.tasks).values()}
        home = next((group for group in groups if any(id(p) in old for p in group["params"])), groups[0])
        home["params"].extend(missing)

    def _hold_still(self, parameters: Iterable[nn.Parameter]) -> None:
        others = [m for o in self._optimizers if o in _Hooks._of for m in _Hooks._of[o].methods if m is not self]
        held = {id(p): required for method in others for p, required in method._requires}
        for parameter in parameters:  # what another method holds still already was trained before
            self._requires.append((parameter, held.get(id(parameter), parameter.requires_grad)))
            parameter.requires_grad_(False)
            parameter.grad = None
            self._still.append(parameter)

    def _leave(self) -> None:
        for optimizer in self._optimizers:
            _Hooks.detach(optimizer, self)
        for parameter, required in self._requires:
            parameter.requires_grad_(required)
        self._optimizers, self._still, self._requires = (), [], []

    def _count_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizers[0]:
            self._steps += 1
        self._rates[id(optimizer)] = [
            rate.clone() if isinstance(rate, Tensor) else rate for rate in (g["lr"] for g in optimizer.param_groups)
        ]

    def _under_way(self, seam: str) -> None:
        if self.task is None:
            raise RuntimeError(f"{seam} was called outside a task: call begin_task(task, optimizer) first.")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _warn_user(message)

    def _call(self, x: Any, task: str, model: Callable[..., Any] | None = None) -> Any:
        """`model(x, task)`, `model(x, number of the task)` for a list of heads, or `model(x)` without a task."""
        model = model or self.model
        _, *others = inspect.signature(self.model.forward).parameters.values()
        if not any(p.name == "task" or p.default is p.empty for p in others if p.kind is p.POSITIONAL_OR_KEYWORD):
            return model(x)
        try:
            return model(x, task)
        except (TypeError, KeyError, IndexError):
            if self.heads.listed:
                return model(x, self.tasks.index(task))
            raise

    def _task_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The task a call of the model is for: the one it names, else the one viewed, under way, or learned last."""
        names = list(inspect.signature(self.model.forward).parameters)
        place = names.index("task") if "task" in names else len(args)
        named = args[place] if place < len(args) else kwargs.get("task")
        if isinstance(named, str):
            return named if named in self.tasks else None
        return self._viewed or self.task or (self.tasks[-1] if self.tasks else None)

    def _forward(self, batch: Any) -> Any:
        """What is differentiated by default: the cross-entropy on `(x, y)`, the output on `x`."""
        assert self.task is not None
        if isinstance(batch, tuple | list):
            output = self._call(batch[0], self.task)
            if len(batch) > 1 and isinstance(output, Tensor):
                return F.cross_entropy(output, batch[1])
            return output
        return self._call(batch, self.task)


class NodeMethod(Method):
    """A method that knows the model's nodes: builds the `NodeGraph`, from `example_input` or the first forward pass."""

    def __init__(
        self,
        model: nn.Module,
        *,
        example_input: Any = None,
        heads: HeadPlace | None = None,
        exclude: Sequence[str] = (),
        excluded: Literal["freeze", "train"] = "freeze",
        **settings: Any,
    ) -> None:
        super().__init__(model, heads=heads, **settings)
        self._graph: NodeGraph | None = None
        self._exclude, self._excluded = tuple(exclude), excluded
        self._example = example_input
        self._input: tuple[list[int], torch.dtype] | None = None  # shape and type of one sample, for the certificate
        self._watch = self.model.register_forward_pre_hook(self._first_forward, with_kwargs=True)
        self._watching = True
        known = self.model.heads if isinstance(self.model, MultiHead) else not callable(heads)
        if example_input is not None and known:
            self._build(example_input)

    @property
    def graph(self) -> NodeGraph:
        if self._graph is None:
            raise RuntimeError(
                "The NodeGraph is built at the first forward pass, or from example_input=; neither came yet."
            )
        return self._graph

    def _begun(self) -> None:
        self._watching = True
        if self._graph is None and self._example is not None:
            self._build(self._example)

    def close(self) -> None:
        super().close()
        self._watch.remove()

    def _join(self, optimizers: tuple[Optimizer, ...]) -> None:
        super()._join(optimizers)
        if self._excluded == "freeze":
            self._hold_still(p for name in self._exclude for p in self.model.get_submodule(name).parameters())

    def _first_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the graph at the model's first forward pass; find the new head's columns at each task's first."""
        if not self._watching or self.task is None or torch.is_inference_mode_enabled():
            return  # what is made in inference mode could not be trained with
        arguments = inspect.signature(self.model.forward).bind(*args, **kwargs).args
        if self._graph is None:
            self._build(arguments)
        elif not self._head_known():
            with self._looking_away():
                self._graph.read_head(arguments, self.tasks)
        self._watching = not self._head_known()

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        """While the graph is measured, its own forward passes are not the loop's."""
        self._watching, before = False, self._watching
        try:
            yield
        finally:
            self._watching = before

    def _forward(self, batch: Any) -> Any:
        """Activations are all that is measured: no labels are needed."""
        assert self.task is not None
        return self._call(batch[0] if isinstance(batch, tuple | list) else batch, self.task)

    def _head_known(self) -> bool:
        assert self.task is not None
        return self.graph.knows(self.heads.of(self.task, self.tasks))

    def _build(self, example: Any) -> None:
        with self._looking_away():
            self._graph = NodeGraph(
                self.model,
                example,
                heads=self.heads.place,
                exclude=self._exclude,
                excluded=self._excluded,
                tasks=self.tasks,
            )
        first = example[0] if isinstance(example, tuple) else example
        if isinstance(first, Tensor):
            self._input = (list(first.shape[1:]), first.dtype)
        self._example = None
        self._graph_built()

    def _graph_built(self) -> None: ...

    def certificate(self, probe: Tensor | None = None) -> Certificate:
        """As `Method.certificate`; without a `probe`, 16 random inputs drawn from a seed are the witness."""
        made = super().certificate(probe)
        if probe is not None or self._input is None or not self._input[1].is_floating_point:
            return made
        shape, seed = [16, *self._input[0]], 0
        place = next(self.model.parameters())
        batch = Probe.draw(shape, seed).to(place.device, self._input[1])
        object.__setattr__(made, "probe", Probe.of(batch, self.outputs(batch), seed))
        return made


def _bare(model: nn.Module) -> nn.Module:
    """The model behind DistributedDataParallel or torch.compile; FSDP is refused."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _bare(model.module)
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        return _bare(inner)
    sharded = any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules())
    if sharded or any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise NotImplementedError(
            "The model is sharded (FSDP): its nodes' rows lie on several ranks, which is not supported yet. "
            "Use DistributedDataParallel, which is."
        )
    return model


def _number(rate: float | Tensor) -> float:
    return float(rate)


def _warn_user(message: str) -> None:
    """Warn at the line of the caller's own code that led here, not at one of this package or of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("agscl", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SelfCheckWarning, stacklevel=level)
