"""Writing files so that a dead process or a power cut leaves none of them half written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def as_json(content: Any, indent: int | None = 2) -> bytes:
    """`content` as strict JSON, for files that people read: infinite floats become strings."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, data: bytes) -> None:
    """`path` holds either what it held before or all of `data`, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there, and a rename needs no flush
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
