"""source.json: where the files of a dataset's folder come from, and the checksum each must have."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from agscl.data.errors import DataError, DownloadFailed
from agscl.data.remote import RemoteFile
from agscl.system.files import write_atomically

FILE_NAME = "source.json"


@dataclass(frozen=True)
class Manifest:
    """The files that belong into a folder."""

    origin: str
    """For people: "owner/dataset@revision", or an address."""
    files: list[RemoteFile]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that was downloaded, else None. Raises DataError where it names impossible files."""
    try:
        stored = json.loads((folder / FILE_NAME).read_text())
        origin, entries = stored["from"], [dict(entry) for entry in stored["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        return Manifest(origin, [RemoteFile(**entry) for entry in entries])
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{folder / FILE_NAME} is damaged: {error}. Delete it, and download the dataset again"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = {"from": manifest.origin, "files": [asdict(file) for file in manifest.files]}
    try:
        write_atomically(folder / FILE_NAME, json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        raise DownloadFailed(f"{folder / FILE_NAME} cannot be written: {error.strerror or error}") from error


def is_complete(folder: Path) -> bool:
    """Whether a folder was downloaded and all its files have arrived."""
    manifest = read_manifest(folder)
    return manifest is not None and all((folder / file.file).is_file() for file in manifest.files)
