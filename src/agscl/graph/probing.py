"""Measures, by changing node values, which nodes reach which points of a model.

A probe runs the model with random numbers for the outputs of its node layers, changes some nodes' values, and compares,
bit for bit, what arrives at each probe point: the inputs of layers, BatchNorms and ReLUs, and the output. The real
outputs of node layers are not used, so a change never travels past the layers that read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from agscl.graph.model_state import preserve_model_state
from agscl.graph.refusals import NodeGraphError, Refusal
from agscl.graph.relu_watcher import ReLUWatcher, watch_running

__all__ = ["LAYERS", "ExpectedGroups", "NodeProbe", "NodeTrace", "ProbePoint", "column_dim"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_ROWS = 64  # most samples in one pass
MAX_ACTIVATIONS = 3 * 2**25  # most numbers in one pass: inputs and outputs of layers and norms
MAX_OUTPUTS = 2**25  # most numbers in the outputs of layers in a pass of the proof, which keeps real ones
OTHER_ACTIVATIONS = {"leaky_relu", "rrelu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "tanh"}
PROOF_ROWS = 32  # samples in the proof, each with other groups changed

ProbePoint = tuple[str, str]
"""The kind, and what it is: a name ("reader", "norm", "head"), a number ("site", "output"), both ("excluded")."""


@dataclass
class NodeTrace:
    """The nodes that reach a probe point: per source layer, the node behind each element (-1: none of that layer).

    For readers and norms an element is an input column. `mixed[layer]`: some element depends on several of its nodes.
    """

    nodes: dict[str, Tensor] = field(default_factory=dict)
    mixed: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpectedGroups:
    """What the graph says of a probe point: position c of dimension `dim` (None: flattened) reads group `groups[c]`, or
    none (-1)."""

    dim: int | None
    groups: Tensor


class _CallWatcher(TorchFunctionMode):
    """Finds node layers whose weight is used outside the layer, and activations that are no ReLU."""

    def __init__(self, owners: Mapping[int, str], running: list[str]) -> None:
        super().__init__()
        self.owners, self.running = owners, running
        self.used_outside: dict[str, str] = {}  # layer -> the function that uses its weight
        self.other_activations: dict[str, None] = {}  # in the order of the calls

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        function = getattr(func, "__name__", str(func))
        if function.strip("_") in OTHER_ACTIVATIONS:
            self.other_activations[function.strip("_")] = None
        for argument in (*args, *(kwargs or {}).values()):
            owner = self.owners.get(id(argument)) if isinstance(argument, nn.Parameter) else None
            if owner is not None and owner not in self.running and isinstance(result, Tensor):
                self.used_outside.setdefault(owner, function)
        return result


class NodeProbe:
    """Runs `forward(*arguments)`, on copies of the first sample, with the outputs of some layers replaced.

    `nodes` are the layers whose outputs are nodes; `reader_only` other layers that may read nodes (those of heads and
    of excluded modules); `norms` BatchNorms, which return their input unchanged while probed; `excluded` modules, whose
    output is replaced too; `heads` the modules of heads, whose ReLUs do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        nodes: dict[str, nn.Module],
        reader_only: Mapping[str, nn.Module],
        norms: Mapping[str, nn.Module],
        excluded: Mapping[str, nn.Module],
        heads: Iterable[nn.Module],
    ) -> None:
        self.model, self.forward, self.nodes, self.norms = model, forward, nodes, norms
        self.excluded, self.heads = excluded, list(heads)
        self.inside_excluded = {
            name for name in reader_only if any(name == prefix or name.startswith(f"{prefix}.") for prefix in excluded)
        }
        self.sample = tree_map(
            lambda argument: argument.detach()[:1] if isinstance(argument, Tensor) and argument.dim() else argument,
            arguments,
        )
        self.replaced = {**nodes, **reader_only}
        self.rows_per_sample: dict[ProbePoint, int] = {}
        self._watched: Mapping[str, nn.Module] = {}
        self._random_outputs: dict[str, list[Tensor]] = {}  # by layer: the numbers that replace outputs, unscaled
        with preserve_model_state(model):
            self.never_called = self._run_unchanged()

    # Three measurements ----------------------------------------------------------------------------------------------

    def _run_unchanged(self) -> list[str]:
        """Run the model unchanged and record the shapes of outputs. Returns the node layers that never ran."""
        self.outputs: dict[str, Tensor] = {}  # each layer's output for two samples, in forward order
        watched = {**self.replaced, **self.norms}
        calls = dict.fromkeys(watched, 0)
        running: list[str] = []

        elements = 0

        def record_entry(name: str) -> Callable[..., None]:
            return lambda module, args: running.append(name)

        def record_exit(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                nonlocal elements
                running.remove(name)
                calls[name] += 1
                elements += sum(argument.numel() for argument in args if isinstance(argument, Tensor))
                if name in self.replaced:
                    self.outputs[name] = output

            return hook

        owners = {id(p): name for name, module in self.nodes.items() for p in module.parameters()}
        watcher = _CallWatcher(owners, running)
        with ExitStack() as stack:
            for name, module in watched.items():
                stack.enter_context(module.register_forward_pre_hook(record_entry(name)))
                stack.enter_context(module.register_forward_hook(record_exit(name)))
            stack.enter_context(watcher)
            self._forward(2)
        self.other_activations = list(watcher.other_activations)
        self.called_repeatedly = {name for name, count in calls.items() if count > 1}
        refusals = [
            Refusal(
                name,
                f"its weight is also used outside the layer (by {function}): such tied weights cannot be frozen in one "
                "place and free in the other.",
                exclude=(name,),
            )
            for name, function in watcher.used_outside.items()
        ]
        refusals += [
            Refusal(
                name,
                f"the forward pass calls it {calls[name]} times, so its weights are shared (tied) between places.",
                exclude=(name,),
            )
            for name in watched
            if name in self.called_repeatedly and name not in self.inside_excluded
        ]
        if refusals:
            raise NodeGraphError(*refusals)
        outputs = sum(output.numel() for output in self.outputs.values())
        self.rows = max(4, min(MAX_ROWS, 2 * MAX_ACTIVATIONS // max(1, elements + outputs)))
        self.proof_rows = max(4, min(PROOF_ROWS, 2 * MAX_OUTPUTS // max(1, outputs)))
        return [name for name in self.nodes if calls[name] == 0]

    def trace_nodes(
        self, sources: Sequence[str], scales: Sequence[float] = (1.0,), watched: Mapping[str, nn.Module] | None = None
    ) -> dict[ProbePoint, NodeTrace]:
        """Find which node of each source layer is behind each element of every probe point, in forward order.

        The inputs of `watched`, modules of heads, are probe points too.

        Nodes are told apart by the binary digits of their number: for each digit, the nodes where it is 1 change in
        one row, those where it is 0 in another. An element that depends on one node changes in exactly one of each two
        rows, and these rows spell the node's number.
        """
        self._watched = watched or {}
        codes: dict[tuple[ProbePoint, str], tuple[Tensor, Tensor]] = {}
        digits = {name: max(1, (_count_nodes(self.nodes[name]) - 1).bit_length()) for name in sources}
        changes = [(name, digit, bit) for name in sources for digit in range(digits[name]) for bit in (1, 0)]
        chunk: list[tuple[str, int, int]] = []
        coupled: list[ProbePoint] = []  # where a row changed although only others were changed

        def read_digits(point: ProbePoint, changed: Tensor) -> None:
            for row in _any_position(changed[:, None]).flatten().nonzero().flatten().tolist():
                if row >= len(chunk):  # an unchanged row
                    coupled.append(point)
                    continue
                name, digit, bit = chunk[row]
                if (point, name) not in codes:
                    dtype = torch.int16 if digits[name] < 15 else torch.int64  # a ReLU may have millions of elements
                    empty = torch.zeros(changed.shape[1:], dtype=dtype)
                    codes[point, name] = (empty, empty.clone())
                code = codes[point, name][1 - bit]
                code.bitwise_or_(changed[row].cpu().to(code.dtype) << digit)

        with preserve_model_state(self.model):
            for scale in (sign * scale for scale in scales for sign in (1.0, -1.0)):
                unchanged = self._run_replaced(self.rows, scale)
                for start in range(0, len(changes), self.rows - 1):
                    chunk = changes[start : start + self.rows - 1]  # the last row stays as it is
                    masks: dict[str, Tensor] = {}
                    for row, (name, digit, bit) in enumerate(chunk):
                        nodes = torch.arange(_count_nodes(self.nodes[name]))
                        mask = masks.setdefault(name, torch.zeros(self.rows, len(nodes), dtype=torch.bool))
                        mask[row] = (nodes >> digit) & 1 == bit
                    self._compare_changed(self.rows, scale, masks, unchanged, read_digits, skip_before_masks=True)
                    if coupled and torch.equal(
                        self._run_replaced(self.rows, scale)[coupled[0]], unchanged[coupled[0]]
                    ):  # else the forward pass is random, which the proof will find
                        raise _coupled_examples(coupled[0], sources)
        traces: dict[ProbePoint, NodeTrace] = {point: NodeTrace() for point in unchanged}
        for (point, layer), (ones, zeros) in codes.items():
            is_one_node = (ones ^ zeros == 2 ** digits[layer] - 1) & (ones & zeros == 0)
            traces[point].nodes[layer] = torch.where(is_one_node, ones, -1)
            traces[point].mixed[layer] = bool(((ones | zeros != 0) & ~is_one_node).any())
        return traces

    def find_contradiction(
        self, groups: Mapping[str, Tensor], size: int, expected: Mapping[ProbePoint, ExpectedGroups]
    ) -> tuple[ProbePoint, int] | None:
        """Probe whether exactly the expected columns change when random groups' outputs do.

        `groups[layer]` is the group of each node. With random values, small and large, exactly the expected columns
        must change; with real ones no other may. A point that is not in `expected` must not change at all. Returns the
        first point and column where this fails.
        """
        share = torch.linspace(0.02, 0.7, self.proof_rows)[:, None]
        chosen = torch.rand(self.proof_rows, size, generator=torch.Generator().manual_seed(0)) < share
        passes = -(-self.proof_rows // self.rows)  # of about the same number of samples
        contradictions = (self._find_contradiction(part, groups, expected) for part in chosen.tensor_split(passes))
        return next(filter(None, contradictions), None)

    def _find_contradiction(
        self, chosen: Tensor, groups: Mapping[str, Tensor], expected: Mapping[ProbePoint, ExpectedGroups]
    ) -> tuple[ProbePoint, int] | None:
        """As `find_contradiction`, for the groups `chosen`, (rows, groups), to be changed in each sample."""
        rows = len(chosen)
        masks = {name: chosen[:, node_groups] for name, node_groups in groups.items()}
        changed_random: dict[ProbePoint, Tensor] = {}
        changed_real: dict[ProbePoint, Tensor] = {}

        def collect(found: dict[ProbePoint, Tensor], point: ProbePoint, changed: Tensor) -> None:
            if point[0] in ("excluded", "output"):
                return
            if point not in expected:
                changed = _any_position(changed[:, None])
            elif point[0] == "site":
                dim = expected[point].dim
                changed = changed.flatten(1) if dim is None else _any_position(changed.movedim(dim, 1))
            changed = changed.cpu()
            found[point] = changed | found[point] if point in found else changed

        with preserve_model_state(self.model):
            for scale in (1.0, -1.0, 1e3, -1e3):
                unchanged = self._run_replaced(rows, scale)
                self._compare_changed(rows, scale, masks, unchanged, partial(collect, changed_random))
            unchanged = self._run_replaced(rows, None)
            self._compare_changed(rows, None, masks, unchanged, partial(collect, changed_real))
        chosen = torch.cat([chosen, torch.zeros(rows, 1, dtype=torch.bool)], 1)  # what reads no node never changes
        for point, changed in changed_random.items():
            should_change = chosen[:, expected[point].groups if point in expected else torch.tensor([-1])]
            wrong = (changed != should_change) | (changed_real[point] & ~should_change)
            if bool(wrong.any()):
                return point, int(wrong.any(0).nonzero()[0])
        return None

    # One pass --------------------------------------------------------------------------------------------------------

    def _forward(self, rows: int) -> Any:
        def repeat_sample(argument: Any) -> Any:
            return (
                argument.expand(rows, *argument.shape[1:]).contiguous()
                if isinstance(argument, Tensor) and argument.dim()
                else argument
            )

        return self.forward(*tree_map(repeat_sample, self.sample))

    def _compare_changed(
        self,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor],
        unchanged: Mapping[ProbePoint, Tensor],
        visit: Callable[[ProbePoint, Tensor], None],
        *,
        skip_before_masks: bool = False,
    ) -> None:
        """Run the model with the nodes in `masks` changed; `visit(point, changed)` is called at every probe point.

        `changed`, (rows, …), is where the tensor that arrived differs bit for bit from the one in `unchanged`; of a
        reader or norm, (rows, columns) whether any position of a column does. With `skip_before_masks` points that come
        before any changed layer are not visited.
        """
        missing = {point for point in unchanged if point[0] != "replaced"}

        def compare(point: ProbePoint, arrived: Tensor, may_differ: bool) -> None:
            if point not in missing:
                return
            before = unchanged[point]
            if before.shape[1:] != arrived.shape[1:]:
                raise _other_operations(point)
            missing.remove(point)
            if may_differ or not skip_before_masks:
                changed = arrived != before
                if point[0] in ("reader", "norm"):
                    changed = _any_position(changed.movedim(self._column_dim(point, changed.dim() - 1) + 1, 1))
                visit(point, changed)

        self._run_replaced(rows, scale, masks, unchanged, compare)
        if missing:
            raise _other_operations(next(point for point in unchanged if point in missing))

    def _run_replaced(
        self,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor] | None = None,
        real_outputs: Mapping[ProbePoint, Tensor] | None = None,
        visit: Callable[[ProbePoint, Tensor, bool], None] | None = None,
    ) -> dict[ProbePoint, Tensor]:
        """Run `rows` samples; returns the tensor that arrived at every probe point, (1, …) where all rows are alike.

        With a scale, node outputs are random numbers of that scale, larger where `masks` is true. Without one they are
        real (those of `real_outputs`, if given), and changed where `masks` is true. With `visit`, nothing is returned:
        each tensor is visited as it arrives, together with whether a layer in `masks` has run before.
        """
        arrived: dict[ProbePoint, Tensor] = {}
        relu_calls = 0
        layer_calls: dict[str, int] = {}
        is_changed = False

        def record(kind: str, name: str, tensor: Tensor) -> None:
            if len(tensor) % rows:
                exclude = () if kind in ("site", "output") else (name.rpartition(" ")[2],)
                raise NodeGraphError(
                    Refusal(name, "its input does not have the batch as its first dimension.", exclude=exclude)
                )
            self.rows_per_sample[kind, name] = len(tensor) // rows
            tensor = (tensor if len(tensor) == rows else tensor.unflatten(0, (rows, -1))).detach()
            if visit is not None:
                visit((kind, name), tensor, is_changed)
            else:
                alike = bool((tensor == tensor[:1]).all())
                arrived[kind, name] = (tensor[:1] if alike else tensor).clone()

        def watch_input(kind: str, name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
                if tensor is not None:
                    record(kind, name, tensor)

            return hook

        def watch_excluded(name: str) -> Callable[..., None]:
            calls = count(1)
            return lambda module, args, kwargs: watch_input("excluded", f"{next(calls)} {name}")(module, args, kwargs)

        def watch_head(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                tensor = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
                if tensor is not None and tensor.dim() and len(tensor) % rows == 0:
                    record("head", name, tensor)

            return hook

        def replace(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def replaced(input: Tensor) -> Tensor:
                layer_calls[name] = layer_calls.get(name, 0) + 1  # an excluded layer may run several times
                call = "replaced", f"{name} {layer_calls[name]}"
                if scale is None and visit is None:
                    arrived[call] = forward(input)
                    return arrived[call].clone()
                nonlocal is_changed
                is_changed |= masks is not None and name in masks
                return self._replace_output(
                    name, rows, scale, masks, None if scale is not None else (real_outputs or {})[call]
                )

            return replaced

        def randomise_output(module: nn.Module, args: Any, output: Any) -> Any:
            generator = torch.Generator().manual_seed(0)

            def randomise(leaf: Any, batch_dim: int = 0) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                batch_first = leaf.movedim(batch_dim, 0)
                sample = _random_output(batch_first[:2], generator)[0]
                values = sample.expand(batch_first.shape).movedim(0, batch_dim)
                return _like_layout(values.to(leaf), leaf)

            if isinstance(module, nn.RNNBase):  # its state is (layers, batch, …)
                values, state = output
                return randomise(values), tree_map(partial(randomise, batch_dim=1), state)
            return tree_map(randomise, output)

        def pass_through(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return (args[0] if args else kwargs["input"]).clone() if scale is not None else output

        def record_relu(relu_input: Tensor) -> None:
            nonlocal relu_calls
            if running_heads:
                return
            if relu_input.dim() and len(relu_input) % rows == 0:
                record("site", str(relu_calls), relu_input)
            relu_calls += 1

        self._seed_generators()
        cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
        with ExitStack() as stack, cudnn:
            for name, norm in self.norms.items():
                stack.enter_context(norm.register_forward_pre_hook(watch_input("norm", name), with_kwargs=True))
                stack.enter_context(norm.register_forward_hook(pass_through, with_kwargs=True))
                if scale is not None and type(norm).forward is _BatchNorm.forward:  # the hook returns its input
                    stack.enter_context(_replace_forward(norm, lambda input: input))
            for name, module in self._watched.items():
                stack.enter_context(module.register_forward_pre_hook(watch_head(name), with_kwargs=True))
            for name, module in self.excluded.items():
                stack.enter_context(module.register_forward_pre_hook(watch_excluded(name), with_kwargs=True))
                if name not in self.replaced:
                    stack.enter_context(module.register_forward_hook(randomise_output))
            for name, layer in self.replaced.items():
                if name not in self.called_repeatedly:  # an excluded layer called twice has no certain columns
                    stack.enter_context(layer.register_forward_pre_hook(watch_input("reader", name), with_kwargs=True))
                stack.enter_context(_replace_forward(layer, replace(name, layer.forward)))
            running_heads = stack.enter_context(watch_running(self.heads))
            stack.enter_context(ReLUWatcher(on_input=record_relu))
            output = self._forward(rows)
        for number, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) % rows == 0:
                record("output", str(number), leaf)
        return arrived

    def _replace_output(
        self,
        name: str,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor] | None,
        real_output: Tensor | None,
    ) -> Tensor:
        """The output that a replaced layer returns in this pass."""
        mask = None if masks is None else masks.get(name)
        if real_output is not None:
            values = real_output.unflatten(0, (rows, -1))
            replacement = values + values.abs().amax() + 1
        else:
            assert scale is not None
            if name not in self._random_outputs:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                self._random_outputs[name] = [_random_output(self.outputs[name], generator) for _ in range(2)]
            values, replacement = self._random_outputs[name]
            values, replacement = (
                (scale * values).to(self.outputs[name]),
                (3 * scale * replacement).to(self.outputs[name]),
            )
        if mask is None:
            output = values.expand(rows, *values.shape[1:]).clone(memory_format=torch.contiguous_format)
        else:
            shape = [rows] + [1] * (values.dim() - 1)
            shape[column_dim(self.replaced[name], values.dim())] = -1
            output = torch.where(mask.to(values.device).view(shape), replacement, values)
        return _like_layout(output.flatten(0, 1), self.outputs[name])

    def _seed_generators(self) -> None:
        """Seed the model's own random draws alike in every pass. Not torch.manual_seed: it seeds every GPU."""
        torch.default_generator.manual_seed(0)
        for index in {p.device.index for p in self.model.parameters() if p.device.type == "cuda"}:
            torch.cuda.default_generators[index].manual_seed(0)

    def _column_dim(self, point: ProbePoint, dims: int) -> int:
        """Which dimension of a sample holds the columns of a reader or the channels of a norm."""
        return column_dim(self.replaced[point[1]], dims) if point[0] == "reader" else 0


def column_dim(module: nn.Module, dims: int) -> int:
    """Which of `dims` probed dimensions a layer's columns or nodes lie along: the last for Linear, channels else."""
    positions = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    return dims - 1 - next(count for kind, count in positions.items() if isinstance(module, kind))


def _count_nodes(module: nn.Module) -> int:
    return len(module.weight)  # type: ignore[arg-type]


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run `forward` in place of `module.forward`."""
    instance_forward = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if instance_forward is not None:
            module.forward = instance_forward


def _random_output(two_samples: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers from 0.1 to 0.2 for one sample, (1, n, …), of what `two_samples`, (2n, …), holds for two."""
    return torch.rand(1, len(two_samples) // 2, *two_samples.shape[1:], generator=generator) * 0.1 + 0.1


def _like_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with its channels last in memory if those of `like` are."""
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if like.dim() == dims and like.is_contiguous(memory_format=layout) and not like.is_contiguous():
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def _any_position(changed: Tensor) -> Tensor:
    """(rows, columns, …) whether anything changed at any position of a column, (rows, columns)."""
    flat = changed.flatten(2) if changed.dim() > 2 else changed[:, :, None]
    if flat.shape[2] % 8 == 0 and flat.is_contiguous():
        flat = flat.view(torch.int64)  # eight flags at a time
    return flat.any(2)


def _coupled_examples(point: ProbePoint, sources: Sequence[str]) -> NodeGraphError:
    kind, name = point
    where = {"site": f"ReLU number {int(name) + 1}" if name.isdigit() else name, "output": "the output"}
    reason = (
        f"{where.get(kind, name)} depends on other examples of the batch, or on how many there are (a normalisation by "
        "the batch that is no BatchNorm, attention between examples, views of an example joined along the batch)."
    )
    remedy = (
        "Compute each example by itself (BatchNorm does in eval mode). Of several views of an example, as in a "
        "Siamese network: torch.stack(views, 1).flatten(0, 1), and unflatten(0, (-1, len(views))) afterwards."
    )
    return NodeGraphError(Refusal(sources[0], reason, remedy, tuple(sources)))


def _other_operations(point: ProbePoint) -> NodeGraphError:
    return NodeGraphError(
        Refusal(
            point[1],
            "the forward pass ran other operations when a node's value changed, so which layer reads which node is not "
            "fixed.",
            "Remove control flow that depends on activations.",
        )
    )
