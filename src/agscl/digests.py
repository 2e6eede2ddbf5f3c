"""Digests of tensors: of all their bits, or of the rows that belong to each group of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["describe_conversion", "digest_groups", "digest_tensors", "read_row_bytes"]


def read_row_bytes(tensor: Tensor) -> Any:
    """(rows, bytes) of a tensor's memory to digest, as numpy; a single number is one row."""
    flat = tensor.detach().cpu().contiguous()
    return flat.reshape(len(flat) if flat.dim() else 1, -1).view(torch.uint8).numpy()


def describe_conversion(now: str, then: str) -> str:
    """Why digests cannot be compared with those of tensors of another dtype, and what to do."""
    return (
        f"of dtype {now}, and {then} when the certificate was made: bits of two dtypes cannot be compared. Convert to "
        f"{then} and check again. (A narrower dtype in between has rounded the values; torch.autocast, for training in "
        "half precision, leaves them as they are.)"
    )


def digest_tensors(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """One digest over the bits of the named tensors."""
    total = blake2b(digest_size=16)
    for name in names:
        total.update(read_row_bytes(tensors[name]).tobytes())
    return total.hexdigest()


def digest_groups(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, Sequence[int]],
    size: int,
    later_inputs: Mapping[str, tuple[Any, Any]] | None = None,
) -> list[str]:
    """A digest per group over the bits of all its rows; `rows[name][r]` is the group of row r of that tensor.

    `later_inputs[name]` says, as `Layout.find_later_inputs`, which weights of these rows belong to the group they read.
    """
    totals = [blake2b(digest_size=16) for _ in range(size)]
    for name, groups in rows.items():
        _check_rows(name, tensors[name], len(groups))
        found = read_row_bytes(tensors[name])
        if later_inputs is not None and name in later_inputs:
            sources, is_later = later_inputs[name]
            weights = found.reshape(*is_later.shape, -1)
            found = np.where(is_later[:, :, None], 0, weights).reshape(len(found), -1)
            for columns, members in _find_alike_rows(sources, len(found)):
                own = is_later[members]
                read = np.where(own[:, :, None], weights[members], 0).transpose(1, 0, 2)
                for column in own.any(0).nonzero()[0]:
                    totals[columns[column]].update(read[column].tobytes())
        for group, row in zip(groups, found, strict=True):
            if group >= 0:
                totals[group].update(row.tobytes())
    return [total.hexdigest() for total in totals]


def _find_alike_rows(sources: Any, rows: int) -> Iterator[tuple[Any, Any]]:
    """Each distinct row of `sources` (rows or 1, columns), and the numbers of the rows that are alike."""
    patterns, numbers = np.unique(sources, axis=0, return_inverse=True)
    numbers = np.broadcast_to(numbers.reshape(-1), rows)
    for number, pattern in enumerate(patterns):
        yield pattern, (numbers == number).nonzero()[0]


def _check_rows(name: str, tensor: Tensor, expected: int) -> None:
    rows = len(tensor) if tensor.dim() else 1
    if rows != expected:
        raise ValueError(
            f"{name} has {rows} rows, expected {expected}: these are the weights of another network, or the layer was "
            "replaced."
        )
