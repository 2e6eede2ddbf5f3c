"""A web server that speaks as much of the Hugging Face hub as is needed, and fails when told to."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "5eed" * 10
BRANCH = "refs%2Fconvert%2Fparquet"


@dataclass
class SmallHub:
    """`datasets`: by name, the files of the Parquet branch by path. Downloads are redirected to another host name."""

    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)
    """Paths that are listed with a git object id only, as small files are."""
    others: dict[str, bytes] = field(default_factory=dict)
    """Further files, by path."""
    cuts: list[int] = field(default_factory=list)
    """Each of the next transfers breaks off after so many bytes."""
    stalls: list[int] = field(default_factory=list)
    """Each of the next transfers stops after so many bytes until `released` is set."""
    released: threading.Event = field(default_factory=threading.Event)
    answers: list[int] = field(default_factory=list)
    """Status codes of the next requests for a file."""
    ranges: bool = True
    """Whether parts of a file can be asked for."""
    lie: bytes | None = None
    """Sent instead of any file."""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and Authorization of all requests."""
    page: int = 2
    """Entries on a page of a listing."""

    def __enter__(self) -> SmallHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
                hub.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def transfers(self) -> list[str | None]:
        """The ranges of all requests that were sent a file, or a part of it."""
        return [wanted for path, wanted, _ in self.asked if path.startswith("/cdn/")]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        for name, files in self.datasets.items():
            if path == f"/api/datasets/{name}/revision/{BRANCH}":
                return self._send(request, json.dumps({"sha": REVISION}).encode())
            if path == f"/api/datasets/{name}/tree/{REVISION}":
                return self._list(request, name, files, dict(urllib.parse.parse_qsl(query)))
            start = f"/datasets/{name}/resolve/{REVISION}/"
            if path.startswith(start) and path.removeprefix(start) in files:
                request.send_response(302)
                request.send_header("Location", f"http://localhost:{self.port}/cdn/{name}/{path.removeprefix(start)}")
                request.send_header("Content-Length", "0")
                return request.end_headers()
            if path.startswith(f"/cdn/{name}/"):
                return self._file(request, files[path.removeprefix(f"/cdn/{name}/")])
        if path in self.others:
            return self._file(request, self.others[path])
        return request.send_error(404)

    def _list(self, request: BaseHTTPRequestHandler, name: str, files: dict[str, bytes], query: dict[str, str]) -> None:
        entries = [{"type": "directory", "path": path.rsplit("/", 1)[0], "oid": "0", "size": 0} for path in files][:1]
        for path, content in files.items():
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": path, "oid": git, "size": len(content)}
            if path not in self.small:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 132}
            entries.append(entry)
        start = int(query.get("cursor", 0))
        headers = {}
        if start + self.page < len(entries):
            following = f"{self.url}/api/datasets/{name}/tree/{REVISION}?recursive=true&cursor={start + self.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._send(request, json.dumps(entries[start : start + self.page]).encode(), headers)

    def _file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        if self.answers:
            code = self.answers.pop(0)
            request.send_response(code)
            request.send_header("Retry-After", "0")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        content = content if self.lie is None else self.lie
        start = 0
        wanted = request.headers.get("Range")
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return request.send_error(416)
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if self.stalls:
            request.wfile.write(content[start : start + self.stalls.pop(0)])
            request.wfile.flush()
            self.released.wait(60)
            request.close_connection = True
            return None
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        request.wfile.write(content[start:end])
        if end < len(content):
            request.close_connection = True
        return None

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(200)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
