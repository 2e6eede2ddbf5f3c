"""Many tensors at once, as the whole numbers that their bits are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agscl import MultiHead
from agscl.graph.nodes import NodeGraph
from agscl.graph.rows import FlatRows, Rows
from agscl.methods._agscl.proximal import group_norms, pull, shrink
from agscl.networks.cifar import CifarTrunk
from agscl.system.bitwise import as_bits, copy_where_, mask_bits_, zero_where_
from agscl.system.tensor_pieces import concat_pieces, split_pieces

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
ODD = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -3.5]


def tensors(kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for place, kind in enumerate(kinds):
        x = torch.randn(2, 3, 2, 2, generator=generator)
        if kind.is_floating_point:
            x.view(-1)[: len(ODD)] = torch.tensor(ODD)
        layout = torch.channels_last if place % 2 else torch.contiguous_format
        found.append(x.to(kind).contiguous(memory_format=layout))
    return [*found, torch.tensor(-1.0)]


def same(a, b):
    return all(torch.equal(as_bits(x), as_bits(y)) for x, y in zip(a, b, strict=True))


@given(st.lists(st.sampled_from(KINDS), max_size=4), st.booleans(), st.integers(0, 9))
def test_numbers_are_kept_with_all_their_bits_or_are_zero_whatever_they_were(kinds, kept, seed):
    given, before = tensors(kinds, seed), tensors(kinds, seed)
    zero_where_(given, torch.tensor(not kept))
    assert same(given, before if kept else [torch.zeros_like(one) for one in before])


@given(st.lists(st.sampled_from(KINDS), max_size=4), st.booleans(), st.integers(0, 9))
def test_numbers_are_replaced_bit_for_bit_or_not_at_all(kinds, when, seed):
    given, before, others = tensors(kinds, seed), tensors(kinds, seed), tensors(kinds, seed + 10)
    copy_where_(given, others, torch.tensor(when))
    assert same(given, others if when else before)


def test_single_numbers_are_zeroed_as_masked_fill_does():
    x = torch.tensor([*ODD, 1.0])
    mask = torch.tensor([True, True, True, True, False, False, True, False])
    other = x.clone().masked_fill_(mask, 0.0)
    mask_bits_([x], [(~mask).to(torch.int32)])
    assert same([x], [other])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_large_tensors_are_changed_in_pieces_and_whole_all_the_same(layout):
    shapes = [(64, 64, 9, 9), (3, 5, 3, 3), (2, 7001, 2, 2)]
    given, others = ([torch.randn(shape).contiguous(memory_format=layout) for shape in shapes] for _ in range(2))
    masks = [torch.rand(shape).contiguous(memory_format=layout) < 0.5 for shape in shapes]
    pieces = concat_pieces(split_pieces(48, given, masks))
    assert len(pieces[0]) > len(shapes)
    assert [len(piece) for piece in pieces[0]] == [len(piece) for piece in pieces[1]]
    expected = [one.masked_fill(~mask, 0.0) for one, mask in zip(given, masks, strict=True)]
    mask_bits_(given, [mask.to(torch.int32) for mask in masks])
    assert same(given, expected)
    copy_where_(given, others, torch.tensor(True))
    assert same(given, others)
    row = torch.rand(1, 64, 9, 9) < 0.5
    expected = given[0].masked_fill(~row, 0.0)
    mask_bits_(given[:1], [row.to(torch.int32)])
    assert same(given[:1], [expected])


def test_nothing_is_done_to_no_tensors():
    zero_where_([], torch.tensor(True))
    copy_where_([], [], torch.tensor(True))


class Branches(nn.Module):
    """Two layers whose nodes are joined, and one that is not."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.rest = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 1)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.block(torch.relu(x)))
        return torch.relu(self.rest(x)).mean((2, 3))


def branches():
    torch.manual_seed(0)
    model = MultiHead(Branches(), features=6)
    model.add_head("t", 2)
    return model, NodeGraph(model, (torch.randn(2, 3, 8, 8), "t"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [Branches, CifarTrunk])
def test_rows_laid_end_to_end_are_the_same_rows(kind, layout):
    torch.manual_seed(0)
    features, side = (6, 8) if kind is Branches else (256, 32)
    model = MultiHead(kind(), features=features).to(memory_format=layout)
    model.add_head("t", 2)
    graph = NodeGraph(model, (torch.randn(2, 3, side, side), "t"))
    chosen = torch.rand(graph.size) < 0.5
    rows = Rows(graph, chosen)
    assert FlatRows.supports(rows)
    laid = FlatRows(rows)
    (numbers,) = laid.gather()
    assert len(laid) == len(rows)
    assert len(numbers) == sum(part.numel() for part in rows.gather())
    torch.testing.assert_close(group_norms([numbers], laid.members), group_norms(rows.gather(), rows.members))
    assert torch.equal(laid.flatten_rows(rows.gather())[0], numbers)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    laid.scatter_([numbers])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    some = [torch.randn_like(part) for part in rows.gather()]
    frozen = next(iter(rows.parameters))
    frozen.requires_grad_(False)
    rows.scatter_(some)
    usual = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    laid.scatter_(laid.flatten_rows(some))
    assert all(torch.equal(value, usual[name]) for name, value in model.state_dict().items())
    assert torch.equal(frozen, before[next(n for n, p in model.named_parameters() if p is frozen)])


def test_rows_stay_where_they_belong_when_the_model_is_laid_out_anew():
    model, graph = branches()
    rows = Rows(graph, torch.ones(graph.size, dtype=torch.bool))
    laid, before = FlatRows(rows), {name: value.clone() for name, value in model.state_dict().items()}
    taken = laid.gather()
    model.to(memory_format=torch.channels_last)
    assert torch.equal(laid.gather()[0], taken[0])
    laid.scatter_([2 * taken[0]])
    trained = {id(parameter) for parameter in rows.parameters}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, (2 if id(parameter) in trained else 1) * before[name]), name


def test_the_operators_do_the_same_to_rows_laid_end_to_end():
    _, graph = branches()
    rows = Rows(graph, torch.ones(graph.size, dtype=torch.bool))
    laid = FlatRows(rows)
    anchors = [part + 0.1 * torch.randn_like(part) for part in rows.gather()]
    thresholds = torch.linspace(0, 2, graph.size, dtype=torch.float64)
    thresholds[3] = math.inf
    for usual, other in (
        (shrink(rows.gather(), thresholds, rows.members), shrink(laid.gather(), thresholds, laid.members)),
        (
            pull(rows.gather(), anchors, thresholds, rows.members),
            pull(laid.gather(), laid.flatten_rows(anchors), thresholds, laid.members),
        ),
    ):
        (expected,) = laid.flatten_rows(usual)
        torch.testing.assert_close(other[0], expected)
        assert torch.equal(other[0] == 0, expected == 0)


def test_too_many_numbers_or_numbers_of_several_kinds_are_left_as_rows(monkeypatch):
    model, graph = branches()
    everything, nothing = (torch.full((graph.size,), chosen) for chosen in (True, False))
    assert FlatRows.supports(Rows(graph, everything))
    assert not FlatRows.supports(Rows(graph, nothing))
    monkeypatch.setattr(FlatRows, "MAX_NUMBERS", 10)
    assert not FlatRows.supports(Rows(graph, everything))
    monkeypatch.undo()
    model.trunk.rest.double()
    assert not FlatRows.supports(Rows(graph, everything))
