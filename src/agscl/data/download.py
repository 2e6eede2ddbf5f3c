"""Getting files over HTTP: checked, resumable, complete or not there at all; and what the Hugging Face hub offers."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agscl.data.examples import DataMissing
from agscl.data.progress import Bar
from agscl.system.files import flush_folder, lock_file, write_atomically

ATTEMPTS = 5
"""How often in a row a transfer may fail without a single new byte."""
QUESTIONS = 3
"""How often the hub is asked for its list of files."""
PAUSE = 1.0
"""Seconds before the second attempt; twice as long before each further one."""
TIMEOUT = 30.0
CHUNK = 1 << 18
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Errors of our own disk."""
PARQUET = "refs/convert/parquet"
"""The branch in which the hub keeps every dataset as CONFIG/SPLIT/0000.parquet, 0001.parquet …"""
PLAN = "source.json"


Algorithm = Literal["sha256", "md5", "git"]


class DownloadFailed(DataMissing):
    """A file could not be had; the message says why, and how to go on."""


@dataclass(frozen=True)
class Remote:
    """A file somewhere else, and what it must be like once it is here."""

    url: str
    file: str
    """Its name here."""
    digest: str
    """Checksum, in hexadecimal digits."""
    algorithm: Algorithm = "sha256"
    size: int | None = None


def endpoint() -> str:
    """The hub: `HF_ENDPOINT`, as its own client has it."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def on_the_hub(name: str) -> tuple[str, dict[str, dict[str, list[Remote]]]]:
    """The newest revision of a dataset as Parquet, and its files by configuration and split."""
    dataset = f"{endpoint()}/api/datasets/{urllib.parse.quote(name)}"
    branch = urllib.parse.quote(PARQUET, safe="")
    revision = _json(f"{dataset}/revision/{branch}", name)[0]["sha"]
    found: dict[str, dict[str, list[Remote]]] = {}
    url: str | None = f"{dataset}/tree/{revision}?recursive=true"
    while url:
        entries, url = _json(url, name)
        for entry in entries:
            parts = entry["path"].split("/")
            if len(parts) == 3 and parts[2].endswith(".parquet"):
                large = entry.get("lfs")
                remote = Remote(
                    f"{endpoint()}/datasets/{name}/resolve/{revision}/{urllib.parse.quote(entry['path'])}",
                    parts[2],
                    large["oid"].removeprefix("sha256:") if large else entry["oid"],
                    "sha256" if large else "git",
                    entry["size"],
                )
                found.setdefault(parts[0], {}).setdefault(parts[1], []).append(remote)
    for config in found.values():
        for files in config.values():
            files.sort(key=lambda remote: remote.file)
    if not found:
        raise DownloadFailed(f"the hub holds no Parquet files of {name}: {endpoint()}/datasets/{name}")
    return revision, found


def get(folder: Path, plan: Callable[[], tuple[str, list[Remote]]], bar: Callable[[str, int], Any] = Bar) -> None:
    """Put the files that `plan` returns, together with where they are from, into `folder`.

    The plan is kept beside them. Where an earlier one was not completed, it is made anew, since the files may be had
    from elsewhere by now, or be others: of those that have come, what is still wanted stays. `folder` is to be held.
    """
    folder.mkdir(exist_ok=True)
    if is_whole(folder):
        return
    before = read_plan(folder)
    try:
        origin, files = plan()
    except DownloadFailed:
        if before is None:
            raise
        origin, files = before  # they may be had all the same
    wanted = {file.file: file.digest for file in files}
    for file in before[1] if before else []:
        if wanted.get(file.file) != file.digest:
            for left in (folder / file.file, folder / f"{file.file}.part"):
                left.unlink(missing_ok=True)
    keep_plan(folder, origin, files)
    missing = [file for file in files if not (folder / file.file).is_file()]
    needed = sum(file.size or 0 for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free + sum(part.stat().st_size for part in folder.glob("*.part")):
        raise DownloadFailed(f"{folder} has {free / 1e6:.0f} MB left, and {needed / 1e6:.0f} MB are to come")
    for file in missing:
        fetch(file, folder / file.file, bar)


def keep_plan(folder: Path, origin: str, files: list[Remote]) -> None:
    content = {"from": origin, "files": [asdict(file) for file in files]}
    _write(folder / PLAN, json.dumps(content, indent=2).encode() + b"\n")


def read_plan(folder: Path) -> tuple[str, list[Remote]] | None:
    """Where the files of a folder are from, and what they must be like, if they were downloaded."""
    try:
        stored = json.loads((folder / PLAN).read_text())
        return stored["from"], [Remote(**file) for file in stored["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_whole(folder: Path) -> bool:
    """Whether a folder holds all the files that were to come."""
    plan = read_plan(folder)
    return plan is not None and all((folder / file.file).is_file() for file in plan[1])


def fetch(remote: Remote, path: Path, bar: Callable[[str, int], Any] = Bar) -> None:
    """Download a file: into `path`.part first, going on where an earlier try has stopped; renamed when it is right."""
    part = path.with_name(path.name + ".part")
    kept = part.stat().st_size if part.exists() else 0
    with bar(f"{path.parent.name}/{path.name}", remote.size or 0) as progress:
        progress.advance(kept)
        for again in (True, False):
            _transfer_all(remote, part, progress.advance)
            if matches(part, remote):
                break
            progress.advance(-part.stat().st_size)
            part.unlink()
            if not again:
                raise DownloadFailed(
                    f"{remote.url} has not the checksum {remote.digest} that was announced for it; something on the "
                    "way changes it, or it was replaced: remove " + str(path.parent / PLAN) + " and try again"
                )
    os.replace(part, path)
    flush_folder(path.parent)


def matches(path: Path, remote: Remote) -> bool:
    """Whether a file is the one that was announced."""
    if remote.size is not None and path.stat().st_size != remote.size:
        return False
    return digest(path, remote.algorithm) == remote.digest


def digest(path: Path, algorithm: Algorithm = "sha256") -> str:
    if algorithm == "git":
        made = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        made = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            made.update(chunk)
    return made.hexdigest()


def _transfer_all(remote: Remote, part: Path, advance: Callable[[int], None]) -> None:
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _transfer(remote, part, advance)
        except (OSError, http.client.HTTPException) as error:  # urllib's own errors are OSErrors
            here = part.stat().st_size if part.exists() else 0
            failures = 0 if here > before else failures + 1
            if failures == ATTEMPTS or not _may_pass(error):
                raise DownloadFailed(
                    f"{remote.url} could not be downloaded: {_reason(error)}. {here / 1e6:.1f} MB of it are kept; the "
                    "same command goes on from there"
                ) from error
            time.sleep(_pause(error, failures))


def _transfer(remote: Remote, part: Path, advance: Callable[[int], None]) -> None:
    """One request for what is missing. Returns when the server has sent all of it."""
    have = part.stat().st_size if part.exists() else 0
    if have and have == remote.size:
        return
    try:
        answer = _request(remote.url, {"Range": f"bytes={have}-"} if have else {})
    except urllib.error.HTTPError as error:
        if error.code != 416:  # what is here is as long as the file, or longer
            raise
        advance(-have)
        part.unlink()
        return _transfer(remote, part, advance)
    with answer, open(part, "ab") as file:
        if have and answer.status != 206:  # the server sends it from the start
            file.truncate(0)
            advance(-have)
            have = 0
        announced = answer.headers.get("Content-Length")
        expected = remote.size or (have + int(announced) if announced else None)
        try:
            while chunk := answer.read1(CHUNK):
                file.write(chunk)
                advance(len(chunk))
        finally:
            file.flush()
            os.fsync(file.fileno())
    if expected is not None and part.stat().st_size < expected:
        raise ConnectionError("the connection was closed early")


def _request(url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "agscl", "Accept-Encoding": "identity", **headers})
    token = os.environ.get("HF_TOKEN")
    if token and url.startswith(endpoint() + "/"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # not for those it redirects to
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _json(url: str, name: str) -> tuple[Any, str | None]:
    """What the hub answers, and the address of the next page."""
    failures = 0
    while True:
        try:
            with _request(url, {}) as answer:
                following = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))
                return json.load(answer), following and following.group(1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            failures += 1
            if failures < QUESTIONS and _may_pass(error):
                time.sleep(_pause(error, failures))
                continue
            raise DownloadFailed(
                f"{name} could not be found on {endpoint()}: {_reason(error)}. Where the hub is out of reach, set "
                "HF_ENDPOINT to a mirror, or put the files into AGSCL_DATA yourself: docs/data.md says which"
            ) from error


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return getattr(error, "errno", None) not in LASTING and not isinstance(error, ValueError)


def _pause(error: Exception, failures: int) -> float:
    asked = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return min(float(asked), 60.0) if asked.isdigit() else PAUSE * 2.0 ** max(failures - 1, 0)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        known = {
            401: "there is no such dataset, or it needs a login: check the name, or set HF_TOKEN",
            403: "access is refused: accept the terms on the dataset's page, and set HF_TOKEN",
            404: "there is no such dataset, or the hub has no Parquet files of it",
        }
        return known.get(error.code, f"the server answers {error.code} {error.reason}")
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error) or type(error).__name__


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """`folder`, made where it is not there, for this process alone; another one waits."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_file(folder / ".lock", wait=True))
                break
            except FileNotFoundError:  # the process waited for removed the folder, since nothing came
                continue
            except OSError as error:
                raise DownloadFailed(
                    f"{folder} cannot be written: {error.strerror}. Unset AGSCL_DATA for this command, and the files "
                    "go to ~/.cache/agscl/data, where they are found as well"
                ) from error
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [".lock"]:  # nothing came
                with contextlib.suppress(OSError):
                    (folder / ".lock").unlink()
                    folder.rmdir()


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise DownloadFailed(f"{path} cannot be written: {error.strerror or error}") from error
