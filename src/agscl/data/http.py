"""Download one file over HTTP: resumed where it stopped, never larger than announced, verified before it gets its name.

The client of the Hugging Face hub deletes unfinished files and compares sizes but no checksums, so files of the hub are
transferred here too; `agscl.data.hub` says which there are, and how to be allowed to read them.
"""

from __future__ import annotations

import errno
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agscl.data.errors import DownloadFailed
from agscl.data.progress import MakeProgress, ProgressLine
from agscl.data.remote import CHUNK, RemoteFile, compute_digest
from agscl.system.files import flush_folder

MAX_FAILURES = 5
"""Attempts in a row that bring no new byte before a transfer is given up."""
RETRY_DELAY = 1.0
"""Seconds before the second attempt; doubled before each further one."""
TIMEOUT = 30.0
MAX_UNANNOUNCED_SIZE = 8 << 30
"""Limit in bytes where neither the caller nor the server announces a size."""
PERMANENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Errors of the local disk: trying again does not help."""


class _TooLarge(Exception):
    pass


def download_file(
    file: RemoteFile,
    path: Path,
    *,
    headers: Mapping[str, str] | None = None,
    make_progress: MakeProgress = ProgressLine,
) -> None:
    """Download `file` to `path`.

    Content goes to `path`.part first, is resumed where an earlier attempt stopped, and renamed once its checksum is
    right. `headers` are sent to the server named in the URL only, not to those it redirects to.
    """
    part = path.with_name(path.name + ".part")
    with make_progress(f"{path.parent.name}/{path.name}", file.size or 0) as progress:
        progress.advance(_size(part))
        for is_last_attempt in (False, True):  # the part may be left over from another file
            _transfer_with_retries(file, part, headers or {}, progress.advance)
            if file.matches(part):
                break
            actual = compute_digest(part, file.algorithm)
            progress.advance(-_size(part))
            part.unlink()
            if is_last_attempt:
                raise DownloadFailed(
                    f"checksum mismatch for {file.url}: expected {file.algorithm} {file.digest}, got {actual}. The "
                    "file on the server was replaced, or something on the way changes it"
                )
    os.replace(part, path)
    flush_folder(path.parent)


def _transfer_with_retries(
    file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Callable[[int], None]
) -> None:
    failures = 0
    while True:
        before = _size(part)
        try:
            return _transfer(file, part, headers, advance)
        except _TooLarge as error:
            part.unlink(missing_ok=True)
            raise DownloadFailed(f"{file.url} was not downloaded: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # urllib's own errors are OSErrors
            failures = 0 if _size(part) > before else failures + 1
            if failures == MAX_FAILURES or not _is_temporary(error):
                raise DownloadFailed(
                    f"{file.url} could not be downloaded: {_describe_error(error)}. {_size(part) / 1e6:.1f} MB of it "
                    "are stored: run the same command again to continue from there"
                ) from error
            time.sleep(_retry_delay(error, failures))


def _transfer(file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Callable[[int], None]) -> None:
    """Make one request for the missing bytes. Returns when the server has sent all of them."""
    start = _size(part)
    if file.size is not None and start > file.size:  # left over from another file
        advance(-start)
        part.unlink()
        start = 0
    if start and start == file.size:
        return
    try:
        response = _open_url(file.url, {"Range": f"bytes={start}-"} if start else {}, headers)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the part is as long as the file, or longer
            raise
        advance(-start)
        part.unlink()
        return _transfer(file, part, headers, advance)
    with response, open(part, "ab") as output:
        if start and response.status != 206:  # the server ignores ranges and sends the file from its start
            output.truncate(0)
            advance(-start)
            start = 0
        length = response.headers.get("Content-Length")
        announced = None if length is None else start + int(length)
        expected = announced if file.size is None else file.size
        limit = MAX_UNANNOUNCED_SIZE if expected is None else expected
        if announced is not None and announced > limit:
            raise _TooLarge(f"the server announces {announced} bytes, expected are {limit}")
        received = start
        try:
            while chunk := response.read1(CHUNK):
                received += len(chunk)
                if received > limit:
                    raise _TooLarge(f"the server sends more than the expected {limit} bytes")
                output.write(chunk)
                advance(len(chunk))
        finally:
            output.flush()
            os.fsync(output.fileno())
    if expected is not None and received < expected:
        raise ConnectionError("the connection was closed early")


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only; headers meant for one server stay with that server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        _require_http(newurl)
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None and _origin(newurl) == _origin(req.full_url):
            for name, value in req.unredirected_hdrs.items():
                if name != "Host":
                    redirected.add_unredirected_header(name, value)
        return redirected


def _open_url(url: str, headers: Mapping[str, str], server_headers: Mapping[str, str]) -> Any:
    _require_http(url)
    request = urllib.request.Request(url, headers={"User-Agent": "agscl", "Accept-Encoding": "identity", **headers})
    for name, value in server_headers.items():
        request.add_unredirected_header(name, value)
    return urllib.request.build_opener(_RedirectHandler).open(request, timeout=TIMEOUT)


def _require_http(url: str) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not an http or https address")


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_temporary(error: Exception) -> bool:
    """Whether trying again may help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return getattr(error, "errno", None) not in PERMANENT_ERRNOS and not isinstance(error, ValueError)


def _retry_delay(error: Exception, failures: int) -> float:
    requested = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return min(float(requested), 60.0) if requested.isdigit() else RETRY_DELAY * 2.0 ** max(failures - 1, 0)


def _describe_error(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        login = (
            "; if it needs a login, accept its terms on its page and set HF_TOKEN" if error.code in (401, 403) else ""
        )
        return f"the server answers {error.code} {error.reason}{login}"
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error) or type(error).__name__
