"""Finding out by experiment which nodes reach which places of a model.

A probe runs the model with made-up outputs for its node layers, changes some nodes' values, and compares, bit for bit,
what arrives at the inputs of layers, at BatchNorms, at ReLUs and at the output. No layer's real output takes part, so
a change never travels past the layers that read it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["LAYERS", "Claim", "Flow", "NodeGraphError", "Place", "Probe", "column_dim", "relu_watch", "undisturbed"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RELUS = {F.relu, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_CLAMPS = {torch.clamp, torch.clamp_, torch.clamp_min, torch.clamp_min_}
_CLAMPS |= {Tensor.clamp, Tensor.clamp_, Tensor.clamp_min, Tensor.clamp_min_}
_ROWS = 64  # samples of one pass at the most
_ELEMENTS = 2**26  # activations held by one pass at the most

Place = tuple[str, str]  # kind ("reader", "norm", "site", "excluded", "output") and name, or call number


class NodeGraphError(ValueError):
    """A layer that cannot be placed. `layer` is its name; the message says why and what to do."""

    def __init__(self, layer: str, why: str, cure: str) -> None:
        self.layer = layer
        super().__init__(f"{layer}: {why} {cure}")


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


@contextmanager
def undisturbed(model: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Run `model` in eval (or train) mode without leaving a trace: modes, buffers and random states come back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    model.train(train)
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002


class relu_watch(TorchFunctionMode):
    """Calls `seen(input, output)` at every ReLU, be it a module or a function, in call order."""

    def __init__(self, seen: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_relu(func, args, kwargs):
            return func(*args, **kwargs)
        given = (args[0] if args else kwargs["input"]).clone()  # a ReLU in place overwrites it
        result = func(*args, **kwargs)
        self.seen(given, result)
        return result


def _is_relu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _RELUS:
        return True
    if func not in _CLAMPS:
        return False
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    return isinstance(low, int | float) and low == 0 and high is None


class _weight_watch(TorchFunctionMode):
    """Refuses a node's weight that is used outside its layer."""

    def __init__(self, owners: Mapping[int, str], running: list[str], cure: Callable[..., str]) -> None:
        super().__init__()
        self.owners, self.running, self.cure = owners, running, cure

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
                    self.cure(owner),
                )
        return result


class Probe:
    """Runs `model(*arguments)`, on copies of the first sample, with the outputs of some layers made up.

    `nodes` are the layers whose outputs are nodes; `ends` other layers that may read nodes (heads, excluded layers);
    `norms` BatchNorms, which let everything through unchanged while probed; `boxes` excluded modules, whose output is
    made up too.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        *,
        nodes: dict[str, nn.Module],
        ends: Mapping[str, nn.Module],
        norms: Mapping[str, nn.Module],
        boxes: Mapping[str, nn.Module],
        cure: Callable[..., str],
    ) -> None:
        self.model, self.nodes, self.norms, self.boxes, self.cure = model, nodes, norms, boxes, cure
        self.lenient = {name for name in ends if any(name == box or name.startswith(f"{box}.") for box in boxes)}
        self.one = tree_map(lambda a: a.detach()[:1] if isinstance(a, Tensor) and a.dim() else a, arguments)
        self.pinned = {**nodes, **ends}
        self.folds: dict[Place, int] = {}
        with undisturbed(model):
            self.unreached = self._try()

    # Three experiments ---------------------------------------------------------------------------------------------

    def _try(self) -> list[str]:
        """Run the model as it is and note the shapes of outputs. Returns the node layers that never ran."""
        self.two: dict[str, Tensor] = {}  # each layer's output for two samples, in forward order
        watched = {**self.pinned, **self.norms}
        calls = dict.fromkeys(watched, 0)
        running: list[str] = []

        def enter(name: str) -> Callable[..., None]:
            return lambda module, args: running.append(name)

        def leave(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                running.remove(name)
                calls[name] += 1
                if name in self.pinned:
                    self.two[name] = output

            return hook

        owners = {id(p): name for name, module in self.nodes.items() for p in module.parameters()}
        with ExitStack() as stack:
            for name, module in watched.items():
                stack.enter_context(module.register_forward_pre_hook(enter(name)))
                stack.enter_context(module.register_forward_hook(leave(name)))
            stack.enter_context(_weight_watch(owners, running, self.cure))
            self._forward(2)
        self.often = {name for name, count in calls.items() if count > 1}
        for name in watched:
            if name in self.often and name not in self.lenient:
                raise NodeGraphError(
                    name,
                    f"the forward pass calls it {calls[name]} times, so its weights are shared (tied) between places.",
                    self.cure(name),
                )
        elements = sum(output.numel() for output in self.two.values())
        self.rows = max(4, min(_ROWS, _ELEMENTS // max(1, elements)))
        return [name for name in self.nodes if calls[name] == 0]

    def measure(self, sources: Sequence[str], scales: Sequence[float] = (1.0,)) -> dict[Place, Flow]:
        """Which node of each source layer is behind each element of every place.

        Nodes are told apart by the binary digits of their number: for each digit, the nodes where it is 1 change in
        one row, those where it is 0 in another. An element behind which there is one node changes in just one of each
        two rows, and these spell its number.
        """
        codes: dict[tuple[Place, str], tuple[Tensor, Tensor]] = {}
        digits = {name: max(1, (_size(self.nodes[name]) - 1).bit_length()) for name in sources}
        changes = [(name, k, bit) for name in sources for k in range(digits[name]) for bit in (1, 0)]
        with undisturbed(self.model):
            for sign in (sign * scale for scale in scales for sign in (1.0, -1.0)):
                base = self._run(self.rows, sign)
                for at in range(0, len(changes), self.rows):
                    chunk = changes[at : at + self.rows]
                    masks: dict[str, Tensor] = {}
                    for row, (name, k, bit) in enumerate(chunk):
                        nodes = torch.arange(_size(self.nodes[name]))
                        mask = masks.setdefault(name, torch.zeros(self.rows, len(nodes), dtype=torch.bool))
                        mask[row] = (nodes >> k) & 1 == bit
                    for place, changed in _changes(base, self._run(self.rows, sign, masks)).items():
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

    def prove(self, groups: Mapping[str, Tensor], size: int, claims: Mapping[Place, Claim]) -> tuple[Place, int] | None:
        """Change random groups' outputs and see whether exactly the claimed columns change.

        `groups[layer]` is the group of each node. With made-up values, small and large, just the claimed columns must
        change; with real ones no other may. A place without a claim must not change at all. Returns the first place and
        column where this fails.
        """
        with undisturbed(self.model):
            rows = min(32, self.rows)
            share = torch.linspace(0.02, 0.7, rows)[:, None]
            chosen = torch.rand(rows, size, generator=torch.Generator().manual_seed(0)) < share
            masks = {name: chosen[:, mine] for name, mine in groups.items()}
            made: dict[Place, Tensor] = {}
            for sign in (1.0, -1.0, 1e3, -1e3):
                for place, changed in _changes(self._run(rows, sign), self._run(rows, sign, masks)).items():
                    made[place] = changed | made[place] if place in made else changed
            base = self._run(rows, None)
            real = _changes(base, self._run(rows, None, masks, base))
        chosen = torch.cat([chosen, torch.zeros(rows, 1, dtype=torch.bool)], 1)  # what reads no node never changes
        for place in made:
            claim = claims.get(place)
            if place[0] in ("excluded", "output"):
                continue
            if claim is None:
                if bool(made[place].any()) or bool(real[place].any()):
                    return place, 0
                continue
            claimed = chosen[:, claim.groups]
            for changed, exactly in ((made[place], True), (real[place], False)):
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

        return self.model(*tree_map(repeat, self.one))

    def _run(
        self,
        rows: int,
        sign: float | None,
        masks: Mapping[str, Tensor] | None = None,
        base: Mapping[Place, Tensor] | None = None,
    ) -> dict[Place, Tensor]:
        """Run `rows` samples; returns what stood at every place.

        With a sign, node outputs are made up: small numbers of that sign, larger where `masks` says so. Without one
        they are real, those of `base` where given, and moved where `masks` says so.
        """
        places: dict[Place, Tensor] = {}
        sites = 0
        calls: dict[str, int] = {}

        def record(kind: str, name: str, tensor: Tensor) -> None:
            if len(tensor) % rows:
                raise NodeGraphError(name, "its input does not have the batch as its first dimension.", self.cure(name))
            places[kind, name] = (tensor if len(tensor) == rows else tensor.unflatten(0, (rows, -1))).detach().clone()
            self.folds[kind, name] = len(tensor) // rows

        def watch_input(kind: str, name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
                if given is not None:
                    record(kind, name, given)

            return hook

        def pin(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def pinned(input: Tensor) -> Tensor:
                calls[name] = calls.get(name, 0) + 1  # an excluded layer may run several times
                place = "pinned", f"{name} {calls[name]}"
                if sign is None and base is None:
                    places[place] = forward(input)
                    return places[place].clone()
                return self._output(name, rows, sign, masks, None if base is None else base[place])

            return pinned

        def pin_box(module: nn.Module, args: Any, output: Any) -> Any:
            draw = torch.Generator().manual_seed(0)
            return tree_map(lambda o: _made_up(o[:2], len(o), 1.0, draw) if isinstance(o, Tensor) else o, output)

        def let_through(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return (args[0] if args else kwargs["input"]).clone() if sign is not None else output

        def seen(given: Tensor, result: Tensor) -> None:
            nonlocal sites
            if given.dim() and len(given) % rows == 0:
                record("site", str(sites), given)
            sites += 1

        torch.manual_seed(0)  # draws of the model itself are the same in every pass
        cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
        with ExitStack() as stack, cudnn:
            for name, norm in self.norms.items():
                stack.enter_context(norm.register_forward_pre_hook(watch_input("norm", name), with_kwargs=True))
                stack.enter_context(norm.register_forward_hook(let_through, with_kwargs=True))
            for name, box in self.boxes.items():
                stack.enter_context(box.register_forward_pre_hook(watch_input("excluded", name), with_kwargs=True))
                if name not in self.pinned:
                    stack.enter_context(box.register_forward_hook(pin_box))
            for name, layer in self.pinned.items():
                if name not in self.often:  # an excluded layer that runs in several places reads no column for sure
                    stack.enter_context(layer.register_forward_pre_hook(watch_input("reader", name), with_kwargs=True))
                stack.enter_context(_instead(layer, pin(name, layer.forward)))
            stack.enter_context(relu_watch(seen))
            output = self._forward(rows)
        for number, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) % rows == 0:
                record("output", str(number), leaf)
        return places

    def _output(
        self,
        name: str,
        rows: int,
        sign: float | None,
        masks: Mapping[str, Tensor] | None,
        real: Tensor | None,
    ) -> Tensor:
        """What a pinned layer gives out in this pass."""
        if real is not None:
            made = real.clone()
            other = made + made.abs().amax() + 1
        else:
            assert sign is not None
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            made = _made_up(self.two[name], rows, sign, draw)
            other = _made_up(self.two[name], rows, 3 * sign, draw)
        if masks is None or name not in masks:
            return made
        mask = masks[name].to(made.device).repeat_interleave(len(made) // rows, 0)
        shape = [len(made)] + [1] * (made.dim() - 1)
        shape[column_dim(self.pinned[name], made.dim())] = -1
        return torch.where(mask.view(shape), other, made)

    def _column_dim(self, place: Place, dims: int) -> int:
        """Which dimension of a sample holds the columns of a reader or the channels of a norm."""
        return column_dim(self.pinned[place[1]], dims) if place[0] == "reader" else 0


def column_dim(module: nn.Module, dims: int) -> int:
    """Which of `dims` dimensions a layer's columns or nodes are: the last for Linear, channels for convolutions."""
    positions = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    return dims - 1 - next(count for kind, count in positions.items() if isinstance(module, kind))


def _size(module: nn.Module) -> int:
    return len(module.weight)  # type: ignore[arg-type]


@contextmanager
def _instead(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `module` run `forward` instead of its own."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _made_up(two: Tensor, rows: int, scale: float, draw: torch.Generator) -> Tensor:
    """Random numbers of 0.1 to 0.2 times `scale`, the same for every sample, laid out as `two` (two samples)."""
    sample = (torch.rand(len(two) // 2, *two.shape[1:], generator=draw) * 0.1 + 0.1) * scale
    made = sample.repeat(rows, *[1] * (two.dim() - 1)).to(two)
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if two.dim() == dims and two.is_contiguous(memory_format=layout) and not two.is_contiguous():
            return made.contiguous(memory_format=layout)
    return made


def _changes(base: Mapping[Place, Tensor], seen: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Where two passes differ, bit for bit, (rows, …) at every place."""
    changed = {}
    for place, tensor in base.items():
        if place[0] == "pinned":
            continue
        if place not in seen or seen[place].shape != tensor.shape:
            raise NodeGraphError(
                place[1],
                "the forward pass took another way when a node's value changed, so who reads whom is not settled.",
                "Let the way through the network not depend on its values.",
            )
        changed[place] = (seen[place] != tensor).cpu()
    return changed
