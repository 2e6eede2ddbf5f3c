"""The JSON files of runs, comparisons and studies: encoded, and read with an error that says what to do."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from agscl.runs.errors import RunError


def encode_json(content: Any, indent: int | None = 2) -> bytes:
    """`content` as strict JSON, for files that people read: infinite floats become strings."""
    return json.dumps(_stringify_infinite(content), indent=indent, allow_nan=False).encode() + b"\n"


def _stringify_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stringify_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stringify_infinite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def encode_json_with_checksum(content: dict[str, Any]) -> bytes:
    """`content` as JSON, with the sha256 of its encoding as a first field `checksum`."""
    return encode_json({"checksum": hashlib.sha256(encode_json(content)).hexdigest(), **content})


def encode_canonical_json(content: Any) -> bytes:
    """`content` as JSON in the one spelling that is hashed: sorted keys, no spaces."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """A JSON object from a file; `advice` ends the message if the file is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}{advice}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: expected a JSON object, got {type(content).__name__}{advice}")
    return content


def read_checked_json(path: Path, advice: str = "") -> dict[str, Any]:
    """The content of one of a run's JSON files, without its checksum, which is compared first.

    Every byte counts: the file must be exactly what `encode_json_with_checksum` makes of its content.
    """
    content = read_json(path, advice)
    if content.pop("checksum", None) is None:
        raise RunError(f"{path} is damaged: it has no checksum, or an older version of agscl wrote it{advice}")
    try:
        is_intact = path.read_bytes() == encode_json_with_checksum(content)
    except RecursionError:
        is_intact = False
    if not is_intact:
        raise RunError(f"{path} is damaged: its content does not match its checksum, or was edited{advice}")
    return content
