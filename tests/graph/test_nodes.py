"""The node graph: hand-written expectations per network, and an independent proof of every claimed column."""

from __future__ import annotations

import ast
import copy
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.graph.nodes import NodeGraph, NodeGraphError
from agscl.heads import MultiHead
from zoo import DIFFICULT, SUPPORTED, OwnHeads

torch.set_num_threads(1)

Node = tuple[str, int]  # (layer's name in the trunk, index)


def build(name: str) -> tuple[MultiHead, tuple[Tensor, str]]:
    """A network of the zoo with one head, run once so that the head knows its size."""
    entry = SUPPORTED.get(name) or DIFFICULT[name]
    torch.manual_seed(0)
    model = MultiHead(entry.trunk())
    model.add_head("a", 3)
    args = (entry.example(), "a")
    with torch.no_grad():
        model.eval()(*args)
    return model.train(), args


@functools.cache
def measured(name: str) -> tuple[MultiHead, tuple[Tensor, str], NodeGraph]:
    """A network of the zoo and its graph, for tests that only look."""
    model, args = build(name)
    return model, args, NodeGraph(model, args)


# What the graph must say, written by hand -----------------------------------------------------------------------


def nodes(layer: str, size: int, start: int = 0) -> list[Node]:
    return [(layer, i) for i in range(start, start + size)]


def each(columns: list[Node], times: int) -> list[Node]:
    """Every node owns `times` consecutive columns."""
    return [node for node in columns for _ in range(times)]


@dataclass
class Expected:
    layers: dict[str, int]
    sources: dict[str, list[Node]]
    coupled: list[list[list[Node]]] = field(default_factory=list)
    """Lists of nodes that are one group position by position."""
    norms: dict[str, list[Node]] = field(default_factory=dict)
    relus: int | None = None


def resnet() -> Expected:
    layers, sources, norms = {"stem": 8}, {}, {"bn": nodes("stem", 8)}
    coupled: list[list[list[Node]]] = []
    stream = nodes("stem", 8)
    for stage, width in enumerate((8, 8, 10, 12), start=1):
        ends = [stream] if stage == 1 else []
        for block in (0, 1):
            at = f"stage{stage}.{block}"
            layers |= {f"{at}.conv1": width, f"{at}.conv2": width}
            sources |= {f"{at}.conv1": stream, f"{at}.conv2": nodes(f"{at}.conv1", width)}
            norms |= {f"{at}.bn1": nodes(f"{at}.conv1", width), f"{at}.bn2": nodes(f"{at}.conv2", width)}
            ends.append(nodes(f"{at}.conv2", width))
            if stage > 1 and block == 0:
                layers[f"{at}.shortcut.0"] = width
                sources[f"{at}.shortcut.0"] = stream
                norms[f"{at}.shortcut.1"] = nodes(f"{at}.shortcut.0", width)
                ends.append(nodes(f"{at}.shortcut.0", width))
            stream = nodes(f"{at}.conv2", width)
        coupled.append(ends)
    return Expected(layers, sources | {"head": stream}, coupled, norms, relus=17)


def separable() -> Expected:
    pairs = [node for i in range(10) for node in (("depth2", 2 * i), ("depth2", 2 * i + 1))]
    return Expected(
        layers={"stem": 8, "depth1": 8, "point1": 10, "depth2": 20, "point2": 12},
        sources={
            "depth1": nodes("stem", 8),
            "point1": nodes("depth1", 8),
            "depth2": nodes("point1", 10),
            "point2": pairs,
            "head": nodes("point2", 12),
        },
        coupled=[
            [nodes("stem", 8), nodes("depth1", 8)],
            [nodes("point1", 10), [("depth2", 2 * i) for i in range(10)], [("depth2", 2 * i + 1) for i in range(10)]],
        ],
        norms={"bn0": nodes("stem", 8), "bn1": nodes("depth1", 8), "bn2": nodes("point1", 10)},
        relus=5,
    )


EXPECTED: dict[str, Expected] = {
    "mlp": Expected({"fc1": 12, "fc2": 10}, {"fc2": nodes("fc1", 12), "head": nodes("fc2", 10)}, relus=2),
    "lenet": Expected(
        {"conv1": 8, "conv2": 10, "fc1": 12, "fc2": 8},
        {
            "conv2": nodes("conv1", 8),
            "fc1": each(nodes("conv2", 10), 4),
            "fc2": nodes("fc1", 12),
            "head": nodes("fc2", 8),
        },
        relus=4,
    ),
    "cifar": Expected(
        {"conv1": 8, "conv2": 8, "conv3": 10, "conv4": 10, "conv5": 12, "conv6": 12, "fc1": 16},
        {
            "conv2": nodes("conv1", 8),
            "conv3": nodes("conv2", 8),
            "conv4": nodes("conv3", 10),
            "conv5": nodes("conv4", 10),
            "conv6": nodes("conv5", 12),
            "fc1": each(nodes("conv6", 12), 4),
            "head": nodes("fc1", 16),
        },
        relus=7,
    ),
    "omniglot": Expected(
        {"conv1": 8, "conv2": 8, "conv3": 8, "conv4": 8},
        {
            "conv2": nodes("conv1", 8),
            "conv3": nodes("conv2", 8),
            "conv4": nodes("conv3", 8),
            "head": each(nodes("conv4", 8), 4),
        },
        relus=4,
    ),
    "alexnet": Expected(
        {
            "features.0": 8,
            "features.3": 10,
            "features.6": 12,
            "features.8": 10,
            "features.10": 10,
            "classifier.1": 16,
            "classifier.4": 12,
        },
        {
            "features.3": nodes("features.0", 8),
            "features.6": nodes("features.3", 10),
            "features.8": nodes("features.6", 12),
            "features.10": nodes("features.8", 10),
            "classifier.1": each(nodes("features.10", 10), 4),
            "classifier.4": nodes("classifier.1", 16),
            "head": nodes("classifier.4", 12),
        },
        relus=7,
    ),
    "vgg": Expected(
        {"features.0": 8, "features.3": 8, "features.7": 10, "features.10": 10, "fc": 12},
        {
            "features.3": nodes("features.0", 8),
            "features.7": nodes("features.3", 8),
            "features.10": nodes("features.7", 10),
            "fc": each(nodes("features.10", 10), 4),
            "head": nodes("fc", 12),
        },
        norms={
            "features.1": nodes("features.0", 8),
            "features.4": nodes("features.3", 8),
            "features.8": nodes("features.7", 10),
            "features.11": nodes("features.10", 10),
            "bn": nodes("fc", 12),
        },
        relus=5,
    ),
    "resnet": resnet(),
    "functional": Expected({"conv": 8, "fc": 10}, {"fc": each(nodes("conv", 8), 9), "head": nodes("fc", 10)}, relus=2),
    "densenet": Expected(
        {"stem": 8, "dense1.conv": 8, "dense2.conv": 8, "transition": 10},
        {
            "dense1.conv": nodes("stem", 8),
            "dense2.conv": nodes("stem", 8) + nodes("dense1.conv", 8),
            "transition": nodes("stem", 8) + nodes("dense1.conv", 8) + nodes("dense2.conv", 8),
            "head": nodes("transition", 10),
        },
        norms={
            "dense1.bn": nodes("stem", 8),
            "dense2.bn": nodes("stem", 8) + nodes("dense1.conv", 8),
            "bn": nodes("stem", 8) + nodes("dense1.conv", 8) + nodes("dense2.conv", 8),
            "last": nodes("transition", 10),
        },
        relus=4,
    ),
    "frozen": Expected({"fc1": 12, "fc2": 10}, {"fc2": nodes("fc1", 12), "head": nodes("fc2", 10)}),
    "conv1d": Expected(
        {"conv1": 8, "conv2": 10, "fc": 12},
        {"conv2": nodes("conv1", 8), "fc": each(nodes("conv2", 10), 3), "head": nodes("fc", 12)},
        norms={"bn1": nodes("conv1", 8)},
        relus=3,
    ),
    "conv3d": Expected(
        {"conv1": 8, "conv2": 10, "fc": 10},
        {"conv2": nodes("conv1", 8), "fc": each(nodes("conv2", 10), 8), "head": nodes("fc", 10)},
        relus=3,
    ),
    "grouped": Expected(
        {"conv1": 8, "conv2": 12, "fc": 10},
        {"conv2": nodes("conv1", 8), "fc": each(nodes("conv2", 12), 9), "head": nodes("fc", 10)},
        relus=3,
    ),
    "separable": separable(),
    "nhwc": Expected({"conv": 8, "fc": 10}, {"fc": nodes("conv", 8) * 9, "head": nodes("fc", 10)}, relus=2),
    "shuffle": Expected(
        {"conv1": 8, "conv2": 12, "conv3": 10},
        {
            "conv2": [("conv1", i) for i in (0, 4, 1, 5, 2, 6, 3, 7)],
            "conv3": [("conv2", i) for i in (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)],
            "head": nodes("conv3", 10),
        },
        relus=3,
    ),
    "padded": Expected(
        {"stem": 8, "conv1": 12, "conv2": 12, "fc": 10},
        {
            "conv1": nodes("stem", 8),
            "conv2": nodes("conv1", 12),
            "fc": nodes("conv2", 12),
            "head": nodes("fc", 10),
        },
        coupled=[[nodes("stem", 8), nodes("conv2", 8, start=2)]],
        norms={"bn1": nodes("conv1", 12), "bn2": nodes("conv2", 12)},
        relus=4,
    ),
    "squeeze": Expected(
        {"conv1": 8, "squeeze": 8, "excite": 8, "conv2": 10},
        {
            "squeeze": nodes("conv1", 8),
            "excite": nodes("squeeze", 8),
            "conv2": nodes("conv1", 8),
            "head": nodes("conv2", 10),
        },
        coupled=[[nodes("conv1", 8), nodes("excite", 8)]],
        relus=3,
    ),
    "relu6": Expected(
        {"conv1": 8, "conv2": 10, "fc1": 12, "fc2": 12, "fc3": 8},
        {
            "conv2": nodes("conv1", 8),
            "fc1": nodes("conv2", 10),
            "fc2": nodes("fc1", 12),
            "fc3": nodes("fc2", 12),
            "head": nodes("fc3", 8),
        },
        norms={"bn": nodes("conv2", 10)},
        relus=5,
    ),
}


def full(name: str) -> str:
    return "heads.a" if name == "head" else f"trunk.{name}"


def groups_of(graph: NodeGraph, columns: Iterable[Node]) -> list[int]:
    return [int(graph.layers[full(layer)].groups[i]) for layer, i in columns]


# The proof, independent of the graph's own ----------------------------------------------------------------------


def channel_dim(module: nn.Module) -> int:
    return -1 if isinstance(module, nn.Linear | nn.LayerNorm) else 1


class Bench:
    """The real network in eval mode, with every layer's output pinned, so that a change reaches direct readers only."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], graph: NodeGraph) -> None:
        self.model, self.args = copy.deepcopy(model).eval(), args
        modules = dict(self.model.named_modules())
        self.watched = {name: modules[name] for name in {*graph.layers, *graph.readers, *graph.exclude}}
        self.compared = {*graph.layers, *graph.readers}
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.base_inputs, self.base_outputs = self._run(pinned={})

    @torch.no_grad()
    def _run(self, pinned: dict[str, list[Tensor]]) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        inputs, outputs = defaultdict(list), defaultdict(list)

        def hook(name: str) -> Any:
            def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
                inputs[name].append(given[0].clone())
                if not pinned:
                    outputs[name].append(copy.deepcopy(out))
                    return None
                return copy.deepcopy(pinned[name][len(inputs[name]) - 1])

            return keep

        handles = [module.register_forward_hook(hook(name)) for name, module in self.watched.items()]
        try:
            self.model(*self.args)
        finally:
            for handle in handles:
                handle.remove()
        return inputs, outputs

    def changed(self, perturbed: Iterable[Node]) -> dict[str, Tensor]:
        """Which input columns of every layer differ when these nodes' outputs are moved, far up and far down."""
        result: dict[str, Tensor] = {}
        for sign in (1.0, -1.0):
            pinned = copy.deepcopy(dict(self.base_outputs))
            generator = torch.Generator().manual_seed(7)
            for name, index in perturbed:
                for out in pinned[name]:
                    part = out.select(channel_dim(self.watched[name]), index)
                    part += sign * (10 + 40 * torch.rand(part.shape, generator=generator))
            inputs, _ = self._run(pinned)
            for name, calls in inputs.items():
                if name not in self.compared:
                    continue
                dim = channel_dim(self.watched[name])
                for before, after in zip(self.base_inputs[name], calls, strict=True):
                    differs = (before != after).movedim(dim, 0).flatten(1).any(1)
                    result[name] = result.get(name, torch.zeros_like(differs)) | differs
        return result


def prove(model: nn.Module, args: tuple[Any, ...], graph: NodeGraph) -> None:
    """Move every group, and every node alone: exactly the claimed columns may change."""
    bench = Bench(model, args, graph)
    members: dict[int, list[Node]] = defaultdict(list)
    for name, layer in graph.layers.items():
        for index, group in enumerate(layer.groups.tolist()):
            members[group].append((name, index))
    for group, together in members.items():
        reached = {}
        for name, changed in bench.changed(together).items():
            claimed = graph.readers[name].sources == group if name in graph.readers else torch.zeros_like(changed)
            reached[name] = claimed
            assert changed.tolist() == claimed.tolist(), f"group {group} {together}: wrong columns of {name}"
        if len(together) > 1:
            for node in together:
                for name, changed in bench.changed([node]).items():
                    assert not (changed & ~reached[name]).any(), f"{node} reaches unclaimed columns of {name}"


# Supported networks ----------------------------------------------------------------------------------------------

supported = pytest.mark.parametrize("name", SUPPORTED)


@supported
def test_the_graph_finds_exactly_the_node_layers_in_forward_order(name: str) -> None:
    model, _, graph = measured(name)
    sizes = {layer: found.size for layer, found in graph.layers.items()}
    assert sizes == {full(layer): size for layer, size in EXPECTED[name].layers.items()}
    assert list(sizes) == [full(layer) for layer in EXPECTED[name].layers]
    for layer, found in graph.layers.items():
        assert found.name == layer
        assert found.module is model.get_submodule(layer)
        assert found.groups.shape == (found.size,)
        assert found.groups.dtype == torch.long
    assert graph.node_count == sum(found.size for found in graph.layers.values())


@supported
def test_nodes_added_or_multiplied_together_are_one_group_and_all_others_are_alone(name: str) -> None:
    graph = measured(name)[2]
    union: dict[Node, frozenset[Node]] = {
        (layer, i): frozenset([(layer, i)]) for layer, found in graph.layers.items() for i in range(found.size)
    }
    for lists in EXPECTED[name].coupled:
        for together in zip(*lists, strict=True):
            merged = frozenset().union(*(union[full(layer), i] for layer, i in together))
            union |= dict.fromkeys(merged, merged)
    found: dict[int, set[Node]] = defaultdict(set)
    for layer, entry in graph.layers.items():
        for i, group in enumerate(entry.groups.tolist()):
            found[group].add((layer, i))
    assert {frozenset(members) for members in found.values()} == set(union.values())
    assert sorted(found) == list(range(graph.size)), "groups are numbered without holes"


@supported
def test_every_reader_reads_the_right_node_in_every_column(name: str) -> None:
    model, _, graph = measured(name)
    expected = EXPECTED[name].sources
    for reader, columns in expected.items():
        assert graph.readers[full(reader)].sources.tolist() == groups_of(graph, columns), reader
        assert graph.readers[full(reader)].module is model.get_submodule(full(reader))
    for reader, entry in graph.readers.items():
        if reader not in {full(r) for r in expected}:
            assert (entry.sources == -1).all(), f"{reader} reads the input, not nodes"


@supported
def test_batch_norm_channels_belong_to_the_group_of_the_node_they_normalise(name: str) -> None:
    model, _, graph = measured(name)
    assert set(graph.norms) == {full(norm) for norm in EXPECTED[name].norms}
    for norm, columns in EXPECTED[name].norms.items():
        assert graph.norms[full(norm)].groups.tolist() == groups_of(graph, columns), norm
        assert graph.norms[full(norm)].module is model.get_submodule(full(norm))


@supported
def test_every_relu_is_found_module_or_functional(name: str) -> None:
    graph = measured(name)[2]
    if EXPECTED[name].relus is not None:
        assert len(graph.relu_sites) == EXPECTED[name].relus


@supported
def test_moving_a_node_in_the_real_network_changes_exactly_the_claimed_columns(name: str) -> None:
    prove(*measured(name))


def test_a_frozen_backbone_has_no_nodes_and_its_features_are_nobodys() -> None:
    model, args = build("frozen")
    graph = NodeGraph(model, args)
    assert not [name for name in (*graph.layers, *graph.norms) if name.startswith("trunk.backbone.")]
    assert "trunk.fc1" not in graph.readers or (graph.readers["trunk.fc1"].sources == -1).all()
    assert not any(p.requires_grad for p in model.trunk.backbone.parameters())


def test_a_model_with_its_own_heads_and_forward_with_a_task_is_understood() -> None:
    model = OwnHeads()
    graph = NodeGraph(model, (torch.randn(4, 10), "0"), heads="last")
    assert {name: layer.size for name, layer in graph.layers.items()} == {"body.0": 12, "body.2": 10}
    assert graph.readers["body.2"].sources.tolist() == graph.layers["body.0"].groups.tolist()
    assert graph.readers["last.0"].sources.tolist() == graph.layers["body.2"].groups.tolist()
    prove(model, (torch.randn(4, 10), "0"), graph)


def test_a_plain_tensor_is_an_example_input_where_forward_takes_one_argument() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 8)
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.fc(x)))

    graph = NodeGraph(Shared(), torch.randn(2, 6), heads="out")
    assert list(graph.layers) == ["fc"]
    assert graph.readers["out"].sources.tolist() == graph.layers["fc"].groups.tolist()


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet", "densenet", "shuffle", "padded"])
def test_a_batch_of_one_is_enough_and_gives_the_same_graph(name: str) -> None:
    model, args = build(name)
    graph, small = NodeGraph(model, args), NodeGraph(model, (args[0][:1], "a"))
    assert list(graph.layers) == list(small.layers)
    assert all(torch.equal(graph.layers[n].groups, small.layers[n].groups) for n in graph.layers)
    assert all(torch.equal(graph.readers[n].sources, small.readers[n].sources) for n in graph.readers)


@pytest.mark.parametrize("name", ["lenet", "resnet", "densenet", "nhwc", "squeeze"])
def test_dead_nodes_and_zero_weights_do_not_hide_who_reads_whom(name: str) -> None:
    """A graph built on a half-empty network (resumed, say) is that of the fresh one."""
    model, args = build(name)
    fresh = NodeGraph(model, args)
    with torch.no_grad():
        for layer in fresh.layers.values():
            layer.module.weight[::2] = 0
            if layer.module.bias is not None:
                layer.module.bias[::2] = -1
        for norm in fresh.norms.values():
            norm.module.weight[::2] = 0
            norm.module.bias[::2] = 0
    sparse = NodeGraph(model, args)
    assert all(torch.equal(fresh.layers[n].groups, sparse.layers[n].groups) for n in fresh.layers)
    assert all(torch.equal(fresh.readers[n].sources, sparse.readers[n].sources) for n in fresh.readers)


@supported
def test_the_printed_graph_has_one_line_per_layer_within_100_columns(name: str) -> None:
    graph = measured(name)[2]
    lines = str(graph).splitlines()
    assert max(map(len, lines)) <= 100
    for layer in graph.layers:
        assert len([line for line in lines if line.split()[0] in (layer, layer.removeprefix("trunk."))]) == 1, layer
    assert len(lines) <= len(graph.layers) + len(graph.frozen_norms) + 2, "one line per layer, and a title"
    assert any("head" in line for line in lines)


# What building must leave alone -------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    hooks = [
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    ]
    return {
        "training": [module.training for module in model.modules()],
        "types": [type(module) for module in model.modules()],
        "state": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "storage": {name: tensor.data_ptr() for name, tensor in model.state_dict().items()},
        "versions": {name: p._version for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grads": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()
        },
        "hooks": [[list(getattr(module, hook)) for hook in hooks] for module in model.modules()],
        "own": [sorted(vars(module)) for module in model.modules()],
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),  # noqa: NPY002
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before: Any, after: Any, where: str = "") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where} {key}")
    elif isinstance(before, list | tuple):
        assert len(before) == len(after), where
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            assert_same(one, other, f"{where} {i}")
    elif isinstance(before, Tensor):
        assert before.dtype == after.dtype, where
        assert torch.equal(before.flatten().view(torch.uint8), after.flatten().view(torch.uint8)), where
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after), where
    else:
        assert before == after, where


def disturb(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Give the model every kind of state that a careless build would lose."""
    model.train()
    next(iter(model.trunk.children())).eval()
    model(*args).sum().backward()
    parameters = list(model.parameters())
    parameters[0].grad = None
    parameters[-1].requires_grad_(False)
    next(iter(model.trunk.children())).register_forward_hook(lambda *_: None)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer[0] = -0.0


@supported
def test_building_leaves_the_model_and_all_random_states_untouched(name: str) -> None:
    model, args = build(name)
    disturb(model, args)
    given = args[0].clone()
    before = snapshot(model)
    NodeGraph(model, args)
    assert_same(before, snapshot(model))
    assert torch.equal(given, args[0])


@pytest.mark.parametrize("name", DIFFICULT)
def test_a_refused_build_leaves_the_model_and_all_random_states_untouched(name: str) -> None:
    model, args = build(name)
    disturb(model, args)
    before = snapshot(model)
    with pytest.raises(NodeGraphError):
        NodeGraph(model, args)
    assert_same(before, snapshot(model))


def test_a_forward_that_raises_leaves_the_model_untouched_too() -> None:
    model, args = build("vgg")
    disturb(model, args)
    wrong = torch.randn(4, 5, 8, 8)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"cannot run on example_input.*\[4, 5, 8, 8\]"):
        NodeGraph(model, (wrong, "a"))
    assert_same(before, snapshot(model))


def test_building_works_where_gradients_are_switched_off() -> None:
    model, args = build("resnet")
    reference = NodeGraph(model, args)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            graph = NodeGraph(model, args)
        assert all(torch.equal(graph.layers[n].groups, reference.layers[n].groups) for n in reference.layers)


# Refused networks ------------------------------------------------------------------------------------------------

difficult = pytest.mark.parametrize("name", DIFFICULT)


@difficult
def test_a_network_that_cannot_be_placed_is_refused_with_the_layer_the_reason_and_a_way_out(name: str) -> None:
    model, args = build(name)
    with pytest.raises(NodeGraphError) as caught:
        NodeGraph(model, args)
    error, message = caught.value, str(caught.value)
    assert isinstance(error, ValueError)
    assert error.layer in {f"trunk.{layer}".rstrip(".") for layer in DIFFICULT[name].blamed}, message
    assert error.layer in message
    if name not in ("cumulative batch norm", "bare scale"):
        assert "exclude=[" in message, "the message must offer a way out"
    reason = {
        "tied parameter": ("shared", "tied", "same"),
        "called twice": ("twice", "2 times", "more than once"),
        "tied transpose": ("shared", "tied", "outside", "used", "functional"),
        "attention": ("relu", "softmax", "mix"),
        "layer norm": ("layernorm", "mix", "norm"),
        "no relu": ("relu",),
        "gelu": ("relu",),
        "cumulative batch norm": ("momentum",),
        "bare scale": ("parameter",),
        "scale module": ("parameter",),
        "weight norm": ("parametriz", "parametris"),
        "inverted residuals": ("no relu",),
        "transposed": ("convtranspose2d is not supported",),
        "lstm": ("(lstm) belongs to no node",),
        "gru": ("(gru) belongs to no node",),
        "transformer": ("(multiheadattention) belongs to no node",),
    }[name]
    assert any(word in message.lower() for word in reason), message
    assert "PackNet and WSN need no nodes" in message


excludable = [name for name, entry in DIFFICULT.items() if entry.exclude]


@pytest.mark.parametrize("excluded", ["freeze", "train"])
@pytest.mark.parametrize("name", excludable)
def test_excluding_the_layer_makes_the_rest_work(name: str, excluded: str) -> None:
    model, args = build(name)
    leave_out = [f"trunk.{layer}" for layer in DIFFICULT[name].exclude]
    graph = NodeGraph(model, args, exclude=leave_out, excluded=excluded)
    assert not set(graph.layers) & set(leave_out)
    assert not set(graph.norms) & set(leave_out)
    prove(model, args, graph)


def advised(message: str) -> list[str] | None:
    found = re.search(r"exclude=(\['[^]]*\])", message)
    return ast.literal_eval(found[1]) if found else None


@difficult
def test_following_the_advice_in_the_messages_ends_in_a_graph(name: str) -> None:
    model, args = build(name)
    exclude: list[str] = []
    for _ in range(6):
        try:
            graph = NodeGraph(model, args, exclude=exclude)
        except NodeGraphError as error:
            advice = advised(str(error))
            if advice is None:
                assert name in ("cumulative batch norm", "bare scale"), str(error)  # noqa: PT017
                return
            assert len(advice) == len(set(advice)), f"the same name twice: {error}"  # noqa: PT017
            assert "trunk" not in advice, f"that would leave no nodes at all: {error}"  # noqa: PT017
            exclude = advice
        else:
            prove(model, args, graph)
            return
    pytest.fail(f"the advice goes in circles: {exclude}")


@difficult
def test_all_refused_layers_come_in_one_error_whose_advice_works_when_followed_once(name: str) -> None:
    model, args = build(name)
    with pytest.raises(NodeGraphError) as caught:
        NodeGraph(model, args)
    if advice := advised(str(caught.value)):
        assert caught.value.exclude == advice
        prove(model, args, NodeGraph(model, args, exclude=advice))


def test_the_error_lists_every_refused_layer_with_equal_reasons_together() -> None:
    model, args = build("inverted residuals")
    with pytest.raises(NodeGraphError) as caught:
        NodeGraph(model, args, exclude=["trunk.stem"])
    message = str(caught.value)
    assert "trunk.blocks.0.6, trunk.blocks.1.6, trunk.blocks.2.6: no ReLU" in message
    assert "only because the others are: trunk.blocks.0.7, trunk.blocks.1.7, trunk.blocks.2.7." in message
    assert len(message.splitlines()) == 4, message
    assert advised(message)[0] == "trunk.stem", "what was excluded before stays excluded"


BLAMED = {  # name -> trunk, the layers that are to blame, those that must be left out with them
    "behind a transposed convolution": (
        lambda: [nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 8, 1), nn.BatchNorm1d(8), nn.Flatten()],
        ["1"],
        ["2"],
    ),
    "behind another activation": (
        lambda: [nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8)],
        ["0"],
        ["2"],
    ),
    "before a norm with trained numbers": (lambda: [nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU()], ["1"], ["0"]),
    "beside one of the input": (
        lambda: [nn.BatchNorm1d(4), nn.Linear(4, 8), nn.PReLU(8), nn.BatchNorm1d(8)],
        ["2", "0"],
        ["3", "1"],
    ),
    "with a fault of its own": (
        lambda: [nn.Linear(4, 8), nn.PReLU(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU()],
        ["1", "3"],
        ["0", "2"],
    ),
}


@pytest.mark.parametrize("name", list(BLAMED))
def test_a_layer_refused_only_because_its_neighbour_is_is_left_out_with_it_and_not_named_as_a_defect(name: str) -> None:
    layers, causes, consequences = BLAMED[name]
    model = MultiHead(nn.Sequential(*layers(), nn.Linear(8, 8), nn.ReLU()))
    model.add_head("a", 3)
    args = (torch.randn(2, 4), "a")
    model.eval()(*args)
    with pytest.raises(NodeGraphError) as caught:
        NodeGraph(model, args)
    assert [refusal.layer for refusal in caught.value.refusals] == [f"trunk.{layer}" for layer in causes]
    message = str(caught.value)
    listed = ", ".join(f"trunk.{layer}" for layer in consequences)
    assert f"Listed only because the others are: {listed}." in message
    assert not any(f"trunk.{layer}: " in message for layer in consequences)
    prove(model, args, NodeGraph(model, args, exclude=advised(message)))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_the_settings_that_the_message_on_an_instance_norm_names_make_it_part_of_the_graph(
    affine: bool, tracks: bool
) -> None:
    def build_graph(**settings: bool) -> NodeGraph:
        norm = nn.InstanceNorm2d(8, **settings)
        return NodeGraph(MultiHead(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU())), torch.randn(2, 3, 8, 8))

    settings = {"affine": affine, "track_running_stats": tracks}
    if affine or tracks:
        with pytest.raises(NodeGraphError, match=r"trunk\.1: .* Make it with") as caught:
            build_graph(**settings)
        settings |= dict.fromkeys(re.findall(r"(\w+)=False", str(caught.value)), False)
    assert list(build_graph(**settings).layers) == ["trunk.0"]


def test_an_activation_that_is_not_supported_is_named() -> None:
    model, args = build("gelu")
    with pytest.raises(NodeGraphError, match="The model calls gelu, which will not do"):
        NodeGraph(model, args)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(), nn.GELU()], ids=lambda module: type(module).__name__)
def test_heads_are_only_offered_for_a_layer_that_may_be_the_output_layer(activation) -> None:
    hidden = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(NodeGraphError, match=r"trunk\.0: .* Let a ReLU come next\.") as caught:
        NodeGraph(MultiHead(hidden), torch.randn(2, 8))
    assert "head" not in str(caught.value)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(NodeGraphError, match="take it out of the trunk"):
        NodeGraph(MultiHead(plain), torch.randn(2, 8))
    with pytest.raises(NodeGraphError, match="name it with heads="):
        NodeGraph(plain, torch.randn(2, 8))


def test_an_excluded_module_that_runs_twice_reads_what_any_of_its_calls_reads() -> None:
    model, args = build("called twice")
    assert NodeGraph(model, args, exclude=["trunk.again"]).excluded_readers == {"trunk.again"}


def test_an_excluded_layer_reads_nodes_and_gives_none() -> None:
    model, args = build("no relu")
    graph = NodeGraph(model, args, exclude=["trunk.fc2"])
    assert list(graph.layers) == ["trunk.fc1", "trunk.fc3"]
    assert graph.readers["trunk.fc2"].sources.tolist() == graph.layers["trunk.fc1"].groups.tolist()
    assert "trunk.fc3" not in graph.readers or (graph.readers["trunk.fc3"].sources == -1).all()


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet"])
def test_any_layer_may_be_excluded_and_the_columns_behind_it_are_nobodys(name: str) -> None:
    model, args = build(name)
    for layer in NodeGraph(model, args).layers:
        try:
            graph = NodeGraph(model, args, exclude=[layer])
        except NodeGraphError as error:
            assert error.layer in str(error), "refused where nodes are added to it, by name"  # noqa: PT017
            continue
        assert layer not in graph.layers
        prove(model, args, graph)


def test_a_name_to_exclude_that_does_not_exist_is_refused_by_name() -> None:
    model, args = build("mlp")
    with pytest.raises(ValueError, match=r"trunk\.fc9"):
        NodeGraph(model, args, exclude=["trunk.fc9"])


def test_an_unknown_way_to_treat_excluded_layers_is_refused() -> None:
    model, args = build("mlp")
    with pytest.raises(ValueError, match="freeze"):
        NodeGraph(model, args, exclude=["trunk.fc1"], excluded="melt")


# Right or refused: what may lie between two layers -----------------------------------------------------------------


class Between(nn.Module):
    """fc1 → ReLU → an operation → fc2 → ReLU."""

    def __init__(self, operation: Callable[[Tensor], Tensor], columns: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.operation = operation
        self.fc2 = nn.Linear(columns, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(self.operation(F.relu(self.fc1(x)))))


def between(operation: Callable[[Tensor], Tensor]) -> tuple[MultiHead, tuple[Tensor, str]]:
    torch.manual_seed(0)
    model = MultiHead(Between(operation, operation(torch.ones(2, 8)).shape[1]))
    model.add_head("a", 3)
    args = (torch.randn(4, 6), "a")
    model(*args)
    return model, args


ORDER = [3, 0, 7, 1, 1, 5]
PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "flip": (lambda x: x.flip(1), list(range(7, -1, -1))),
    "roll": (lambda x: x.roll(3, 1), [5, 6, 7, 0, 1, 2, 3, 4]),
    "index": (lambda x: x[:, ORDER], ORDER),
    "index_select": (lambda x: x.index_select(1, torch.tensor(ORDER)), ORDER),
    "gather": (lambda x: x.gather(1, torch.tensor(ORDER).expand(len(x), -1)), ORDER),
    "slice that leaves nodes unread": (lambda x: x[:, 2:5], [2, 3, 4]),
    "concatenation with itself negated": (lambda x: torch.cat([x, -x], 1), [*range(8), *range(8)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), [i // 2 for i in range(16)]),
    "repeat": (lambda x: x.repeat(1, 2), [*range(8), *range(8)]),
    "pad": (lambda x: F.pad(x, (1, 2)), [-1, *range(8), -1, -1]),
    "unflatten and transpose": (lambda x: x.unflatten(1, (2, 4)).mT.flatten(1), [0, 4, 1, 5, 2, 6, 3, 7]),
    "swapped halves": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), [4, 5, 6, 7, 0, 1, 2, 3]),
    "einsum": (lambda x: torch.einsum("bi->ib", x).T, list(range(8))),
    "tanh": (torch.tanh, list(range(8))),
    "square": (lambda x: x * x, list(range(8))),
    "stack": (lambda x: torch.stack([x, 2 * x], 2).flatten(1), [i // 2 for i in range(16)]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_columns_are_followed_through(name: str) -> None:
    operation, columns = PLAIN[name]
    model, args = between(operation)
    graph = NodeGraph(model, args)
    sources = graph.readers["trunk.fc2"].sources.tolist()
    groups = graph.layers["trunk.fc1"].groups.tolist()
    assert sources == [groups[c] if c >= 0 else -1 for c in columns]
    prove(model, args, graph)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, 1),
    "unit length": lambda x: F.normalize(x, dim=1),
    "cumulative sum": lambda x: x.cumsum(1),
    "centring": lambda x: x - x.mean(1, keepdim=True),
    "sorting": lambda x: x.sort(1).values,
    "maxout": lambda x: torch.maximum(x[:, ::2], x[:, 1::2]),
    "fixed projection": lambda x: x @ torch.linspace(-1, 1, 64).view(8, 8),
    "addition of its own mirror image": lambda x: x + x.flip(1),
    "product of its own halves": lambda x: x[:, :4] * x[:, 4:],
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "local response norm": lambda x: F.local_response_norm(x[:, :, None], 3).flatten(1),
    "pooling over channels": lambda x: F.avg_pool1d(x[:, None], 2).flatten(1),
    "total": lambda x: x.sum(1, keepdim=True),
    "gate from all nodes": lambda x: x * torch.sigmoid(x.sum(1, keepdim=True)),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_column_that_mixes_nodes_of_one_layer_is_refused(name: str) -> None:
    model, args = between(MIXING[name])
    with pytest.raises(NodeGraphError, match=r"exclude=\[") as caught:
        NodeGraph(model, args)
    assert caught.value.layer in ("trunk.fc1", "trunk.fc2")


class Written(nn.Module):
    """A trunk made of named layers and a forward function."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def written(trunk: nn.Module, *shape: int) -> tuple[MultiHead, tuple[Tensor, str]]:
    torch.manual_seed(0)
    model = MultiHead(trunk)
    model.add_head("a", 3)
    args = (torch.randn(4, *shape), "a")
    model(*args)
    return model, args


REFUSED: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "LSTM": lambda: (
        Written(
            lambda m, x: F.relu(m.fc2(m.middle(F.relu(m.fc1(x)))[0])).mean(1),
            fc1=nn.Linear(6, 8),
            middle=nn.LSTM(8, 8, batch_first=True),
            fc2=nn.Linear(8, 8),
        ),
        (5, 6),
    ),
    "MultiheadAttention": lambda: (
        Written(
            lambda m, x: F.relu(m.fc2(m.middle(*[F.relu(m.fc1(x))] * 3)[0])).mean(1),
            fc1=nn.Linear(6, 8),
            middle=nn.MultiheadAttention(8, 2, batch_first=True),
            fc2=nn.Linear(8, 8),
        ),
        (5, 6),
    ),
    "PReLU": lambda: (
        Written(
            lambda m, x: F.relu(m.fc2(m.middle(m.fc1(x)))), fc1=nn.Linear(6, 8), middle=nn.PReLU(), fc2=nn.Linear(8, 8)
        ),
        (6,),
    ),
    "ConvTranspose2d": lambda: (
        Written(
            lambda m, x: F.relu(m.middle(F.relu(m.conv(x)))).mean((2, 3)),
            conv=nn.Conv2d(3, 8, 3),
            middle=nn.ConvTranspose2d(8, 8, 3),
        ),
        (3, 6, 6),
    ),
    "GroupNorm": lambda: (
        Written(
            lambda m, x: F.relu(m.middle(m.conv(x))).mean((2, 3)), conv=nn.Conv2d(3, 8, 3), middle=nn.GroupNorm(2, 8)
        ),
        (3, 6, 6),
    ),
    "BatchNorm without running statistics": lambda: (
        Written(
            lambda m, x: F.relu(m.middle(m.conv(x))).mean((2, 3)),
            conv=nn.Conv2d(3, 8, 3),
            middle=nn.BatchNorm2d(8, track_running_stats=False),
        ),
        (3, 6, 6),
    ),
    "BatchNorm of the input": lambda: (
        Written(
            lambda m, x: F.relu(m.conv(m.middle(x))).mean((2, 3)), middle=nn.BatchNorm2d(3), conv=nn.Conv2d(3, 8, 3)
        ),
        (3, 6, 6),
    ),
    "BatchNorm used in two places": lambda: (
        Written(
            lambda m, x: F.relu(m.middle(m.conv2(F.relu(m.middle(m.conv(x)))))).mean((2, 3)),
            conv=nn.Conv2d(3, 8, 3),
            conv2=nn.Conv2d(8, 8, 3),
            middle=nn.BatchNorm2d(8),
        ),
        (3, 6, 6),
    ),
    "pixel shuffle": lambda: (
        Written(
            lambda m, x: F.relu(m.middle(F.pixel_shuffle(F.relu(m.conv(x)), 2))).mean((2, 3)),
            conv=nn.Conv2d(3, 8, 3),
            middle=nn.Conv2d(2, 8, 3),
        ),
        (3, 6, 6),
    ),
    "a frozen layer between trained ones": lambda: (
        Written(
            lambda m, x: F.relu(m.fc2(F.relu(m.middle(F.relu(m.fc1(x)))))),
            fc1=nn.Linear(6, 8),
            middle=nn.Linear(8, 8).requires_grad_(False),
            fc2=nn.Linear(8, 8),
        ),
        (6,),
    ),
    "a layer that is never called": lambda: (
        Written(lambda m, x: F.relu(m.fc1(x)), fc1=nn.Linear(6, 8), middle=nn.Linear(8, 8)),
        (6,),
    ),
    "a layer whose weight alone is used": lambda: (
        Written(
            lambda m, x: F.relu(F.linear(F.relu(m.fc1(x)), m.middle.weight, m.middle.bias)),
            fc1=nn.Linear(6, 8),
            middle=nn.Linear(8, 8),
        ),
        (6,),
    ),
    "leaky ReLU": lambda: (
        Written(lambda m, x: F.relu(m.fc1(F.leaky_relu(m.middle(x)))), middle=nn.Linear(6, 8), fc1=nn.Linear(8, 8)),
        (6,),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    trunk, shape = REFUSED[name]()
    model, args = written(trunk, *shape)
    with pytest.raises(NodeGraphError) as caught:
        NodeGraph(model, args)
    assert caught.value.layer in str(caught.value)
    assert caught.value.layer.startswith("trunk")
    assert "middle" in str(caught.value) or name == "a frozen layer between trained ones"


def test_a_weight_that_a_head_and_a_node_layer_share_is_refused() -> None:
    model, args = written(Written(lambda m, x: F.relu(m.fc1(x)), fc1=nn.Linear(3, 3)), 3)
    model.heads["a"].weight = model.trunk.fc1.weight
    with pytest.raises(NodeGraphError, match=r"trunk\.fc1"):
        NodeGraph(model, args)


def test_a_weight_that_an_excluded_and_a_node_layer_share_is_refused() -> None:
    model, args = build("tied parameter")
    with pytest.raises(NodeGraphError, match=r"trunk\.fc[12]"):
        NodeGraph(model, args, exclude=["trunk.fc1"])


@pytest.mark.parametrize("name", ["detach", "data", "square"])
def test_a_weight_read_outside_its_layer_is_refused(name: str) -> None:
    read = {"detach": lambda w: w.detach(), "data": lambda w: w.data, "square": lambda w: w * w}[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.fc1(x))
        return F.relu(m.fc2(F.relu(F.linear(x, read(m.fc1.weight)))))

    model, args = written(Written(forward, fc1=nn.Linear(8, 8), fc2=nn.Linear(8, 8)), 8)
    with pytest.raises(NodeGraphError, match=r"trunk\.fc1"):
        NodeGraph(model, args)


def test_layers_defined_in_another_order_come_in_forward_order() -> None:
    trunk = Written(lambda m, x: F.relu(m.fc2(F.relu(m.fc1(x)))), fc2=nn.Linear(8, 9), fc1=nn.Linear(6, 8))
    model, args = written(trunk, 6)
    graph = NodeGraph(model, args)
    assert list(graph.layers) == ["trunk.fc1", "trunk.fc2"]
    assert graph.readers["trunk.fc2"].sources.tolist() == graph.layers["trunk.fc1"].groups.tolist()


def test_a_layer_called_with_a_keyword_is_still_a_reader() -> None:
    trunk = Written(lambda m, x: F.relu(m.fc2(input=F.relu(m.fc1(input=x)))), fc1=nn.Linear(6, 8), fc2=nn.Linear(8, 9))
    model, args = written(trunk, 6)
    graph = NodeGraph(model, args)
    assert graph.readers["trunk.fc2"].sources.tolist() == graph.layers["trunk.fc1"].groups.tolist()


def test_the_input_may_be_read_beside_nodes() -> None:
    trunk = Written(
        lambda m, x: F.relu(m.fc2(torch.cat([x, F.relu(m.fc1(x))], 1))), fc1=nn.Linear(6, 8), fc2=nn.Linear(14, 9)
    )
    model, args = written(trunk, 6)
    graph = NodeGraph(model, args)
    assert graph.readers["trunk.fc2"].sources.tolist() == [-1] * 6 + graph.layers["trunk.fc1"].groups.tolist()
    prove(model, args, graph)


@pytest.mark.parametrize("threshold", [0.5, 3.0, 100.0])
def test_a_reader_behind_a_high_threshold_is_found_or_the_network_refused(threshold: float) -> None:
    model, args = between(lambda x: F.relu(x - threshold))
    try:
        graph = NodeGraph(model, args)
    except NodeGraphError:
        return
    assert graph.readers["trunk.fc2"].sources.tolist() == graph.layers["trunk.fc1"].groups.tolist()


def test_a_gate_multiplied_in_after_the_relu_is_one_group_with_its_channel() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.conv1(x))
        gate = torch.sigmoid(m.excite(F.relu(m.squeeze(x.mean((2, 3))))))
        return F.relu(m.conv2(x * gate[:, :, None, None])).mean((2, 3))

    trunk = Written(
        forward,
        conv1=nn.Conv2d(3, 8, 3),
        squeeze=nn.Linear(8, 8),
        excite=nn.Linear(8, 8),
        conv2=nn.Conv2d(8, 9, 3),
    )
    model, args = written(trunk, 3, 8, 8)
    graph = NodeGraph(model, args)
    channels = graph.layers["trunk.conv1"].groups.tolist()
    assert graph.layers["trunk.excite"].groups.tolist() == channels
    assert graph.readers["trunk.conv2"].sources.tolist() == channels
    assert graph.readers["trunk.squeeze"].sources.tolist() == channels
    prove(model, args, graph)


def test_pixel_unshuffle_gives_every_channel_its_columns() -> None:
    trunk = Written(
        lambda m, x: F.relu(m.conv2(F.pixel_unshuffle(F.relu(m.conv1(x)), 2))).mean((2, 3)),
        conv1=nn.Conv2d(3, 8, 3, padding=1),
        conv2=nn.Conv2d(32, 9, 3),
    )
    model, args = written(trunk, 3, 8, 8)
    graph = NodeGraph(model, args)
    assert (
        graph.readers["trunk.conv2"].sources.tolist()
        == graph.layers["trunk.conv1"].groups.repeat_interleave(4).tolist()
    )
    prove(model, args, graph)


def test_every_part_of_a_head_that_is_a_dict_is_a_reader() -> None:
    model = MultiHead(SUPPORTED["lenet"].trunk())
    model.add_head("pong", {"actor": 6, "critic": 1})
    args = (SUPPORTED["lenet"].example(), "pong")
    model(*args)
    graph = NodeGraph(model, args)
    features = graph.layers["trunk.fc2"].groups.tolist()
    assert graph.readers["heads.pong.actor"].sources.tolist() == features
    assert graph.readers["heads.pong.critic"].sources.tolist() == features


def test_only_the_first_layer_of_a_deep_head_reads_nodes() -> None:
    model = MultiHead(SUPPORTED["mlp"].trunk())
    model.add_head("a", nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 2)))
    args = (SUPPORTED["mlp"].example(), "a")
    graph = NodeGraph(model, args)
    assert list(graph.layers) == ["trunk.fc1", "trunk.fc2"]
    assert graph.readers["heads.a.0"].sources.tolist() == graph.layers["trunk.fc2"].groups.tolist()
    assert "heads.a.2" not in graph.readers or (graph.readers["heads.a.2"].sources == -1).all()


def test_a_head_that_is_no_layer_is_refused() -> None:
    model = MultiHead(SUPPORTED["mlp"].trunk())
    model.add_head("a", nn.Identity())
    with pytest.raises(NodeGraphError, match="head"):
        NodeGraph(model, (SUPPORTED["mlp"].example(), "a"))


class CosineHead(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(classes, features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=1), F.normalize(self.directions, dim=1))


class BilinearHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x, x)


class BranchedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cosine = nn.Linear(8, 3), CosineHead(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.cosine(x)


class NormalisedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.normalize(x, dim=1))


class SkipHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x


class UnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3]


UNREADABLE_HEADS = {  # name -> head, the module that is to blame
    "cosine": (lambda: CosineHead(8, 3), "heads.a: this CosineHead reads the nodes of trunk.2"),
    "bilinear": (BilinearHead, "heads.a.pairs: this Bilinear"),
    "transposed": (
        lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), nn.ConvTranspose1d(8, 3, 1), nn.Flatten()),
        "heads.a.1: this ConvTranspose1d",
    ),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)), "heads.a.0: this LayerNorm"),
    "normalised": (NormalisedHead, "heads.a: this NormalisedHead"),
    "recurrent": (lambda: nn.GRUCell(8, 3), "heads.a: this GRUCell"),
    "branched": (BranchedHead, "heads.a.cosine: this CosineHead"),
    "skip": (SkipHead, "trunk.2: its nodes reach the model's output without passing a Linear or Conv layer"),
    "unused": (UnusedHead, "heads.a: this UnusedHead"),
    "part of a dict": (
        lambda: nn.ModuleDict({"actor": nn.Linear(8, 3), "critic": CosineHead(8, 1)}),
        "heads.a.critic: this CosineHead",
    ),
}


def small_trunk() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())


@pytest.mark.parametrize("name", list(UNREADABLE_HEADS))
def test_a_head_whose_first_reader_of_nodes_is_no_linear_or_conv_layer_is_refused_by_the_name_of_that_module(name):
    torch.manual_seed(0)
    make_head, words = UNREADABLE_HEADS[name]
    late, early = MultiHead(small_trunk()), MultiHead(small_trunk())
    graph = NodeGraph(late, torch.randn(2, 4))
    for model in (late, early):
        model.add_head("a", make_head())
    for _ in range(2):  # a second try, as in a notebook, is refused too
        with pytest.raises(NodeGraphError, match=re.escape(words)) as caught:
            graph.trace_head("a", ["a"])
        assert "Let each task's head begin with a Linear or Conv layer" in str(caught.value)
    with pytest.raises(NodeGraphError, match=re.escape(words)) as caught:
        NodeGraph(early, (torch.randn(2, 4), "a"))
    assert not caught.value.exclude, "leaving nodes out would not help"


@pytest.mark.parametrize("name", [name for name in UNREADABLE_HEADS if name != "part of a dict"])
def test_a_refused_head_is_accepted_once_it_begins_with_a_linear_layer_as_the_message_says(name):
    torch.manual_seed(0)
    model = MultiHead(small_trunk())
    graph = NodeGraph(model, torch.randn(2, 4))
    model.add_head("a", UNREADABLE_HEADS[name][0]())
    with pytest.raises(NodeGraphError):
        graph.trace_head("a", ["a"])
    model.heads["a"] = nn.Sequential(nn.Linear(8, 8), model.heads["a"])
    graph.trace_head("a", ["a"])
    assert torch.equal(graph.readers["heads.a.0"].sources, graph.layers["trunk.2"].groups)


def test_a_trunk_that_mixes_nodes_before_the_head_is_blamed_and_not_the_head():
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8, elementwise_affine=False)))
    model.add_head("a", nn.Sequential(nn.Dropout(), nn.Linear(8, 3)))
    with pytest.raises(NodeGraphError, match=r"trunk\.0: an input column of heads\.a\.1 depends on several"):
        NodeGraph(model, (torch.randn(2, 4), "a"))


def test_a_head_that_the_forward_pass_does_not_run_is_said_not_to_run():
    class Forgetful(MultiHead):
        def forward(self, x: Any, task: str) -> Any:
            return super().forward(x, "a")

    model = Forgetful(small_trunk(), features=8)
    model.add_head("a", 3)
    graph = NodeGraph(model, torch.randn(2, 4), tasks=["a"])
    model.add_head("b", CosineHead(8, 3))
    with pytest.raises(ValueError, match="'b' does not run its head"):
        graph.trace_head("b", ["a", "b"])


def test_a_head_that_reads_only_an_excluded_layer_may_be_of_any_kind():
    model = MultiHead(small_trunk())
    model.add_head("a", CosineHead(8, 3))
    graph = NodeGraph(model, torch.randn(2, 4), tasks=["a"], exclude="trunk.2")
    graph.trace_head("a", ["a"])
    assert not any(reader.is_head for reader in graph.readers.values())


def test_a_head_whose_size_was_not_known_yet_is_initialised_from_the_users_own_seed() -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = MultiHead(SUPPORTED["mlp"].trunk())
        model.add_head("a", 3)
        NodeGraph(model, (SUPPORTED["mlp"].example(), "a"))
        model.add_head("b", 3)
        drawn.append(model.heads["a"].weight.detach().clone())
    assert not torch.equal(*drawn), "two seeds must not give the same head"


# The graph's own proof ----------------------------------------------------------------------------------------------


def wrong_claims(graph: NodeGraph) -> dict[str, Callable[[], None]]:
    """Ways in which a graph might be wrong, each small."""
    reader, norm = graph.readers["trunk.features.3"], graph.norms["trunk.features.4"]
    head = graph.readers["heads.a"]
    return {
        "two columns swapped": lambda: reader.sources.__setitem__(slice(0, 2), reader.sources[:2].flip(0)),
        "a column that reads nothing": lambda: head.sources.__setitem__(3, -1),
        "a column that reads another layer": lambda: head.sources.__setitem__(0, reader.sources[0].clone()),
        "a reader missing": lambda: graph.readers.pop("trunk.fc") and None,
        "channels of a norm shifted": lambda: norm.groups.copy_(norm.groups.roll(1)),
        "nodes of a layer shifted": lambda: graph.layers["trunk.fc"].groups.copy_(
            graph.layers["trunk.fc"].groups.roll(1)
        ),
    }


@pytest.mark.parametrize("claim", list(wrong_claims(NodeGraph(*build("vgg")))))
def test_the_graphs_own_proof_refuses_a_wrong_claim(claim: str) -> None:
    model, args = build("vgg")
    graph = NodeGraph(model, args)
    graph.prove()
    wrong_claims(graph)[claim]()
    with pytest.raises(NodeGraphError, match=r"trunk|heads"):
        graph.prove()


class Other(MultiHead):
    """Of another type, so that every head is measured."""


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_a_further_linear_head_is_taken_as_read_and_that_is_what_measuring_finds(name, monkeypatch):
    def readers(kind):
        torch.manual_seed(0)
        model = kind(SUPPORTED[name].trunk())
        model.add_head("a", 3)
        example = SUPPORTED[name].example()
        graph = NodeGraph(model, (example, "a"), tasks=["a"])
        model.add_head("b", 5)
        measured = []
        monkeypatch.setattr(NodeGraph, "prove", lambda graph, task=None: measured.append(1))
        graph.trace_head("b", ["a", "b"])
        monkeypatch.undo()
        assert graph.has_head(model.heads["b"])
        return graph, bool(measured)

    (short, measured), (long, also_measured) = readers(MultiHead), readers(Other)
    assert not measured
    assert also_measured
    assert short.readers.keys() == long.readers.keys()
    for reader in short.readers:
        assert torch.equal(short.readers[reader].sources, long.readers[reader].sources)
        assert short.readers[reader].module.weight.shape == long.readers[reader].module.weight.shape
        assert short.readers[reader].is_head == long.readers[reader].is_head
    assert short.readers_of == long.readers_of


@pytest.mark.parametrize("outputs", [{"actor": 3, "critic": 1}, nn.Sequential(nn.Linear(8, 4), nn.Tanh())])
def test_a_further_head_of_another_form_is_placed_too(outputs):
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), features=8)
    model.add_head("a", 3)
    graph = NodeGraph(model, (torch.randn(2, 4), "a"), tasks=["a"])
    model.add_head("b", outputs)
    graph.trace_head("b", ["a", "b"])
    assert graph.has_head(model.heads["b"])
    read = [reader for reader in graph.readers.values() if reader.name.startswith("heads.b")]
    assert all(torch.equal(reader.sources, torch.arange(8)) for reader in read)
    assert len(read) == (2 if isinstance(outputs, dict) else 1)


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_a_graph_built_before_there_is_a_head_is_the_one_built_with_a_head(name):
    def build_graph(headless):
        torch.manual_seed(0)
        model, example = MultiHead(SUPPORTED[name].trunk()), SUPPORTED[name].example()
        if not headless:
            model.add_head("a", 3)
            return NodeGraph(model, (example, "a"))
        graph = NodeGraph(model, example)
        assert not any(reader.is_head for reader in graph.readers.values())
        model.add_head("a", 3)
        graph.trace_head("a", ["a"])
        return graph

    early, late = build_graph(True), build_graph(False)
    early.prove()
    assert early.readers_of == late.readers_of
    assert early.readers.keys() == late.readers.keys()
    for reader in late.readers:
        assert torch.equal(early.readers[reader].sources, late.readers[reader].sources)
    assert all(torch.equal(early.layers[layer].groups, late.layers[layer].groups) for layer in late.layers)


class SharedReLU(nn.Module):
    """A model whose heads share the trunk's ReLU module and are made before the trunk."""

    def __init__(self, *, last_relu: bool) -> None:
        super().__init__()
        self.relu, self.last_relu = nn.ReLU(), last_relu
        self.heads = nn.ModuleList(nn.Sequential(self.relu, nn.Linear(8, 3)) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, task: int) -> Any:
        features = self.fc2(self.relu(self.fc1(x)))
        return self.heads[task](self.relu(features) if self.last_relu else features)


def test_relus_within_heads_are_no_sites_also_where_trunk_and_heads_share_the_module() -> None:
    graph = NodeGraph(SharedReLU(last_relu=True), (torch.randn(2, 4), 0), heads="heads")
    assert [site.index for site in graph.relu_sites] == [0, 1]
    assert list(graph.layers) == ["fc1", "fc2"]


def test_a_layer_whose_only_relu_is_in_a_head_is_refused_with_the_advice_to_put_one_before_the_head() -> None:
    trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    model = MultiHead(trunk)
    model.add_head("a", nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))
    words = r"Let a ReLU come next\. ReLUs within heads do not count"
    with pytest.raises(NodeGraphError, match=rf"trunk\.2: .*{words}"):
        NodeGraph(model, (torch.randn(2, 4), "a"))
    with pytest.raises(NodeGraphError, match=rf"trunk\.2: .*{words}"):
        NodeGraph(MultiHead(trunk), torch.randn(2, 4))
    with pytest.raises(NodeGraphError, match=rf"fc2: .*{words}"):
        NodeGraph(SharedReLU(last_relu=False), (torch.randn(2, 4), 0), heads="heads")
    model.trunk.append(nn.ReLU())
    assert list(NodeGraph(model, (torch.randn(2, 4), "a")).layers) == ["trunk.0", "trunk.2"]


class Selected(nn.Module):
    """A head that reads some of the features, in an order of its own."""

    def __init__(self, *columns: int) -> None:
        super().__init__()
        self.columns, self.linear = list(columns), nn.Linear(len(columns), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.columns])


@pytest.mark.parametrize("columns", [range(7, -1, -1), range(3)], ids=["reversed", "some"])
@pytest.mark.parametrize("second", [3, {"a": 3, "b": 1}], ids=["linear", "dict"])
def test_a_linear_head_after_one_that_selects_features_reads_the_features_themselves(columns, second) -> None:
    model = MultiHead(small_trunk())
    model.add_head("a", Selected(*columns))
    graph = NodeGraph(model, (torch.randn(2, 4), "a"))
    assert graph.readers["heads.a.linear"].sources.tolist() == [8 + column for column in columns]
    model.add_head("b", second)
    graph.trace_head("b", ["a", "b"])
    read = [reader for name, reader in graph.readers.items() if name.startswith("heads.b")]
    assert read
    assert all(torch.equal(reader.sources, graph.layers["trunk.2"].groups) for reader in read)


def test_a_task_whose_forward_pass_skips_a_relu_of_the_graph_is_refused_as_often_as_it_is_tried() -> None:
    class Skipping(MultiHead):
        def forward(self, x: Any, task: str) -> Any:
            return super().forward(x, task) if task == "a" else self.heads[task](self.trunk[:2](x))

    model = Skipping(small_trunk(), features=8)
    model.add_head("a", 3)
    graph = NodeGraph(model, torch.randn(2, 4), tasks=["a"])
    model.add_head("b", 3)
    for _ in range(2):
        with pytest.raises(NodeGraphError, match=r"trunk\.2: .* ReLU number 2, which .* task 'b' does not reach"):
            graph.trace_head("b", ["a", "b"])
