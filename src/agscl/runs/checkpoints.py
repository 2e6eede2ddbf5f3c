"""Checkpoints: nested state as one safetensors file for the tensors and one JSON file for the rest.

Both are written under a temporary name, flushed to disk and renamed, the JSON file last: a checkpoint exists once its
JSON file does. That file holds the checksums of both, so a damaged checkpoint is seen and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from agscl.system.files import write_atomically

FORMAT = 1
OWN = re.compile(r"(\d+)\.(json|safetensors)(\.tmp)?")
"""How the files of checkpoints are called; no other is ever removed."""


class NotReadable(Exception):
    """A checkpoint is there and may be whole, but cannot be read here and now."""


class Checkpoints:
    """The checkpoints of one run; the newest two are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self.damaged: dict[int, str] = {}
        """The checkpoints that `load` passed over, and what it found wrong with each."""

    def numbers(self) -> list[int]:
        """Every checkpoint there is, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdecimal())

    def save(self, state: dict[str, Any]) -> Path:
        """Write `state` as the newest checkpoint; on an OSError the ones before it are untouched."""
        plain, tensors = flatten(state)
        data = safetensors.torch.save(tensors)
        body = {"format": FORMAT, "tensors": hashlib.sha256(data).hexdigest(), "state": plain}
        sealed = {"checksum": _checksum(body), **body}

        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = self.numbers()
        path = self._json(numbers[-1] + 1 if numbers else 1)
        write_atomically(path.with_suffix(".safetensors"), data, flush=False)
        write_atomically(path, json.dumps(sealed, allow_nan=False).encode())
        whole = [number for number in numbers if number not in self.damaged]
        self._remove_all_but([*whole, int(path.stem)][-self.keep :])
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole, or None. Raises `NotReadable` where one may be whole all the same."""
        self.damaged = {}
        for number in reversed(self.numbers()):
            try:
                return self._read(number)
            except (FileNotFoundError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
                self.damaged[number] = str(error)
            except OSError as error:
                raise NotReadable(f"{error.filename or self._json(number)}: {error.strerror or error}") from error
        return None

    def _read(self, number: int) -> dict[str, Any]:
        path = self._json(number)
        sealed = json.loads(path.read_bytes())
        body = {key: sealed[key] for key in ("format", "tensors", "state")}
        if sealed["checksum"] != _checksum(body):
            raise ValueError(f"{path.name} does not match its checksum")
        if body["format"] != FORMAT:
            raise NotReadable(f"{path} has format {body['format']}, which another version of agscl wrote: use that one")
        data = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != body["tensors"]:
            raise ValueError(f"{path.stem}.safetensors does not match its checksum")
        state: dict[str, Any] = unflatten(body["state"], safetensors.torch.load(data))
        return state

    def _json(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _remove_all_but(self, kept: list[int]) -> None:
        for path in self.folder.iterdir():
            named = OWN.fullmatch(path.name)
            if named and (named[3] or int(named[1]) not in kept) and path.is_file():
                path.unlink(missing_ok=True)


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """`state` with a place-holder for every tensor (and for every infinite float), and the tensors by their path."""
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


def unflatten(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`; tuples come back as lists."""
    if isinstance(plain, list):
        return [unflatten(item, tensors) for item in plain]
    if isinstance(plain, dict):
        if "$tensor" in plain:
            return tensors[plain["$tensor"]]
        if "$float" in plain:
            return float(plain["$float"])
        return {key: unflatten(item, tensors) for key, item in plain.items()}
    return plain


def digest(state: Any) -> str:
    """sha256 of a nested state: every name, dtype, shape and bit."""
    plain, tensors = flatten(state)
    total = hashlib.sha256(_canonical(plain))
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(safetensors.torch.save({"": tensor}))
    return total.hexdigest()


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
