"""Trained weights of a network from elsewhere: found or downloaded, checked, and opened without running code."""

from __future__ import annotations

import http.client
import os
import pickle
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Download", "WeightsMissing", "fetch", "find", "load", "read"]

HUB_NAME = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?/(?P<file>[\w./ -]+)")


class WeightsMissing(Exception):
    """Weights are not there, or not what they should be; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Download:
    """A file on the network, known by its content."""

    url: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def find(weights: str | Path, known: Mapping[str, Download]) -> Path:
    """The file behind `weights`: a name in `known`, hf://owner/repository[@revision]/file, or a path.

    What is downloaded is looked for in $AGSCL_DATA/weights first, then where torch keeps its own downloads.
    """
    if isinstance(weights, str) and weights in known:
        return _official(known[weights])
    if isinstance(weights, str) and weights.startswith("hf://"):
        return _from_hub(weights)
    path = Path(weights).expanduser()
    if not path.is_file():
        names = ", ".join(map(repr, known))
        raise WeightsMissing(f"there is no file {path}; weights is {names}, a file, or hf://owner/repository/file")
    return path


def _official(download: Download) -> Path:
    from agscl.data.download import Remote, matches

    path = _place(download.file)
    if not path.is_file():
        fetch(download, path)
    elif not matches(path, Remote(download.url, path.name, download.sha256)):
        raise WeightsMissing(
            f"{path} is damaged, or another file than {download.url}: its SHA-256 does not begin with "
            f"{download.sha256[:8]}. Delete it, and it will be downloaded again."
        )
    return path


def _place(file: str) -> Path:
    """Where a downloaded file is, or will be."""
    folders = [Path(torch.hub.get_dir()) / "checkpoints"]
    if data := os.environ.get("AGSCL_DATA"):
        folders.insert(0, Path(data) / "weights")
    return next((path for folder in folders if (path := folder / file).is_file()), folders[-1] / file)


# The Hugging Face hub ------------------------------------------------------------------------------------------------


def _from_hub(name: str) -> Path:
    from agscl.data.download import endpoint

    parts = HUB_NAME.fullmatch(name)
    if parts is None:
        raise WeightsMissing(f"{name!r} is not of the form hf://owner/repository/file, with @revision where it matters")
    revision = parts["revision"] or "main"
    path = _place("--".join([*parts["repository"].split("/"), revision, *parts["file"].split("/")]))
    if not path.is_file():
        url = f"{endpoint()}/{parts['repository']}/resolve/{revision}/{urllib.parse.quote(parts['file'])}"
        try:
            told = _told_by_hub(url)
        except (OSError, http.client.HTTPException) as error:
            raise _not_had(url, path, error) from error
        if told is None:
            raise WeightsMissing(
                f"the hub tells no checksum of {name}, so it is not a file of weights kept there. Download {url} "
                "yourself, and give the path of the file."
            )
        fetch(told, path)
    return path


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the checksum is told by the hub, not by the store that it sends us to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _told_by_hub(url: str) -> Download | None:
    """The content's checksum and size, which the hub tells as it redirects to where the content is."""
    from agscl.data.download import TIMEOUT

    opener = urllib.request.build_opener(_Stay)
    for _ in range(5):
        request = urllib.request.Request(url, method="HEAD", headers={"Accept-Encoding": "identity"})
        try:
            with opener.open(request, timeout=TIMEOUT) as answer:
                headers: Message = answer.headers
        except urllib.error.HTTPError as error:
            if error.code not in (301, 302, 303, 307, 308):
                raise
            headers = error.headers
        told, size = (
            headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"').lower(),
            headers.get("X-Linked-Size"),
        )
        if re.fullmatch("[0-9a-f]{64}", told) and size is not None:
            return Download(url, told, int(size))
        moved = headers.get("Location", "")
        if not moved.startswith("/"):
            return None
        url = urllib.parse.urljoin(url, moved)  # a repository that was renamed
    return None


def fetch(download: Download, path: Path) -> None:
    """Download to `path`, unless another process does: one that was broken off goes on, and only whole, checked content
    gets the name."""
    from filelock import FileLock  # torch needs it too

    from agscl.data.download import DownloadFailed, Remote
    from agscl.data.download import fetch as transfer

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            if not path.is_file():
                transfer(Remote(download.url, path.name, download.sha256, size=download.size), path)
    except DownloadFailed as error:
        wrong = ValueError(f"it is not the expected file, with a SHA-256 of {download.sha256[:8]}…")
        raise _not_had(download.url, path, error.__cause__ or wrong) from error
    except OSError as error:
        raise _not_had(download.url, path, error) from error


def _not_had(url: str, path: Path, error: BaseException) -> WeightsMissing:
    reason = f"HTTP {error.code} {error.reason}" if isinstance(error, urllib.error.HTTPError) else None
    reason = reason or str(getattr(error, "reason", "") or error) or type(error).__name__
    return WeightsMissing(
        f"{url} could not be downloaded: {reason}. Try again: it goes on where it stopped. Or get the file on another "
        f"machine and put it at {path}."
    )


# Reading -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; a file that holds more than tensors is refused, for opening it would run code."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise WeightsMissing(f"reading {path} needs safetensors: pip install 'agscl[cli]'") from error
    except pickle.UnpicklingError as error:
        raise WeightsMissing(
            f"{path} cannot be read as weights: it does not hold tensors alone, and anything else could run code when "
            "it is opened. Expected a .safetensors file, or a state_dict as torch.save writes it."
        ) from error
    except Exception as error:  # each format has its own errors
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise WeightsMissing(f"{path} cannot be read as weights: {reason}. Is it whole?") from error
    if not (isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values())):
        raise WeightsMissing(f"{path} holds a {type(found).__name__}, not the tensors of a state_dict by name.")
    return found


@torch.no_grad()
def load(module: nn.Module, path: Path, *, names: Mapping[str, str], without: str) -> None:
    """Copy the weights in `path` into `module`; where they do not fit, the module stays as it is.

    `names`: how names begin in the file, and in the module. What begins with `without` in the file is left out.
    """
    given = {key: tensor for key, tensor in read(path).items() if not key.startswith(without)}
    wanted = {_renamed(name, {new: old for old, new in names.items()}): t for name, t in module.state_dict().items()}
    wrong = [f"{key} is missing" for key in wanted if key not in given]
    wrong += [f"{key} is unknown" for key in given if key not in wanted]
    wrong += [
        f"{key} is {list(tensor.shape)} of {tensor.dtype}, not {list(wanted[key].shape)}"
        for key, tensor in given.items()
        if key in wanted and (tensor.shape != wanted[key].shape or not tensor.is_floating_point())
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WeightsMissing(f"{path} does not fit {type(module).__name__}: {'; '.join(wrong[:3])}{more}.")
    for key, own in wanted.items():
        own.copy_(given[key])


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in beginnings.items() if name.startswith(old)), name)
