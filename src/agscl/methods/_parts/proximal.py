"""The two proximal operators of AGS-CL in closed form, exact where they promise exactness.

Both act on whole groups of weights: a group's norm is taken over all its rows, wherever they lie
(weight, bias, BatchNorm scale and shift, layers joined by a residual addition).

    shrink   argmin  c‖θ‖          + ‖θ − v‖² / 2α   (free nodes,      threshold αμ)
    pull     argmin  c‖θ − anchor‖ + ‖θ − v‖² / 2α   (important nodes, threshold αλΩ)

`rows` are tensors whose first dimension runs over nodes. Without `members`, group g is row g of every
tensor, e.g. `[weight (n, in), bias (n,)]`. With `members` (groups, m), it is the rows listed there, counted
through all tensors laid end to end; short lists are padded with the total number of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_norms", "norm_gradients", "pull", "shrink"]


@torch.no_grad()
def shrink(rows: Sequence[Tensor], thresholds: Tensor, members: Tensor | None = None) -> list[Tensor]:
    """`(1 − threshold/‖θ‖)₊ · θ` per group: +0.0 where ‖θ‖ ≤ threshold, the row's own bits where threshold is 0."""
    wide = [_upcast_half(row) for row in rows]
    factors = _shrink_factors(group_norms(wide, members), thresholds, wide, members)
    shrunk = torch._foreach_mul(wide, factors)
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
    wide, targets = [_upcast_half(row) for row in rows], [_upcast_half(anchor) for anchor in anchors]
    away = torch._foreach_sub(wide, targets)
    factors = _shrink_factors(group_norms(away, members), thresholds, wide, members)
    moved = torch._foreach_add(targets, torch._foreach_mul(away, factors))
    return [
        torch.where(factor == 0, anchor, torch.where(factor == 1, row, new.to(row.dtype)))
        for row, anchor, factor, new in zip(rows, anchors, factors, moved, strict=True)
    ]


def group_norms(rows: Sequence[Tensor], members: Tensor | None = None) -> Tensor:
    """Euclidean norm of every group, (groups,). Summed in float64, so no float32 weight over- or underflows."""
    squares = [
        torch.linalg.vector_norm(row.flatten(1) if row.dim() > 1 else row[:, None], dim=1, dtype=_sum_dtype(row))
        for row in rows
    ]
    torch._foreach_mul_(squares, squares)
    if members is None:
        return torch.stack(squares).sum(0).sqrt()
    every = torch.cat([*squares, squares[0].new_zeros(1)])
    return every[members].sum(1).sqrt()


@torch.no_grad()
def norm_gradients(away: Sequence[Tensor], strengths: Tensor, members: Tensor | None = None) -> list[Tensor]:
    """Gradient of `strength · ‖away‖` per group, 0 at the origin: what the operators replace."""
    norms = group_norms(away, members)
    factors = _expand_to_rows(torch.where(norms > 0, strengths / norms, 0.0), away, members)
    return list(torch._foreach_mul(list(away), factors))


def _shrink_factors(norms: Tensor, thresholds: Tensor, rows: Sequence[Tensor], members: Tensor | None) -> list[Tensor]:
    """γ of every row."""
    thresholds = thresholds.to(norms)
    kept = torch.where((norms <= thresholds) | thresholds.isinf(), 0.0, 1 - thresholds / norms)  # inf: also from NaN
    return _expand_to_rows(torch.where(thresholds == 0, 1.0, kept), rows, members)


def _expand_to_rows(values: Tensor, rows: Sequence[Tensor], members: Tensor | None) -> list[Tensor]:
    """(groups,) values to the groups' rows: one tensor (n, 1, …) per tensor of `rows`, in its dtype."""
    kinds = {row.dtype for row in rows}
    values = values.to(kinds.pop()) if len(kinds) == 1 else values  # once for all
    if members is None:
        parts: Sequence[Tensor] = [values] * len(rows)
    else:
        counts = [len(row) for row in rows]
        every = values.new_ones(sum(counts) + 1)
        every[members] = values[:, None].expand_as(members)
        parts = every[:-1].split(counts)
    return [part.to(row.dtype).view(-1, *[1] * (row.dim() - 1)) for part, row in zip(parts, rows, strict=True)]


def _upcast_half(tensor: Tensor) -> Tensor:
    """Half-precision rows are worked on in float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
