"""The page of a run while it is trained, served to this machine alone."""

from __future__ import annotations

import contextlib
import http.server
import threading
from pathlib import Path
from typing import Any

from agscl.report.page import make_page
from agscl.report.read import NothingToShow, read_report

WATCHED = ("events.jsonl", "result.json", "comparison.json", "diverged.json")
HOST = "127.0.0.1"


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the page of one run or comparison at /, and at /version what changes when the page would."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] = ("", b"")
        super().__init__((HOST, port), PageHandler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def get_version(self) -> str:
        """Sizes and times of all that the page is made from."""
        found = []
        for name in WATCHED:
            for path in (self.folder / name, *sorted(self.folder.glob(f"*/{name}"))):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found.append(f"{status.st_size}.{status.st_mtime_ns}")
        return "-".join(found)

    def get_page(self) -> bytes:
        """The page, made again only if its files have changed."""
        with self._lock:
            version = self.get_version()
            if self._made[0] != version or not self._made[1]:
                self._made = (version, make_page(read_report([self.folder]), version=version).encode())
            return self._made[1]


class PageHandler(http.server.BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # another name for this machine: a page elsewhere may have made it up
            self._answer(403, "text/plain", b"this page is served to this machine alone")
        elif self.path == "/version":
            self._answer(200, "text/plain", self.server.get_version().encode())
        elif self.path == "/":
            try:
                self._answer(200, "text/html; charset=utf-8", self.server.get_page())
            except NothingToShow as error:
                self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())
        else:
            self._answer(404, "text/plain", b"there is only /")

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing of a watched page: a request every second is no news."""
