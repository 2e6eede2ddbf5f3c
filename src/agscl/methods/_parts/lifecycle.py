"""`Method`: the life cycle that every method shares. It keeps its `Knowledge` between tasks and a `Plan` within one."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from agscl.certificate import Certificate, Layout
from agscl.digests import digest_tensors
from agscl.graph.model_state import preserve_model_state
from agscl.heads import HeadPlace, Heads
from agscl.methods._parts import knowledge as kept
from agscl.methods._parts import task_plan as plans
from agscl.methods._parts.batches import Batches, explain_batch_errors
from agscl.methods._parts.ddp_and_compile import (
    contains_compiled,
    find_ddp_parameters,
    list_modules,
    recompile_if_hooks_change,
    refuse_sharded,
    unwrap_model,
)
from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.memory_forecast import COMMON_PURPOSES, Memory, Outline
from agscl.methods._parts.recorded_outputs import compare_outputs, concat_tensors, record_outputs
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.settings import NoSettings, Settings
from agscl.methods._parts.warnings import warn_user
from agscl.probe_outputs import ProbeOutputs
from agscl.system.describe import describe_value
from agscl.system.distributed import is_distributed

__all__ = ["Forward", "Method"]

Forward = Callable[[Any], Any]
Need = Literal["epochs", "steps_per_epoch", "end_epoch", "loss"]
_LEARNED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # by model, the tasks learned with any method

_viewed_tasks: ContextVar[Mapping[int, str]] = ContextVar("viewed tasks", default=MappingProxyType({}))
"""By id of the method; each thread, and each coroutine, has its own."""


class Method:
    """A continual-learning method for any training loop. `docs/architecture.md` lists what the loop must do.

    `heads` says where the heads of a model that is not a `MultiHead` are: the name of an `nn.ModuleList` or
    `nn.ModuleDict`, or a function `(model, task) -> module`. `settings` are the fields of the method's `Config`.
    """

    # What a method declares ------------------------------------------------------------------------------------------

    title: ClassVar[str] = ""
    """Its name in tables; the first line of the class's docstring says what it does."""
    formula: ClassVar[tuple[str, ...]] = ()
    """What it adds to the loss or does to weights, line by line, in the letters of its settings; for its page."""
    Config: ClassVar[type[Any]] = NoSettings
    Knowledge: ClassVar[type[kept.Knowledge]] = kept.Knowledge
    Plan: ClassVar[type[plans.Plan]] = plans.Plan
    needs: ClassVar[frozenset[Need]] = frozenset()
    """What a loop must do beside begin_task, steps and end_task. A missing count is an error in begin_task."""
    protects: ClassVar[bool] = True
    """Whether it is meant to keep what was learned; false for fine-tuning."""
    owns_weights: ClassVar[bool] = False
    """Whether it decides which weights are free, and changes those: two such methods would undo each other's work."""
    prunes_in_place: ClassVar[bool] = False
    """Whether a step that a CUDA graph captured before a pruning does the right thing after it."""
    min_captured_epochs: int = 1
    """Tasks of fewer epochs are captured only if asked for: something is done between steps that graphs leave out."""
    search: ClassVar[tuple[SearchAxis, ...]] = ()
    """The settings that a search tries, one after the other."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """Settings that give the form behind the AGS-CL paper's table: `Kind(model, lam=…, **Kind.paper)`."""

    def __new__(cls, *args: Any, **_: Any) -> Self:
        if len(args) == 2 and isinstance(args[0], nn.Module):
            try:
                inspect.signature(cls.__init__).bind_partial(None, *args)
            except TypeError:
                raise TypeError(
                    f"{cls.__name__} takes the model alone, {cls.__name__}(model, …): only AGSCL, PaperAGSCL and HAT "
                    "need an example input."
                ) from None
        return super().__new__(cls)

    def __init__(self, model: nn.Module, *, heads: HeadPlace | None = None, **settings: Any) -> None:
        setting_names = [field.name for field in fields(self.Config)]
        if unknown := [name for name in settings if name not in setting_names]:
            kind = type(self).__name__
            raise TypeError(f"{kind} has no setting {unknown[0]!r}. It has: {', '.join(setting_names) or 'none'}.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__}(model, …) needs a torch module, got {describe_value(model)}.")
        self.config = self.Config(**settings)
        self._warn_of_unused_settings()
        self.model = unwrap_model(model)
        self._given_compiled = contains_compiled(model)
        self.averaged_by_ddp = find_ddp_parameters(model)
        self.heads = Heads(self.model, heads)
        self.knowledge = self.Knowledge()
        self.plan: plans.Plan | None = None  # of the task under way
        self._queued_warnings: list[str] | None = None
        self._head_versions: dict[str, int] = {}  # of old heads' parameters, as torch counts writes, when a task began

    @property
    def tasks(self) -> list[str]:
        """The tasks that the method has begun so far, in order."""
        return self.knowledge.tasks

    @property
    def task(self) -> str | None:
        """The task that the method is learning."""
        return None if self.plan is None else self.plan.task

    # For engines that capture steps as CUDA graphs -------------------------------------------------------------------

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold a step of the method: nothing is counted in Python from step to step."""
        return True

    @property
    def end_epoch_capturable(self) -> bool:
        """Whether the method's `end_epoch` does the same work each time, so that a CUDA graph may hold it."""
        return True

    @property
    def depends_on_batch_size(self) -> bool:
        """Whether the method's `end_task` measures something else in larger batches of the same data."""
        return True

    @property
    def plan_version(self) -> int:
        """Counts up with each of the method's prunings: from then on steps hold other weights at 0.

        Earlier weights do not fit then: a loop that keeps its best weights starts over. A captured step is captured
        again, unless `prunes_in_place`.
        """
        return 0 if self.plan is None else self.plan.version

    @property
    def tasks_need_method(self) -> bool:
        """Whether the model runs tasks as they were learned only with this method: it shows each another model."""
        return False

    # Called by the loop ----------------------------------------------------------------------------------------------

    def begin_task(
        self,
        task: str,
        *optimizers: Optimizer,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Start learning `task`: hook the optimizers, add the new head to them, freeze the other heads.

        The head joins the parameter group that holds heads already, else the first group of the first optimizer, unless
        an optimizer holds it. `epochs`: how often the loop will call `end_epoch`; `steps_per_epoch`: how many optimizer
        steps lie between. Methods that prune or anneal follow them; the smallest that is likely will do.
        """
        if self.task is not None:
            raise RuntimeError(f"Task {self.task!r} is still under way: call end_task before begin_task({task!r}).")
        if not isinstance(task, str) or not task:
            got = describe_value(task)
            raise TypeError(f"begin_task(task, optimizer) needs the task's name, a non-empty string; got {got}.")
        if task in self.tasks:
            raise ValueError(f"Task {task!r} was learned already. Give further data of it another task name.")
        for need, count in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch)):
            if need in self.needs and count is None:
                raise ValueError(f"{self.title} needs {need}: call begin_task(task, optimizer, {need}=…).")
            if count is not None and (not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1):
                raise ValueError(f"begin_task: {need} must be a whole number of at least 1, not {count!r}.")
        refuse_sharded(list_modules(self.model))  # it may be since the method was made
        self._check_optimizers(optimizers)
        for named in [*self.tasks[-1:], task]:
            self.heads.get_head(named, [*self.tasks, task])  # an error here leaves everything as it was
        self._warn_of_unprotected(task)
        self.heads.initialise_head(task)
        self.tasks.append(task)
        try:
            with recompile_if_hooks_change(self.model, self._given_compiled):
                self._prepare_task(task)
                self.plan = self.Plan(self, task, optimizers, epochs, steps_per_epoch)
                self.plan.attach()
                self.plan.build()
                self.plan.start()
            self._warn_of_shared_heads()
            self._warn_of_changed_heads(self.plan.head_parameters)
        except BaseException as error:
            self._undo_begin_task()
            lazy = [name for name, p in self.heads.list_trunk_parameters().items() if is_lazy(p)]
            if lazy and type(error) is ValueError:
                raise ValueError(f"{lazy[0]} is lazy and has no shape yet: run the model once on a batch.") from error
            raise

    def end_epoch(self) -> None:
        """Tell the method that an epoch is over."""
        plan = self._require_plan("end_epoch")
        self._warn_of_lost_copy(plan, epochs=1)
        plan.end_epoch()

    def clear_moments(self, when: Tensor | None = None) -> None:
        """Reset the moments that the method itself holds, where `when` is true (default: always).

        For a loop that clears an optimizer's state within a task.
        """

    def end_task(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], forward: Forward | None = None) -> None:
        """Finish the task: `batches` of its training data (`x` or `(x, y)`) serve to measure importances.

        `batches` is a DataLoader, a list, any other iterable, or a function that returns one.
        `forward(batch)` runs the model and returns what is differentiated; by default the cross-entropy of
        `model(x, task)`, or the output itself where there are no labels.
        """
        self._queued_warnings = []  # until the task has ended, for a loop that makes errors of warnings
        try:
            self._end_task(batches, forward)
        finally:
            messages, self._queued_warnings = self._queued_warnings, None
            for message in messages:
                warn_user(message)

    def _end_task(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], forward: Forward | None) -> None:
        plan = self._require_plan("end_task")
        if plan.steps == 0:
            self.warn_once(
                "steps",
                "The optimizer given to begin_task never stepped in this task, so the method could not act. "
                "Is another optimizer object doing the steps? Give that one to begin_task.",
            )
        self._warn_of_lost_copy(plan, epochs=0)
        self.check_weights_finite()
        checked = Batches(batches)
        with recompile_if_hooks_change(self.model, self._given_compiled):
            with explain_batch_errors(checked, self.model, is_default=forward is None):
                self._finish_task(checked, forward or self._default_forward)
            plan.detach()
            self.plan = None
        digest = self._digest_head(plan.task)
        self.knowledge.head_digests[plan.task] = digest
        self._check_ranks(plan.task, digest)
        self._record_outputs(plan.task)
        self.knowledge.weight_dtypes = self._list_dtypes()
        _LEARNED.setdefault(self.model, set()).add(plan.task)

    def state_dict_for(self, task: str) -> dict[str, Tensor]:
        """The model's state_dict with which a plain copy of the model runs `task` as it was learned."""
        if task not in self.tasks:
            raise ValueError(f"Task {task!r} has not begun. Tasks so far: {', '.join(self.tasks) or 'none'}.")
        if self.tasks_need_method:
            raise NotImplementedError(
                f"{type(self).__name__} shows each task another model, which weights alone cannot hold. Save the "
                "method with the model: method.state_dict() and load_state_dict."
            )
        state: dict[str, Tensor] = self.model.state_dict()
        return state

    def loss(self, x: Any, output: Any) -> Tensor:
        """The method's term to add to the task's loss; 0 for methods that need none."""
        return next(self.model.parameters()).new_zeros(())

    def penalty(self) -> Tensor:
        """The current value of the penalty whose gradient the method adds, to report or to validate by."""
        return next(self.model.parameters()).new_zeros(())

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        """Run the method's model as it was learned for `task` (gates, masks); not needed where a call names the task.

        Only this thread sees it so: each may look at a task of its own.
        """
        if task not in self.tasks:
            raise ValueError(f"Task {task!r} has not begun. Tasks so far: {', '.join(self.tasks) or 'none'}.")
        before = _viewed_tasks.set({**_viewed_tasks.get(), id(self): task})
        try:
            yield
        finally:
            _viewed_tasks.reset(before)

    @property
    def _viewed_task(self) -> str | None:
        return _viewed_tasks.get().get(id(self))

    def add_penalty_gradients(self) -> None:
        """Add the method's penalty to the gradients now, before the loop clips them; the next step will not."""
        for optimizer in self._require_plan("add_penalty_gradients").optimizers:
            hooks = StepHooks.get(optimizer)
            assert hooks is not None
            hooks.add_penalties(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The method's state, knowledge and plan, as tensors and plain values. The loop saves model and optimizers."""
        return {
            "method": type(self).__name__,
            "settings": asdict(self.config),
            "knowledge": self.knowledge.state_dict(),
            "plan": None if self.plan is None else self.plan.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *optimizers: Optimizer) -> None:
        """Continue a method from its saved state; in the middle of a task, hook the optimizers again.

        The model must have its heads and its saved weights by now. The optimizers' own states are loaded after this.
        """
        if not isinstance(state, Mapping) or not {"method", "settings", "knowledge", "plan"} <= state.keys():
            raise ValueError("This is not the state of a method: give what method.state_dict() returned.")
        if state["method"] != type(self).__name__:
            raise ValueError(f"This is the state of {state['method']}, not of {type(self).__name__}.")
        plan = state["plan"]
        if plan is not None:
            self._check_optimizers(optimizers, call="load_state_dict(state, optimizer), within a task")
            if len(optimizers) != (count := len(state["knowledge"]["parameter_order"])):
                raise ValueError(
                    f"The state was saved within a task that has {count} optimizers, and {len(optimizers)} are given: "
                    "give load_state_dict the same ones, in the same order."
                )
        current, stored = asdict(self.config), state["settings"]
        if changed := [key for key in current if stored.get(key, current[key]) != current[key]]:
            changes = ", ".join(f"{key} {stored[key]!r} → {current[key]!r}" for key in changed)
            warn_user(f"The state was saved with other settings: {changes}. Training continues with the new ones.")
        self._load_knowledge(state["knowledge"], None if plan is None else plan["task"])
        self._restore_parameter_order(optimizers)
        if plan is not None:
            self.plan = self.Plan(self, plan["task"], optimizers, plan["epochs"], plan["steps_per_epoch"])
            self.plan.load_state_dict(plan)
            self.plan.attach()
            self.plan.build()
            self._warn_of_other_weights(plan["task"])

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        """Replace the knowledge; `task` is the one under way in that state."""
        self._drop_plan()
        self.knowledge.load_state_dict(state, next(self.model.parameters()).device)

    def _restore_parameter_order(self, optimizers: Sequence[Optimizer]) -> None:
        """Give the optimizers' parameters the order they were saved in: torch loads their moments by position.

        Heads that an optimizer held then and does not hold now are added: it was made before they were.
        """
        heads = self.heads.parameters(self.tasks)
        names = self.heads.list_names_by_id(heads)
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        for optimizer, groups in zip(optimizers, self.knowledge.parameter_order, strict=False):
            for group, order in zip(optimizer.param_groups, groups, strict=False):
                missing = [name for name in order if name in heads and id(heads[name]) not in held]
                group["params"] += [heads[name] for name in missing]
                if "param_names" in group:
                    group["param_names"] += missing
                position = {name: number for number, name in enumerate(order)}
                if {names.get(id(p)) for p in group["params"]} == {name for name in order if name}:
                    numbers = [position[names[id(p)]] for p in group["params"]]
                    ranks = sorted(range(len(numbers)), key=numbers.__getitem__)
                    for key in ("params", "param_names") if "param_names" in group else ("params",):
                        group[key][:] = [group[key][rank] for rank in ranks]
            if _holds_misplaced(optimizer):
                raise ValueError(
                    "The optimizer's state does not fit its parameters: torch loads it by position. Load the method's "
                    "state first, which puts the parameters in their saved order, and then the optimizer's."
                )

    def cancel_task(self) -> None:
        """Undo `begin_task`, as if it had not been called; weights that steps have changed since stay as they are."""
        self._require_plan("cancel_task")
        self._undo_begin_task()

    def _undo_begin_task(self) -> None:
        if self.plan is not None:
            self.plan.cancel()
            self.plan = None
        self.tasks.pop()

    def close(self) -> None:
        """Remove all hooks of the method and undo all its changes to the model but those of weights."""
        if self.tasks_need_method:
            self.warn_once(
                "closed",
                f"{type(self).__name__}.close(): without the method the model no longer runs all tasks as they were "
                "learned. Keep the method as long as the model is used.",
            )
        self._drop_plan()
        _LEARNED.get(self.model, set()).difference_update(self.tasks)

    def _drop_plan(self) -> None:
        if self.plan is not None:
            self.plan.detach()
            self.plan = None

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if self.plan is not None and vars(self.plan) and self.plan.method is self:
            self.plan.reconnect_copy()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self.config).items())
        return f"{type(self).__name__}({settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a method does at the ends of a task; empty unless overridden -----------------------------------------------

    def _prepare_task(self, task: str) -> None:
        """Called when a new task begins, before its plan is made."""

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        """Turn the task that was learned into knowledge. An error leaves the task under way."""

    # What it reports -------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """What the method holds: numbers by purpose, and `bytes` in all; within a task also what its plan holds.

        Every method reports importances, anchors, masks and embeddings, and its own purposes where it has more.
        """
        tensors = self.knowledge.held_tensors()
        for purpose, plan_tensors in self.plan.held_tensors().items() if self.plan is not None else ():
            tensors[purpose] = [*tensors.get(purpose, []), *plan_tensors]
        counts = dict.fromkeys(COMMON_PURPOSES, 0)
        for purpose, purpose_tensors in tensors.items():
            if purpose in counts or purpose_tensors:
                counts[purpose] = sum(t.numel() for t in purpose_tensors)
        counts["bytes"] = sum(
            t.numel() * t.element_size() for purpose_tensors in tensors.values() for t in purpose_tensors
        )
        return counts

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """What the method will store between tasks, after so many of them, for a model of this outline."""
        return Memory.from_counts()

    def statistics(self) -> dict[str, Any]:
        """The method's figures on the last task."""
        return dict(self.knowledge.statistics)

    def certificate(self, probe: Tensor | None = None) -> Certificate:
        """Certify what the method's last task left unchanged; outputs of all heads on a `probe` are a second check."""
        if self.task is not None:
            raise RuntimeError(f"Task {self.task!r} is under way: a certificate is made after end_task.")
        if not self.tasks:
            raise RuntimeError("No task has been learned yet, so there is nothing to certify.")
        claims = self._certified_claims()
        stored, changed, unrecorded, without_tensor = self._compute_outputs(probe)
        names = {task: self.heads.tensor_names(task, self.tasks) for task in self.tasks}
        tensors = self.model.state_dict()
        if self.heads.is_shared:
            names, shared = {}, "all tasks share one head, which every task trains"
            claims["uncovered"] = [*dict.fromkeys([*claims.get("uncovered", []), shared])]
        if unrecorded and claims["kind"] == "guaranteed":
            tasks = ", ".join(unrecorded)
            claims["notes"] = [*claims["notes"], f"outputs of {tasks} were not compared: recorded elsewhere, or never"]
        if without_tensor:
            note = f"outputs of {', '.join(without_tensor)} were not compared: the model returns no tensor there"
            claims["notes"] = [*claims.get("notes", []), note]
        if changed or claims.get("uncovered"):
            claims["kind"] = "held"
        digests = self.knowledge.head_digests
        return Certificate(
            moved_heads=[task for task in names if digest_tensors(tensors, names[task]) != digests[task]],
            method=type(self).__name__,
            task=self.tasks[-1],
            index=len(self.tasks) - 1,
            heads={task: digests[task] for task in names},
            head_tensors=names,
            probe=stored,
            changed_outputs=changed,
            dtypes=self.knowledge.weight_dtypes,
            **claims,
        )

    def _default_probe(self) -> tuple[Any, int | None]:
        """Inputs on which outputs are recorded, and the seed they were drawn from; None: there are none."""
        return None, None

    def _record_outputs(self, task: str) -> None:
        """Remember the outputs of the task that has just ended, for the certificates that follow."""
        inputs, _ = self._default_probe()
        if inputs is not None:
            try:
                outputs = self.head_outputs(inputs, [task])
            except Exception:  # a model that cannot run on the probe can be trained all the same
                return
            record_outputs(self.knowledge.output_digests, inputs, self.model, outputs)

    def _compute_outputs(self, probe: Tensor | None) -> tuple[ProbeOutputs | None, list[str], list[str], list[str]]:
        """Outputs on the probe; tasks whose outputs are not the recorded ones; tasks without a record; tasks for which
        the model returns no tensor."""
        inputs, seed = self._default_probe()
        stored, changed, unrecorded, without_tensor = None, [], [], []
        for x, number in ((inputs, seed), (probe, None)):
            if x is not None:
                try:
                    outputs = self.head_outputs(x)
                except Exception as error:
                    if x is not probe:
                        raise
                    raise ValueError(
                        f"certificate(probe): the model cannot run on {describe_value(x)}. Give a batch of inputs as "
                        "the model takes them."
                    ) from error
                without_tensor = [task for task in self.tasks if task not in outputs]
                if isinstance(x, Tensor) and outputs:
                    stored = ProbeOutputs.from_outputs(x, outputs, number, self.model)
                own, given = self.knowledge.output_digests, self.knowledge.given_output_digests
                more, missing = compare_outputs(own if x is inputs else given, x, self.model, outputs)
                changed += more
                unrecorded += missing if x is inputs else []
        return stored, [task for task in self.tasks if task in changed], unrecorded, without_tensor

    def head_outputs(self, x: Any, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The output on `x` for each of `tasks`, by default all learned, as the method shows it: one tensor each.

        The tensors of a dict, a tuple or a nested output are concatenated; a task whose output has none is left out.
        """
        tasks = self.tasks if tasks is None else tasks
        with preserve_model_state(self.model):
            outputs = self.heads.run_on_features(x, tasks)
            if outputs is None:
                outputs = {task: self._view_output(x, task) for task in tasks}
        tensors = {task: concat_tensors(output) for task, output in outputs.items()}
        return {task: tensor for task, tensor in tensors.items() if tensor is not None}

    def _view_output(self, x: Any, task: str) -> Any:
        with self.viewing(task):
            return self.call_model(x, task)

    def _certified_claims(self) -> dict[str, Any]:
        return {
            "kind": "held",
            "zero_rule": "off",
            "layout": Layout(0, {}, {}, {}),
            "first": [],
            "digests": [],
            "held": [],
            "moved": [],
        }

    # Shared machinery ------------------------------------------------------------------------------------------------

    def call_model(self, x: Any, task: str, model: Callable[..., Any] | None = None) -> Any:
        """Run the method's model on `x` for `task`, as `Heads.call_model` does."""
        return self.heads.call_model(x, task, self.tasks, model)

    def task_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The task that a call of the method's model is for: named there, else viewed, under way, or learned last."""
        return self.heads.task_of_call(args, kwargs, self.tasks, self._default_task)

    def _default_task(self) -> str | None:
        return self._viewed_task or self.task or (self.tasks[-1] if self.tasks else None)

    def warn_once(self, key: str, message: str) -> None:
        """Warn the user, once for each `key` in the life of the method."""
        if key not in self.knowledge.warned:
            self.knowledge.warned.append(key)
            if self._queued_warnings is None:
                warn_user(message)
            else:
                self._queued_warnings.append(message)

    def _warn_of_unused_settings(self) -> None:
        """Warn of settings that are not the defaults and change nothing in what is learned."""
        unused = self.config.find_unused() if isinstance(self.config, Settings) else {}
        defaults = {field.name: field.default for field in fields(self.Config)}
        for name, reason in unused.items():
            value = getattr(self.config, name)
            if value != defaults[name]:
                warn_user(
                    f"{type(self).__name__}: {name}={value!r} changes nothing in what is learned: {reason}. "
                    "Leave it out."
                )

    def _default_forward(self, batch: Any) -> Any:
        """What is differentiated by default: the cross-entropy on `(x, y)`, the output on `x`."""
        assert self.task is not None
        if isinstance(batch, tuple | list):
            output = self.call_model(batch[0], self.task)
            if len(batch) > 1 and isinstance(output, Tensor):
                return F.cross_entropy(output, batch[1])
            return output
        return self.call_model(batch, self.task)

    def _require_plan(self, caller: str) -> plans.Plan:
        if self.plan is None:
            raise RuntimeError(f"{caller} was called outside a task: call begin_task(task, optimizer) first.")
        return self.plan

    def check_weights_finite(self) -> None:
        """Raise where training diverged, before the task becomes the method's knowledge."""
        parameters = self.heads.list_task_parameters(self.tasks[-1], self.tasks)  # no other head is trained
        trained = {name: p for name, p in parameters.items() if p.requires_grad and not is_lazy(p)}
        broken = [n for n, p in trained.items() if p.is_floating_point() and not bool(p.isfinite().all())]
        if broken:
            raise FloatingPointError(
                f"Weights of task {self.task!r} are not finite ({', '.join(broken[:3])}): training diverged. The task "
                f"was not ended; go back to the last good weights, or {self._divergence_advice}."
            )

    def _warn_of_unprotected(self, task: str) -> None:
        """Warn where a new task will change what the method cannot protect: a shared head, another method's tasks."""
        loaded: set[str] = getattr(self.model, "loaded_heads", set())
        if unknown := sorted(loaded - {task}) if self.protects and not self.tasks else []:
            self.warn_once(
                "loaded heads",
                f"The model was loaded with heads of {', '.join(unknown)}, which this {type(self).__name__} did not "
                "learn: nothing protects them. If they were learned before, load the state of the method, too, before "
                "begin_task: method.load_state_dict(…).",
            )
        if self.tasks and self.heads.is_shared:
            self.warn_once(
                "shared head",
                f"All tasks share one head ({self.heads.place!r}), which every task trains, so outputs of old tasks "
                "change whatever the method does. Give each task a head of its own, e.g. with MultiHead(trunk).",
            )
        dtypes, before = self._list_dtypes(), self.knowledge.weight_dtypes
        if before and dtypes != before:
            self.warn_once(
                "dtype",
                f"The model's weights are {', '.join(dtypes)} and were {', '.join(before)} when task "
                f"{self.tasks[-1]!r} ended. What the method keeps is converted too, but rounding may have changed the "
                "outputs of old tasks. Convert a model before its first task; for half precision use torch.autocast.",
            )
        if others := self.find_tasks_of_others():
            self.warn_once(
                "other method",
                f"The model learned {', '.join(others)} with another method object; this one does not protect what "
                "was learned there. Make the method once, before the loop over tasks, or load its state; if this is "
                "meant, call close() of the other one first.",
            )

    def find_tasks_of_others(self) -> list[str]:
        """The tasks that the model learned with other method objects that were not closed."""
        return sorted(_LEARNED.get(self.model, set()).difference(self.tasks))

    def _warn_of_lost_copy(self, plan: plans.Plan, *, epochs: int) -> None:
        if plan.find_lost_copy(epochs=epochs):
            self.warn_once(
                "copy",
                f"The method was copied or unpickled within task {plan.task!r}, and the optimizer copied with it has "
                "not stepped since, so the method does not act. Copy all in one go, copy.deepcopy((model, optimizer, "
                "method)), and train with these; or load method.state_dict() with load_state_dict(state, optimizer).",
            )

    def _digest_head(self, task: str) -> str:
        head = self.heads.get_head(task, self.tasks).state_dict()
        return digest_tensors(head, list(head))

    def _warn_of_shared_heads(self) -> None:
        if self.protects and (shared := self.heads.find_shared()):
            self.warn_once(
                "shared heads",
                f"Heads of two tasks share parameters ({' is '.join(shared[0])}): what one task trains there changes "
                "the outputs of the other. Give each task its own, and put what all share into the trunk. One output "
                "layer for all tasks is named when the method is made: heads='name of the layer'.",
            )

    def _warn_of_changed_heads(self, heads: Mapping[str, nn.Parameter]) -> None:
        """Warn where old heads changed between two tasks, when nothing protects them.

        The newest of them is always compared; another only where torch has counted a write to it since the last task
        began: there may be hundreds.
        """
        if self.heads.is_shared or {"dtype", "shared heads"}.intersection(self.knowledge.warned):
            return
        *others, current = self.tasks
        before, suspects = self._head_versions, others[-1:]
        versions = dict(zip(heads, [p._version for p in heads.values()], strict=True))
        if not before.items() <= versions.items():
            written = {name for name, version in before.items() if versions.get(name, version) != version}
            names = {task: self.heads.tensor_names(task, self.tasks) for task in others}
            suspects = [task for task in others if task in suspects or written.intersection(names[task])]
        for name in self.heads.tensor_names(current, self.tasks):  # which this task will write to
            versions.pop(name, None)
        self._head_versions = versions
        if changed := self._find_changed_heads(suspects, current):
            self.warn_once(
                "changed heads",
                f"The heads of {', '.join(changed)} changed after their tasks had ended and before {current!r} began, "
                "when nothing protects them. Between end_task and begin_task take no optimizer step: its weight decay "
                "and momentum change old heads too. To undo it, load the weights that the last task ended with.",
            )

    def _warn_of_other_weights(self, current: str) -> None:
        """Warn where the model does not have the weights of the state just loaded, within the task `current`."""
        if self.heads.is_shared or self._list_dtypes() != self.knowledge.weight_dtypes:
            return
        if other := self._find_changed_heads(self.knowledge.head_digests, current):
            self.warn_once(
                "other weights",
                f"The model does not have the weights that this state was saved with: the heads of {', '.join(other)} "
                "differ, so old tasks are lost. Load the model's weights first: model.load_state_dict(…), then "
                "method.load_state_dict(state, optimizer).",
            )

    def _find_changed_heads(self, tasks: Iterable[str], current: str) -> list[str]:
        """Which of the tasks have other heads than when they ended; not heads that are part of the current one's."""
        digests, own = self.knowledge.head_digests, set(self.heads.tensor_names(current, self.tasks))
        ended = [task for task in tasks if task in digests and task != current]
        apart = [task for task in ended if not own.intersection(self.heads.tensor_names(task, self.tasks))]
        return [task for task in apart if self._digest_head(task) != digests[task]]

    def _list_dtypes(self) -> list[str]:
        """Of the trunk and the newest head; the others follow them."""
        parameters = self.heads.list_task_parameters(self.tasks[-1], self.tasks) if self.tasks else {}
        return sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values() if p.is_floating_point()})

    @property
    def _divergence_advice(self) -> str:
        return "lower the learning rate"

    def _check_ranks(self, task: str, digest: str) -> None:
        """Warn where ranks that train together ended a task with other weights of its head."""
        if not is_distributed() or self.heads.is_shared:
            return
        device = next(self.model.parameters()).device
        words = torch.tensor([int(digest[start : start + 8], 16) for start in range(0, len(digest), 8)], device=device)
        highest, lowest = words.clone(), -words
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(lowest, dist.ReduceOp.MAX)
        if not torch.equal(highest, -lowest):
            self.warn_once(
                "ranks",
                f"The head of task {task!r} differs between ranks: its gradients were not averaged. Give the method "
                "the DistributedDataParallel model, not the one inside it, or wrap the model after adding the head.",
            )

    def _check_optimizers(self, optimizers: Sequence[Any], call: str = "begin_task(task, optimizer)") -> None:
        if not optimizers:
            raise ValueError(f"Give the optimizer that trains the model: {call}.")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"Expected a torch.optim optimizer, got {type(optimizer).__name__}.")
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        trunk, every = self.heads.list_trunk_parameters().values(), self.model.parameters()
        if not any(_hold_any(groups, parameters) for parameters in (trunk, every)):
            raise ValueError(
                "The optimizer holds none of the model's parameters. Was the model copied or moved after the "
                "optimizer was made? Then make the optimizer again."
            )


def _holds_misplaced(optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch has a parameter with the moments of one of another shape."""
    if not type(optimizer).__module__.startswith("torch.optim"):  # others may keep moments of any shape
        return False
    moments = [(p, state.get(key)) for p, state in optimizer.state.items() for key in ("exp_avg", "momentum_buffer")]
    return any(isinstance(moment, Tensor) and moment.shape != parameter.shape for parameter, moment in moments)


def _hold_any(groups: Sequence[Sequence[nn.Parameter]], parameters: Iterable[nn.Parameter]) -> bool:
    ids = {id(p) for p in parameters}
    return any(id(p) in ids for group in groups for p in group)
