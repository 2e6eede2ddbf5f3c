"""Checkpoints: nested state as safetensors files for the tensors and one JSON file for the rest.

Tensors of more than `SHARD_BYTES` in all are split into several files, so that each is small enough to carry, and large
ones are packed without loss. All are written under a temporary name, flushed to disk and renamed, the JSON file last: a
checkpoint exists once its JSON file does. That file holds the checksums of all, so a damaged checkpoint is noticed and
the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from agscl.runs.json_files import encode_canonical_json
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.system.files import write_atomically

FORMAT, SHARDED_FORMAT, PACKED_FORMAT = 12, 13, 14
SHARD_BYTES = 15 * 2**20
"""The most bytes of tensors in one file, unless a single tensor has more."""
PACKED_BYTES = 2**20
"""The fewest bytes of a tensor of float32 that is packed."""
CHECKPOINT_FILE = re.compile(r"(\d+)(?:-\d+)?\.(json|safetensors)(\.tmp)?")
"""The file names of checkpoints. Files with other names are never removed."""


DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError, zlib.error)
"""What reading a damaged checkpoint raises."""


class UnreadableCheckpoint(Exception):
    """A checkpoint exists and may be intact, but cannot be read here and now (permissions, a newer format)."""


class Checkpoints:
    """The checkpoints of one run; only the newest `keep_last` are kept."""

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.damaged: dict[int, str] = {}
        """The checkpoints that `load` skipped, and what is wrong with each."""

    def list_numbers(self) -> list[int]:
        """The number of every checkpoint, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdecimal())

    def save(self, state: dict[str, Any]) -> Path:
        """Write `state` as the newest checkpoint. On an OSError the earlier checkpoints are untouched."""
        plain, tensors = flatten_state(state)
        tensors, shapes = pack_tensors(tensors)
        shards = [safetensors.torch.save(shard) for shard in split_into_shards(tensors, SHARD_BYTES)]
        checksums = [hashlib.sha256(data).hexdigest() for data in shards]
        body = (
            {"format": FORMAT, "tensors": checksums[0], "state": plain}
            if len(shards) == 1
            else {"format": SHARDED_FORMAT, "tensors": checksums, "state": plain}
        )
        if shapes:
            body = {"format": PACKED_FORMAT, "tensors": checksums, "packed": shapes, "state": plain}
        content = {"checksum": _compute_checksum(body), **body}

        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = self.list_numbers()
        path = self._json_path(numbers[-1] + 1 if numbers else 1)
        for data, shard_path in zip(shards, _shard_paths(path, len(shards)), strict=True):
            write_atomically(shard_path, data, flush=False)
        write_atomically(path, _encode(content))
        intact = [number for number in numbers if number not in self.damaged]
        self._remove_all_except([*intact, int(path.stem)][-self.keep_last :])
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest intact checkpoint, or None. Raises `UnreadableCheckpoint` for one that may be intact."""
        self.damaged = {}
        for number in reversed(self.list_numbers()):
            try:
                return self._read(number)
            except DAMAGE as error:
                self.damaged[number] = str(error)
            except OSError as error:
                path = error.filename or self._json_path(number)
                raise UnreadableCheckpoint(f"{path}: {error.strerror or error}") from error
        return None

    def find_damaged(self) -> dict[int, str]:
        """Every damaged checkpoint, and what is wrong with it."""
        damaged: dict[int, str] = {}
        for number in self.list_numbers():
            try:
                self._read(number)
            except DAMAGE as error:
                damaged[number] = str(error)
            except (OSError, UnreadableCheckpoint) as error:
                damaged[number] = f"cannot be read: {error}"
        return damaged

    def _read(self, number: int) -> dict[str, Any]:
        path = self._json_path(number)
        text = path.read_bytes()
        content = json.loads(text)
        body = {key: content[key] for key in ("format", "tensors", "packed", "state") if key in content}
        # The bytes too: two spellings of a number, 1e-5 and 1E-5, have the same checksum.
        if content["checksum"] != _compute_checksum(body) or text != _encode(content):
            raise ValueError(f"checksum mismatch in {path.name}")
        if body["format"] not in (FORMAT, SHARDED_FORMAT, PACKED_FORMAT):
            raise UnreadableCheckpoint(
                f"{path} has checkpoint format {body['format']}, written by another version of agscl: use that version"
            )
        checksums = [body["tensors"]] if body["format"] == FORMAT else body["tensors"]
        tensors: dict[str, Tensor] = {}
        for shard_path, checksum in zip(_shard_paths(path, len(checksums)), checksums, strict=True):
            if not shard_path.exists():
                raise ValueError(f"{shard_path.name} is missing")
            data = shard_path.read_bytes()
            if hashlib.sha256(data).hexdigest() != checksum:
                raise ValueError(f"checksum mismatch in {shard_path.name}")
            tensors |= safetensors.torch.load(data)
        for name, shape in body.get("packed", {}).items():
            tensors[name] = unpack_tensor(tensors[name], shape)
        state: dict[str, Any] = unflatten_state(body["state"], tensors)
        return state

    def _json_path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _remove_all_except(self, numbers: list[int]) -> None:
        for path in self.folder.iterdir():
            match = CHECKPOINT_FILE.fullmatch(path.name)
            if match and (match[3] or int(match[1]) not in numbers) and path.is_file():
                path.unlink(missing_ok=True)


def pack_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """A checkpoint's tensors, where it saves space as bytes that `unpack_tensor` reads, and the shapes of those.

    All first bytes of the numbers come first, then all second ones, and so on: signs and exponents repeat themselves.
    """
    packed, shapes = dict(tensors), {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and tensor.nbytes >= PACKED_BYTES:
            planes = np.ascontiguousarray(tensor.numpy().reshape(-1, 1).view(np.uint8).T)
            data = zlib.compress(planes.tobytes(), level=1)
            if len(data) < tensor.nbytes:
                packed[name], shapes[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8), list(tensor.shape)
    return packed, shapes


def unpack_tensor(packed: Tensor, shape: list[int]) -> Tensor:
    """The tensor that `pack_tensors` packed into a checkpoint."""
    planes = np.frombuffer(zlib.decompress(packed.numpy().tobytes()), np.uint8).reshape(4, -1)
    return torch.from_numpy(np.ascontiguousarray(planes.T).view(np.float32).reshape(shape))


def split_into_shards(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """A checkpoint's tensors in parts of at most `limit` bytes, a file each (a larger tensor is one), at least one."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if parts[-1] and size > limit:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor
    return parts


def _shard_paths(path: Path, count: int) -> list[Path]:
    """The files of the tensors of the checkpoint `path`."""
    if count == 1:
        return [path.with_suffix(".safetensors")]
    return [path.with_name(f"{path.stem}-{number + 1:02d}.safetensors") for number in range(count)]


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()


def _compute_checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(encode_canonical_json(body)).hexdigest()
