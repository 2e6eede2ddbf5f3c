"""`NodeGraph`: the nodes of a model, and which columns of which later layers read each one.

The graph is measured, not inferred, so there is no list of operators to keep: see `probing`. What a measurement cannot
explain (a column that mixes several nodes of one layer, a weight used outside its layer, …) is refused with the name of
the layer. When it is built, the graph proves itself with a measurement of another kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from agscl.graph.probing import LAYERS, Claim, Flow, NodeGraphError, NodeProbe, Place, column_dim
from agscl.heads import HeadPlace, Heads, MultiHead

__all__ = ["NodeGraph", "NodeGraphError", "NodeLayer", "NormLayer", "ReLUSite", "Reader"]


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
        return self.module.get_parameter("weight")


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
        return self.module.get_parameter("weight")

    def source_groups(self) -> Tensor:
        """The group that each stored weight reads, shaped to broadcast against the weight: (rows or 1, columns, 1…)."""
        grouped = getattr(self.module, "groups", 1)
        sources = self.sources.view(grouped, -1)
        if grouped > 1:
            sources = sources.repeat_interleave(len(self.weight) // grouped, 0)
        return sources.view(*sources.shape, *[1] * (self.weight.dim() - 2))


@dataclass
class ReLUSite:
    """A ReLU, the `index`-th that a forward pass calls. Along `dim`, element e is a value of group `groups[e]`."""

    index: int
    dim: int | None  # None: groups run over the flattened sample
    groups: Tensor
    folded: int = 1  # how many rows of the tensor are one sample, where a model folds another dimension into the batch


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
            raise ValueError(f"excluded is 'freeze' or 'train', not {excluded!r}.")
        self.model, self.exclude, self.excluded = model, tuple(exclude), excluded
        self.heads = Heads(model, heads) if heads is not None or isinstance(model, MultiHead) else None
        self._tasks = list(tasks)
        arguments = example_input if isinstance(example_input, tuple) else (example_input,)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if not tensors:
            raise TypeError(
                f"example_input is a batch of inputs, or a tuple of the forward pass's arguments; got "
                f"{type(example_input).__name__}."
            )
        if not all(bool(leaf.isfinite().all()) for leaf in tensors if leaf.is_floating_point()):
            raise ValueError("Some inputs are infinite or NaN: the nodes of a network cannot be found with them.")
        self.example: tuple[Any, ...] = tree_map(_first_sample, arguments)
        self.features: Tensor | None = None  # (features,) the group behind each input of a MultiHead's linear heads
        self._node_layers: dict[str, nn.Module] = {}
        self._norm_layers: dict[str, _BatchNorm] = {}
        self._later_heads: list[str] = []  # heads of tasks that have not begun, where a function tells the heads
        self._find_layers()
        task = self._first_task()
        probe = self._probe(task)
        for name in probe.never_called:
            if self.heads is None or not callable(self.heads.place):  # else: a head whose task has not begun
                raise NodeGraphError(
                    name,
                    "the forward pass never calls it, so who reads its nodes is not known.",
                    self._suggest_exclude(name),
                )
            del self._node_layers[name], probe.replaced[name]
            self._later_heads.append(name)
        self._node_layers = {name: self._node_layers[name] for name in probe.outputs if name in self._node_layers}
        self._called = set(probe.outputs)
        self._place_nodes(probe.trace_nodes(list(self._node_layers)), probe.batch_folds)
        try:
            self.prove(task)
        except NodeGraphError:  # small values may be hidden, e.g. under an input that is added: try large ones
            self._place_nodes(probe.trace_nodes(list(self._node_layers), scales=(1.0, 1e3)), probe.batch_folds)
            self.prove(task)

    def _first_task(self) -> str | None:
        """The task to run the model for while it is probed; None: as the example says, or the trunk alone."""
        if self.heads is None or not self.heads.takes_task or len(self.example) > (self.heads.task_position or 0):
            return None
        known = self._tasks or self.heads.existing_tasks
        return known[-1] if known else None

    def _run_model(self, task: str | None, *arguments: Any) -> Any:
        """The model's forward pass for `task`; of a `MultiHead` without a head, that of its trunk."""
        if isinstance(self.model, MultiHead) and not self.model.heads:
            return self.model.trunk(*arguments)
        if self.heads is None or task is None:
            return self.model(*arguments)
        return self.heads.call_model(arguments, task, self._tasks or self.heads.existing_tasks)

    # What is where ---------------------------------------------------------------------------------------------------

    def _find_layers(self) -> None:
        """Sort the model's modules into nodes, norms, excluded ones and heads; refuse what is none of these."""
        modules = dict(self.model.named_modules())
        for name in self.exclude:
            if name not in modules:
                near = [known for known in modules if known.endswith(name)] or [known for known in modules if known]
                raise ValueError(f"exclude: the model has no module {name!r}. It has: {', '.join(near[:20])}.")
        self._head_names = self._find_head_names()
        self._end_layers = self._find_end_layers()
        parameter_owners: dict[int, str] = {}
        for name, module in modules.items():
            if not self._is_outside(name) and isinstance(module, _InstanceNorm) and module.running_mean is not None:
                raise NodeGraphError(
                    name,
                    "its running statistics would change for old tasks; only those of BatchNorm can be kept.",
                    f"Use track_running_stats=False, or exclude={[*self.exclude, name]!r}.",
                )
            if self._is_outside(name) or not isinstance(module, (*LAYERS, _BatchNorm)):
                continue
            if isinstance(module, _BatchNorm):
                self._norm_layers[name] = module
            elif any(p.requires_grad for p in module.parameters()):
                self._check_layer(name, module)
                self._node_layers[name] = module
            for key, parameter in module.named_parameters(recurse=False):
                owner = parameter_owners.setdefault(id(parameter), name)
                if owner != name and parameter.requires_grad:
                    raise NodeGraphError(
                        name,
                        f"its {key} is also that of {owner} (tied weights): one weight cannot be frozen in one place "
                        "and free in the other.",
                        self._suggest_exclude(owner, name),
                    )
        for name, parameter in self.model.named_parameters():
            holder = name.rpartition(".")[0]
            if parameter.requires_grad and not self._is_outside(holder) and id(parameter) not in parameter_owners:
                alone = holder and not any(isinstance(m, LAYERS) for m in modules[holder].modules())
                raise NodeGraphError(
                    holder or name,
                    f"the trained parameter {name} ({type(modules[holder]).__name__}) belongs to no node: nodes are "
                    "outputs of Linear and Conv layers, with the scale and shift of BatchNorm.",
                    self._suggest_exclude(holder)
                    if alone
                    else "Move it into a module of its own, and exclude that one.",
                )
        if not self._node_layers:
            raise NodeGraphError(
                type(self.model).__name__,
                "it has no trained Linear or Conv layer outside its heads, so there are no nodes.",
                "Check requires_grad, heads= and exclude=.",
            )

    def _find_head_names(self) -> tuple[str, ...]:
        if self.heads is None:
            return ()
        if not callable(self.heads.place):
            return (self.heads.prefix,)
        if not self._tasks:
            raise ValueError("heads is a function of the task, so say for which: tasks=['name of the first task'].")
        mine = {id(self.heads.get_head(task, self._tasks)) for task in self._tasks}
        return tuple(name for name, module in self.model.named_modules() if id(module) in mine)

    def _find_end_layers(self) -> dict[str, nn.Module]:
        """Layers of heads and of excluded modules: they read nodes, and are none."""
        return {n: m for n, m in self.model.named_modules() if isinstance(m, LAYERS) and self._is_outside(n)}

    def _is_outside(self, name: str) -> bool:
        return _is_within(name, self._head_names) or _is_within(name, self.exclude)

    def _suggest_exclude(self, *names: str) -> str:
        return f"Leave it out of the nodes with exclude={[*self.exclude, *names]!r}, or change the network."

    def _check_layer(self, name: str, module: nn.Module) -> None:
        own = next(kind for kind in LAYERS if isinstance(module, kind))
        changed = [
            key
            for key in ("forward", "_conv_forward")
            if getattr(type(module), key, None) is not getattr(own, key, None)
        ]
        if changed:
            raise NodeGraphError(
                name,
                f"{type(module).__name__} computes its output in a way of its own ({changed[0]}), so a weight of 0 "
                "need not mean that nothing is read.",
                self._suggest_exclude(name),
            )
        extra = [key for key in module._parameters if key not in ("weight", "bias")]
        if extra or "weight" not in module._parameters or parametrize.is_parametrized(module):
            raise NodeGraphError(
                name,
                "its weight is computed from other parameters (a parametrization such as weight_norm), so freezing "
                "the weight would freeze nothing.",
                f"Remove the parametrization, or leave the layer out with exclude={[*self.exclude, name]!r}.",
            )

    def _probe(self, task: str | None) -> NodeProbe:
        return NodeProbe(
            self.model,
            partial(self._run_model, task),
            self.example,
            nodes=self._node_layers,
            ends=self._end_layers,
            norms=self._norm_layers,
            excluded={name: self.model.get_submodule(name) for name in self.exclude},
            suggest_exclude=self._suggest_exclude,
        )

    # Placing what was measured ---------------------------------------------------------------------------------------

    def _place_nodes(self, flows: Mapping[Place, Flow], folds: Mapping[Place, int]) -> None:
        """Turn the measured flows into groups, readers, norms and sites."""
        start: dict[str, int] = {}
        self.node_count = 0
        for name, module in self._node_layers.items():
            start[name] = self.node_count
            self.node_count += _count_nodes(module)
        union = _Union(self.node_count)
        found: dict[Place, Tensor] = {}  # a node behind each element, numbered through all layers
        for place, flow in flows.items():
            self._refuse_mixing(place, flow)
            parts = [torch.where(nodes >= 0, nodes + start[layer], -1) for layer, nodes in flow.nodes.items()]
            for part in parts:  # what meets in one element is added together: one group
                known = found.setdefault(place, part)
                union.join(known, part)
                found[place] = torch.where(known >= 0, known, part)
        self._join_depthwise(union, start, found)

        group_of = torch.cat([union.groups(), torch.tensor([-1])])  # the last for -1, no node
        self.size = int(group_of.max()) + 1
        self.layers = {
            name: NodeLayer(name, module, group_of[start[name] : start[name] + _count_nodes(module)].clone())
            for name, module in self._node_layers.items()
        }
        self.readers: dict[str, Reader] = {}
        self.norms: dict[str, NormLayer] = {}
        self.frozen_norms = self._excluded_norms()  # of a frozen backbone or module
        self.relu_sites: tuple[ReLUSite, ...] = ()
        for (kind, name), nodes in found.items():
            if kind == "reader":
                module = self._node_layers.get(name) or self._end_layers[name]
                self.readers[name] = Reader(name, module, group_of[nodes], _is_within(name, self._head_names))
            elif kind == "site":
                self.relu_sites += (_make_site(int(name), group_of[nodes], folds.get((kind, name), 1)),)
        for name, norm in self._norm_layers.items():
            self._place_norm(name, norm, found, group_of)
        self.readers_of = {name: _count_columns(name, flows) for name in self._node_layers}
        self._followed_by_norm = {layer for (kind, _), flow in flows.items() if kind == "norm" for layer in flow.nodes}
        self._find_features(flows, found, group_of)
        self._check_activations()
        self._check_outputs(flows)

    def _join_depthwise(self, union: _Union, start: Mapping[str, int], found: Mapping[Place, Tensor]) -> None:
        """A depthwise filter belongs to the channel it reads."""
        for name, module in self._node_layers.items():
            grouped = getattr(module, "groups", 1)
            reads = found.get(("reader", name))
            if grouped > 1 and grouped == module.in_channels and reads is not None:
                own = torch.arange(_count_nodes(module)) + start[name]
                union.join(own, reads.repeat_interleave(len(own) // grouped))

    def _refuse_mixing(self, place: Place, flow: Flow) -> None:
        kind, name = place
        where = {"reader": f"an input column of {name}", "norm": f"a channel of {name}", "output": "an output"}
        for layer, mixed in flow.mixed.items():
            if mixed and kind != "excluded":
                ours = kind in ("reader", "norm") and not _is_within(name, self._head_names)
                raise NodeGraphError(
                    layer,
                    f"{where.get(kind) or f'ReLU number {int(name) + 1}'} depends on several of its nodes at once (a "
                    "normalisation over channels, attention, a frozen layer or another mixing operation lies between), "
                    "so no column can be said to read one node.",
                    self._suggest_exclude(*dict.fromkeys([layer, name] if ours else [layer])),
                )

    def _place_norm(self, name: str, norm: _BatchNorm, found: Mapping[Place, Tensor], group_of: Tensor) -> None:
        nodes = found.get(("norm", name))
        if nodes is None and norm.affine and not any(p.requires_grad for p in norm.parameters()):
            self.frozen_norms[name] = norm
            return
        if nodes is None or bool((nodes < 0).any()):
            raise NodeGraphError(
                name,
                "some of its channels are not nodes (they come from the input, or from a frozen or excluded layer), so "
                "its statistics would change for old tasks.",
                self._suggest_exclude(name),
            )
        if norm.momentum is None:
            raise NodeGraphError(
                name,
                "BatchNorm with momentum=None averages over all batches ever seen, so its statistics cannot be kept "
                "for some channels and updated for others.",
                f"Change it to a moving average, e.g. momentum=0.1, or exclude={[*self.exclude, name]!r}.",
            )
        if norm.running_mean is None:
            raise NodeGraphError(
                name,
                "BatchNorm without running statistics normalises every batch by itself, so an old task's output "
                "depends on the batch it comes in.",
                f"Change it to track_running_stats=True, or exclude={[*self.exclude, name]!r}.",
            )
        self.norms[name] = NormLayer(name, norm, group_of[nodes])

    def _excluded_norms(self) -> dict[str, _BatchNorm]:
        if self.excluded == "train":
            return {}
        modules = self.model.named_modules()
        return {n: m for n, m in modules if isinstance(m, _BatchNorm) and _is_within(n, self.exclude)}

    def _check_activations(self) -> None:
        active = torch.zeros(self.size + 1, dtype=torch.bool)
        for site in self.relu_sites:
            active[site.groups] = True
        for layer in self.layers.values():
            if not bool(active[layer.groups].all()):
                raise NodeGraphError(
                    layer.name,
                    "no ReLU reads its outputs, and a node's importance is its mean ReLU activation.",
                    f"Put a ReLU after it; or, if it is the output layer, say heads={layer.name!r}; or leave it out of "
                    f"the nodes with exclude={[*self.exclude, layer.name]!r}.",
                )

    def _check_outputs(self, flows: Mapping[Place, Flow]) -> None:
        past = [layer for (kind, _), flow in flows.items() if kind == "output" for layer in flow.nodes]
        headless = isinstance(self.model, MultiHead) and not self.model.heads
        if self.heads is not None and past and not headless:
            raise NodeGraphError(
                past[0],
                "its nodes reach the model's output without passing a Linear or Conv layer of a head, so their "
                "influence on old tasks cannot be set to zero.",
                "Let each task's head begin with a Linear or Conv layer.",
            )

    # The proof -------------------------------------------------------------------------------------------------------

    def prove(self, task: str | None = None) -> None:
        """Change random groups' outputs: exactly the claimed columns may change, with random and with real values."""
        probe = self._probe(task or self._first_task())
        claims: dict[Place, Claim] = {("norm", name): Claim(1, norm.groups) for name, norm in self.norms.items()}
        for name, reader in self.readers.items():
            if name in probe.outputs:
                dims = probe.outputs[name].dim() + (len(probe.outputs[name]) != 2)
                claims["reader", name] = Claim(column_dim(reader.module, dims), reader.sources)
        claims |= {("site", str(site.index)): Claim(site.dim, site.groups) for site in self.relu_sites}
        groups = {name: layer.groups for name, layer in self.layers.items()}
        if contradiction := probe.find_contradiction(groups, self.size, claims):
            (kind, name), column = contradiction
            place = f"ReLU number {int(name) + 1}" if kind == "site" else name
            raise NodeGraphError(
                next(iter(self.layers)) if kind == "site" else name,
                f"the graph failed its own proof at column {column} of {place}: it does not read just the nodes it was "
                "found to read. Does the forward pass depend on chance, or on the values it sees?",
                "Make it deterministic in eval mode, or exclude=[…] the layers around.",
            )

    # Heads -----------------------------------------------------------------------------------------------------------

    def trace_head(self, task: str, tasks: Sequence[str]) -> None:
        """Find which nodes the head of `task`, one of `tasks`, reads, and add it to the readers; once is enough."""
        assert self.heads is not None
        self._tasks = list(tasks)
        head = self.heads.get_head(task, tasks)
        if self.has_head(head):
            return
        self._head_names = self._find_head_names()
        self._end_layers = self._find_end_layers()
        if self._add_linear_head(head):
            return
        sources = [n for n, readers in self.readers_of.items() if any(self.readers[r].is_head for r in readers)]
        probe = self._probe(task)
        self._called |= set(probe.outputs)
        for (kind, name), flow in probe.trace_nodes(sources or list(self._node_layers)).items():
            if kind != "reader" or name not in self._end_layers:
                continue
            self._refuse_mixing((kind, name), flow)
            for layer, nodes in flow.nodes.items():
                groups = torch.cat([self.layers[layer].groups, torch.tensor([-1])])[nodes]
                reader = self.readers.setdefault(
                    name, Reader(name, self._end_layers[name], groups, not _is_within(name, self.exclude))
                )
                reader.sources = torch.where(reader.sources >= 0, reader.sources, groups)
                self.readers_of[layer][name] = int(torch.bincount(nodes[nodes >= 0]).max())
        self.prove(task)
        if not self.has_head(head):
            raise ValueError(f"The forward pass for task {task!r} does not run its head: what does heads= say?")

    def _add_linear_head(self, head: nn.Module) -> bool:
        """Add a head that is one or several linear layers of a `MultiHead`: all of these read the trunk's features."""
        parts = list(head.values()) if isinstance(head, nn.ModuleDict) else [head]
        if self.features is None or type(self.model) is not MultiHead:
            return False
        for part in parts:
            if isinstance(part, nn.LazyLinear) and part.has_uninitialized_params():
                part(torch.zeros(1, len(self.features), dtype=part.weight.dtype, device=part.weight.device))
        if not all(_is_plain_linear(part) and part.in_features == len(self.features) for part in parts):
            return False
        names = {id(module): name for name, module in self._end_layers.items()}
        for part in parts:
            name = names[id(part)]
            self.readers[name] = Reader(name, part, self.features, is_head=True)
            for layer, count in self._feature_columns.items():
                self.readers_of[layer][name] = count
            self._called.add(name)
        return True

    def _find_features(self, flows: Mapping[Place, Flow], found: Mapping[Place, Tensor], group_of: Tensor) -> None:
        """Note which group is behind each of the trunk's features, from its output or from a linear head's input."""
        self._feature_columns: dict[str, int] = {}
        if type(self.model) is not MultiHead:
            return
        outputs = [place for place in flows if place[0] == "output"]
        if not self.model.heads:
            place = outputs[0] if len(outputs) == 1 else None
        else:
            linear = [name for name in self._called if _is_plain_linear(self._end_layers.get(name))]
            place = ("reader", linear[0]) if len(linear) == 1 and _is_within(linear[0], self._head_names) else None
        if place is None or place not in found:
            return
        self.features = group_of[found[place].flatten()]
        self.model.features = len(self.features)
        for layer, nodes in flows[place].nodes.items():
            self._feature_columns[layer] = int(torch.bincount(nodes[nodes >= 0]).max())

    def has_head(self, head: nn.Module) -> bool:
        """Whether it is known which nodes `head` reads."""
        own = {id(module) for module in head.modules()}
        return any(id(self._end_layers[name]) in own for name in self._called if name in self._end_layers)

    def find_unfrozen(self) -> list[str]:
        """Trained parameters of no node, norm, head or excluded module: unfrozen since the graph was built."""
        known = {id(p) for _, p, _ in self.incoming_parameters()}
        return [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad
            and id(p) not in known
            and not self._is_outside(holder := name.rpartition(".")[0])
            and holder not in self._later_heads
        ]

    # For a person ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        groups = f" in {self.size} groups" if self.size != self.node_count else ""
        lines = [f"{type(self.model).__name__}: {self.node_count} nodes{groups} in {len(self.layers)} layers"]
        width = max(len(name) for name in self.layers)
        sets = {name: set(layer.groups.tolist()) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            readers = [
                reader + (f" ({count} columns each)" if count > 1 else "")
                for reader, count in self.readers_of[name].items()
                if not self.readers[reader].is_head
            ]
            if any(self.readers[reader].is_head for reader in self.readers_of[name]):
                readers.append("heads")
            partners = [other for other in sets if other != name and sets[name] & sets[other]]
            line = f"  {name:<{width}} {layer.size:>5} nodes  {type(layer.module).__name__}"
            line += (
                f"{', BatchNorm' if name in self._followed_by_norm else ''} → ReLU → {_shorten(readers) or 'output'}"
            )
            line += f"; one group with {_shorten(partners)}" if partners else ""
            lines.append(line if len(line) <= 100 else line[:99] + "…")
        fate = "kept as it is" if self.excluded == "freeze" else "trained by every task"
        lines += [f"  {name}: excluded, {fate}; what later layers read of it is not protected" for name in self.exclude]
        if self.frozen_norms:
            lines.append(f"  frozen BatchNorm keeps its statistics: {_shorten(list(self.frozen_norms))}")
        return "\n".join(lines)

    # For methods -----------------------------------------------------------------------------------------------------

    @property
    def incoming_modules(self) -> list[NodeLayer]:
        """Layers and norms: all that holds rows of a node's incoming group."""
        return [*self.layers.values(), *self.norms.values()]

    def groups_by_layer(self) -> Iterator[Tensor]:
        """Of each layer, the groups (groups,) that no layer before it has: a group counts there."""
        seen = torch.zeros(self.size, dtype=torch.bool)
        for layer in self.layers.values():
            here = torch.zeros_like(seen)
            here[layer.groups] = True
            yield here & ~seen
            seen |= here

    def incoming_parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every parameter of a node's incoming group: its name, itself, and the group of each of its rows."""
        for owner in self.incoming_modules:
            for key, parameter in owner.module.named_parameters(recurse=False):
                yield f"{owner.name}.{key}", parameter, owner.groups


def _first_sample(argument: Any) -> Any:
    return argument.detach()[:1] if isinstance(argument, Tensor) and argument.dim() else argument


def _is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module computes what `nn.Linear` does, and nothing else."""
    return type(module) is nn.Linear and not (module._forward_pre_hooks or module._forward_hooks)


def _count_nodes(module: nn.Module) -> int:
    return len(module.get_parameter("weight"))


def _is_within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _shorten(names: Sequence[str]) -> str:
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _count_columns(layer: str, flows: Mapping[Place, Flow]) -> dict[str, int]:
    """For each reader of `layer`, in forward order, how many columns it reads of each node."""
    found = {}
    for (kind, name), flow in flows.items():
        if kind == "reader" and layer in flow.nodes:
            nodes = flow.nodes[layer]
            found[name] = int(torch.bincount(nodes[nodes >= 0]).max())
    return found


def _make_site(index: int, groups: Tensor, folded: int) -> ReLUSite:
    """A site whose groups vary along one dimension only (channels) is kept as that vector, else flattened."""
    for dim in range(groups.dim()):
        lines = groups.movedim(dim, 0).reshape(groups.shape[dim], -1)
        vector = lines.amax(1)
        if bool(((lines == vector[:, None]) | (lines < 0)).all()):
            return ReLUSite(index, dim + 1, vector, folded)
    return ReLUSite(index, None, groups.flatten(), folded)


class _Union:
    """Disjoint sets of nodes."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            self.parent[a] = a = self.parent[self.parent[a]]
        return a

    def join(self, left: Tensor, right: Tensor) -> None:
        """Join left[i] with right[i], where both are nodes."""
        both = (left >= 0) & (right >= 0) & (left != right)
        for a, b in set(zip(left[both].tolist(), right[both].tolist(), strict=True)):
            a, b = sorted((self.find(a), self.find(b)))
            self.parent[b] = a

    def groups(self) -> Tensor:
        """A number from 0 for each node's set, in the order of the sets' first nodes."""
        roots = torch.tensor([self.find(a) for a in range(len(self.parent))])
        numbers: Tensor = torch.unique(roots, return_inverse=True)[1]
        return numbers
