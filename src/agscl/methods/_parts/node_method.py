"""`NodeMethod`: a method that knows the model's nodes, from a `NodeGraph` built when the method is made."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agscl.graph.nodes import NodeGraph
from agscl.graph.refusals import NodeGraphError
from agscl.heads import HeadPlace
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.task_plan import Plan
from agscl.probe_outputs import ProbeOutputs

__all__ = ["NodeMethod", "NodePlan"]

PROBE_SIZE, PROBE_SEED = 16, 0
"""Random inputs on which a certificate keeps the outputs of all heads."""


class NodePlan(Plan):
    """A plan with the node graph at hand; it freezes excluded modules."""

    method: NodeMethod

    @property
    def graph(self) -> NodeGraph:
        return self.method.graph

    def attach(self) -> None:
        super().attach()
        graph = self.graph
        if graph.excluded == "freeze":
            inside = {id(p): p for name in graph.exclude for p in graph.model.get_submodule(name).parameters()}
            self.freeze(inside.values())

    def refuse_unfrozen(self) -> None:
        """Raise where weights are trained that the node graph does not know, as they were frozen when it was built."""
        if unfrozen := self.graph.find_unfrozen():
            raise RuntimeError(
                f"{', '.join(unfrozen[:3])}: frozen when the graph was built and trained now, so nothing protects it. "
                "Freeze it again, or build a new method on the model."
            )


class NodeMethod(Method):
    """A method that knows the model's nodes.

    `example_input` is a batch of inputs, as the model takes them (a tuple for several arguments), or a `NodeGraph` of
    the model. `exclude` and `excluded` are those of `NodeGraph`. The graph is built at once; where the model can be run
    only once a task has a name (`heads` is a function of the task, or a list), when the first task begins.
    """

    owns_weights = True

    def __init__(
        self,
        model: nn.Module,
        example_input: Any = None,
        *,
        heads: HeadPlace | None = None,
        exclude: Sequence[str] = (),
        excluded: Literal["freeze", "train"] = "freeze",
        **settings: Any,
    ) -> None:
        if example_input is None:
            raise TypeError(
                f"{type(self).__name__} needs an example input to find the network's nodes: give a batch of inputs, "
                f"{type(self).__name__}(model, example_input), or a NodeGraph."
            )
        graph = example_input if isinstance(example_input, NodeGraph) else None
        if heads is None and graph is not None and graph.heads is not None:
            heads = graph.heads.place
        super().__init__(model, heads=heads, **settings)
        if graph is not None and graph.model is not self.model:
            raise ValueError("The NodeGraph was built on another model: build it on the model given to the method.")
        self._graph = graph
        self._graph_options: dict[str, Any] = {"exclude": exclude, "excluded": excluded}
        self._example_input = example_input if graph is None else None
        if graph is not None:
            self._init_nodes()
        elif self._can_run_model(example_input):
            self._build_graph()

    def _can_run_model(self, example_input: Any) -> bool:
        """Whether it is known, before the first task begins, how to run the model and where its heads are."""
        heads, argument_count = self.heads, len(self.heads.split_arguments(example_input))
        if callable(heads.place):
            return False
        names_task = heads.task_position is None or argument_count > heads.task_position
        return heads.place is None or names_task or bool(heads.existing_tasks)

    @property
    def graph(self) -> NodeGraph:
        if self._graph is None:
            raise RuntimeError("There is no NodeGraph yet: this model's heads are known once begin_task was called.")
        return self._graph

    def _build_graph(self) -> None:
        try:
            self._graph = NodeGraph(
                self.model, self._example_input, heads=self.heads.place, tasks=self.tasks, **self._graph_options
            )
        except NodeGraphError as error:
            if others := self.find_tasks_of_others():
                raise RuntimeError(
                    f"The model learned {', '.join(others)} with another method object, which still acts on it. Go on "
                    "with that one, or call its close() first; in a notebook, make the model and the method together."
                ) from error
            raise
        self._example_input = None
        self._init_nodes()

    def _init_nodes(self) -> None:
        """Size the knowledge by the graph, which has just been built."""

    @property
    def _node_device(self) -> torch.device:
        return next(parameter.device for _, parameter, _ in self.graph.incoming_parameters())

    @property
    def _node_dtype(self) -> torch.dtype:
        """Of numbers kept for each node: the weights' own, float32 at least."""
        kinds = [parameter.dtype for _, parameter, _ in self.graph.incoming_parameters()]
        return functools.reduce(torch.promote_types, kinds, torch.float32)

    def _prepare_task(self, task: str) -> None:
        if self._graph is None:
            self._build_graph()
        self.graph.trace_head(task, self.tasks)

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        self._drop_plan()
        self.knowledge.tasks = list(state["tasks"])
        if self._graph is None and self.tasks:
            self._build_graph()
        if self._graph is not None:
            self._check_group_count(state)
            for learned in self.tasks:
                self.graph.trace_head(learned, self.tasks)
        super()._load_knowledge(state, task)

    def _check_group_count(self, state: Mapping[str, Any]) -> None:
        """Raise if a state is of a network with another number of groups."""

    def _require_group_count(self, count: int) -> None:
        if count not in (0, self.graph.size):
            raise ValueError(f"The state is of a network with {count} groups of nodes; this one has {self.graph.size}.")

    def _default_forward(self, batch: Any) -> Any:
        """Activations are all that is measured: no labels are needed."""
        assert self.task is not None
        return self.call_model(batch[0] if isinstance(batch, tuple | list) else batch, self.task)

    def _default_probe(self) -> tuple[Any, int | None]:
        """16 random inputs drawn from a seed; where the model takes something else than a batch, the example."""
        example, device = self.graph.example, next(self.model.parameters()).device
        tensors = [argument for argument in example if isinstance(argument, Tensor)]
        if len(tensors) != 1 or example[0] is not tensors[0] or not tensors[0].is_floating_point():
            return tuple(a.to(device) if isinstance(a, Tensor) else a for a in example), None
        kinds = {p.dtype for p in self.heads.list_trunk_parameters().values() if p.is_floating_point()}
        dtype = kinds.pop() if len(kinds) == 1 else tensors[0].dtype
        batch = ProbeOutputs.draw_batch([PROBE_SIZE, *tensors[0].shape[1:]], PROBE_SEED).to(device, dtype)
        return batch if len(example) == 1 else (batch, *example[1:]), PROBE_SEED
