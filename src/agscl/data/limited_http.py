"""HTTP with limits: download a file, resumed where it stopped and verified before it gets its name; read an answer.

The client of the Hugging Face hub deletes unfinished files, compares sizes but no checksums, and reads answers of any
length, so everything from the hub is transferred here; `agscl.data.hub_files` says which files there are, and how to be
allowed to read them.
"""

from __future__ import annotations

import errno
import functools
import http.client
import io
import json
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any

from agscl.data.errors import DownloadFailed
from agscl.data.progress_line import MakeProgress, ProgressLine
from agscl.data.remote_file import CHUNK, RemoteFile, compute_digest, parse_size
from agscl.system.files import flush_folder, open_for_writing

MAX_FAILURES = 5
"""Attempts in a row that bring less than `MIN_PROGRESS` before a transfer is given up."""
MAX_ATTEMPTS = 200
MIN_PROGRESS = 1 << 16
"""Bytes that an attempt must bring to count as progress."""
RETRY_DELAY = 1.0
"""Seconds before the second attempt; doubled before each further one."""
TIMEOUT = 30.0
"""Seconds to wait for the next byte."""
MAX_ANSWER_SECONDS = 60.0
"""Seconds for the headers of any answer, and for all of an answer that is no file."""
PACE_WINDOW, MIN_BYTES_PER_SECOND = 60.0, 1000
"""A file must come at this rate or faster, on average over so many seconds."""
MAX_UNANNOUNCED_SIZE = 8 << 30
"""Limit in bytes where the caller knows no size."""
MAX_ANSWER = 16 << 20
"""Limit in bytes for an answer in JSON: a list of about 50,000 files. Python takes up to 25 times as much for it."""
MAX_HEADERS = 1 << 20
"""Limit in bytes for the headers of an answer together with those of the redirects before it."""
PERMANENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of the local disk: trying again does not help."""
REQUEST_ERRORS = (OSError, http.client.HTTPException, ValueError, RecursionError)
"""What a request may raise; urllib's own errors are OSErrors. RecursionError: JSON nested too deeply."""


class TooLarge(ValueError):
    """A server sends, or announces, more than the limit."""


def download_file(
    file: RemoteFile,
    path: Path,
    *,
    headers: Mapping[str, str] | None = None,
    make_progress: MakeProgress = ProgressLine,
) -> None:
    """Download `file` to `path`, within limits of size and time, and verify it.

    Content goes to `path`.part first, is resumed where an earlier attempt stopped, and renamed once its checksum is
    right. `headers` are sent to the server named in the URL only, not to those it redirects to.
    """
    part = path.with_name(path.name + ".part")
    if part.is_symlink() or (part.exists() and not part.is_file()):
        part.unlink()  # it may lead out of the folder
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
    for attempt in range(1, MAX_ATTEMPTS + 1):
        before = _size(part)
        try:
            return _transfer(file, part, headers, advance)
        except TooLarge as error:
            part.unlink(missing_ok=True)
            raise DownloadFailed(f"{file.url} was not downloaded: {error}") from error
        except REQUEST_ERRORS as error:
            failures = 0 if _size(part) >= before + MIN_PROGRESS else failures + 1
            if failures == MAX_FAILURES or attempt == MAX_ATTEMPTS or not _is_temporary(error):
                raise DownloadFailed(
                    f"{file.url} could not be downloaded: {describe_error(error)}. {_size(part) / 1e6:.1f} MB of it "
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
    meter = _Meter()
    try:
        response = _open_url(file.url, {"Range": f"bytes={start}-"} if start else {}, headers, meter)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not start:  # 416: the part is as long as the file, or longer
            raise
        error.close()
        advance(-start)
        part.unlink()
        return _transfer(file, part, headers, advance)
    with response, open_for_writing(part, append=True) as output:
        if start and response.status != 206:  # the server ignores ranges and sends the file from its start
            output.truncate(0)
            advance(-start)
            start = 0
        length = response.headers.get("Content-Length")
        announced = None if length is None else start + parse_size(length)
        expected = announced if file.size is None else file.size
        limit = MAX_UNANNOUNCED_SIZE if file.size is None else file.size
        if announced is not None and announced > limit:
            raise TooLarge(f"the server announces {announced} bytes, expected are at most {limit}")
        meter.start_body(limit - start, None)
        received = start
        try:
            while chunk := response.read1(CHUNK):
                received += len(chunk)
                if received > limit:
                    raise TooLarge(f"the server sends more than the expected {limit} bytes")
                output.write(chunk)
                advance(len(chunk))
        finally:
            output.flush()
            os.fsync(output.fileno())
    if expected is not None and received < expected:
        raise ConnectionError("the connection was closed early")


def fetch_json(url: str, headers: Mapping[str, str]) -> Any:
    """The JSON at `url`, limited to `MAX_ANSWER` bytes. Raises one of `REQUEST_ERRORS`."""
    meter = _Meter()
    with _open_url(url, {"Accept": "application/json"}, headers, meter) as response:
        meter.start_body(MAX_ANSWER, MAX_ANSWER_SECONDS)
        content = bytearray()
        while chunk := response.read1(CHUNK):
            content += chunk
            if len(content) > MAX_ANSWER:
                raise TooLarge(f"its answer is longer than {MAX_ANSWER >> 20} MB")
        if response.length:  # what is missing of the announced length
            raise ConnectionError("the connection was closed early")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its answer cannot be read as JSON ({type(error).__name__})") from error


def fetch_headers(url: str, headers: Mapping[str, str]) -> tuple[int, Message]:
    """Status and headers of the answer to a HEAD request; redirects are followed on the same server only.

    Raises one of `REQUEST_ERRORS`.
    """
    try:
        with _open_url(url, {}, headers, _Meter(), method="HEAD", leave_server=False) as response:
            return response.status, response.headers
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400 and error.headers.get("Location"):
            return error.code, error.headers
        raise


class _Meter:
    """Limits what connections may send, headers and bodies: bytes in all, seconds in all, and the slowest pace."""

    def __init__(self) -> None:
        self._max_bytes, self._deadline = MAX_HEADERS, time.monotonic() + MAX_ANSWER_SECONDS
        self._received = self._received_in_window = 0
        self._window_start = time.monotonic()

    def start_body(self, max_bytes: int, max_seconds: float | None) -> None:
        """From now on a body of so many bytes may come; twice as many on the wire, where it comes in chunks."""
        now = time.monotonic()
        self._max_bytes = self._received + 2 * max_bytes + MAX_HEADERS
        self._deadline = float("inf") if max_seconds is None else now + max_seconds
        self._window_start, self._received_in_window = now, 0

    def count(self, received: int) -> None:
        now = time.monotonic()
        self._received += received
        self._received_in_window += received
        if self._received > self._max_bytes:
            raise TooLarge(f"the server sends more than the {self._max_bytes} bytes that are allowed")
        if now > self._deadline:
            raise TimeoutError(f"its answer takes longer than {MAX_ANSWER_SECONDS:.0f} seconds")
        if now - self._window_start >= PACE_WINDOW:
            if self._received_in_window < PACE_WINDOW * MIN_BYTES_PER_SECOND:
                raise TimeoutError(f"the server sends less than {MIN_BYTES_PER_SECOND / 1000:g} kB per second")
            self._window_start, self._received_in_window = now, 0


class _MeteredStream(io.RawIOBase):
    """What a socket receives, counted by a meter."""

    def __init__(self, stream: Any, meter: _Meter) -> None:
        self._stream, self._meter = stream, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        received: int = self._stream.readinto(buffer)
        self._meter.count(received)
        return received

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class _MeteredSocket:
    """A socket whose `makefile`, from which `http.client` reads, is counted by a meter."""

    def __init__(self, connected: socket.socket, meter: _Meter) -> None:
        self._socket, self._meter = connected, meter

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_MeteredStream(self._socket.makefile("rb", buffering=0), self._meter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class _HTTPConnection(http.client.HTTPConnection):
    def __init__(self, meter: _Meter, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._meter = meter

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _MeteredSocket(self.sock, self._meter)


class _HTTPSConnection(http.client.HTTPSConnection):
    def __init__(self, meter: _Meter, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._meter = meter

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _MeteredSocket(self.sock, self._meter)


class _ConnectionHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens metered connections, to http and https alike."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(functools.partial(_HTTPConnection, self._meter), req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(functools.partial(_HTTPSConnection, self._meter), req)


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only; headers meant for one server stay with that server."""

    def __init__(self, leave_server: bool) -> None:
        self._leave_server = leave_server

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        _require_http(newurl)
        stays = _origin(newurl) == _origin(req.full_url)
        if not (stays or self._leave_server):
            return None
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None:
            redirected.method = req.get_method()
            if stays:
                for name, value in req.unredirected_hdrs.items():
                    if name != "Host":
                        redirected.add_unredirected_header(name, value)
        return redirected


def _open_url(
    url: str,
    headers: Mapping[str, str],
    server_headers: Mapping[str, str],
    meter: _Meter,
    *,
    method: str = "GET",
    leave_server: bool = True,
) -> Any:
    """The response, its body still unread. `server_headers` are sent to the server named in `url` alone."""
    _require_http(url)
    headers = {"User-Agent": "agscl", "Accept-Encoding": "identity", **headers}
    request = urllib.request.Request(url, headers=headers, method=method)
    for name, value in server_headers.items():
        request.add_unredirected_header(name, value)
    opener = urllib.request.OpenerDirector()  # without urllib's handlers of file:, ftp: and data:
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _ConnectionHandler(meter),
        _RedirectHandler(leave_server),
    ):
        opener.add_handler(handler)
    return opener.open(request, timeout=TIMEOUT)


def _require_http(url: str) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not an http or https address")


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_temporary(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return getattr(error, "errno", None) not in PERMANENT_ERRNOS and not isinstance(error, ValueError | RecursionError)


def _retry_delay(error: BaseException, failures: int) -> float:
    if isinstance(error, urllib.error.HTTPError):
        requested = error.headers.get("Retry-After", "")
        error.close()
        if requested.isascii() and requested.isdecimal():
            return min(float(requested), 60.0)
    return RETRY_DELAY * 2.0 ** max(failures - 1, 0)


def describe_error(error: BaseException) -> str:
    """Why an HTTP request failed, in one line that is safe to print."""
    if isinstance(error, urllib.error.HTTPError):
        if 300 <= error.code < 400:
            return f"the server answers {error.code}, and redirects in a circle or to no address"
        login = (
            "; if it needs a login, accept its terms on its page and set HF_TOKEN" if error.code in (401, 403) else ""
        )
        return make_printable(f"the server answers {error.code} {error.reason}") + login
    text = str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error) or type(error).__name__
    return make_printable(text)


def make_printable(text: str, limit: int = 200) -> str:
    """One line without control characters, at most `limit` characters: servers put anything into their words."""
    line = "".join(each if each.isprintable() else " " for each in text[: limit + 1]).strip()
    return line if len(line) <= limit else line[:limit] + "…"
