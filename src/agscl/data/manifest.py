"""source.json: where the files of a dataset's folder come from, and the checksum each must have."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path

from agscl.data.errors import DataError, DownloadFailed
from agscl.data.remote_file import RemoteFile
from agscl.system.files import read_limited, write_atomically

FILE_NAME = "source.json"
MAX_BYTES = 16 << 20
RESERVED_SUFFIXES = (".part", ".tmp", ".lock")
"""Of our own files beside those of the manifest."""


@dataclass(frozen=True)
class Manifest:
    """The files that belong into a folder. Raises ValueError where two of them would be one file."""

    origin: str
    """For people: "owner/dataset@revision", or an address."""
    files: list[RemoteFile]

    def __post_init__(self) -> None:
        if not isinstance(self.origin, str):
            raise ValueError(f"{self.origin!r:.100} does not say where the files come from")
        names = {FILE_NAME}
        for file in self.files:
            # Some file systems do not distinguish upper and lower case, or two ways to write é.
            name = unicodedata.normalize("NFC", file.file.casefold())
            if name in names or name.endswith(RESERVED_SUFFIXES):
                raise ValueError(f"{file.file!r} would replace another file of the same folder")
            names.add(name)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that was downloaded, else None. Raises DataError where it names impossible files."""
    try:
        stored = json.loads(read_limited(folder / FILE_NAME, MAX_BYTES))
        origin, entries = stored["from"], [dict(entry) for entry in stored["files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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
