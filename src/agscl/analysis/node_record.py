"""What is recorded of every node when a task ends, for the report: its importance, and whether it got fresh weights."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from agscl.methods._parts.lifecycle import Method
from agscl.methods.agscl import AGSCL

Array = np.ndarray[Any, Any]


def make_node_record(method: Method) -> dict[str, Any] | None:
    """The record of the task that `method` has just ended, as plain values; None for a method without importances."""
    if not isinstance(method, AGSCL):
        return None
    return {
        "task": method.tasks[-1],
        "importance": _encode(method.knowledge.omega.float().cpu().numpy().astype("<f4")),
        "fresh": method.knowledge.fresh_groups or None,
    }


def read_node_record(record: Mapping[str, Any], size: int) -> tuple[Array, Array | None]:
    """(groups,) the importances, and (groups,) which groups got fresh weights, None if that is not known.

    Raises ValueError for a record of another number of groups, or of something else.
    """
    try:
        importance = np.frombuffer(base64.b64decode(record["importance"]), dtype="<f4")
        fresh = record["fresh"]
        bits = None if fresh is None else np.unpackbits(np.frombuffer(base64.b64decode(fresh), dtype=np.uint8))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no record of nodes: {error!r}") from error
    if len(importance) != size or (bits is not None and not size <= len(bits) < size + 8):
        raise ValueError(f"it is of {len(importance)} groups of nodes, expected {size}")
    return np.nan_to_num(importance, posinf=0.0), None if bits is None else bits[:size].astype(bool)


def _encode(array: Array) -> str:
    return base64.b64encode(array.tobytes()).decode()
