"""Whether a GPU multiplies float32 numbers as TF32.

Torch has older and newer settings for it and does not let one mix them: what was set through the newer ones cannot be
asked for through the older, which torch itself still goes by when it compiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["arithmetic", "tf32_allowed"]

_matmul: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Within it TF32 is forbidden for "float32", else allowed; afterwards it is as it was."""
    older = _older()
    newer = _newer() if older is None else {}
    _matmul.allow_tf32 = _cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        if older is not None:
            _matmul.allow_tf32, _cudnn.allow_tf32 = older
        for setting, value in newer.items():
            setting.fp32_precision = value


def tf32_allowed() -> dict[str, bool]:
    """For products of matrices and for convolutions."""
    allowed = _older() or [value == "tf32" for value in _newer().values()]
    return {"matmul": allowed[0], "cudnn": allowed[1]}


def _older() -> tuple[bool, bool] | None:
    _let_torch_warn()
    try:
        return _matmul.allow_tf32, _cudnn.allow_tf32
    except RuntimeError:  # the newer settings are in use
        return None


def _newer() -> dict[Any, str]:
    return {setting: setting.fp32_precision for setting in (_matmul, _cudnn.conv, _cudnn.rnn)}


@cache
def _let_torch_warn() -> None:
    """The older settings say, once, that they are going to be deprecated: nothing that a user could do about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _ = _matmul.allow_tf32
        except RuntimeError:
            return
