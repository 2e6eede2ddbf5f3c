"""A file to be downloaded, and how its content is verified."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Literal

Algorithm = Literal["sha256", "md5", "git"]
DIGEST_LENGTHS = {"sha256": 64, "md5": 32, "git": 40}
"""Hexadecimal digits of each checksum; git: the SHA-1 that git computes of a file."""
CHUNK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server, and what it must be once it is here. Raises ValueError for what cannot be right."""

    url: str
    file: str
    """Its file name here."""
    digest: str
    """Checksum, in hexadecimal digits."""
    algorithm: Algorithm = "sha256"
    size: int | None = None
    """In bytes: never is more downloaded."""

    def __post_init__(self) -> None:
        check_file_name(self.file)
        digits = DIGEST_LENGTHS.get(self.algorithm)
        if digits is None:
            raise ValueError(f"unknown checksum algorithm {self.algorithm!r}; known are: {', '.join(DIGEST_LENGTHS)}")
        if not isinstance(self.digest, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", self.digest):
            raise ValueError(f"{self.digest!r} is not a checksum of {digits} hexadecimal digits ({self.algorithm})")
        if self.size is not None and (type(self.size) is not int or self.size < 0):
            raise ValueError(f"{self.size!r} is not a file size")

    def matches(self, path: Path) -> bool:
        """Whether the file at `path` has the announced size and checksum."""
        if self.size is not None and path.stat().st_size != self.size:
            return False
        return compute_digest(path, self.algorithm) == self.digest


def check_file_name(name: str) -> None:
    """Raise ValueError unless `name` is a plain file name: names from elsewhere must not lead out of their folder."""
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(".")
        or "/" in name
        or PureWindowsPath(name).name != name
        or not name.isprintable()
    ):
        raise ValueError(f"{name!r} is not a plain file name: no folders, no leading dot")


def compute_digest(path: Path, algorithm: Algorithm = "sha256") -> str:
    if algorithm == "git":
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
