"""Nested state, of dicts, lists, tensors and plain values: taken apart for files, put together again, hashed."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import safetensors.torch
from torch import Tensor

from agscl.runs.json_files import encode_canonical_json


def flatten_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """`state` with a placeholder for every tensor (and for every infinite float), and the tensors by their path."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach().cpu().contiguous().clone()
            return {"$tensor": path}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str) or key.startswith("$"):
                    raise TypeError(f"a key in a checkpoint must be a string that does not start with $, not {key!r}")
            return {key: walk(item, f"{path}/{_escape(key)}" if path else _escape(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}/{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": repr(value)}
        if value is None or isinstance(value, str | int | float):
            return value
        raise TypeError(f"a checkpoint cannot hold {type(value).__name__} (at {path})")

    return walk(state, ""), tensors


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def unflatten_state(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten_state`; tuples come back as lists."""
    if isinstance(plain, list):
        return [unflatten_state(item, tensors) for item in plain]
    if isinstance(plain, dict):
        if "$tensor" in plain:
            return tensors[plain["$tensor"]]
        if "$float" in plain:
            return float(plain["$float"])
        return {key: unflatten_state(item, tensors) for key, item in plain.items()}
    return plain


def hash_state(state: Any) -> str:
    """sha256 of a nested state: every name, dtype, shape and bit."""
    plain, tensors = flatten_state(state)
    total = hashlib.sha256(encode_canonical_json(plain))
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(safetensors.torch.save({"": tensor}))
    return total.hexdigest()
