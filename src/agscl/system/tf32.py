"""Whether a GPU multiplies float32 numbers as TF32.

Torch has a legacy setting (`allow_tf32`) and a newer one (`fp32_precision`) and forbids mixing them: once the newer one
was set, the legacy one cannot be read, and torch itself still reads it when it compiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["tf32_allowed", "tf32_for"]

_matmul: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn


@contextmanager
def tf32_for(precision: str) -> Iterator[None]:
    """Forbid TF32 if `precision` is "float32", else allow it; restore the setting afterwards."""
    legacy = _read_legacy_setting()
    newer = _read_newer_setting() if legacy is None else {}
    _matmul.allow_tf32 = _cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        if legacy is not None:
            _matmul.allow_tf32, _cudnn.allow_tf32 = legacy
        for backend, value in newer.items():
            backend.fp32_precision = value


def tf32_allowed() -> dict[str, bool]:
    """Whether matrix products ("matmul") and convolutions ("cudnn") may use TF32."""
    allowed = _read_legacy_setting() or [value == "tf32" for value in _read_newer_setting().values()]
    return {"matmul": allowed[0], "cudnn": allowed[1]}


def _read_legacy_setting() -> tuple[bool, bool] | None:
    """For matrix products and convolutions; None where the newer setting is in use."""
    _ignore_deprecation_warning()
    try:
        return _matmul.allow_tf32, _cudnn.allow_tf32
    except RuntimeError:
        return None


def _read_newer_setting() -> dict[Any, str]:
    return {backend: backend.fp32_precision for backend in (_matmul, _cudnn.conv, _cudnn.rnn)}


@cache
def _ignore_deprecation_warning() -> None:
    """Torch warns once when the legacy setting is read, of nothing that a user could change: use that once up here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _ = _matmul.allow_tf32
        except RuntimeError:
            return
