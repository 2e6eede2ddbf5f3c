"""Pretrained weights from elsewhere: found or downloaded, verified, and read without running code."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from agscl.data.errors import DownloadFailed
from agscl.data.remote_file import RemoteFile
from agscl.system.files import lock_file

HUB_PATTERN = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?/(?P<file>[\w./ -]+)")


class WeightsError(Exception):
    """Pretrained weights are missing or unusable; the message says what was tried and what to do."""


def find_weights(weights: str | Path, known: Mapping[str, RemoteFile]) -> Path:
    """The file that `weights` stands for: a name in `known`, hf://owner/repository[@revision]/file, or a path.

    Downloads are looked for in $AGSCL_DATA/weights first, then in the folder where torch stores its own.
    """
    if isinstance(weights, str) and weights in known:
        return _find_known(known[weights])
    if isinstance(weights, str) and weights.startswith("hf://"):
        return _find_on_hub(weights)
    path = Path(weights).expanduser()
    if not path.is_file():
        names = ", ".join(map(repr, known))
        raise WeightsError(f"there is no file {path}; weights must be {names}, a file, or hf://owner/repository/file")
    return path


def _find_known(file: RemoteFile) -> Path:
    path = _find_path(file.file)
    if not path.is_file():
        download_weights(file, path)
    elif not file.matches(path):
        raise WeightsError(
            f"checksum mismatch: {path} is damaged, or not the file of {file.url} (SHA-256 {file.digest[:8]}…). Delete "
            "it, and it will be downloaded again."
        )
    return path


def _find_on_hub(address: str) -> Path:
    from agscl.data.hub_files import describe_model_file

    parts = HUB_PATTERN.fullmatch(address)
    if parts is None or {"", ".", ".."} & set(parts["file"].split("/")):
        raise WeightsError(
            f"{address!r} is not of the form hf://owner/repository/file or hf://owner/repository@revision/file"
        )
    revision = parts["revision"] or "main"
    path = _find_path("--".join([*parts["repository"].split("/"), revision, *parts["file"].split("/")]))
    if not path.is_file():
        try:
            file = describe_model_file(parts["repository"], revision, parts["file"], save_as=path.name)
        except DownloadFailed as error:
            raise WeightsError(f"{error}.") from error
        download_weights(file, path)
    return path


def _find_path(file_name: str) -> Path:
    """Where a downloaded file is, or where to download it to."""
    folders = [Path(torch.hub.get_dir()) / "checkpoints"]
    if data := os.environ.get("AGSCL_DATA"):
        folders.insert(0, Path(data) / "weights")
    return next((path for folder in folders if (path := folder / file_name).is_file()), folders[-1] / file_name)


def download_weights(file: RemoteFile, path: Path) -> None:
    """Download pretrained weights to `path`; another process that wants them meanwhile waits."""
    from agscl.data.hub_files import request_headers
    from agscl.data.limited_http import download_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_name(path.name + ".lock"), wait=True):
            if not path.is_file():
                download_file(file, path, headers=request_headers(file.url))
    except (DownloadFailed, OSError) as error:
        raise WeightsError(f"{error}. Or download {file.url} on another machine and save it as {path}.") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The pretrained weights in a file, by name; with anything else in it, it is refused: opening it could run code."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise WeightsError(f"reading {path} needs safetensors: pip install 'agscl[cli]'") from error
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} cannot be read as weights: it contains more than tensors, which could run code when opened. "
            "Expected a .safetensors file, or a state_dict saved by torch.save."
        ) from error
    except Exception as error:  # each format has its own errors
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path} cannot be read as weights: {reason}. Is the file complete?") from error
    if not (isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())):
        raise WeightsError(f"{path} contains a {type(content).__name__}, not a state_dict of tensors by name.")
    return content


@torch.no_grad()
def load_weights(module: nn.Module, path: Path, *, prefixes: Mapping[str, str], skip: str) -> None:
    """Copy pretrained weights in `path` into `module`; where they do not fit, the module stays as it is.

    `prefixes`: how names begin in the file, and in the module. Names in the file that begin with `skip` are ignored.
    """
    stored = {key: tensor for key, tensor in read_weights(path).items() if not key.startswith(skip)}
    in_file = {in_module: in_file for in_file, in_module in prefixes.items()}
    expected = {_replace_prefix(name, in_file): tensor for name, tensor in module.state_dict().items()}
    problems = [f"{key} is missing" for key in expected if key not in stored]
    problems += [f"{key} is unknown" for key in stored if key not in expected]
    problems += [
        f"{key} is {list(tensor.shape)} of {tensor.dtype}, not {list(expected[key].shape)}"
        for key, tensor in stored.items()
        if key in expected and (tensor.shape != expected[key].shape or not tensor.is_floating_point())
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsError(f"{path} does not fit {type(module).__name__}: {'; '.join(problems[:3])}{more}.")
    for key, parameter in expected.items():
        parameter.copy_(stored[key])


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)
