"""A web server that speaks as much of the Hugging Face hub as its client and agscl need, and fails on request."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "5eed" * 10
PARQUET_BRANCH = "refs%2Fconvert%2Fparquet"


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A client that closes its connection early is no error here."""


@dataclass
class SmallHub:
    """Files of datasets and models are redirected to another host name, as the hub does with large files."""

    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By dataset, the files of its Parquet branch by path."""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By repository, its files by path."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Old names of repositories: new names."""
    other_files: dict[str, bytes] = field(default_factory=dict)
    """Files outside repositories, by path."""
    stored_in_git: set[str] = field(default_factory=set)
    """Paths that have a git object id and no SHA-256, as small files have."""
    siblings: list[dict[str, object]] | None = None
    """A listing to give instead of the true one."""
    checksum: str | None = None
    """A SHA-256 to state for files of models instead of the true one; empty for none."""
    redirect_to: str | None = None
    """Where requests for a file are redirected instead."""
    cut_after: list[int] = field(default_factory=list)
    """Each of the next transfers breaks off after so many bytes."""
    stall_after: list[int] = field(default_factory=list)
    """Each of the next transfers stops after so many bytes until `stall_ends` is set."""
    stall_ends: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)
    """Status codes of the next requests for the content of a file."""
    listing_statuses: list[int] = field(default_factory=list)
    """Status codes of the next requests for a listing."""
    has_ranges: bool = True
    """Whether a part of a file can be requested."""
    announces_length: bool = True
    """Whether answers have a Content-Length."""
    wrong_content: bytes | None = None
    """Sent instead of any file."""
    refuses: int = 0
    """Status code with which uploads are refused."""
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and Authorization of all requests."""

    def __enter__(self) -> SmallHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.requests.append((self.path, None, self.headers.get("Authorization")))
                hub.take(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def log_message(self, *args: object) -> None:
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
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
        """The ranges of all requests for the content of a file."""
        return [
            requested for path, requested, _ in self.requests if path.startswith("/cdn/") or path in self.other_files
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        for old, new in self.renamed.items():
            if f"/{old}/" in path:
                return self._send(request, 307, {"Location": path.replace(f"/{old}/", f"/{new}/")})
        for name, files in self.datasets.items():
            if path == f"/api/datasets/{name}/revision/{PARQUET_BRANCH}":
                return self._send_listing(request, name, files)
            start = f"/datasets/{name}/resolve/{REVISION}/"
            if path.startswith(start) and path.removeprefix(start) in files:
                return self._redirect(request, f"{name}/{path.removeprefix(start)}", {})
            if path.startswith(f"/cdn/{name}/"):
                return self._send_file(request, files[path.removeprefix(f"/cdn/{name}/")])
        for name, files in self.models.items():
            if path.startswith(f"/api/models/{name}/revision/") or path == f"/api/models/{name}":
                return self._send_listing(request, name, files)
            if path.startswith(f"/{name}/resolve/"):
                file = path.removeprefix(f"/{name}/resolve/").partition("/")[2]
                if file in files:
                    return self._redirect(request, f"{name}/{file}", self._describe(files[file]))
                return self._send(request, 404, {"X-Error-Code": "EntryNotFound"})
            if path.startswith(f"/cdn/{name}/"):
                return self._send_file(request, files[path.removeprefix(f"/cdn/{name}/")])
        if path in self.other_files:
            return self._send_file(request, self.other_files[path])
        return self._send(request, 404, {"X-Error-Code": "RepoNotFound"})

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Take an upload: a new repository, the question how files should come, a commit of files."""
        path = request.path.partition("?")[0]
        if self.refuses:
            return self._send(request, self.refuses, {"X-Error-Message": "not for you"}, b"{}")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.models.setdefault(name, {})
            return self._send_json(request, {"url": f"{self.url}/{name}"})
        for name, files in self.models.items():
            if path.startswith(f"/api/models/{name}/preupload/"):
                asked = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
                return self._send_json(request, {"files": [{**one, "shouldIgnore": False} for one in asked]})
            if path.startswith(f"/api/models/{name}/commit/"):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                url = f"{self.url}/{name}/commit/{REVISION}"
                return self._send_json(request, {"success": True, "commitOid": REVISION, "commitUrl": url})
        return self._send_json(request, {}) if path == "/api/validate-yaml" else self._send(request, 404, {})

    def _send_json(self, request: BaseHTTPRequestHandler, content: object) -> None:
        self._send(request, 200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _redirect(self, request: BaseHTTPRequestHandler, file: str, headers: dict[str, str]) -> None:
        target = self.redirect_to or f"http://localhost:{self.port}/cdn/{file}"
        self._send(request, 302, {"Location": target, **headers})

    def _describe(self, content: bytes) -> dict[str, str]:
        headers = {"X-Repo-Commit": REVISION, "X-Linked-Size": str(len(content))}
        checksum = hashlib.sha256(content).hexdigest() if self.checksum is None else self.checksum
        return {**headers, "X-Linked-Etag": f'"{checksum}"'} if checksum else headers

    def _send_listing(self, request: BaseHTTPRequestHandler, name: str, files: dict[str, bytes]) -> None:
        if self.listing_statuses:
            return self._send(request, self.listing_statuses.pop(0), {})
        siblings: list[dict[str, object]] = [{"rfilename": ".gitattributes", "size": 0, "blobId": "0" * 40}]
        for path, content in files.items():
            git_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, object] = {"rfilename": path, "blobId": git_id, "size": len(content)}
            if path not in self.stored_in_git:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 132}
            siblings.append(entry)
        content = {"id": name, "sha": REVISION, "siblings": siblings if self.siblings is None else self.siblings}
        return self._send(request, 200, {}, json.dumps(content).encode())

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        if self.statuses:
            return self._send(request, self.statuses.pop(0), {"Retry-After": "0"})
        content = content if self.wrong_content is None else self.wrong_content
        start = 0
        requested = request.headers.get("Range")
        if requested and self.has_ranges:
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return request.send_error(416)
        request.send_response(206 if start else 200)
        if self.announces_length:
            request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if self.stall_after:
            request.wfile.write(content[start : start + self.stall_after.pop(0)])
            request.wfile.flush()
            self.stall_ends.wait(60)
            request.close_connection = True
            return None
        end = start + self.cut_after.pop(0) if self.cut_after else len(content)
        request.wfile.write(content[start:end])
        if end < len(content):
            request.close_connection = True
        return None

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
