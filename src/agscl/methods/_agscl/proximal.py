"""The two proximal operators of AGS-CL in closed form, exact where they promise exactness.

Both act on whole groups of weights: a group's norm is taken over all its rows, wherever they lie
(weight, bias, BatchNorm scale and shift, layers joined by a residual addition).

    shrink   argmin  c‖θ‖          + ‖θ − v‖² / 2α   (free nodes,      threshold αμ)
    pull     argmin  c‖θ − anchor‖ + ‖θ − v‖² / 2α   (important nodes, threshold αλΩ)

`rows` are tensors whose first dimension runs over nodes. Without `members`, group g is row g of every
tensor, e.g. `[weight (n, in), bias (n,)]`. With `members` (groups, m), it is the rows listed there, counted
through all tensors, concatenated; short lists are padded with the total number of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agscl.system.sums import sum_dtype

__all__ = ["group_norms", "norm_gradients", "pull", "shrink"]


@torch.no_grad()
def shrink(rows: Sequence[Tensor], thresholds: Tensor, members: Tensor | None = None) -> list[Tensor]:
    """`(1 − threshold/‖θ‖)₊ · θ` per group: +0.0 where ‖θ‖ ≤ threshold, the row's own bits where threshold is 0."""
    upcast = [_upcast_half(row) for row in rows]
    factors = _shrink_factors(group_norms(upcast, members), thresholds, upcast, members)
    shrunk = torch._foreach_mul(upcast, factors)
    return [
        new.masked_fill_(factor == 0, 0.0).to(row.dtype) for row, factor, new in zip(rows, factors, shrunk, strict=True)
    ]


@torch.no_grad()
def pull(
    rows: Sequence[Tensor], anchors: Sequence[Tensor], thresholds: Tensor, members: Tensor | None = None
) -> list[Tensor]:
    """`γθ + (1 − γ)·anchor`, γ = (1 − threshold/‖θ − anchor‖)₊, per group.

    Where ‖θ − anchor‖ ≤ threshold the result is the anchor's own bits; where threshold is 0, the row's.
    """
    upcast, targets = [_upcast_half(row) for row in rows], [_upcast_half(anchor) for anchor in anchors]
    differences = torch._foreach_sub(upcast, targets)
    factors = _shrink_factors(group_norms(differences, members), thresholds, upcast, members)
    moved = torch._foreach_add(targets, torch._foreach_mul(differences, factors))
    return [
        torch.where(factor == 0, anchor, torch.where(factor == 1, row, new.to(row.dtype)))
        for row, anchor, factor, new in zip(rows, anchors, factors, moved, strict=True)
    ]


def group_norms(rows: Sequence[Tensor], members: Tensor | None = None) -> Tensor:
    """Euclidean norm of every group, (groups,). Summed in float64, so no float32 weight over- or underflows."""
    squares = [
        torch.linalg.vector_norm(row.flatten(1) if row.dim() > 1 else row[:, None], dim=1, dtype=sum_dtype(row.device))
        for row in rows
    ]
    torch._foreach_mul_(squares, squares)
    if members is None:
        return torch.stack(squares).sum(0).sqrt()
    padded = torch.cat([*squares, squares[0].new_zeros(1)])
    return padded[members].sum(1).sqrt()


@torch.no_grad()
def norm_gradients(differences: Sequence[Tensor], strengths: Tensor, members: Tensor | None = None) -> list[Tensor]:
    """Gradient of `strength · ‖difference‖` per group, 0 at the origin: instead of the proximal operators."""
    norms = group_norms(differences, members)
    factors = _expand_to_rows(torch.where(norms > 0, strengths / norms, 0.0), differences, members)
    return list(torch._foreach_mul(list(differences), factors))


def _shrink_factors(norms: Tensor, thresholds: Tensor, rows: Sequence[Tensor], members: Tensor | None) -> list[Tensor]:
    """γ of every row."""
    thresholds = thresholds.to(norms)
    factors = torch.where((norms <= thresholds) | thresholds.isinf(), 0.0, 1 - thresholds / norms)  # inf: also from NaN
    return _expand_to_rows(torch.where(thresholds == 0, 1.0, factors), rows, members)


def _expand_to_rows(values: Tensor, rows: Sequence[Tensor], members: Tensor | None) -> list[Tensor]:
    """(groups,) values to the groups' rows: one tensor (n, 1, …) per tensor of `rows`, in its dtype."""
    dtypes = {row.dtype for row in rows}
    values = values.to(dtypes.pop()) if len(dtypes) == 1 else values  # one cast for all
    if members is None:
        row_values: Sequence[Tensor] = [values] * len(rows)
    else:
        counts = [len(row) for row in rows]
        padded = values.new_ones(sum(counts) + 1)
        padded[members] = values[:, None].expand_as(members)
        row_values = padded[:-1].split(counts)
    return [
        row_value.to(row.dtype).view(-1, *[1] * (row.dim() - 1))
        for row_value, row in zip(row_values, rows, strict=True)
    ]


def _upcast_half(tensor: Tensor) -> Tensor:
    """Half-precision rows as float32, in which they are computed."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
