"""The two proximal operators: against a numerical minimiser of their definition, and to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from agscl.methods._agscl.proximal import pull, shrink

torch.set_num_threads(1)

quick = settings(max_examples=60, deadline=None)
coordinates = st.floats(-10, 10, allow_nan=False, width=64)
strengths = st.floats(1e-3, 8, allow_nan=False)
rates = st.floats(1e-3, 2, allow_nan=False)
vectors = hnp.arrays(np.float64, st.integers(1, 7), elements=coordinates)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SMALLEST = {torch.float32: 1.4e-45, torch.float64: 5e-324, torch.bfloat16: 9.2e-41}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers, so that -0.0 differs from +0.0."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def objective(theta: np.ndarray, v: np.ndarray, target: np.ndarray, c: float, alpha: float) -> float:
    """The definition: c‖θ − θ₀‖ + ‖θ − v‖² / 2α."""
    return c * float(np.linalg.norm(theta - target)) + float(np.sum((theta - v) ** 2)) / (2 * alpha)


def minimum(v: np.ndarray, target: np.ndarray, c: float, alpha: float) -> np.ndarray:
    """The minimiser, found numerically: on the ray from the target through v, then free in all directions."""
    ray = minimize_scalar(
        lambda s: objective(target + s * (v - target), v, target, c, alpha),
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-12},
    )
    best = target + ray.x * (v - target)
    anywhere = minimize(lambda t: objective(t, v, target, c, alpha), best, method="Nelder-Mead")
    candidates = [target, best, anywhere.x]
    return min(candidates, key=lambda t: objective(t, v, target, c, alpha))


def check_minimises(found: np.ndarray, v: np.ndarray, target: np.ndarray, c: float, alpha: float) -> None:
    reached = objective(found, v, target, c, alpha)
    slack = 1e-9 * (1 + abs(reached))
    numerical = minimum(v, target, c, alpha)
    assert reached <= objective(numerical, v, target, c, alpha) + slack
    # The objective is strongly convex with modulus 1/α: a gap in value bounds the distance.
    gap = objective(numerical, v, target, c, alpha) - reached
    assert np.sum((found - numerical) ** 2) <= 2 * alpha * (gap + slack) + 1e-12
    rng = np.random.default_rng(0)
    for size in (1e-6, 1e-3, 1e-1, 1.0):
        for _ in range(5):
            elsewhere = found + size * rng.standard_normal(found.shape)
            assert reached <= objective(elsewhere, v, target, c, alpha) + slack


@quick
@given(v=vectors, c=strengths, alpha=rates)
def test_shrink_minimises_its_definition(v: np.ndarray, c: float, alpha: float) -> None:
    (found,) = shrink([torch.from_numpy(v)[None]], torch.tensor([alpha * c], dtype=torch.float64))
    check_minimises(found[0].numpy(), v, np.zeros_like(v), c, alpha)


@quick
@given(data=st.data(), v=vectors, c=strengths, alpha=rates)
def test_pull_minimises_its_definition(data: st.DataObject, v: np.ndarray, c: float, alpha: float) -> None:
    target = data.draw(hnp.arrays(np.float64, v.shape, elements=coordinates))
    rows, anchors = [torch.from_numpy(v)[None]], [torch.from_numpy(target)[None]]
    (found,) = pull(rows, anchors, torch.tensor([alpha * c], dtype=torch.float64))
    check_minimises(found[0].numpy(), v, target, c, alpha)


@quick
@given(v=vectors, c=strengths, alpha=rates)
def test_shrink_minimises_one_norm_over_weight_and_bias_together(v: np.ndarray, c: float, alpha: float) -> None:
    whole = np.append(v, 0.5)
    weight, bias = torch.from_numpy(v)[None], torch.tensor([0.5], dtype=torch.float64)
    new_weight, new_bias = shrink([weight, bias], torch.tensor([alpha * c], dtype=torch.float64))
    found = np.append(new_weight[0].numpy(), new_bias.numpy())
    check_minimises(found, whole, np.zeros_like(whole), c, alpha)


@quick
@given(data=st.data(), nodes=st.integers(1, 5), fan_in=st.integers(1, 6))
def test_pull_towards_zero_is_shrink(data: st.DataObject, nodes: int, fan_in: int) -> None:
    weight = torch.from_numpy(data.draw(hnp.arrays(np.float64, (nodes, fan_in), elements=coordinates)))
    thresholds = torch.from_numpy(data.draw(hnp.arrays(np.float64, nodes, elements=st.floats(0, 20))))
    (pulled,) = pull([weight], [torch.zeros_like(weight)], thresholds)
    (shrunk,) = shrink([weight], thresholds)
    torch.testing.assert_close(pulled, shrunk, rtol=1e-12, atol=1e-14)


@quick
@given(
    weight=hnp.arrays(np.float32, (4, 6), elements=st.floats(-100, 100, width=32)),
    bias=hnp.arrays(np.float32, 4, elements=st.floats(-100, 100, width=32)),
    thresholds=hnp.arrays(np.float32, 4, elements=st.floats(0, 300, width=32)),
)
def test_float32_groups_within_their_threshold_are_positive_zero_and_the_rest_are_not(
    weight: np.ndarray, bias: np.ndarray, thresholds: np.ndarray
) -> None:
    new_weight, new_bias = shrink([torch.from_numpy(weight), torch.from_numpy(bias)], torch.from_numpy(thresholds))
    groups = np.concatenate([weight, bias[:, None]], 1).astype(np.float64)
    norms = np.sqrt((groups**2).sum(1))
    for node in range(4):
        found = torch.cat([new_weight[node], new_bias[node : node + 1]])
        if norms[node] < thresholds[node] * (1 - 1e-9) or (norms[node] == 0 and thresholds[node] > 0):
            assert not bits(found).any(), "zero must be +0.0, in every bit"
        elif norms[node] > thresholds[node] * (1 + 1e-9):
            expected = groups[node] * (1 - thresholds[node].astype(np.float64) / norms[node])
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
            assert found.count_nonzero() or np.abs(expected).max() < 1e-30


@quick
@given(
    weight=hnp.arrays(np.float32, (4, 6), elements=st.floats(-100, 100, width=32)),
    anchor=hnp.arrays(np.float32, (4, 6), elements=st.floats(-100, 100, width=32)),
    thresholds=hnp.arrays(np.float32, 4, elements=st.floats(0, 500, width=32)),
)
def test_float32_rows_within_their_threshold_are_the_anchors_own_bits(
    weight: np.ndarray, anchor: np.ndarray, thresholds: np.ndarray
) -> None:
    rows, anchors = torch.from_numpy(weight), torch.from_numpy(anchor)
    (found,) = pull([rows], [anchors], torch.from_numpy(thresholds))
    away = np.linalg.norm(weight.astype(np.float64) - anchor.astype(np.float64), axis=1)
    for node in range(4):
        if thresholds[node] == 0:
            assert same_bits(found[node], rows[node])
        elif away[node] < thresholds[node] * (1 - 1e-5) or away[node] == 0:
            assert same_bits(found[node], anchors[node])
        elif away[node] > thresholds[node] * (1 + 1e-5):
            left = 1 - float(thresholds[node]) / away[node]
            expected = anchor[node] + left * (weight[node].astype(np.float64) - anchor[node])
            np.testing.assert_allclose(found[node].numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeroed_rows_are_positive_zero_even_where_the_weights_were_negative(dtype: torch.dtype) -> None:
    weight = torch.tensor([[-0.25, -0.0], [-SMALLEST[dtype], -1e-3]], dtype=dtype)
    bias = torch.tensor([-0.125, -0.0], dtype=dtype)
    for found in shrink([weight, bias], torch.tensor([1.0, 1.0])):
        assert not bits(found).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_equal_to_the_threshold_gives_the_target_itself(dtype: torch.dtype) -> None:
    weight, bias = torch.tensor([[3.0, 0.0]], dtype=dtype), torch.tensor([-4.0], dtype=dtype)
    new_weight, new_bias = shrink([weight, bias], torch.tensor([5.0]))
    assert not bits(new_weight).any()
    assert not bits(new_bias).any()

    anchors = [torch.tensor([[1.0, -0.0]], dtype=dtype), torch.tensor([-1.0], dtype=dtype)]
    moved = [torch.tensor([[4.0, 0.0]], dtype=dtype), torch.tensor([3.0], dtype=dtype)]
    for found, anchor in zip(pull(moved, anchors, torch.tensor([5.0])), anchors, strict=True):
        assert same_bits(found, anchor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_just_above_the_threshold_nothing_is_zero(dtype: torch.dtype) -> None:
    threshold = math.nextafter(5.0, 0.0) if dtype == torch.float64 else 4.99
    (found,) = shrink([torch.tensor([[3.0, -4.0]], dtype=dtype)], torch.tensor([threshold], dtype=torch.float64))
    assert found.count_nonzero() == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_anchors_keep_negative_zero_and_denormals(dtype: torch.dtype) -> None:
    tiny = SMALLEST[dtype]
    anchor = torch.tensor([[-0.0, tiny, -tiny, 0.0, 1.5, torch.finfo(dtype).max, torch.finfo(dtype).tiny]], dtype=dtype)
    assert bits(anchor)[0, 1] == 1, "the denormal must have arrived as one"
    for row in (anchor + 1, torch.full_like(anchor, 0.0), anchor.clone(), -anchor):
        (found,) = pull([row], [anchor], torch.tensor([math.inf]))
        assert same_bits(found, anchor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_threshold_of_zero_gives_the_rows_own_bits(dtype: torch.dtype) -> None:
    tiny = SMALLEST[dtype]
    rows = torch.tensor([[-0.0, tiny, 0.1, -7.0], [0.0, -0.0, 0.0, -0.0], [1e-30, 3e10, -tiny, 2.0]], dtype=dtype)
    thresholds = torch.zeros(3)
    (shrunk,) = shrink([rows], thresholds)
    (pulled,) = pull([rows], [torch.randn_like(rows)], thresholds)
    (home,) = pull([rows], [rows.clone()], thresholds)
    assert same_bits(pulled, rows)
    assert same_bits(home, rows)
    assert same_bits(shrunk[[0, 2]], rows[[0, 2]])
    assert not shrunk[1].count_nonzero()


@pytest.mark.parametrize("threshold", [0.0, 1e-38, 0.5, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_zero_gives_no_nan(dtype: torch.dtype, threshold: float) -> None:
    zero = torch.zeros(3, 2, 2, dtype=dtype)
    anchor = torch.full((3, 2, 2), 0.3, dtype=dtype)
    thresholds = torch.full((3,), threshold)
    (shrunk,) = shrink([zero], thresholds)
    (pulled,) = pull([anchor.clone()], [anchor], thresholds)
    assert not bits(shrunk).any()
    assert same_bits(pulled, anchor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_threshold_gives_the_target_however_far_it_is(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[largest, -largest], [1.0, 2.0], [0.0, 0.0]], dtype=dtype)
    anchor = torch.tensor([[-0.0, 1.0], [-largest, largest], [0.0, -0.0]], dtype=dtype)
    thresholds = torch.full((3,), math.inf)
    assert not bits(shrink([rows], thresholds)[0]).any()
    assert same_bits(pull([rows], [anchor], thresholds)[0], anchor)


def test_large_and_small_float32_rows_neither_overflow_nor_vanish() -> None:
    rows = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [3e-42, 4e-42]])
    (found,) = shrink([rows], torch.tensor([1e30, 1e-30, 1e-42], dtype=torch.float64))
    expected = rows.double() * 0.8
    assert found.isfinite().all()
    torch.testing.assert_close(found[:2].double(), expected[:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2].double(), expected[2], rtol=0, atol=3e-45)


@quick
@given(
    weight=hnp.arrays(np.float32, (3, 4), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    anchor=hnp.arrays(np.float32, (3, 4), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    thresholds=hnp.arrays(np.float32, 3, elements=st.floats(0, width=32, allow_nan=False)),
)
def test_finite_weights_stay_finite_for_every_threshold(
    weight: np.ndarray, anchor: np.ndarray, thresholds: np.ndarray
) -> None:
    rows, anchors, limits = torch.from_numpy(weight), torch.from_numpy(anchor), torch.from_numpy(thresholds)
    assert shrink([rows], limits)[0].isfinite().all()
    assert pull([rows], [anchors], limits)[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_shape_are_kept_and_the_arguments_are_not_written_to(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 3, 2, 2, generator=generator).to(dtype)
    bias = torch.randn(5, generator=generator).to(dtype)
    anchors = [torch.randn_like(weight), torch.randn_like(bias)]
    thresholds = torch.tensor([0.0, 0.5, 1.0, 100.0, math.inf])
    before = [tensor.clone() for tensor in (weight, bias, *anchors)]
    for found in (shrink([weight, bias], thresholds), pull([weight, bias], anchors, thresholds)):
        assert isinstance(found, list)
        assert [(f.shape, f.dtype) for f in found] == [(weight.shape, dtype), (bias.shape, dtype)]
    assert all(same_bits(a, b) for a, b in zip(before, (weight, bias, *anchors), strict=True))


def test_bfloat16_rounds_once_from_the_exact_result() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 33, generator=generator).bfloat16()
    anchor = torch.randn(64, 33, generator=generator).bfloat16()
    thresholds = torch.full((64,), 1.7)
    exact = shrink([weight.double()], thresholds)[0]
    assert (shrink([weight], thresholds)[0].double() - exact).abs().max() <= exact.abs().max() * 2**-8
    exact = pull([weight.double()], [anchor.double()], thresholds)[0]
    assert (pull([weight], [anchor], thresholds)[0].double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_parameters_that_require_gradients_are_taken_and_no_graph_is_built() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    anchor = torch.zeros(3, 2)
    for (found,) in (shrink([weight], torch.ones(3)), pull([weight], [anchor], torch.ones(3))):
        assert not found.requires_grad


def coupled() -> tuple[list[Tensor], Tensor, list[list[tuple[int, int]]]]:
    """Rows of two layers and a bias; node i of the first and node 2-i of the second are one group, the rest alone."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randn(3, 2, 2, generator=generator),  # rows 0, 1, 2
        torch.randn(4, 5, generator=generator),  # rows 3, 4, 5, 6
        torch.randn(4, generator=generator),  # rows 7, 8, 9, 10: the bias of the second
    ]
    groups = [[(0, i), (1, 2 - i), (2, 2 - i)] for i in range(3)] + [[(1, 3), (2, 3)]]
    starts = [0, 3, 7]
    members = torch.full((4, 3), 11)
    for g, group in enumerate(groups):
        for k, (tensor, row) in enumerate(group):
            members[g, k] = starts[tensor] + row
    return rows, members, groups


def gather(rows: list[Tensor], group: list[tuple[int, int]]) -> Tensor:
    return torch.cat([rows[tensor][row].flatten() for tensor, row in group])


def test_coupled_rows_share_one_norm_when_shrunk() -> None:
    rows, members, groups = coupled()
    norms = torch.stack([gather(rows, group).double().norm() for group in groups])
    thresholds = norms * torch.tensor([0.5, 1.01, 0.0, 0.25], dtype=torch.float64)
    found = shrink(rows, thresholds, members)
    for group, left in zip(groups, (0.5, 0.0, 1.0, 0.75), strict=True):
        before, after = gather(rows, group), gather(found, group)
        if left == 0:
            assert not bits(after).any()
        elif left == 1:
            assert same_bits(after, before)
        else:
            torch.testing.assert_close(after, left * before, rtol=1e-6, atol=1e-7)


def test_coupled_rows_share_one_distance_when_pulled() -> None:
    rows, members, groups = coupled()
    generator = torch.Generator().manual_seed(4)
    anchors = [torch.randn(row.shape, generator=generator) for row in rows]
    norms = torch.stack([(gather(rows, g).double() - gather(anchors, g).double()).norm() for g in groups])
    thresholds = norms * torch.tensor([0.5, 1.01, 0.0, math.inf], dtype=torch.float64)
    thresholds[3] = math.inf
    found = pull(rows, anchors, thresholds, members)
    for group, left in zip(groups, (0.5, 0.0, 1.0, 0.0), strict=True):
        before, anchor, after = gather(rows, group), gather(anchors, group), gather(found, group)
        if left == 0:
            assert same_bits(after, anchor)
        elif left == 1:
            assert same_bits(after, before)
        else:
            torch.testing.assert_close(after, (before + anchor) / 2, rtol=1e-6, atol=1e-6)


def test_rows_in_no_group_keep_their_bits() -> None:
    rows, members, groups = coupled()
    found = shrink(rows, torch.full((2,), math.inf), members[:2])
    assert not any(bits(gather(found, group)).any() for group in groups[:2])
    assert all(same_bits(gather(found, group), gather(rows, group)) for group in groups[2:])


def test_one_group_per_row_is_the_same_as_no_members() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)
    anchors = [torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)]
    thresholds = torch.linspace(0, 3, 6)
    members = torch.stack([torch.arange(6), torch.arange(6, 12)], 1)
    for plain, listed in (
        (shrink([weight, bias], thresholds), shrink([weight, bias], thresholds, members)),
        (pull([weight, bias], anchors, thresholds), pull([weight, bias], anchors, thresholds, members)),
    ):
        assert all(same_bits(p, m) for p, m in zip(plain, listed, strict=True))
