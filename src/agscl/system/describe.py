"""Values in words, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["describe_value"]


def describe_value(value: Any) -> str:
    """What was given, in a few words: the shape of a tensor, the keys of a dict, the parts of a tuple or list."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of {list(value.shape)} ({dtype}, {value.device})"
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(map(repr, list(value)[:5]))}" if value else f"an empty {kind}"
    if isinstance(value, tuple | list):
        is_plain = all(isinstance(part, bool | int | float | str | tuple | list) for part in value)
        parts = ", ".join(describe_value(part) for part in value[:3]) + (", …" if len(value) > 3 else "")
        return f"a {kind} of {len(value)}" + ("" if is_plain else f" ({parts})")
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else text[:39] + "…"
    return f"{'an' if kind[0] in 'AEIOUaeiou' or kind == 'ndarray' else 'a'} {kind}"
