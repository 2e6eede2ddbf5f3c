"""Measures, by changing node values, which nodes reach which points of a model.

A probe runs the model with random numbers for the outputs of its node layers, changes some nodes' values, and compares,
bit for bit, what arrives at each probe point: the inputs of layers, BatchNorms and ReLUs, and the output. The real
outputs of node layers are not used, so a change never travels past the layers that read it.
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

from agscl.graph.forward import ReLUWatcher, preserve_model_state

__all__ = ["LAYERS", "ExpectedGroups", "NodeGraphError", "NodeProbe", "NodeTrace", "ProbePoint", "column_dim"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_ROWS = 64  # most samples in one pass
MAX_ACTIVATIONS = 2**26  # most activations held by one pass

ProbePoint = tuple[str, str]  # kind ("reader", "norm", "site", "excluded", "output") and name, or call number


class NodeGraphError(ValueError):
    """A layer that cannot be part of the graph. `layer` is its name; the message says why and what to do."""

    def __init__(self, layer: str, reason: str, advice: str) -> None:
        self.layer = layer
        super().__init__(f"{layer}: {reason} {advice}")


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


class _WeightUseGuard(TorchFunctionMode):
    """Raises where a node layer's weight is used outside that layer."""

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

    `nodes` are the layers whose outputs are nodes; `reader_only` other layers that may read nodes (those of heads and
    of excluded modules); `norms` BatchNorms, which return their input unchanged while probed; `excluded` modules, whose
    output is replaced too.
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
        suggest_exclude: Callable[..., str],
    ) -> None:
        self.model, self.forward, self.nodes, self.norms = model, forward, nodes, norms
        self.excluded, self.suggest_exclude = excluded, suggest_exclude
        self.inside_excluded = {
            name for name in reader_only if any(name == prefix or name.startswith(f"{prefix}.") for prefix in excluded)
        }
        self.sample = tree_map(
            lambda argument: argument.detach()[:1] if isinstance(argument, Tensor) and argument.dim() else argument,
            arguments,
        )
        self.replaced = {**nodes, **reader_only}
        self.rows_per_sample: dict[ProbePoint, int] = {}
        with preserve_model_state(model):
            self.never_called = self._run_unchanged()

    # Three measurements ----------------------------------------------------------------------------------------------

    def _run_unchanged(self) -> list[str]:
        """Run the model unchanged and record the shapes of outputs. Returns the node layers that never ran."""
        self.outputs: dict[str, Tensor] = {}  # each layer's output for two samples, in forward order
        watched = {**self.replaced, **self.norms}
        calls = dict.fromkeys(watched, 0)
        running: list[str] = []

        def record_entry(name: str) -> Callable[..., None]:
            return lambda module, args: running.append(name)

        def record_exit(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                running.remove(name)
                calls[name] += 1
                if name in self.replaced:
                    self.outputs[name] = output

            return hook

        owners = {id(p): name for name, module in self.nodes.items() for p in module.parameters()}
        with ExitStack() as stack:
            for name, module in watched.items():
                stack.enter_context(module.register_forward_pre_hook(record_entry(name)))
                stack.enter_context(module.register_forward_hook(record_exit(name)))
            stack.enter_context(_WeightUseGuard(owners, running, self.suggest_exclude))
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

    def trace_nodes(self, sources: Sequence[str], scales: Sequence[float] = (1.0,)) -> dict[ProbePoint, NodeTrace]:
        """Find which node of each source layer is behind each element of every probe point.

        Nodes are told apart by the binary digits of their number: for each digit, the nodes where it is 1 change in
        one row, those where it is 0 in another. An element that depends on one node changes in exactly one of each two
        rows, and these rows spell the node's number.
        """
        codes: dict[tuple[ProbePoint, str], tuple[Tensor, Tensor]] = {}
        digits = {name: max(1, (_count_nodes(self.nodes[name]) - 1).bit_length()) for name in sources}
        changes = [(name, digit, bit) for name in sources for digit in range(digits[name]) for bit in (1, 0)]
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
                    for point, changed in _find_changes(unchanged, self._run_replaced(self.rows, scale, masks)).items():
                        for row in changed.flatten(1).any(1).nonzero().flatten().tolist():
                            if row >= len(chunk):
                                self._refuse_coupling(point, sources)
                            name, digit, bit = chunk[row]
                            if (point, name) not in codes:
                                empty = torch.zeros(changed.shape[1:], dtype=torch.int64)
                                codes[point, name] = (empty, empty.clone())
                            codes[point, name][1 - bit].bitwise_or_(changed[row].long() << digit)
        traces: dict[ProbePoint, NodeTrace] = {point: NodeTrace() for point in unchanged}
        for (point, layer), (ones, zeros) in codes.items():
            is_one_node = (ones ^ zeros == 2 ** digits[layer] - 1) & (ones & zeros == 0)
            nodes = torch.where(is_one_node, ones, -1)
            mixed = bool(((ones | zeros != 0) & ~is_one_node).any())
            if point[0] in ("reader", "norm"):
                dim = self._column_dim(point, nodes.dim())
                by_column = nodes.movedim(dim, 0).reshape(nodes.shape[dim], -1)
                nodes = by_column.amax(1)
                mixed |= bool(((by_column >= 0) & (by_column != nodes[:, None])).any())
            traces[point].nodes[layer], traces[point].mixed[layer] = nodes, mixed
        return traces

    def _refuse_coupling(self, point: ProbePoint, sources: Sequence[str]) -> None:
        kind, name = point
        where = {"site": f"ReLU number {int(name) + 1}" if name.isdigit() else name, "output": "the output"}
        raise NodeGraphError(
            sources[0],
            f"{where.get(kind, name)} depends on other examples of the batch (a normalisation by the batch that is no "
            "BatchNorm, attention between examples), so an old task's output depends on the batch it comes in.",
            f"Compute each example by itself (BatchNorm does in eval mode). {self.suggest_exclude(*sources)}",
        )

    def find_contradiction(
        self, groups: Mapping[str, Tensor], size: int, expected: Mapping[ProbePoint, ExpectedGroups]
    ) -> tuple[ProbePoint, int] | None:
        """Change random groups' outputs and check that exactly the expected columns change.

        `groups[layer]` is the group of each node. With random values, small and large, exactly the expected columns
        must change; with real ones no other may. A point that is not in `expected` must not change at all. Returns the
        first point and column where this fails.
        """
        with preserve_model_state(self.model):
            rows = min(32, self.rows)
            share = torch.linspace(0.02, 0.7, rows)[:, None]
            chosen = torch.rand(rows, size, generator=torch.Generator().manual_seed(0)) < share
            masks = {name: chosen[:, node_groups] for name, node_groups in groups.items()}
            changed_random: dict[ProbePoint, Tensor] = {}
            for scale in (1.0, -1.0, 1e3, -1e3):
                for point, changed in _find_changes(
                    self._run_replaced(rows, scale), self._run_replaced(rows, scale, masks)
                ).items():
                    changed_random[point] = changed | changed_random[point] if point in changed_random else changed
            real_outputs = self._run_replaced(rows, None)
            changed_real = _find_changes(real_outputs, self._run_replaced(rows, None, masks, real_outputs))
        chosen = torch.cat([chosen, torch.zeros(rows, 1, dtype=torch.bool)], 1)  # what reads no node never changes
        for point in changed_random:
            point_groups = expected.get(point)
            if point[0] in ("excluded", "output"):
                continue
            if point_groups is None:
                if bool(changed_random[point].any()) or bool(changed_real[point].any()):
                    return point, 0
                continue
            should_change = chosen[:, point_groups.groups]
            for changed, must_be_equal in ((changed_random[point], True), (changed_real[point], False)):
                by_position = (
                    changed.flatten(1)[:, :, None] if point_groups.dim is None else changed.movedim(point_groups.dim, 1)
                )
                changed_columns = by_position.reshape(rows, len(point_groups.groups), -1).any(2)
                wrong = changed_columns != should_change if must_be_equal else changed_columns & ~should_change
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

    def _run_replaced(
        self,
        rows: int,
        scale: float | None,
        masks: Mapping[str, Tensor] | None = None,
        real_outputs: Mapping[ProbePoint, Tensor] | None = None,
    ) -> dict[ProbePoint, Tensor]:
        """Run `rows` samples; returns the tensor that arrived at every probe point.

        With a scale, node outputs are random numbers of that scale, larger where `masks` is true. Without one they are
        real (those of `real_outputs`, if given), and changed where `masks` is true.
        """
        arrived: dict[ProbePoint, Tensor] = {}
        relu_calls = 0
        layer_calls: dict[str, int] = {}

        def record(kind: str, name: str, tensor: Tensor) -> None:
            if len(tensor) % rows:
                raise NodeGraphError(
                    name, "its input does not have the batch as its first dimension.", self.suggest_exclude(name)
                )
            arrived[kind, name] = (tensor if len(tensor) == rows else tensor.unflatten(0, (rows, -1))).detach().clone()
            self.rows_per_sample[kind, name] = len(tensor) // rows

        def watch_input(kind: str, name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
                if tensor is not None:
                    record(kind, name, tensor)

            return hook

        def replace(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def replaced(input: Tensor) -> Tensor:
                layer_calls[name] = layer_calls.get(name, 0) + 1  # an excluded layer may run several times
                call = "replaced", f"{name} {layer_calls[name]}"
                if scale is None and real_outputs is None:
                    arrived[call] = forward(input)
                    return arrived[call].clone()
                return self._replace_output(
                    name, rows, scale, masks, None if real_outputs is None else real_outputs[call]
                )

            return replaced

        def randomise_output(module: nn.Module, args: Any, output: Any) -> Any:
            generator = torch.Generator().manual_seed(0)

            def randomise(leaf: Any) -> Any:
                return _random_output(leaf[:2], len(leaf), 1.0, generator) if isinstance(leaf, Tensor) else leaf

            return tree_map(randomise, output)

        def pass_through(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return (args[0] if args else kwargs["input"]).clone() if scale is not None else output

        def record_relu(before: Tensor, after: Tensor) -> None:
            nonlocal relu_calls
            if before.dim() and len(before) % rows == 0:
                record("site", str(relu_calls), before)
            relu_calls += 1

        self._seed_generators()
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
                if name not in self.called_repeatedly:  # an excluded layer called twice has no certain columns
                    stack.enter_context(layer.register_forward_pre_hook(watch_input("reader", name), with_kwargs=True))
                stack.enter_context(_replace_forward(layer, replace(name, layer.forward)))
            stack.enter_context(ReLUWatcher(record_relu))
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
        if real_output is not None:
            values = real_output.clone()
            replacement = values + values.abs().amax() + 1
        else:
            assert scale is not None
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = _random_output(self.outputs[name], rows, scale, generator)
            replacement = _random_output(self.outputs[name], rows, 3 * scale, generator)
        if masks is None or name not in masks:
            return values
        mask = masks[name].to(values.device).repeat_interleave(len(values) // rows, 0)
        shape = [len(values)] + [1] * (values.dim() - 1)
        shape[column_dim(self.replaced[name], values.dim())] = -1
        return torch.where(mask.view(shape), replacement, values)

    def _seed_generators(self) -> None:
        """Seed the model's own random draws alike in every pass. Not torch.manual_seed: it seeds every GPU."""
        torch.default_generator.manual_seed(0)
        for index in {p.device.index for p in self.model.parameters() if p.device.type == "cuda"}:
            torch.cuda.default_generators[index].manual_seed(0)

    def _column_dim(self, point: ProbePoint, dims: int) -> int:
        """Which dimension of a sample holds the columns of a reader or the channels of a norm."""
        return column_dim(self.replaced[point[1]], dims) if point[0] == "reader" else 0


def column_dim(module: nn.Module, dims: int) -> int:
    """Which of `dims` dimensions a layer's columns or nodes are: the last for Linear, channels for convolutions."""
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


def _random_output(two_samples: Tensor, rows: int, scale: float, generator: torch.Generator) -> Tensor:
    """Random numbers from 0.1 to 0.2 times `scale`, the same for every sample, shaped as `two_samples`, (2, …)."""
    sample = (torch.rand(len(two_samples) // 2, *two_samples.shape[1:], generator=generator) * 0.1 + 0.1) * scale
    values = sample.repeat(rows, *[1] * (two_samples.dim() - 1)).to(two_samples)
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if (
            two_samples.dim() == dims
            and two_samples.is_contiguous(memory_format=layout)
            and not two_samples.is_contiguous()
        ):
            return values.contiguous(memory_format=layout)
    return values


def _find_changes(before: Mapping[ProbePoint, Tensor], after: Mapping[ProbePoint, Tensor]) -> dict[ProbePoint, Tensor]:
    """Where two passes differ bit for bit: (rows, …) at every probe point."""
    changed = {}
    for point, tensor in before.items():
        if point[0] == "replaced":
            continue
        if point not in after or after[point].shape != tensor.shape:
            raise NodeGraphError(
                point[1],
                "the forward pass ran other operations when a node's value changed, so which layer reads which node "
                "is not fixed.",
                "Remove control flow that depends on activations.",
            )
        changed[point] = (after[point] != tensor).cpu()
    return changed
