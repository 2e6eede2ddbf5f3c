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
MAX_SIZE = 1 << 50
"""Bytes; no file is larger."""
MAX_NAME_BYTES = 200
"""File systems allow 255; the rest is for .part and .lock."""
DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)\s*(\..*)?", re.IGNORECASE)
"""Names that are devices on Windows, in every folder and with every suffix."""


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
        if not isinstance(self.url, str) or not self.url.isprintable():
            raise ValueError(f"{self.url!r:.100} is not an address")
        digits = DIGEST_LENGTHS.get(self.algorithm) if isinstance(self.algorithm, str) else None
        if digits is None:
            raise ValueError(
                f"unknown checksum algorithm {self.algorithm!r:.100}; known are: {', '.join(DIGEST_LENGTHS)}"
            )
        if not isinstance(self.digest, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", self.digest):
            raise ValueError(
                f"{self.digest!r:.100} is not a checksum of {digits} hexadecimal digits ({self.algorithm})"
            )
        if self.size is not None and (type(self.size) is not int or not 0 <= self.size <= MAX_SIZE):
            raise ValueError(f"{self.size!r:.100} is not a file size")

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
        or name.endswith((".", " "))
        or "/" in name
        or PureWindowsPath(name).name != name
        or not name.isprintable()
        or DEVICE_NAME.fullmatch(name)
    ):
        raise ValueError(f"{name!r:.100} is not a plain file name: no folders, no leading dot")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.100}… is not a plain file name: it is longer than {MAX_NAME_BYTES} bytes")


def parse_size(text: str) -> int:
    """The size of a remote file that a header states, in bytes; raises ValueError where it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_SIZE)) and int(text) <= MAX_SIZE):
        raise ValueError(f"{text!r:.100} is not a file size")
    return int(text)


def compute_digest(path: Path, algorithm: Algorithm = "sha256") -> str:
    if algorithm == "git":
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
