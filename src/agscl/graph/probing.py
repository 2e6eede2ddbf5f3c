"""Finding out by experiment which nodes reach which places of a model.

A probe runs the model with random numbers for the outputs of its node layers, changes some nodes' values, and compares,
bit for bit, what arrives at the inputs of layers, at BatchNorms, at ReLUs and at the output. No layer's real output
takes part, so a change never travels past the layers that read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from agscl.graph.forward import WatchReLUs, preserve_model_state

__all__ = ["LAYERS", "Claim", "Flow", "NodeGraphError", "NodeProbe", "Place", "column_dim"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_ROWS = 64  # samples of one pass at the most
MAX_ACTIVATIONS = 2**26  # activations held by one pass at the most

Place = tuple[str, str]  # kind ("reader", "norm", "site", "excluded", "output") and name, or call number


class NodeGraphError(ValueError):
    """A layer that cannot be part of the graph. `layer` is its name; the message says why and what to do."""

    def __init__(self, layer: str, reason: str, advice: str) -> None:
        self.layer = layer
        super().__init__(f"{layer}: {reason} {advice}")


@dataclass
class Flow:
    """What arrives at a place: per layer that reaches it, the node behind each element (-1: none of that layer).

    For readers and norms an element is an input column; `mixed` says that one depends on several nodes at once.
    """

    nodes: dict[str, Tensor] = field(default_factory=dict)
    mixed: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A place is said to read group `groups[c]` (-1: none) at position c of dimension `dim` (None: flattened)."""

    dim: int | None
    groups: Tensor


class _WatchWeights(TorchFunctionMode):
    """Refuses a node's weight that is used outside its layer."""

    def __init__(self, owners: Mapping[int, str], running: list[str], suggest_exclude: Callable[..., str]) -> None:
        super().__init__()
        self.owners, self.running, self.suggest_exclude = owners, running, suggest_exclude

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for argument in (*args, *(kwargs or {}).values()):
            owner = self.owners.get(id(argument)) if isinstance(argument, nn.Parameter) else None
            if owner is not None and owner not in self.running and isinstance(result, Tensor):
                raise NodeGraphError(
                    owner,
                    f"its weight is also used outside the layer (by {getattr(func, '__name__', func)}): such tied "
                    "weights cannot be frozen in one place and free in the other.",
                    self.suggest_exclude(owner),
                )
        return result


class NodeProbe:
    """Runs `forward(*arguments)`, on copies of the first sample, with the outputs of some layers replaced.

    `nodes` are the layers whose outputs are nodes; `ends` other layers that may read nodes (heads, excluded layers);
    `norms` BatchNorms, which pass their input on unchanged while probed; `excluded` modules, whose output is replaced
    too.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        nodes: dict[str, nn.Module],
        ends: Mapping[str, nn.Module],
        norms: Mapping[str, nn.Module],
        excluded: Mapping[str, nn.Module],
        suggest_exclude: Callable[..., str],
    ) -> None:
        self.model, self.forward, self.nodes, self.norms = model, forward, nodes, norms
        self.excluded, self.suggest_exclude = excluded, suggest_exclude
        self.inside_excluded = {
            name for name in ends if any(name == box or name.startswith(f"{box}.") for box in excluded)
        }
        self.sample = tree_map(lambda a: a.detach()[:1] if isinstance(a, Tensor) and a.dim() else a, arguments)
        self.replaced = {**nodes, **ends}
        self.batch_folds: dict[Place, int] = {}
        with preserve_model_state(model):
            self.never_called = self._run_unchanged()

    # Three experiments -----------------------------------------------------------------------------------------------

    def _run_unchanged(self) -> list[str]:
        """Run the model unchanged and record the shapes of outputs. Returns the node layers that never ran."""
        self.outputs: dict[str, Tensor] = {}  # each layer's output for two samples, in forward order
        watched = {**self.replaced, **self.norms}
        calls = dict.fromkeys(watched, 0)
        running: list[str] = []

        def enter(name: str) -> Callable[..., None]:
            return lambda module, args: running.append(name)

        def leave(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                running.remove(name)
                calls[name] += 1
                if name in self.replaced:
                    self.outputs[name] = output

            return hook

        owners = {id(p): name for name, module in self.nodes.items() for p in module.parameters()}
        with ExitStack() as stack:
            for name, module in watched.items():
                stack.enter_context(module.register_forward_pre_hook(enter(name)))
                stack.enter_context(module.register_forward_hook(leave(name)))
            stack.enter_context(_WatchWeights(owners, running, self.suggest_exclude))
            self._forward(2)
        self.called_repeatedly = {name for name, count in calls.items() if count > 1}
        for name in watched:
            if name in self.called_repeatedly and name not in self.inside_excluded:
                raise NodeGraphError(
                    name,
                    f"the forward pass calls it {calls[name]} times, so its weights are shared (tied) between places.",
                    self.suggest_exclude(name),
                )
        elements = sum(output.numel() for output in self.outputs.values())
        self.rows = max(4, min(MAX_ROWS, MAX_ACTIVATIONS // max(1, elements)))
        return [name for name in self.nodes if calls[name] == 0]

    def trace_nodes(self, sources: Sequence[str], scales: Sequence[float] = (1.0,)) -> dict[Place, Flow]:
        """Which node of each source layer is behind each element of every place.

        Nodes are told apart by the binary digits of their number: for each digit, the nodes where it is 1 change in
        one row, those where it is 0 in another. An element behind which there is one node changes in just one of each
        two rows, and these spell its number.
        """
        codes: dict[tuple[Place, str], tuple[Tensor, Tensor]] = {}
        digits = {name: max(1, (_count_nodes(self.nodes[name]) - 1).bit_length()) for name in sources}
        changes = [(name, k, bit) for name in sources for k in range(digits[name]) for bit in (1, 0)]
        with preserve_model_state(self.model):
            for scale in (sign * scale for scale in scales for sign in (1.0, -1.0)):
                base = self._run_replaced(self.rows, scale)
                for at in range(0, len(changes), self.rows):
                    chunk = changes[at : at + self.rows]
                    masks: dict[str, Tensor] = {}
                    for row, (name, k, bit) in enumerate(chunk):
                        nodes = torch.arange(_count_nodes(self.nodes[name]))
                        mask = masks.setdefault(name, torch.zeros(self.rows, len(nodes), dtype=torch.bool))
                        mask[row] = (nodes >> k) & 1 == bit
                    for place, changed in _find_changes(base, self._run_replaced(self.rows, scale, masks)).items():
                        for row in changed.flatten(1).any(1).nonzero().flatten().tolist():
                            name, k, bit = chunk[row]
                            if (place, name) not in codes:
                                empty = torch.zeros(changed.shape[1:], dtype=torch.int64)
                                codes[place, name] = (empty, empty.clone())
                            codes[place, name][1 - bit].bitwise_or_(changed[row].long() << k)
        flows: dict[Place, Flow] = {place: Flow() for place in base}
        for (place, layer), (ones, zeros) in codes.items():
            single = (ones ^ zeros == 2 ** digits[layer] - 1) & (ones & zeros == 0)
            nodes = torch.where(single, ones, -1)
            mixed = bool(((ones | zeros != 0) & ~single).any())
            if place[0] in ("reader", "norm"):
                dim = self._column_dim(place, nodes.dim())
                lines = nodes.movedim(dim, 0).reshape(nodes.shape[dim], -1)
                nodes = lines.amax(1)
                mixed |= bool(((lines >= 0) & (lines != nodes[:, None])).any())
            flows[place].nodes[layer], flows[place].mixed[layer] = nodes, mixed
        return flows

    def find_contradiction(
        self, groups: Mapping[str, Tensor], size: int, claims: Mapping[Place, Claim]
    ) -> tuple[Place, int] | None:
        """Change random groups' outputs and see whether exactly the claimed columns change.

        `groups[layer]` is the group of each node. With random values, small and large, just the claimed columns must
        change; with real ones no other may. A place without a claim must not change at all. Returns the first place and
        column where this fails.
        """
        with preserve_model_state(self.model):
            rows = min(32, self.rows)
            share = torch.linspace(0.02, 0.7, rows)[:, None]
            chosen = torch.rand(rows, size, generator=torch.Generator().manual_seed(0)) < share
            masks = {name: chosen[:, mine] for name, mine in groups.items()}
            values: dict[Place, Tensor] = {}
            for scale in (1.0, -1.0, 1e3, -1e3):
                for place, changed in _find_changes(
                    self._run_replaced(rows, scale), self._run_replaced(rows, scale, masks)
                ).items():
                    values[place] = changed | values[place] if place in values else changed
            base = self._run_replaced(rows, None)
            real = _find_changes(base, self._run_replaced(rows, None, masks, base))
        chosen = torch.cat([chosen, torch.zeros(rows, 1, dtype=torch.bool)], 1)  # what reads no node never changes
        for place in values:
            claim = claims.get(place)
            if place[0] in ("excluded", "output"):
                continue
            if claim is None:
                if bool(values[place].any()) or bool(real[place].any()):
                    return place, 0
                continue
            claimed = chosen[:, claim.groups]
            for changed, exactly in ((values[place], True), (real[place], False)):
                lines = changed.flatten(1)[:, :, None] if claim.dim is None else changed.movedim(claim.dim, 1)
                columns = lines.reshape(rows, len(claim.groups), -1).any(2)
                wrong = columns != claimed if exactly else columns & ~claimed
                if bool(wrong.any()):
                    return place, int(wrong.any(0).nonzero()[0])
        return None

    # One pass --------------------------------------------------------------------------------------------------------

    def _forward(self, rows: int) -> Any:
        def repeat(a: Any) -> Any:
            return a.expand(rows, *a.shape[1:]).contiguous() if isinstance(a, Tensor) and a.dim() else a

        return self.forward(*tree_map(repeat, self.sample))

    def _run_replaced(
        self,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor] | None = None,
        base: Mapping[Place, Tensor] | None = None,
    ) -> dict[Place, Tensor]:
        """Run `rows` samples; returns what stood at every place.

        With a scale, node outputs are random: small numbers of that scale, larger where `masks` says so. Without one
        they are real, those of `base` where given, and moved where `masks` says so.
        """
        places: dict[Place, Tensor] = {}
        sites = 0
        calls: dict[str, int] = {}

        def record(kind: str, name: str, tensor: Tensor) -> None:
            if len(tensor) % rows:
                raise NodeGraphError(
                    name, "its input does not have the batch as its first dimension.", self.suggest_exclude(name)
                )
            places[kind, name] = (tensor if len(tensor) == rows else tensor.unflatten(0, (rows, -1))).detach().clone()
            self.batch_folds[kind, name] = len(tensor) // rows

        def watch_input(kind: str, name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
                if given is not None:
                    record(kind, name, given)

            return hook

        def replace(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def replaced(input: Tensor) -> Tensor:
                calls[name] = calls.get(name, 0) + 1  # an excluded layer may run several times
                place = "replaced", f"{name} {calls[name]}"
                if scale is None and base is None:
                    places[place] = forward(input)
                    return places[place].clone()
                return self._replace_output(name, rows, scale, masks, None if base is None else base[place])

            return replaced

        def randomise_output(module: nn.Module, args: Any, output: Any) -> Any:
            draw = torch.Generator().manual_seed(0)
            return tree_map(lambda o: _random_output(o[:2], len(o), 1.0, draw) if isinstance(o, Tensor) else o, output)

        def pass_through(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return (args[0] if args else kwargs["input"]).clone() if scale is not None else output

        def record_relu(given: Tensor, result: Tensor) -> None:
            nonlocal sites
            if given.dim() and len(given) % rows == 0:
                record("site", str(sites), given)
            sites += 1

        self._seed_draws()
        cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
        with ExitStack() as stack, cudnn:
            for name, norm in self.norms.items():
                stack.enter_context(norm.register_forward_pre_hook(watch_input("norm", name), with_kwargs=True))
                stack.enter_context(norm.register_forward_hook(pass_through, with_kwargs=True))
            for name, module in self.excluded.items():
                stack.enter_context(module.register_forward_pre_hook(watch_input("excluded", name), with_kwargs=True))
                if name not in self.replaced:
                    stack.enter_context(module.register_forward_hook(randomise_output))
            for name, layer in self.replaced.items():
                if (
                    name not in self.called_repeatedly
                ):  # an excluded layer that runs in several places reads no column for sure
                    stack.enter_context(layer.register_forward_pre_hook(watch_input("reader", name), with_kwargs=True))
                stack.enter_context(_replace_forward(layer, replace(name, layer.forward)))
            stack.enter_context(WatchReLUs(record_relu))
            output = self._forward(rows)
        for number, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) % rows == 0:
                record("output", str(number), leaf)
        return places

    def _replace_output(
        self,
        name: str,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor] | None,
        real: Tensor | None,
    ) -> Tensor:
        """What a replaced layer returns in this pass."""
        if real is not None:
            values = real.clone()
            other = values + values.abs().amax() + 1
        else:
            assert scale is not None
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = _random_output(self.outputs[name], rows, scale, draw)
            other = _random_output(self.outputs[name], rows, 3 * scale, draw)
        if masks is None or name not in masks:
            return values
        mask = masks[name].to(values.device).repeat_interleave(len(values) // rows, 0)
        shape = [len(values)] + [1] * (values.dim() - 1)
        shape[column_dim(self.replaced[name], values.dim())] = -1
        return torch.where(mask.view(shape), other, values)

    def _seed_draws(self) -> None:
        """Let what the model itself draws be the same in every pass. Not torch.manual_seed: it seeds every GPU."""
        torch.default_generator.manual_seed(0)
        for index in {p.device.index for p in self.model.parameters() if p.device.type == "cuda"}:
            torch.cuda.default_generators[index].manual_seed(0)

    def _column_dim(self, place: Place, dims: int) -> int:
        """Which dimension of a sample holds the columns of a reader or the channels of a norm."""
        return column_dim(self.replaced[place[1]], dims) if place[0] == "reader" else 0


def column_dim(module: nn.Module, dims: int) -> int:
    """Which of `dims` dimensions a layer's columns or nodes are: the last for Linear, channels for convolutions."""
    positions = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    return dims - 1 - next(count for kind, count in positions.items() if isinstance(module, kind))


def _count_nodes(module: nn.Module) -> int:
    return len(module.weight)  # type: ignore[arg-type]


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `module` run `forward` instead of its own."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _random_output(two: Tensor, rows: int, scale: float, draw: torch.Generator) -> Tensor:
    """Random numbers from 0.1 to 0.2 times `scale`, the same for every sample, laid out as `two` (two samples)."""
    sample = (torch.rand(len(two) // 2, *two.shape[1:], generator=draw) * 0.1 + 0.1) * scale
    values = sample.repeat(rows, *[1] * (two.dim() - 1)).to(two)
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if two.dim() == dims and two.is_contiguous(memory_format=layout) and not two.is_contiguous():
            return values.contiguous(memory_format=layout)
    return values


def _find_changes(base: Mapping[Place, Tensor], record_relu: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Where two passes differ, bit for bit, (rows, …) at every place."""
    changed = {}
    for place, tensor in base.items():
        if place[0] == "replaced":
            continue
        if place not in record_relu or record_relu[place].shape != tensor.shape:
            raise NodeGraphError(
                place[1],
                "the forward pass took another way when a node's value changed, so who reads whom is not settled.",
                "Let the way through the network not depend on its values.",
            )
        changed[place] = (record_relu[place] != tensor).cpu()
    return changed
