"""`NodeGraph`: the nodes of a model, and which columns of which later layers read each one.

The graph is measured, not inferred from operators: see `probing`. A layer that a measurement cannot explain (a column
that mixes several nodes of one layer, a weight used outside its layer, …) is refused by name. Once built, the graph is
checked with a second, independent measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from agscl.graph.probing import LAYERS, ExpectedGroups, NodeProbe, NodeTrace, ProbePoint, column_dim
from agscl.graph.refusals import NodeGraphError, Refusal
from agscl.heads import HeadPlace, Heads, MultiHead, list_parameters
from agscl.system.describe import describe_value

__all__ = ["NodeGraph", "NodeGraphError", "NodeLayer", "NormLayer", "ReLUSite", "Reader"]

HEAD_REMEDY = "Let each task's head begin with a Linear or Conv layer, e.g. nn.Sequential(nn.Linear(…), YourHead(…))."


def read_own_weight(name: str, module: nn.Module) -> nn.Parameter:
    """A node layer's own weight, also where this thread looks at a task that sees another in its place."""
    if "weight" not in module._parameters:
        raise RuntimeError(
            f"The weight of {name} is computed now, by a parametrization or pruning of torch that came after the node "
            "graph. Make it a plain parameter again (parametrize.remove_parametrizations, prune.remove)."
        )
    return dict.__getitem__(module._parameters, "weight")  # type: ignore[return-value]


@dataclass
class NodeLayer:
    """A trained linear or convolutional layer: one node per output unit or channel."""

    name: str
    module: nn.Module
    groups: Tensor  # (nodes,) the group of each node

    @property
    def size(self) -> int:
        return len(self.groups)

    @property
    def weight(self) -> nn.Parameter:
        return read_own_weight(self.name, self.module)


@dataclass
class NormLayer(NodeLayer):
    """A BatchNorm over nodes: channel c's scale, shift and statistics belong to group `groups[c]`."""

    module: _BatchNorm


@dataclass
class Reader:
    """A layer whose input columns are nodes: column c reads group `sources[c]`, or none (-1)."""

    name: str
    module: nn.Module
    sources: Tensor  # (columns,)
    is_head: bool

    @property
    def weight(self) -> nn.Parameter:
        return read_own_weight(self.name, self.module)

    def source_groups(self) -> Tensor:
        """The group of nodes that each stored weight reads, to broadcast against it: (rows or 1, columns, 1…)."""
        conv_groups = getattr(self.module, "groups", 1)
        sources = self.sources.view(conv_groups, -1)
        if conv_groups > 1:
            sources = sources.repeat_interleave(len(self.weight) // conv_groups, 0)
        return sources.view(*sources.shape, *[1] * (self.weight.dim() - 2))

    def reads(self, chosen: Tensor) -> Tensor:
        """Which stored weights read the `chosen` (groups,) groups of nodes, in the shape of `source_groups`."""
        return F.pad(chosen, (0, 1))[self.source_groups().to(chosen.device)]  # the last: no node


@dataclass
class ReLUSite:
    """A ReLU of the graph: the `index`-th of a forward pass. Along `dim`, element e is a value of group `groups[e]`."""

    index: int
    dim: int | None  # None: groups run over the flattened sample
    groups: Tensor
    rows_per_sample: int = 1  # above 1 where a model folds another dimension into the batch


class NodeGraph:
    """The nodes of `model`, found with `example_input` (a batch of one or more, or the forward's arguments).

    Nodes that are added together (residual connections) or tied channel by channel (a depthwise filter and the
    channel it reads) form one group, free or important together; elsewhere a group is one node.

    `exclude` names modules to leave out of the nodes: kept as they are (`excluded="freeze"`), or trained by every
    task as a head would be (`excluded="train"`). What later layers read of an excluded one is not protected.

    `heads` says where the heads are, as for a method. A model that is no `MultiHead`, without `heads`, is taken as a
    trunk, whose outputs heads will read; a `MultiHead` needs no head yet.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        *,
        heads: HeadPlace | None = None,
        exclude: Sequence[str] = (),
        excluded: Literal["freeze", "train"] = "freeze",
        tasks: Sequence[str] = (),
    ) -> None:
        if excluded not in ("freeze", "train"):
            raise ValueError(f"excluded must be 'freeze' or 'train', not {excluded!r}.")
        self.model, self.excluded = model, excluded
        self.exclude = self._given_exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self.heads = Heads(model, heads) if heads is not None or isinstance(model, MultiHead) else None
        self._tasks = list(tasks)
        arguments = example_input if isinstance(example_input, tuple) else (example_input,)
        if self.heads is not None:
            arguments = self.heads.split_arguments(example_input)
        _check_example(example_input)
        self.example: tuple[Any, ...] = tree_map(_first_sample, arguments)
        try:
            self._build(example_input)
        except NodeGraphError as error:
            raise self._collect_refusals(error) from None

    def _build(self, example_input: Any) -> None:
        self.features: Tensor | None = None  # (features,) the group behind each input of a MultiHead's linear heads
        self._node_layers: dict[str, nn.Module] = {}
        self._norm_layers: dict[str, _BatchNorm] = {}
        self._later_heads: list[str] = []  # heads of tasks not yet begun, where heads= is a function
        self._find_layers()
        task = self._first_task()
        probe = self._run_example(task, example_input)
        self._other_activations = probe.other_activations
        never_called = []
        for name in probe.never_called:
            if self.heads is None or not callable(self.heads.place):  # else: a head whose task has not begun
                reason = "the forward pass never calls it, so which layers read its nodes is not known."
                never_called.append(Refusal(name, reason, exclude=(name,)))
                continue
            del self._node_layers[name], probe.replaced[name]
            self._later_heads.append(name)
        _raise_if_any(never_called)
        self._node_layers = {name: self._node_layers[name] for name in probe.outputs if name in self._node_layers}
        self._called_layers = set(probe.outputs)
        self._assemble_graph(probe)
        try:
            self.prove(task)
        except NodeGraphError:  # small values may be lost in rounding, e.g. beside an added input: try large ones
            self._assemble_graph(probe, scales=(1.0, 1e3))
            self.prove(task)

    def _collect_refusals(self, error: NodeGraphError) -> NodeGraphError:
        """Leave out what was refused and try again, until a graph can be built: one error for all that was refused."""
        refusals = {refusal.layer: refusal for refusal in error.refusals}
        note = ""
        while True:
            new = [name for name in error.exclude if name not in self.exclude]
            if not new:
                break
            self.exclude = (*self.exclude, *new)
            try:
                self._build(self.example)
                break
            except NodeGraphError as next_error:
                error = next_error
                if not error.exclude:
                    note = f"That is not enough, though: {error}"
                else:
                    refusals |= {refusal.layer: refusal for refusal in error.refusals if refusal.layer not in refusals}
            except Exception as other:  # the user's own forward pass, which sees other values now
                note = f"That was tried, and the forward pass raised {type(other).__name__}: {other}"
                break
        exclude, self.exclude = self.exclude, self._given_exclude
        causes = [refusal for refusal in refusals.values() if not refusal.is_consequence]
        if consequences := ", ".join(refusal.layer for refusal in refusals.values() if refusal.is_consequence):
            note = " ".join(filter(None, [f"Listed only because the others are: {consequences}.", note]))
        note = " ".join(filter(None, [note, "PackNet and WSN need no nodes: they freeze single weights."]))
        return NodeGraphError(*causes, exclude=exclude, note=note)

    def _first_task(self) -> str | None:
        """The task to run the model for while it is probed; None: the example names it, or the trunk runs alone."""
        if self.heads is None or not self.heads.takes_task or len(self.example) > (self.heads.task_position or 0):
            return None
        task_names = self._tasks or self.heads.existing_tasks
        return task_names[-1] if task_names else None

    def _run_model(self, task: str | None, *arguments: Any) -> Any:
        """Run the model for `task`; of a `MultiHead` without a head, run its trunk."""
        if isinstance(self.model, MultiHead) and not self.model.heads:
            return self.model.trunk(*arguments)
        if self.heads is None or task is None:
            return self.model(*arguments)
        return self.heads.call_model(arguments, task, self._tasks or self.heads.existing_tasks)

    # Sorting the modules ---------------------------------------------------------------------------------------------

    def _find_layers(self) -> None:
        """Sort the model's modules into nodes, norms, excluded ones and heads; refuse what is none of these."""
        modules = dict(self.model.named_modules())
        for name in self.exclude:
            if name not in modules:
                similar = [other for other in modules if other.endswith(name)] or [other for other in modules if other]
                raise ValueError(f"exclude: the model has no module {name!r}. It has: {', '.join(similar[:20])}.")
        self._head_names = self._find_head_names()
        self._refuse_lazy_modules(modules)
        self._reader_only_layers = self._find_reader_only_layers()
        parameter_owners: dict[int, str] = {}
        refusals: list[Refusal] = []
        for name, module in modules.items():
            if (
                not self._is_head_or_excluded(name)
                and isinstance(module, _InstanceNorm)
                and module.running_mean is not None
            ):
                reason = "its running statistics would change for old tasks; only those of BatchNorm can be kept."
                affine = ", affine=False" if any(p.requires_grad for p in module.parameters()) else ""
                refusals.append(Refusal(name, reason, f"Make it with track_running_stats=False{affine}.", (name,)))
            if self._is_head_or_excluded(name) or not isinstance(module, (*LAYERS, _BatchNorm)):
                continue
            if isinstance(module, _BatchNorm):
                self._norm_layers[name] = module
            elif any(p.requires_grad for p in module.parameters()):
                refusals += self._check_layer(name, module)
                self._node_layers[name] = module
            for key, parameter in module.named_parameters(recurse=False):
                owner = parameter_owners.setdefault(id(parameter), name)
                if owner != name and parameter.requires_grad:
                    reason = (
                        f"its {key} is also the one of {owner} (tied weights), so it cannot be frozen in one layer and "
                        "free in the other."
                    )
                    refusals.append(Refusal(name, reason, exclude=(owner, name)))
        for name, parameter in self.model.named_parameters():
            holder = name.rpartition(".")[0]
            if (
                parameter.requires_grad
                and not self._is_head_or_excluded(holder)
                and id(parameter) not in parameter_owners
            ):
                refusals.append(self._refuse_parameter(name, holder, modules[holder]))
        _raise_if_any(refusals)
        if not self._node_layers:
            reason = "it has no trained Linear or Conv layer outside its heads, so there are no nodes."
            remedy = "Check requires_grad, heads= and exclude=."
            raise NodeGraphError(Refusal(type(self.model).__name__, reason, remedy))

    def _refuse_lazy_modules(self, modules: Mapping[str, nn.Module]) -> None:
        outside = {name: module for name, module in modules.items() if not _is_within(name, self._head_names)}
        lazy = [name for name, m in outside.items() if any(is_lazy(p) for p in m.parameters(recurse=False))]
        call = "model.trunk(x)" if isinstance(self.model, MultiHead) else "model(x)"
        remedy = f"Run the model once on a batch first: {call}."
        _raise_if_any([Refusal(name, "it is lazy, so its weights have no shape yet.", remedy) for name in lazy])

    def _find_head_names(self) -> tuple[str, ...]:
        if self.heads is None:
            return ()
        if not callable(self.heads.place):
            return (self.heads.prefix,)
        if not self._tasks:
            raise ValueError(
                "heads is a function of the task, so give the tasks too: tasks=['name of the first task']."
            )
        head_ids = {id(self.heads.get_head(task, self._tasks)) for task in self._tasks}
        return tuple(name for name, module in self.model.named_modules() if id(module) in head_ids)

    def _find_reader_only_layers(self) -> dict[str, nn.Module]:
        """The layers of heads and of excluded modules: their inputs are nodes, their outputs are not."""
        return {n: m for n, m in self.model.named_modules() if isinstance(m, LAYERS) and self._is_head_or_excluded(n)}

    def list_head_modules(self) -> dict[str, nn.Module]:
        """Modules of heads alone, but for Linear and Conv layers, by name. Their ReLUs are no sites: tasks differ in
        them."""
        inside: dict[str, nn.Module] = {}
        outside: set[int] = set()
        waiting = [("", self.model, False)]
        while waiting:  # not named_modules, which takes longer for hundreds of heads
            name, module, in_head = waiting.pop()
            in_head = in_head or name in self._head_names
            if in_head:
                inside[name] = module
            else:
                outside.add(id(module))
            for key, child in module._modules.items():
                if child is not None and not isinstance(child, LAYERS):
                    waiting.append((f"{name}.{key}" if name else key, child, in_head))
        return {name: module for name, module in inside.items() if id(module) not in outside}

    def _is_head_or_excluded(self, name: str) -> bool:
        return _is_within(name, self._head_names) or _is_within(name, self.exclude)

    def _refuse_parameter(self, name: str, holder: str, module: nn.Module) -> Refusal:
        """Refuse a trained parameter of a module of another kind."""
        if isinstance(module, _ConvTransposeNd):
            reason = (
                f"{type(module).__name__} is not supported: its weight has output channels in the second dimension, "
                "while incoming weights are rows of the first."
            )
            return Refusal(holder, reason, exclude=(holder,))
        reason = (
            f"the trained parameter {name} ({type(module).__name__}) belongs to no node: nodes are outputs of Linear "
            "and Conv layers, with the scale and shift of BatchNorm."
        )
        remedy = "Make it with affine=False." if isinstance(module, _InstanceNorm) else ""
        parameter = self.model.get_parameter(name)
        if parameter.numel() == max(parameter.shape, default=1) and not type(module).__module__.startswith("torch."):
            remedy = (
                f"If it scales or shifts each node by itself, freeze it, model.get_parameter({name!r})."
                "requires_grad_(False): the Linear or Conv layers beside it learn the same."
            )
        layers = (name for name, layer in self.model.named_modules() if isinstance(layer, LAYERS))
        if holder and not all(_is_within(name, (holder, *self._head_names)) for name in layers):
            return Refusal(holder, reason, remedy, (holder,))
        remedy += f"{' Or move' if remedy else 'Move'} it into a module of its own, and exclude that one."
        return Refusal(holder or name, reason, remedy)

    def _check_layer(self, name: str, module: nn.Module) -> Iterator[Refusal]:
        base_class = next(layer_class for layer_class in LAYERS if isinstance(module, layer_class))
        overridden = [
            key
            for key in ("forward", "_conv_forward")
            if getattr(type(module), key, None) is not getattr(base_class, key, None)
        ]
        if overridden:
            reason = (
                f"{type(module).__name__} overrides {overridden[0]}, so a weight of 0 need not mean that the input is "
                "not read."
            )
            yield Refusal(name, reason, exclude=(name,))
        extra = [key for key in module._parameters if key not in ("weight", "bias")]
        if extra or "weight" not in module._parameters or parametrize.is_parametrized(module):
            reason = (
                "its weight is computed from other parameters (a parametrization such as weight_norm), so freezing the "
                "weight would freeze nothing."
            )
            yield Refusal(name, reason, "Remove the parametrization.", (name,))

    def _check_reader(self, name: str, module: nn.Module) -> None:
        """Refuse a head that reads nodes with a weight of which no column can be set to 0."""
        if "weight" not in module._parameters and _is_within(name, self._head_names):
            reason = (
                "its weight is computed from other parameters (a parametrization such as weight_norm), so what a head "
                "reads of free nodes cannot be set to 0."
            )
            remedy = (
                "Remove the parametrization (torch.nn.utils.parametrize.remove_parametrizations), or let the head "
                "begin with a plain Linear or Conv layer."
            )
            raise NodeGraphError(Refusal(name, reason, remedy))

    def _run_example(self, task: str | None, example_input: Any) -> NodeProbe:
        """The first probe; where the model cannot run on the example, an error that says what was given."""
        try:
            return self._probe(task)
        except NodeGraphError:
            raise
        except Exception as error:
            weight = next(self.model.parameters())
            raise ValueError(
                f"The model cannot run on example_input, {describe_value(example_input)}: {error} (The model's weights "
                f"are {str(weight.dtype).removeprefix('torch.')} on {weight.device}.) Give a batch of inputs alone, "
                "such as next(iter(loader))[0], of the shape, dtype and device that the model takes. A tuple stands "
                "for several arguments of the forward pass, not for inputs and labels."
            ) from error

    def _probe(self, task: str | None) -> NodeProbe:
        return NodeProbe(
            self.model,
            partial(self._run_model, task),
            self.example,
            nodes=self._node_layers,
            reader_only=self._reader_only_layers,
            norms=self._norm_layers,
            excluded={name: self.model.get_submodule(name) for name in self.exclude},
            heads=self.list_head_modules().values(),
        )

    # Building the graph from what was measured -----------------------------------------------------------------------

    def _assemble_graph(self, probe: NodeProbe, scales: Sequence[float] = (1.0,)) -> None:
        """Turn what the probe measures into groups, readers, norms and ReLU sites."""
        traces = probe.trace_nodes(list(self._node_layers), scales)
        first_node: dict[str, int] = {}
        self.node_count = 0
        for name, module in self._node_layers.items():
            first_node[name] = self.node_count
            self.node_count += _count_nodes(module)
        node_sets = _DisjointSets(self.node_count)
        nodes_at: dict[ProbePoint, Tensor] = {}  # a node behind each element, numbered through all layers
        _raise_if_any([refusal for point in traces for refusal in self._find_mixing(probe, point, traces[point])])
        for point, trace in traces.items():
            for layer, nodes in trace.nodes.items():
                nodes = nodes.long()
                numbered = torch.where(nodes >= 0, nodes + first_node[layer], -1)
                earlier = nodes_at.setdefault(point, numbered)
                node_sets.merge(earlier, numbered)  # nodes that meet in one element are added together: one group
                nodes_at[point] = torch.where(earlier >= 0, earlier, numbered)
        self._merge_depthwise(node_sets, first_node, nodes_at)

        group_of = torch.cat([node_sets.number_sets(), torch.tensor([-1])])  # the last for -1, no node
        self.size = int(group_of.max()) + 1
        self.layers = {
            name: NodeLayer(name, module, group_of[first_node[name] : first_node[name] + _count_nodes(module)].clone())
            for name, module in self._node_layers.items()
        }
        self.readers: dict[str, Reader] = {}
        self.norms: dict[str, NormLayer] = {}
        self.excluded_readers = {call.partition(" ")[2] for kind, call in nodes_at if kind == "excluded"}
        self.frozen_norms = self._excluded_norms()  # of a frozen backbone or module
        self.relu_sites: tuple[ReLUSite, ...] = ()
        for (kind, name), nodes in nodes_at.items():
            if kind == "reader":
                module = self._node_layers.get(name) or self._reader_only_layers[name]
                self._check_reader(name, module)
                self.readers[name] = Reader(name, module, group_of[nodes], _is_within(name, self._head_names))
            elif kind == "site":
                self.relu_sites += (
                    _make_relu_site(int(name), group_of[nodes], probe.rows_per_sample.get((kind, name), 1)),
                )
        self._find_beside_refused(traces)
        refusals = [self._add_norm(name, norm, nodes_at, group_of) for name, norm in self._norm_layers.items()]
        self.readers_of = {name: _count_columns(name, traces) for name in self._node_layers}
        self._followed_by_norm = {
            layer for (kind, _), trace in traces.items() if kind == "norm" for layer in trace.nodes
        }
        self._find_features(traces, nodes_at, group_of)
        _raise_if_any([*filter(None, refusals), *self._find_inactive()])
        self._check_outputs(probe, traces)

    def _merge_depthwise(
        self, node_sets: _DisjointSets, first_node: Mapping[str, int], nodes_at: Mapping[ProbePoint, Tensor]
    ) -> None:
        """A depthwise filter belongs to the channel it reads."""
        for name, module in self._node_layers.items():
            conv_groups = getattr(module, "groups", 1)
            sources = nodes_at.get(("reader", name))
            if conv_groups > 1 and conv_groups == module.in_channels and sources is not None:
                filters = torch.arange(_count_nodes(module)) + first_node[name]
                node_sets.merge(filters, sources.repeat_interleave(len(filters) // conv_groups))

    def _find_mixing(self, probe: NodeProbe, point: ProbePoint, trace: NodeTrace) -> Iterator[Refusal]:
        kind, name = point
        if kind == "excluded" or (kind == "output" and self._has_heads()):
            return
        where = {"reader": f"an input column of {name}", "norm": f"a channel of {name}", "output": "an output"}
        for layer, mixed in trace.mixed.items():
            if not mixed:
                continue
            if _is_within(name, self._head_names) and (refusal := self._refuse_head(probe, layer, point)):
                yield refusal
            else:
                excludable = kind in ("reader", "norm") and not _is_within(name, self._head_names)
                reason = (
                    f"{where.get(kind) or f'ReLU number {int(name) + 1}'} depends on several of its nodes at once (a "
                    "normalisation over channels, attention, a frozen layer or another mixing operation lies between), "
                    "so no column can be said to read one node."
                )
                yield Refusal(layer, reason, exclude=tuple(dict.fromkeys([layer, name] if excludable else [layer])))

    def _find_beside_refused(self, traces: Mapping[ProbePoint, NodeTrace]) -> None:
        """Find what comes after the first module that was refused before, and which layers such modules read."""
        points, refused = list(traces), set(self.exclude) - set(self._given_exclude)
        calls = [point for point in points if point[0] == "excluded" and point[1].partition(" ")[2] in refused]
        self._after_refused = set(points[points.index(calls[0]) :]) if calls else set()
        self._read_by_refused = {layer for call in calls for layer in traces[call].nodes}

    def _add_norm(
        self, name: str, norm: _BatchNorm, nodes_at: Mapping[ProbePoint, Tensor], group_of: Tensor
    ) -> Refusal | None:
        nodes = nodes_at.get(("norm", name))
        if nodes is None and norm.affine and not any(p.requires_grad for p in norm.parameters()):
            self.frozen_norms[name] = norm
            return None
        if nodes is None or bool((nodes < 0).any()):
            reason = (
                "some of its channels are not nodes (they come from the input, or from a frozen or excluded layer), so "
                "its statistics would change for old tasks."
            )
            return Refusal(name, reason, exclude=(name,), is_consequence=("norm", name) in self._after_refused)
        if norm.momentum is None:
            reason = (
                "BatchNorm with momentum=None averages over all batches ever seen, so its statistics cannot be kept "
                "for some channels and updated for others."
            )
            return Refusal(name, reason, "Change it to a moving average, e.g. momentum=0.1.", (name,))
        if norm.running_mean is None:
            reason = (
                "BatchNorm without running statistics normalises every batch by itself, so an old task's output "
                "depends on the batch it comes in."
            )
            return Refusal(name, reason, "Change it to track_running_stats=True.", (name,))
        self.norms[name] = NormLayer(name, norm, group_of[nodes])
        return None

    def _excluded_norms(self) -> dict[str, _BatchNorm]:
        if self.excluded == "train":
            return {}
        modules = self.model.named_modules()
        return {n: m for n, m in modules if isinstance(m, _BatchNorm) and _is_within(n, self.exclude)}

    def _find_inactive(self) -> Iterator[Refusal]:
        active = torch.zeros(self.size + 1, dtype=torch.bool)
        for site in self.relu_sites:
            active[site.groups] = True
        others = f" The model calls {', '.join(self._other_activations)}, which will not do."
        reason = (
            "no ReLU or ReLU6 reads its outputs straight, without a layer in between that mixes them (LayerNorm, say); "
            f"a node's importance is its mean ReLU activation.{others if self._other_activations else ''}"
        )
        for layer in self.layers.values():
            if not bool(active[layer.groups].all()):
                remedy = "Let a ReLU come next."
                readers = [reader for reader in self.readers_of[layer.name] if not self.readers[reader].is_head]
                if self.heads is not None and not readers:
                    remedy += " ReLUs within heads do not count: not every task may have them."
                if isinstance(self.model, MultiHead) and not readers:
                    remedy += " If it is an output layer, take it out of the trunk: every task gets a head of its own."
                elif not self.readers_of[layer.name]:
                    remedy += " If it is the output layer, name it with heads=."
                yield Refusal(layer.name, reason, remedy, (layer.name,), layer.name in self._read_by_refused)

    def _has_heads(self) -> bool:
        """Whether the forward pass ends in a head, so that no node may reach the output but through it."""
        return self.heads is not None and not (isinstance(self.model, MultiHead) and not self.model.heads)

    def _check_outputs(self, probe: NodeProbe, traces: Mapping[ProbePoint, NodeTrace]) -> None:
        at_output = [(layer, point) for point, trace in traces.items() if point[0] == "output" for layer in trace.nodes]
        if at_output and self._has_heads():
            layer, point = at_output[0]
            reason = (
                "its nodes reach the model's output without passing a Linear or Conv layer of a head, so their "
                "influence on old tasks cannot be set to zero."
            )
            raise NodeGraphError(self._refuse_head(probe, layer, point) or Refusal(layer, reason, HEAD_REMEDY))

    def _refuse_head(self, probe: NodeProbe, layer: str, point: ProbePoint) -> Refusal | None:
        """Refuse the module of a head that gets each node of `layer` by itself and passes it on to `point`, where no
        Linear or Conv layer lies between; None where that is no module of a head."""
        head_modules = self.list_head_modules()
        found = None
        for (kind, name), trace in probe.trace_nodes([layer], watched=head_modules).items():
            if (kind, name) == point:
                break
            if trace.mixed.get(layer) is False and kind == "head":
                found = name
            elif trace.mixed.get(layer) is False and kind == "reader" and found and _is_within(name, [found]):
                found = None  # it does begin with a Linear or Conv layer
        if found is None:
            return None
        reason = (
            f"this {type(head_modules[found]).__name__} reads the nodes of {layer}, and no Linear or Conv layer of the "
            "head comes before it, so their influence on old tasks cannot be set to zero."
        )
        return Refusal(found, reason, HEAD_REMEDY)

    # The proof -------------------------------------------------------------------------------------------------------

    def prove(self, task: str | None = None) -> None:
        """Prove the graph: change random groups' outputs and raise unless exactly the columns that read them change."""
        probe = self._probe(task or self._first_task())
        expected: dict[ProbePoint, ExpectedGroups] = {
            ("norm", name): ExpectedGroups(1, norm.groups) for name, norm in self.norms.items()
        }
        for name, reader in self.readers.items():
            if name in probe.outputs:
                dims = probe.outputs[name].dim() + (len(probe.outputs[name]) != 2)
                expected["reader", name] = ExpectedGroups(column_dim(reader.module, dims), reader.sources)
        expected |= {("site", str(site.index)): ExpectedGroups(site.dim, site.groups) for site in self.relu_sites}
        groups = {name: layer.groups for name, layer in self.layers.items()}
        if contradiction := probe.find_contradiction(groups, self.size, expected):
            (kind, name), column = contradiction
            point_name = f"ReLU number {int(name) + 1}" if kind == "site" else name
            reason = (
                f"the graph failed its own check: column {column} of {point_name} does not read exactly the nodes that "
                "were found before. Is the forward pass random, or does it depend on the values it sees?"
            )
            remedy = "Make it deterministic in eval mode, or leave the layers around it out with exclude=[…]."
            raise NodeGraphError(Refusal(next(iter(self.layers)) if kind == "site" else name, reason, remedy))

    # Heads -----------------------------------------------------------------------------------------------------------

    def trace_head(self, task: str, tasks: Sequence[str]) -> None:
        """Find which nodes the head of `task`, one of `tasks`, reads, and add it to the readers; once is enough."""
        assert self.heads is not None
        self._tasks = list(tasks)
        head = self.heads.get_head(task, tasks)
        if self.has_head(head):
            return
        if self._add_linear_head(task, head):
            return
        self._head_names = self._find_head_names()
        self._reader_only_layers = self._find_reader_only_layers()
        sources = [n for n, readers in self.readers_of.items() if any(self.readers[r].is_head for r in readers)]
        probe = self._probe_head(task, head)
        traces = probe.trace_nodes(sources or list(self._node_layers))
        read = {name: traces["reader", name] for name in self._reader_only_layers if ("reader", name) in traces}
        for name, trace in read.items():
            _raise_if_any(list(self._find_mixing(probe, ("reader", name), trace)))
            self._check_reader(name, self._reader_only_layers[name])
        self._check_outputs(probe, traces)
        self._check_sites(task, traces)
        for name, trace in read.items():
            module = self._reader_only_layers[name]
            if name in self.readers and self.readers[name].module is not module:
                del self.readers[name]  # of a head that was replaced since
            for layer, nodes in trace.nodes.items():
                nodes = nodes.long()
                groups = torch.cat([self.layers[layer].groups, torch.tensor([-1])])[nodes]
                reader = self.readers.setdefault(name, Reader(name, module, groups, not _is_within(name, self.exclude)))
                reader.sources = torch.where(reader.sources >= 0, reader.sources, groups)
                self.readers_of[layer][name] = int(torch.bincount(nodes[nodes >= 0]).max())
        self.prove(task)
        self._called_layers |= set(probe.outputs)

    def _check_sites(self, task: str, traces: Mapping[ProbePoint, NodeTrace]) -> None:
        """Raise where the forward pass for `task` lacks a ReLU at which activations are to be measured."""
        for site in self.relu_sites:
            if ("site", str(site.index)) not in traces:
                layers = self.layers.items()
                name = next(name for name, layer in layers if bool(torch.isin(layer.groups, site.groups).any()))
                reason = (
                    f"its activations are measured at ReLU number {site.index + 1}, which the forward pass for task "
                    f"{task!r} does not reach."
                )
                raise NodeGraphError(Refusal(name, reason, "Let all tasks run the same ReLUs outside their heads."))

    def _probe_head(self, task: str, head: nn.Module) -> NodeProbe:
        """A probe of the model for `task`; an error where the forward pass calls no module of its head."""
        called: list[nn.Module] = []
        with ExitStack() as stack:
            for module in head.modules():
                stack.enter_context(module.register_forward_pre_hook(lambda module, args: called.append(module)))
            probe = self._probe(task)
        if not called:
            raise ValueError(f"The forward pass for task {task!r} does not run its head. Check heads=.")
        return probe

    def _add_linear_head(self, task: str, head: nn.Module) -> bool:
        """Add a head that is one or several linear layers of a `MultiHead`: all of these read the trunk's features."""
        layers = list(head.values()) if isinstance(head, nn.ModuleDict) else [head]
        if self.features is None or type(self.model) is not MultiHead:
            return False
        for linear in layers:
            if isinstance(linear, nn.LazyLinear) and linear.has_uninitialized_params():
                linear(torch.zeros(1, len(self.features), dtype=linear.weight.dtype, device=linear.weight.device))
        if not all(_is_plain_linear(linear) and linear.in_features == len(self.features) for linear in layers):
            return False
        for name, linear in head.named_modules(prefix=f"heads.{task}"):
            if linear not in layers:
                continue
            self._reader_only_layers[name] = linear
            self.readers[name] = Reader(name, linear, self.features, is_head=True)
            for layer, count in self._feature_columns.items():
                self.readers_of[layer][name] = count
            self._called_layers.add(name)
        return True

    def _find_features(
        self, traces: Mapping[ProbePoint, NodeTrace], nodes_at: Mapping[ProbePoint, Tensor], group_of: Tensor
    ) -> None:
        """Find which group is behind each of the trunk's features, from its output or from a linear head's input."""
        self._feature_columns: dict[str, int] = {}
        if type(self.model) is not MultiHead:
            return
        output_points = [point for point in traces if point[0] == "output"]
        if not self.model.heads:
            point = output_points[0] if len(output_points) == 1 else None
        else:
            heads = self.model.heads.values()
            parts = {
                id(part) for head in heads for part in (head.values() if isinstance(head, nn.ModuleDict) else [head])
            }
            linear_heads = (
                name
                for name, module in self._reader_only_layers.items()
                if name in self._called_layers and _is_plain_linear(module) and id(module) in parts
            )
            point = next((("reader", name) for name in linear_heads), None)
        if point is None or point not in nodes_at:
            return
        self.features = group_of[nodes_at[point].flatten()]
        self.model.features = len(self.features)
        for layer, nodes in traces[point].nodes.items():
            self._feature_columns[layer] = int(torch.bincount(nodes[nodes >= 0]).max())

    def has_head(self, head: nn.Module) -> bool:
        """Whether it is known which nodes `head` reads."""
        called = {id(self._reader_only_layers.get(name)) for name in self._called_layers}
        return any(id(module) in called for module in head.modules())

    def find_unfrozen(self) -> list[str]:
        """Names of trained parameters outside nodes, norms, heads and excluded modules: unfrozen since the graph was
        built."""
        node_parameters = {id(p) for _, p, _ in self.incoming_parameters()}
        return [
            name
            for name, p in (self.heads.list_trunk_parameters() if self.heads else list_parameters(self.model)).items()
            if p.requires_grad
            and id(p) not in node_parameters
            and not self._is_head_or_excluded(holder := name.rpartition(".")[0])
            and holder not in self._later_heads
        ]

    # Printing --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        groups = f" in {self.size} groups" if self.size != self.node_count else ""
        layers = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        lines = [f"{type(self.model).__name__}: {self.node_count} nodes{groups} in {layers}"]
        width = max(len(name) for name in self.layers)
        layer_groups = {name: set(layer.groups.tolist()) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            readers = [
                reader + (f" ({count} columns each)" if count > 1 else "")
                for reader, count in self.readers_of[name].items()
                if not self.readers[reader].is_head
            ]
            if any(self.readers[reader].is_head for reader in self.readers_of[name]):
                readers.append("heads")
            partners = [other for other in layer_groups if other != name and layer_groups[name] & layer_groups[other]]
            line = f"  {name:<{width}} {layer.size:>5} nodes  {type(layer.module).__name__}"
            line += (
                f"{', BatchNorm' if name in self._followed_by_norm else ''} → ReLU → {_shorten(readers) or 'output'}"
            )
            line += f"; one group with {_shorten(partners)}" if partners else ""
            lines.append(line if len(line) <= 100 else line[:99] + "…")
        treatment = "kept as it is" if self.excluded == "freeze" else "trained by every task"
        lines += [
            f"  {name}: excluded, {treatment}; what later layers read of it is not protected" for name in self.exclude
        ]
        if self.frozen_norms:
            lines.append(f"  frozen BatchNorm keeps its statistics: {_shorten(list(self.frozen_norms))}")
        return "\n".join(lines)

    # For methods -----------------------------------------------------------------------------------------------------

    @property
    def incoming_modules(self) -> list[NodeLayer]:
        """Layers and norms: the modules that hold rows of a node's incoming group."""
        return [*self.layers.values(), *self.norms.values()]

    def groups_by_layer(self) -> Iterator[Tensor]:
        """For each layer of nodes, (groups,) the groups that no layer before it has, so that each counts once."""
        counted = torch.zeros(self.size, dtype=torch.bool)
        for layer in self.layers.values():
            in_layer = torch.zeros_like(counted)
            in_layer[layer.groups] = True
            yield in_layer & ~counted
            counted |= in_layer

    def incoming_parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every parameter of a node's incoming group: its name, itself, and the group of each of its rows."""
        for owner in self.incoming_modules:
            for key, parameter in owner.module.named_parameters(recurse=False):
                yield f"{owner.name}.{key}", parameter, owner.groups


def _raise_if_any(refusals: Sequence[Refusal]) -> None:
    if refusals:
        layers = {refusal.layer: refusal for refusal in reversed(refusals)}  # one refusal for each layer
        outermost = [refusal for name, refusal in layers.items() if not _is_within(name.rpartition(".")[0], layers)]
        raise NodeGraphError(*reversed(outermost))


def _check_example(example_input: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(example_input) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(
            "example_input must be a batch of inputs as a tensor (torch.from_numpy makes one of an array, "
            "next(iter(loader))[0] takes one from a DataLoader), or a tuple of the forward pass's arguments; got "
            f"{describe_value(example_input)}."
        )
    if any(leaf.is_meta or leaf.layout is not torch.strided for leaf in tensors):
        raise ValueError("example_input must be a dense tensor that holds values, not a sparse, nested or meta one.")
    if not any(leaf.dim() for leaf in tensors) or any(leaf.dim() and not len(leaf) for leaf in tensors):
        raise ValueError(f"example_input must be a batch of one example or more; got {describe_value(example_input)}.")
    if not all(bool(leaf.isfinite().all()) for leaf in tensors if leaf.is_floating_point()):
        raise ValueError("example_input must be finite; some of its values are infinite or NaN.")


def _first_sample(argument: Any) -> Any:
    return argument.detach()[:1] if isinstance(argument, Tensor) and argument.dim() else argument


def _is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module computes what `nn.Linear` does, and nothing else."""
    return type(module) is nn.Linear and not (module._forward_pre_hooks or module._forward_hooks)


def _count_nodes(module: nn.Module) -> int:
    return len(module.get_parameter("weight"))


def _is_within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _shorten(names: Sequence[str]) -> str:
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _count_columns(layer: str, traces: Mapping[ProbePoint, NodeTrace]) -> dict[str, int]:
    """For each reader of `layer`, in forward order, how many columns it reads of each node."""
    columns = {}
    for (kind, name), trace in traces.items():
        if kind == "reader" and layer in trace.nodes:
            nodes = trace.nodes[layer]
            columns[name] = int(torch.bincount(nodes[nodes >= 0]).max())
    return columns


def _make_relu_site(index: int, groups: Tensor, rows_per_sample: int) -> ReLUSite:
    """A site whose groups vary along one dimension only (channels) keeps that vector; any other all its elements."""
    for dim in range(groups.dim()):
        by_position = groups.movedim(dim, 0).reshape(groups.shape[dim], -1)
        channel_groups = by_position.amax(1)
        if bool(((by_position == channel_groups[:, None]) | (by_position < 0)).all()):
            return ReLUSite(index, dim + 1, channel_groups, rows_per_sample)
    return ReLUSite(index, None, groups.flatten(), rows_per_sample)


class _DisjointSets:
    """Disjoint sets of nodes."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find_root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def merge(self, left: Tensor, right: Tensor) -> None:
        """Merge the set of left[i] with that of right[i], where both are nodes."""
        differ = (left >= 0) & (right >= 0) & (left != right)
        for a, b in set(zip(left[differ].tolist(), right[differ].tolist(), strict=True)):
            first, second = sorted((self.find_root(a), self.find_root(b)))
            self.parent[second] = first

    def number_sets(self) -> Tensor:
        """(nodes,) the number of each node's set, counted from 0 in the order of the sets' first nodes."""
        roots = torch.tensor([self.find_root(node) for node in range(len(self.parent))])
        numbers: Tensor = torch.unique(roots, return_inverse=True)[1]
        return numbers
