from __future__ import annotations

import pytest
import torch
from torch import nn

from agscl.analysis.perturbation import PerturbationCurve, order_layer_by_layer, prune_in_order
from agscl.graph.nodes import NodeGraph
from agscl.runs import hash_state


@pytest.fixture
def trunk():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(48, 5), nn.ReLU())
    model(torch.randn(8, 1, 8, 8))  # BatchNorm has seen something
    return model.eval()


def test_pruned_nodes_output_zero_and_all_others_what_they_did_before(trunk):
    x = torch.randn(2, 1, 8, 8)
    graph = NodeGraph(trunk, x)
    before, plain = hash_state(trunk.state_dict()), trunk(x)
    left = []

    def score():
        with torch.no_grad():
            left.append(trunk(x))
        return float(left[-1].abs().sum())

    last = [graph.layers["6"].groups[node].item() for node in (3, 1)]
    others = [group for group in range(graph.size) if group not in last]
    found = prune_in_order(graph, [*last, *others], score, steps=graph.size)
    assert found.pruned == list(range(graph.size + 1))
    assert torch.equal(left[0], plain)
    assert torch.equal(left[2][:, [0, 2, 4]], plain[:, [0, 2, 4]])
    assert not left[2][:, [1, 3]].any()
    assert found.scores[-1] == 0
    assert hash_state(trunk.state_dict()) == before


def test_a_channel_is_pruned_with_its_batchnorm(trunk):
    x = torch.randn(2, 1, 8, 8)
    graph = NodeGraph(trunk, x)
    channel = graph.layers["0"].groups[2].item()
    seen = []
    prune_in_order(
        graph, [channel, *[g for g in range(graph.size) if g != channel]], lambda: seen.append(trunk[:3](x)) or 0.0
    )
    assert seen[0][:, 2].any()
    assert not seen[1][:, 2].any()
    assert torch.equal(seen[1][:, [0, 1, 3]], seen[0][:, [0, 1, 3]])


def test_a_batchnorm_without_scale_and_shift_is_pruned_with_its_channel():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.ReLU(), nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(16, 4)
    trunk(x - 3)
    trunk.eval()
    graph = NodeGraph(trunk, x)
    before = hash_state(trunk.state_dict())
    assert prune_in_order(graph, range(graph.size), lambda: float(trunk[:3](x).detach().sum())).scores[-1] == 0
    assert hash_state(trunk.state_dict()) == before


def test_an_error_while_pruning_leaves_the_model_as_it_was(trunk):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    before, calls = hash_state(trunk.state_dict()), iter(range(3))
    with pytest.raises(StopIteration):
        prune_in_order(graph, range(graph.size), lambda: float(next(calls)))
    assert hash_state(trunk.state_dict()) == before


@pytest.mark.parametrize("order", [[0, 1], [0] * 12, list(range(13))])
def test_an_order_must_name_each_node_once(trunk, order):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="each of the 12 nodes once"):
        prune_in_order(graph, order, lambda: 0.0)


def test_layer_by_layer_every_layer_loses_the_same_share_its_least_important_nodes_first(trunk):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    layers = list(graph.groups_by_layer())
    scale = sum(10.0**number * here for number, here in enumerate(layers))  # by value the first layer would go first
    importances = scale * torch.rand(graph.size, generator=torch.Generator().manual_seed(0))
    order = order_layer_by_layer(graph, importances)
    assert sorted(order.tolist()) == list(range(graph.size))
    for end in range(1, graph.size):
        shares = [float(here[order[:end]].sum() / here.sum()) for here in layers if here.any()]
        assert max(shares) - min(shares) <= max(1 / int(here.sum()) for here in layers if here.any())
    for here in layers:
        of_layer = importances[[group for group in order.tolist() if here[group]]]
        assert of_layer.tolist() == sorted(of_layer.tolist())


def test_the_area_over_a_curve_is_the_mean_loss_so_far():
    found = PerturbationCurve([0, 1, 2, 3], [0.8, 0.8, 0.5, 0.2])
    assert found.aopc == pytest.approx([0, 0, 0.1, 0.225])


def test_all_nodes_are_pruned_in_at_most_so_many_steps(trunk):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    assert prune_in_order(graph, range(graph.size), lambda: 0.0, steps=5).pruned == [0, 2, 5, 7, 10, 12]
    assert prune_in_order(graph, range(graph.size), lambda: 0.0, steps=1).pruned == [0, 12]
    with pytest.raises(ValueError, match="at least 1"):
        prune_in_order(graph, range(graph.size), lambda: 0.0, steps=0)
