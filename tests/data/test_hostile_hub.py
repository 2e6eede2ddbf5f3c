"""A hub that answers anything: a sentence for the user, no file outside the data folder, bounded memory and time."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

import small_images
from agscl import tasks
from agscl.cli import main as cli
from agscl.data import limited_http
from agscl.data.errors import DataError
from agscl.data.hub_files import list_parquet_files
from agscl.data.limited_http import download_file
from small_hub import REVISION, QuietServer

NAME, CONFIG = "ylecun/mnist", "mnist"
MEGABYTE = b" " * (1 << 20)
GOOD_FILE = small_images.to_parquet_bytes(small_images.make_table(list(range(10)) * 2, size=(28, 28)))


def entry(split="train", **changes):
    sha256 = hashlib.sha256(GOOD_FILE).hexdigest()
    described = {
        "rfilename": f"{CONFIG}/{split}/0000.parquet",
        "size": len(GOOD_FILE),
        "blobId": "0" * 40,
        "lfs": {"sha256": sha256, "size": len(GOOD_FILE), "pointerSize": 132},
        **changes,
    }
    return {key: value for key, value in described.items() if value is not ...}


def listing(*entries, **changes):
    answer = {"id": NAME, "sha": REVISION, "siblings": [*entries, entry("test")], **changes}
    return {key: value for key, value in answer.items() if value is not ...}


def named(name):
    return listing(entry(rfilename=f"{CONFIG}/train/{name}.parquet"))


def lfs(**changes):
    return listing(entry(lfs=changes))


GOOD_LISTING = listing(entry())

LISTINGS = {
    "no sha": listing(entry(), sha=...),
    "null sha": listing(entry(), sha=None),
    "sha that is a number": listing(entry(), sha=5),
    "sha that leads elsewhere": listing(entry(), sha="../../../etc"),
    "sha with a line break": listing(entry(), sha="a\nb"),
    "no files": listing(entry(), siblings=...),
    "null files": listing(entry(), siblings=None),
    "files that are a word": listing(entry(), siblings="all"),
    "files that are an object": listing(entry(), siblings={"a": 1}),
    "a file that is null": listing(None),
    "a file that is a word": listing("x"),
    "a file that is a list": listing([]),
    "no name": listing(entry(rfilename=...)),
    "null name": listing(entry(rfilename=None)),
    "name that is a number": listing(entry(rfilename=7)),
    "name that is a list": listing(entry(rfilename=["a"])),
    "path instead of name": listing({"path": "x", "size": 1, "oid": None}),
    "name that leads up": named(".."),
    "hidden name": named(".bashrc"),
    "name with a backslash": named("..\\..\\x"),
    "name with a drive": named("C:x"),
    "name of a device": named("NUL"),
    "name with a NUL": named("a\0b"),
    "name with half a character": named("\ud800"),
    "name with escape codes": named("\x1b[2J"),
    "name in another script": named("列車"),
    "name of 5000 letters": named("x" * 5000),
    "configuration that leads up": listing(entry(rfilename="../train/0000.parquet")),
    "split that leads up": listing(entry(rfilename=f"{CONFIG}/../0000.parquet")),
    "absolute name": listing(entry(rfilename="/etc/passwd.parquet")),
    "only other names": listing(entry(rfilename="README.md"), siblings=[entry(rfilename="README.md")]),
    "a name twice": listing(entry(), entry()),
    "names that differ by case": listing(entry(), entry(rfilename=f"{CONFIG}/TRAIN/0000.parquet")),
    "no size": listing(entry(size=...)),
    "null size": listing(entry(size=None)),
    "size that is a word": listing(entry(size="many")),
    "size that is a fraction": listing(entry(size=1.5)),
    "size that is true": listing(entry(size=True)),
    "negative size": listing(entry(size=-1)),
    "size of an exabyte": listing(entry(size=10**18)),
    "size of 4000 digits": listing(entry(size=10**4000)),
    "size of 5000 digits": json.dumps(listing(entry(size=0))).replace('"size": 0', '"size": ' + "9" * 5000).encode(),
    "infinite size": json.dumps(listing(entry(size=float("inf")))).encode(),
    "null oid": lfs(oid=None, size=5),
    "null sha256": lfs(sha256=None),
    "checksum that is a number": lfs(sha256=1),
    "short checksum": lfs(sha256="00"),
    "checksum of another file": lfs(sha256="0" * 64),
    "lfs that is a word": listing(entry(lfs="yes")),
    "lfs that is empty": listing(entry(lfs={})),
    "no checksum at all": listing(entry(lfs=..., blobId=...)),
    "null git id": listing(entry(lfs=None, blobId=None)),
    "an empty answer": b"",
    "an answer that is null": b"null",
    "an answer that is a list": b"[]",
    "an answer that is a number": b"12",
    "an answer that is a word": b'"x"',
    "half an answer": json.dumps(GOOD_LISTING).encode()[:100],
    "a page of HTML": b"<!doctype html><title>Login</title>",
    "bytes that are no text": b"\xff\xfe\x00\x80",
    "JSON nested 100,000 lists deep": b"[" * 100_000,
    "JSON nested 100,000 objects deep": b'{"a":' * 100_000,
    "compressed without being asked": gzip.compress(json.dumps(GOOD_LISTING).encode()),
}
"""What the hub says about the files of a dataset."""


def send(status=200, body=b"", length=..., **headers):
    """A function that answers a request so."""

    def answer(request):
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        if length is not None:
            request.send_header("Content-Length", str(len(body) if length is ... else length))
        request.end_headers()
        request.wfile.write(body)

    return answer


def send_raw(*pieces, pause=0.0, repeat=1):
    """A function that writes these bytes to the connection, whatever HTTP says."""

    def answer(request):
        for piece in (*pieces[:-1], *([pieces[-1]] * repeat)):
            request.wfile.write(piece)
            time.sleep(pause)

    return answer


OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = 1_000_000
ANSWERS = {
    **{f"status {status}": send(status) for status in (204, 304, 400, 401, 402, 404, 410, 418, 451, 500, 503, 599)},
    "a redirect to a file": send(302, Location="file:///etc/passwd"),
    "a redirect to ftp": send(302, Location="ftp://127.0.0.1/x"),
    "a redirect to data": send(302, Location="data:,x"),
    "a redirect to nowhere": send(302),
    "a redirect to an empty address": send(302, Location=""),
    "a redirect to half an address": send(302, Location="http://[::1"),
    "a redirect to no port": send(302, Location="http://127.0.0.1:nine/"),
    "a redirect to a closed port": send(302, Location="http://127.0.0.1:9/x"),
    "a redirect in a circle": lambda request: send(302, Location=request.path)(request),
    "a redirect to ever longer addresses": lambda request: send(302, Location=request.path + "x")(request),
    "a redirect with an endless body": send_raw(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", MEGABYTE, repeat=5000),
    "a link to a file": send(200, b"{}", Link='<file:///etc/passwd>; rel="next"'),
    "nothing at all": send_raw(b""),
    "no HTTP": send_raw(b"SSH-2.0-OpenSSH\r\n"),
    "a status that is no number": send_raw(b"HTTP/1.1 OK fine\r\n\r\n"),
    "a status with escape codes": send_raw(b"HTTP/1.1 404 \x1b[2J" + b"x" * 9000 + b"\r\n\r\n"),
    "a header of 1 MB": send_raw(OK + b"X: ", MEGABYTE, b"\r\n\r\n"),
    "a hundred thousand headers": send_raw(OK, b"X: y\r\n" * 1000, repeat=100),
    "endless informational answers": send_raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, repeat=ENDLESS),
    "an announced body that never comes": send(200, b"", 1000),
    "a body cut short": send(200, b"PAR1", 1000),
    "a length that is a word": send(200, b"{}", "many"),
    "a negative length": send(200, b"{}", -5),
    "a length of 5000 digits": send(200, b"{}", "9" * 5000),
    "a length of an exabyte": send(200, b"{}", 10**18),
    "an endless body": send_raw(OK + b"\r\n", MEGABYTE, repeat=5000),
    "an endless body in chunks": send_raw(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + MEGABYTE + b"\r\n", repeat=5000
    ),
    "endless chunks of a byte": send_raw(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000, repeat=ENDLESS
    ),
    "an endless size of a chunk": send_raw(OK + b"Transfer-Encoding: chunked\r\n\r\n", MEGABYTE, repeat=5000),
    "chunks of a negative size": send_raw(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc"),
    "endless trailers": send_raw(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 1000, repeat=ENDLESS),
    "a gzip bomb": send(200, gzip.compress(MEGABYTE * 100), Content_Encoding="gzip"),
    "another content type": send(200, b"<html>", Content_Type="text/html; charset=nonsense"),
    "busy until a day that is no number": lambda request: send_raw(
        b"HTTP/1.1 503 Busy\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n"
    )(request),
    "a drip": send_raw(OK + b"Content-Length: 100000\r\n\r\n", b" ", pause=0.05, repeat=200),
    "a drip of headers": send_raw(OK + b"X: ", b"y", pause=0.05, repeat=200),
}
"""How a server answers a request, for the list of files or for a file."""


class HostileHub:
    """Answers requests for the list of files by `listing`, those for a file by `file`."""

    def __init__(self) -> None:
        self.listing = send(200, json.dumps(GOOD_LISTING).encode())
        self.file = send(200, GOOD_FILE)
        self.paths: list[str] = []

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.paths.append(self.path)
                self.close_connection = True
                (hub.listing if self.path.startswith("/api/") else hub.file)(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hostile_hub(data, monkeypatch):
    from agscl.data import hub_files

    monkeypatch.setattr(hub_files, "RETRY_DELAY", 0.001)
    for name, value in {
        "RETRY_DELAY": 0.001,
        "TIMEOUT": 1.0,
        "MAX_ANSWER_SECONDS": 1.0,
        "PACE_WINDOW": 0.3,
        "MAX_FAILURES": 2,
    }.items():
        monkeypatch.setattr(limited_http, name, value)
    with HostileHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def check_download(tmp_path, data, capsys):
    """`agscl data get` ends with a sentence, and has written into the data folder alone; returns what it printed."""
    (tmp_path / "data.parquet").write_bytes(b"mine")
    code = cli.main(["data", "get", "mnist"])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "Traceback" not in text
    assert "\x1b[2J" not in text
    assert code == 0 or "FAILED: " in text
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "home", "cache", "data.parquet"}
    assert (tmp_path / "data.parquet").read_bytes() == b"mine"
    assert not list((tmp_path / "home").rglob("*.parquet"))
    assert {path.name for path in data.rglob("*") if path.is_file()} <= {
        *("source.json", ".lock", "train.parquet", "train.parquet.part", "test.parquet", "test.parquet.part")
    } | {f"train-0000{number}-of-00002.parquet" for number in range(2)}
    return code, " ".join(text.split())


def test_there_are_at_least_sixty_kinds_of_answers():
    assert len(LISTINGS) + len(ANSWERS) >= 60


def test_the_same_hub_is_believed_where_it_tells_the_truth(hostile_hub, tmp_path, data, capsys):
    assert check_download(tmp_path, data, capsys)[0] == 0
    assert (data / "mnist" / "train.parquet").read_bytes() == GOOD_FILE


HARMLESS = {"name in another script", "names that differ by case"}


@pytest.mark.parametrize("kind", LISTINGS)
def test_a_list_of_files_that_cannot_be_is_a_sentence(hostile_hub, kind, tmp_path, data, capsys):
    content = LISTINGS[kind]
    hostile_hub.listing = send(200, content if isinstance(content, bytes) else json.dumps(content).encode())
    code, _ = check_download(tmp_path, data, capsys)
    assert (code == 0) == (kind in HARMLESS)


@pytest.mark.parametrize("what", ["listing", "file"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_is_no_answer_is_a_sentence(hostile_hub, kind, what, tmp_path, data, capsys):
    setattr(hostile_hub, what, ANSWERS[kind])
    started = time.monotonic()
    assert check_download(tmp_path, data, capsys)[0] == 1
    assert time.monotonic() - started < 30
    assert not any("passwd" in path for path in hostile_hub.paths)


def test_a_server_that_sends_a_byte_a_second_is_given_up_with_a_reason(hostile_hub, tmp_path, data, capsys):
    hostile_hub.listing = ANSWERS["a drip"]
    assert "less than 1 kB per second" in check_download(tmp_path, data, capsys)[1]
    hostile_hub.listing, hostile_hub.file = (
        HostileHub().listing,
        send_raw(OK + f"Content-Length: {len(GOOD_FILE)}\r\n\r\n".encode(), b" ", pause=0.05, repeat=200),
    )
    assert "less than 1 kB per second" in check_download(tmp_path, data, capsys)[1]


def test_a_list_of_files_that_comes_fast_enough_and_without_end_is_given_up(hostile_hub, tmp_path, data, capsys):
    hostile_hub.listing = send_raw(OK + b"Content-Length: 10000000\r\n\r\n", b" " * 1000, pause=0.05, repeat=200)
    assert "its answer takes longer than 1 seconds" in check_download(tmp_path, data, capsys)[1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("an endless body", "its answer is longer than 1 MB"),
        ("endless informational answers", "the server sends more than the 1048576 bytes that are allowed"),
    ],
)
def test_a_long_list_of_files_is_given_up_by_its_length(hostile_hub, kind, words, tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(limited_http, "MAX_ANSWER", 1 << 20)
    monkeypatch.setattr(limited_http, "MAX_ANSWER_SECONDS", 5.0)
    hostile_hub.listing = ANSWERS[kind]
    assert words in check_download(tmp_path, data, capsys)[1]


def test_a_server_that_closes_after_every_byte_is_given_up(hostile_hub, tmp_path):
    (file,) = list_parquet_files(NAME)[1][CONFIG]["train"]
    hostile_hub.paths.clear()

    def send_byte(request):
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        send(206 if start else 200, b"P", len(GOOD_FILE) - start)(request)

    hostile_hub.file = send_byte
    with pytest.raises(DataError, match="closed early"):
        download_file(file, tmp_path / "file")
    assert len(hostile_hub.paths) < 10


def test_links_in_a_data_folder_are_not_followed_when_it_is_written(hostile_hub, tmp_path, data, capsys):
    folder = data / "mnist"
    folder.mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("train.parquet.part", "test.parquet.part", "source.json.tmp", "source.json", "test.parquet"):
        (folder / name).symlink_to(mine if name != "test.parquet" else tmp_path / "missing")
    assert cli.main(["data", "get", "mnist"]) == 0
    assert mine.read_text() == "mine"
    assert not (tmp_path / "missing").exists()
    assert (folder / "train.parquet").read_bytes() == (folder / "test.parquet").read_bytes() == GOOD_FILE


def test_a_lock_that_is_a_link_is_not_followed(hostile_hub, tmp_path, data, capsys):
    (data / "mnist").mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (data / "mnist" / ".lock").symlink_to(tmp_path / "mine")
    cli.main(["data", "get", "mnist"])
    assert "Traceback" not in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def wrong_parquet_files():
    table = small_images.make_table(list(range(10)) * 2)
    pa = small_images.pyarrow
    features = {"info": {"features": {"label": [1, 2], "image": 5}}}
    return {
        "not Parquet": b"x" * 1000,
        "Parquet cut short": small_images.to_parquet_bytes(table)[:-100],
        "no image column": small_images.to_parquet_bytes(pa.table({"label": [1, 2]})),
        "no label column": small_images.to_parquet_bytes(table.drop(["label"])),
        "images that are numbers": small_images.to_parquet_bytes(pa.table({"image": [1, 2], "label": [0, 1]})),
        "images that are null": small_images.to_parquet_bytes(
            pa.table({"image": pa.array([None, None], pa.binary()), "label": [0, 1]})
        ),
        "images that are none": small_images.to_parquet_bytes(pa.table({"image": [b"x", b"y"], "label": [0, 1]})),
        "labels that are lists": small_images.to_parquet_bytes(
            table.set_column(1, "label", pa.array([[1]] * len(table)))
        ),
        "no rows": small_images.to_parquet_bytes(table.slice(0, 0)),
        "features that are no features": small_images.to_parquet_bytes(
            table.replace_schema_metadata({"huggingface": json.dumps(features)}).slice(0, 1)
        ),
        "features nested deeply": small_images.to_parquet_bytes(
            table.replace_schema_metadata({"huggingface": "[" * 100_000}).slice(0, 1)
        ),
        "a narrow image": small_images.to_parquet_bytes(
            pa.table({"image": [small_images.encode_image(np.zeros((60_000, 1), np.uint8))] * 4, "label": [0, 1] * 2})
        ),
    }


@pytest.mark.parametrize("kind", list(wrong_parquet_files()))
def test_a_file_with_the_right_checksum_and_wrong_content_is_a_sentence(hostile_hub, kind):
    content = wrong_parquet_files()[kind]
    sha256 = hashlib.sha256(content).hexdigest()
    described = entry(size=len(content), lfs={"sha256": sha256})
    hostile_hub.listing = send(200, json.dumps(listing(siblings=[described])).encode())
    hostile_hub.file = send(200, content)
    with pytest.raises((DataError, ValueError), match=r"\w+ \w+ \w+"):
        tasks.from_hub("some/data", size=224)


def run_limited(program: str, *arguments: str) -> str:
    """Run a program that may take 6 GB and must take less than 1 GB; returns the sentence it ends with."""
    preamble = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))\n"
        "from agscl import tasks\n"
        "from agscl.data.errors import DataError\n"
    )
    # Not ru_maxrss, which a new process takes over from the one that started it.
    ending = "print(next(int(line.split()[1]) // 1024 for line in open('/proc/self/status') if 'VmHWM' in line))"
    command = [sys.executable, "-c", preamble + program + ending, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    *lines, megabytes = finished.stdout.strip().splitlines()
    assert int(megabytes) < 1000
    return "\n".join(lines)


READ = (
    "try:\n  print(len(tasks.from_folder(sys.argv[1], size=int(sys.argv[2]), classes_per_task=2)))\n"
    "except (DataError, ValueError) as error:\n  print(error)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [True, False])
def test_a_small_parquet_file_does_not_fill_the_memory(data, compressed):
    """Long images of one byte repeated: packed by the compressor, or stored once and repeated in every row."""
    pa, parquet = small_images.pyarrow, small_images.parquet
    data.mkdir()
    with parquet.ParquetWriter(
        data / "train.parquet",
        pa.schema({"image": pa.binary(), "label": pa.int64()}),
        compression="zstd",
        use_dictionary=not compressed,
    ) as writer:
        size, count = (1 << 20, 400) if compressed else (30 << 20, 20)
        images = [small_images.encode_image(np.zeros((8, 8), np.uint8)).ljust(size, b"\0")] * count
        writer.write_table(pa.table({"image": images, "label": [0, 1] * (count // 2)}), row_group_size=count)
    assert (data / "train.parquet").stat().st_size < 1_000_000
    assert ("takes" in run_limited(READ, str(data), "8")) == compressed


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(60_000, 1), (1, 60_000), (12_000, 12_000), (8_000, 8_000)])
def test_an_odd_image_does_not_fill_the_memory(data, shape):
    for label in "ab":
        (data / label).mkdir(parents=True)
        for number in range(3):
            (data / label / f"{number}.png").write_bytes(small_images.encode_image(np.zeros(shape, np.uint8)))
    printed = run_limited(READ, str(data), "224")
    assert printed == "1" if shape == (8_000, 8_000) else "cannot be decoded: it " in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ANSWERS if "endless" in kind or "MB" in kind or "gzip" in kind])
@pytest.mark.parametrize("what", ["listing", "file"])
def test_an_endless_answer_does_not_fill_the_memory(hostile_hub, kind, what):
    setattr(hostile_hub, what, ANSWERS[kind])
    program = f"try:\n  tasks.from_hub({NAME!r}, size=8)\nexcept DataError as error:\n  print(error)\n"
    assert run_limited(program)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [b"[],", b"{},", b"1.5,", b'"",'])
def test_a_long_answer_of_small_things_does_not_fill_the_memory(hostile_hub, piece):
    hostile_hub.listing = send(200, b"[" + piece * ((16 << 20) // len(piece) - 2) + b"0]")
    program = f"try:\n  tasks.from_hub({NAME!r}, size=8)\nexcept DataError as error:\n  print(error)\n"
    assert "its answer is a list" in run_limited(program)
