"""`NodeGraph`: the nodes of a model, and which columns of which later layers read each one.

The graph is measured, not inferred, so there is no list of operators to keep: see `probing`. What a measurement cannot
explain (a column that mixes several nodes of one layer, a weight used outside its layer, …) is refused with the name of
the layer. When it is built, the graph proves itself with a measurement of another kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from agscl.graph.probing import LAYERS, Claim, Flow, NodeGraphError, Place, Probe, column_dim
from agscl.heads import HeadPlace, Heads, MultiHead

__all__ = ["NodeGraph", "NodeGraphError", "NodeLayer", "NormLayer", "Reader", "Rows", "Site"]


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
    head: bool

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    def columns(self) -> Tensor:
        """The group that each stored weight reads, shaped to broadcast against the weight: (rows or 1, columns, 1…)."""
        grouped = getattr(self.module, "groups", 1)
        sources = self.sources.view(grouped, -1)
        if grouped > 1:
            sources = sources.repeat_interleave(len(self.weight) // grouped, 0)
        return sources.view(*sources.shape, *[1] * (self.weight.dim() - 2))


@dataclass
class Site:
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
    trunk, whose outputs heads will read.
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
        if isinstance(model, MultiHead) and len(arguments) == 1:
            if not model.heads:
                raise ValueError("The model has no head yet: call model.add_head before building its NodeGraph.")
            arguments = (*arguments, self._tasks[-1] if self._tasks else list(model.heads)[-1])
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not all(bool(leaf.isfinite().all()) for leaf in given):
            raise ValueError("Some inputs are infinite or NaN: the nodes of a network cannot be found with them.")
        self._nodes: dict[str, nn.Module] = {}
        self._norms: dict[str, _BatchNorm] = {}
        self._later: list[str] = []  # heads of tasks that have not begun, where a function tells the heads
        self._find_layers()
        probe = self._probe(arguments)
        for name in probe.unreached:
            if self.heads is None or not callable(self.heads.place):  # else: a head whose task has not begun
                raise NodeGraphError(
                    name, "the forward pass never calls it, so who reads its nodes is not known.", self._cure(name)
                )
            del self._nodes[name], probe.pinned[name]
            self._later.append(name)
        self._nodes = {name: self._nodes[name] for name in probe.two if name in self._nodes}  # in forward order
        self._ran = set(probe.two)
        self._place(probe.measure(list(self._nodes)), probe.folds)
        try:
            self.prove(arguments)
        except (
            NodeGraphError
        ):  # small values may be hidden, e.g. under an input that is added: look again with large ones
            self._place(probe.measure(list(self._nodes), scales=(1.0, 1e3)), probe.folds)
            self.prove(arguments)

    # What is where ---------------------------------------------------------------------------------------------------

    def _find_layers(self) -> None:
        """Sort the model's modules into nodes, norms, excluded ones and heads; refuse what is none of these."""
        modules = dict(self.model.named_modules())
        for name in self.exclude:
            if name not in modules:
                near = [known for known in modules if known.endswith(name)] or [known for known in modules if known]
                raise ValueError(f"exclude: the model has no module {name!r}. It has: {', '.join(near[:20])}.")
        self._head_names = self._names_of_heads()
        self._ends = self._find_ends()
        owners: dict[int, str] = {}
        for name, module in modules.items():
            if not self._apart(name) and isinstance(module, _InstanceNorm) and module.running_mean is not None:
                raise NodeGraphError(
                    name,
                    "its running statistics would change for old tasks; only those of BatchNorm can be kept.",
                    f"Use track_running_stats=False, or exclude={[*self.exclude, name]!r}.",
                )
            if self._apart(name) or not isinstance(module, (*LAYERS, _BatchNorm)):
                continue
            if isinstance(module, _BatchNorm):
                self._norms[name] = module
            elif any(p.requires_grad for p in module.parameters()):
                self._check_layer(name, module)
                self._nodes[name] = module
            for key, parameter in module.named_parameters(recurse=False):
                owner = owners.setdefault(id(parameter), name)
                if owner != name and parameter.requires_grad:
                    raise NodeGraphError(
                        name,
                        f"its {key} is also that of {owner} (tied weights): one weight cannot be frozen in one place "
                        "and free in the other.",
                        self._cure(owner, name),
                    )
        for name, parameter in self.model.named_parameters():
            holder = name.rpartition(".")[0]
            if parameter.requires_grad and not self._apart(holder) and id(parameter) not in owners:
                alone = holder and not any(isinstance(m, LAYERS) for m in modules[holder].modules())
                raise NodeGraphError(
                    holder or name,
                    f"the trained parameter {name} ({type(modules[holder]).__name__}) belongs to no node: nodes are "
                    "outputs of Linear and Conv layers, with the scale and shift of BatchNorm.",
                    self._cure(holder) if alone else "Move it into a module of its own, and exclude that one.",
                )
        if not self._nodes:
            raise NodeGraphError(
                type(self.model).__name__,
                "it has no trained Linear or Conv layer outside its heads, so there are no nodes.",
                "Check requires_grad, heads= and exclude=.",
            )

    def _names_of_heads(self) -> tuple[str, ...]:
        if self.heads is None:
            return ()
        if not callable(self.heads.place):
            return (self.heads.prefix,)
        if not self._tasks:
            raise ValueError("heads is a function of the task, so say for which: tasks=['name of the first task'].")
        mine = {id(self.heads.of(task, self._tasks)) for task in self._tasks}
        return tuple(name for name, module in self.model.named_modules() if id(module) in mine)

    def _find_ends(self) -> dict[str, nn.Module]:
        """Layers of heads and of excluded modules: they read nodes, and are none."""
        return {n: m for n, m in self.model.named_modules() if isinstance(m, LAYERS) and self._apart(n)}

    def _apart(self, name: str) -> bool:
        return _within(name, self._head_names) or _within(name, self.exclude)

    def _cure(self, *names: str) -> str:
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
                self._cure(name),
            )
        extra = [key for key in module._parameters if key not in ("weight", "bias")]
        if extra or "weight" not in module._parameters or parametrize.is_parametrized(module):
            raise NodeGraphError(
                name,
                "its weight is computed from other parameters (a parametrization such as weight_norm), so freezing "
                "the weight would freeze nothing.",
                f"Remove the parametrization, or leave the layer out with exclude={[*self.exclude, name]!r}.",
            )

    def _probe(self, arguments: tuple[Any, ...]) -> Probe:
        return Probe(
            self.model,
            arguments,
            nodes=self._nodes,
            ends=self._ends,
            norms=self._norms,
            boxes={name: self.model.get_submodule(name) for name in self.exclude},
            cure=self._cure,
        )

    # Placing what was measured ---------------------------------------------------------------------------------------

    def _place(self, flows: Mapping[Place, Flow], folds: Mapping[Place, int]) -> None:
        """Turn the measured flows into groups, readers, norms and sites."""
        start: dict[str, int] = {}
        self.nodes = 0
        for name, module in self._nodes.items():
            start[name] = self.nodes
            self.nodes += _size(module)
        union = _Union(self.nodes)
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
            name: NodeLayer(name, module, group_of[start[name] : start[name] + _size(module)].clone())
            for name, module in self._nodes.items()
        }
        self.readers: dict[str, Reader] = {}
        self.norms: dict[str, NormLayer] = {}
        self.fixed_norms = self._excluded_norms()  # of a frozen backbone or module
        self.sites: tuple[Site, ...] = ()
        for (kind, name), nodes in found.items():
            if kind == "reader":
                module = self._nodes.get(name) or self._ends[name]
                self.readers[name] = Reader(name, module, group_of[nodes], _within(name, self._head_names))
            elif kind == "site":
                self.sites += (_site(int(name), group_of[nodes], folds.get((kind, name), 1)),)
        for name, norm in self._norms.items():
            self._place_norm(name, norm, found, group_of)
        self.feeds = {name: _feeds(name, flows) for name in self._nodes}
        self._normed = {layer for (kind, _), flow in flows.items() if kind == "norm" for layer in flow.nodes}
        self._check_activations()
        self._check_outputs(flows)

    def _join_depthwise(self, union: _Union, start: Mapping[str, int], found: Mapping[Place, Tensor]) -> None:
        """A depthwise filter belongs to the channel it reads."""
        for name, module in self._nodes.items():
            grouped = getattr(module, "groups", 1)
            reads = found.get(("reader", name))
            if grouped > 1 and grouped == module.in_channels and reads is not None:
                own = torch.arange(_size(module)) + start[name]
                union.join(own, reads.repeat_interleave(len(own) // grouped))

    def _refuse_mixing(self, place: Place, flow: Flow) -> None:
        kind, name = place
        where = {"reader": f"an input column of {name}", "norm": f"a channel of {name}", "output": "an output"}
        for layer, mixed in flow.mixed.items():
            if mixed and kind != "excluded":
                ours = kind in ("reader", "norm") and not _within(name, self._head_names)
                raise NodeGraphError(
                    layer,
                    f"{where.get(kind) or f'ReLU number {int(name) + 1}'} depends on several of its nodes at once (a "
                    "normalisation over channels, attention, a frozen layer or another mixing operation lies between), "
                    "so no column can be said to read one node.",
                    self._cure(*dict.fromkeys([layer, name] if ours else [layer])),
                )

    def _place_norm(self, name: str, norm: _BatchNorm, found: Mapping[Place, Tensor], group_of: Tensor) -> None:
        nodes = found.get(("norm", name))
        if nodes is None and norm.affine and not any(p.requires_grad for p in norm.parameters()):
            self.fixed_norms[name] = norm
            return
        if nodes is None or bool((nodes < 0).any()):
            raise NodeGraphError(
                name,
                "some of its channels are not nodes (they come from the input, or from a frozen or excluded layer), so "
                "its statistics would change for old tasks.",
                self._cure(name),
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
        return {n: m for n, m in modules if isinstance(m, _BatchNorm) and _within(n, self.exclude)}

    def _check_activations(self) -> None:
        active = torch.zeros(self.size + 1, dtype=torch.bool)
        for site in self.sites:
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
        if self.heads is not None and past:
            raise NodeGraphError(
                past[0],
                "its nodes reach the model's output without passing a Linear or Conv layer of a head, so their "
                "influence on old tasks cannot be set to zero.",
                "Let each task's head begin with a Linear or Conv layer.",
            )

    # The proof -------------------------------------------------------------------------------------------------------

    def prove(self, arguments: tuple[Any, ...]) -> None:
        """Change random groups' outputs: exactly the claimed columns may change, with made-up and with real values."""
        probe = self._probe(arguments)
        claims: dict[Place, Claim] = {("norm", name): Claim(1, norm.groups) for name, norm in self.norms.items()}
        for name, reader in self.readers.items():
            if name in probe.two:
                dims = probe.two[name].dim() + (len(probe.two[name]) != 2)
                claims["reader", name] = Claim(column_dim(reader.module, dims), reader.sources)
        claims |= {("site", str(site.index)): Claim(site.dim, site.groups) for site in self.sites}
        groups = {name: layer.groups for name, layer in self.layers.items()}
        if failure := probe.prove(groups, self.size, claims):
            (kind, name), column = failure
            place = f"ReLU number {int(name) + 1}" if kind == "site" else name
            raise NodeGraphError(
                next(iter(self.layers)) if kind == "site" else name,
                f"the graph failed its own proof at column {column} of {place}: it does not read just the nodes it was "
                "found to read. Does the forward pass depend on chance, or on the values it sees?",
                "Make it deterministic in eval mode, or exclude=[…] the layers around.",
            )

    def read_head(self, arguments: tuple[Any, ...], tasks: Sequence[str] = ()) -> None:
        """Find which nodes the head that `arguments` lead to reads, and add it to the readers."""
        self._tasks = list(tasks)
        self._head_names = self._names_of_heads()
        self._ends = self._find_ends()
        if self._reads_as_another(arguments):
            return
        sources = [n for n, feeds in self.feeds.items() if any(self.readers[r].head for r in feeds)]
        probe = self._probe(arguments)
        self._ran |= set(probe.two)
        for (kind, name), flow in probe.measure(sources or list(self._nodes)).items():
            if kind != "reader" or name not in self._ends:
                continue
            self._refuse_mixing((kind, name), flow)
            for layer, nodes in flow.nodes.items():
                groups = torch.cat([self.layers[layer].groups, torch.tensor([-1])])[nodes]
                known = self.readers.setdefault(
                    name, Reader(name, self._ends[name], groups, not _within(name, self.exclude))
                )
                known.sources = torch.where(known.sources >= 0, known.sources, groups)
                self.feeds[layer][name] = int(torch.bincount(nodes[nodes >= 0]).max())
        self.prove(arguments)

    def _reads_as_another(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a head reads what a known one does, which is then noted: linear heads of a `MultiHead` all read the
        same features, so that there is nothing to measure."""
        if type(self.model) is not MultiHead:
            return False
        head = self.model.heads[arguments[1]]
        names = {id(module): name for name, module in self._ends.items()}
        for twin in self.model.heads.values():
            alike = type(head) is type(twin) is nn.Linear and head.in_features == twin.in_features
            if alike and not (head._forward_pre_hooks or head._forward_hooks) and self.knows(twin):
                new, old = names[id(head)], names[id(twin)]
                if old in self.readers:
                    self.readers[new] = replace(self.readers[old], name=new, module=head)
                for feeds in self.feeds.values():
                    if old in feeds:
                        feeds[new] = feeds[old]
                self._ran.add(new)
                return True
        return False

    def knows(self, head: nn.Module) -> bool:
        """Whether `head` has run while the graph looked on."""
        mine = {id(module) for module in head.modules()}
        return any(id(self._ends[name]) in mine for name in self._ran if name in self._ends)

    def unprotected(self) -> list[str]:
        """Trained parameters of no node, norm, head or excluded module: unfrozen since the graph was built."""
        known = {id(p) for _, p, _ in self.parameters()}
        return [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad
            and id(p) not in known
            and not self._apart(holder := name.rpartition(".")[0])
            and holder not in self._later
        ]

    # For a person ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        groups = f" in {self.size} groups" if self.size != self.nodes else ""
        lines = [f"{type(self.model).__name__}: {self.nodes} nodes{groups} in {len(self.layers)} layers"]
        width = max(len(name) for name in self.layers)
        sets = {name: set(layer.groups.tolist()) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            readers = [
                reader + (f" ({count} columns each)" if count > 1 else "")
                for reader, count in self.feeds[name].items()
                if not self.readers[reader].head
            ]
            if any(self.readers[reader].head for reader in self.feeds[name]):
                readers.append("heads")
            partners = [other for other in sets if other != name and sets[name] & sets[other]]
            line = f"  {name:<{width}} {layer.size:>5} nodes  {type(layer.module).__name__}"
            line += f"{', BatchNorm' if name in self._normed else ''} → ReLU → {_some(readers) or 'output'}"
            line += f"; one group with {_some(partners)}" if partners else ""
            lines.append(line if len(line) <= 100 else line[:99] + "…")
        fate = "kept as it is" if self.excluded == "freeze" else "trained by every task"
        lines += [f"  {name}: excluded, {fate}; what later layers read of it is not protected" for name in self.exclude]
        if self.fixed_norms:
            lines.append(f"  frozen BatchNorm keeps its statistics: {_some(list(self.fixed_norms))}")
        return "\n".join(lines)

    # For methods -----------------------------------------------------------------------------------------------------

    @property
    def owners(self) -> list[NodeLayer]:
        """Layers and norms: all that holds rows of a node's incoming group."""
        return [*self.layers.values(), *self.norms.values()]

    def in_first_layer(self) -> Iterator[Tensor]:
        """Of each layer, the groups (groups,) that no layer before it has: a group counts there."""
        seen = torch.zeros(self.size, dtype=torch.bool)
        for layer in self.layers.values():
            here = torch.zeros_like(seen)
            here[layer.groups] = True
            yield here & ~seen
            seen |= here

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every parameter of a node's incoming group: its name, itself, and the group of each of its rows."""
        for owner in self.owners:
            for key, parameter in owner.module.named_parameters(recurse=False):
                yield f"{owner.name}.{key}", parameter, owner.groups


class Rows:
    """All rows of some groups' incoming weights, wherever they lie, as the proximal operators take them.

    `groups` are their numbers, `members` (groups, m) their rows counted through all tensors laid end to end.
    """

    def __init__(self, graph: NodeGraph, chosen: Tensor) -> None:
        chosen = chosen.cpu()
        self.groups = chosen.nonzero().flatten()
        place = torch.full((graph.size,), -1).masked_scatter_(chosen, torch.arange(len(self.groups)))
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.index: list[Tensor] = []
        owners = []
        for name, parameter, groups in graph.parameters():
            mine = chosen[groups].nonzero().flatten()
            if len(mine):
                self.names.append(name)
                self.parameters.append(parameter)
                self.index.append(mine.to(parameter.device))
                owners.append(place[groups[mine]])
        owner = torch.cat(owners) if owners else torch.empty(0, dtype=torch.int64)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=len(self.groups))
        rank = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]]
        members = torch.full((len(self.groups), int(counts.max()) if len(counts) else 0), len(owner))
        members[owner[order], rank] = order
        device = self.parameters[0].device if self.parameters else None
        self.members, self.groups = members.to(device), self.groups.to(device)

    def __len__(self) -> int:
        return len(self.groups)

    def laid(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Rows of the same groups that were taken by a `Rows`, as `put` wants them."""
        return list(rows)

    def take(self) -> list[Tensor]:
        """Copies of the rows, one tensor per parameter."""
        return [p.detach().index_select(0, index) for p, index in zip(self.parameters, self.index, strict=True)]

    @torch.no_grad()
    def put(self, rows: Sequence[Tensor]) -> None:
        """Write rows back, but for what the user has frozen."""
        for parameter, index, new in zip(self.parameters, self.index, rows, strict=True):
            if parameter.requires_grad:
                parameter.index_copy_(0, index, new)


class LaidRows(Rows):
    """The same rows with all their numbers laid end to end, as one tensor: fewer kernels for a GPU to launch.

    `take` gives that tensor alone, (numbers,), and `members` (groups, m) counts numbers, not rows.
    """

    MOST = 2**23
    """Numbers of members, which take eight bytes each."""

    def __init__(self, rows: Rows) -> None:
        self.groups, self.names, self.parameters, self.index = rows.groups, rows.names, rows.parameters, rows.index
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._last = [_channels_last(parameter) for parameter in self.parameters]  # whatever they may become
        places, widths, offset = [], [], 0
        for parameter, index in zip(self.parameters, self.index, strict=True):
            width = parameter[0].numel()
            widths.append(torch.full((len(index),), width))
            places.append(((offset + index * width)[:, None] + torch.arange(width, device=index.device)).flatten())
            offset += parameter.numel()
        self._places = torch.cat(places)
        wide = torch.cat([*widths, torch.zeros(1, dtype=torch.long)])  # of each row; 0 where a group has no more
        first = wide.cumsum(0) - wide
        blocks = []
        for row in rows.members.unbind(1):
            of_row, start = (part.to(row.device)[row][:, None] for part in (wide, first))
            along = torch.arange(int(of_row.max()), device=row.device)
            blocks.append(torch.where(along < of_row, start + along, len(self._places)))
        self.members = torch.cat(blocks, 1)

    @classmethod
    def fits(cls, rows: Rows) -> bool:
        """Whether there are some and not too many, of one kind, each without gaps in memory."""
        parameters = rows.parameters
        widest = sum(parameter[0].numel() for parameter in parameters)
        alike = len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
        dense = all(parameter.is_contiguous() or _channels_last(parameter) for parameter in parameters)
        return alike and dense and len(rows) * widest <= cls.MOST

    def laid(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [self._end_to_end(rows)] if rows else []

    def take(self) -> list[Tensor]:
        return [self._end_to_end(self.parameters)[self._places]]

    @torch.no_grad()
    def put(self, rows: Sequence[Tensor]) -> None:
        whole = self._end_to_end(self.parameters)
        whole[self._places] = rows[0]
        news = whole.split(self._sizes)
        moved = [parameter.requires_grad for parameter in self.parameters]
        mine = list(itertools.compress(self._in_order(self.parameters), moved))
        if mine:
            theirs = itertools.compress(news, moved)
            torch._foreach_copy_(mine, [new.view(one.shape) for new, one in zip(theirs, mine, strict=True)])

    def _end_to_end(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of whole parameters, or of rows of each."""
        return torch.cat([tensor.reshape(-1) for tensor in self._in_order(tensors)])

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of them with dimensions in the order in which the parameters lay in memory."""
        pairs = zip(tensors, self._last, strict=True)
        return [tensor.detach().permute(0, 2, 3, 1) if last else tensor.detach() for tensor, last in pairs]


def _channels_last(tensor: Tensor) -> bool:
    dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return dense and not tensor.is_contiguous()


def _size(module: nn.Module) -> int:
    return len(module.get_parameter("weight"))


def _within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _feeds(layer: str, flows: Mapping[Place, Flow]) -> dict[str, int]:
    """For each reader of `layer`, in forward order, how many columns it reads of each node."""
    found = {}
    for (kind, name), flow in flows.items():
        if kind == "reader" and layer in flow.nodes:
            nodes = flow.nodes[layer]
            found[name] = int(torch.bincount(nodes[nodes >= 0]).max())
    return found


def _site(index: int, groups: Tensor, folded: int) -> Site:
    """A site whose groups vary along one dimension only (channels) is kept as that vector, else flattened."""
    for dim in range(groups.dim()):
        lines = groups.movedim(dim, 0).reshape(groups.shape[dim], -1)
        vector = lines.amax(1)
        if bool(((lines == vector[:, None]) | (lines < 0)).all()):
            return Site(index, dim + 1, vector, folded)
    return Site(index, None, groups.flatten(), folded)


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
