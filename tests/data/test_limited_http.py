"""Downloading one file."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from agscl.data import limited_http
from agscl.data.errors import DownloadFailed
from agscl.data.hub_files import list_parquet_files, request_headers
from agscl.data.limited_http import download_file
from agscl.data.progress_line import ProgressLine


@pytest.fixture
def content():
    return np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def remote(small_hub, content):
    small_hub.datasets["some/data"] = {"default/train/0000.parquet": content}
    _, files = list_parquet_files("some/data")
    small_hub.requests.clear()
    return files["default"]["train"][0]


def test_a_file_arrives_complete(remote, content, tmp_path):
    amounts = []

    class Counter(ProgressLine):
        def advance(self, amount):
            amounts.append(amount)

    download_file(remote, tmp_path / "file", make_progress=Counter)
    assert (tmp_path / "file").read_bytes() == content
    assert sum(amounts) == len(content)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]


def test_a_broken_transfer_is_resumed_where_it_stopped(small_hub, remote, content, tmp_path):
    small_hub.cut_after[:] = [1_000_000, 500_000]
    download_file(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert small_hub.transfers() == [None, "bytes=1000000-", "bytes=1500000-"]


def test_the_part_of_an_earlier_process_is_resumed(small_hub, remote, content, tmp_path):
    (tmp_path / "file.part").write_bytes(content[:2_999_000])
    download_file(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert small_hub.transfers() == ["bytes=2999000-"]
    (tmp_path / "again.part").write_bytes(content)
    download_file(remote, tmp_path / "again")
    assert len(small_hub.transfers()) == 1


@pytest.mark.parametrize("part", [b"other" * 1000, b"x" * 4_000_000])
@pytest.mark.parametrize("known_size", [True, False])
def test_the_part_of_another_file_is_thrown_away(remote, content, tmp_path, part, known_size):
    (tmp_path / "file.part").write_bytes(part)
    download_file(remote if known_size else replace(remote, size=None), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_a_server_without_ranges_sends_the_file_from_its_start(small_hub, remote, content, tmp_path):
    small_hub.has_ranges = False
    small_hub.cut_after[:] = [1_000_000]
    download_file(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_busy_servers_are_asked_again(small_hub, remote, content, tmp_path):
    small_hub.statuses[:] = [503, 429, 500]
    download_file(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_a_server_that_stays_broken_is_given_up_and_the_part_kept(small_hub, remote, content, tmp_path):
    small_hub.cut_after[:] = [1_000_000]
    first = threading.Event()
    send_file = small_hub._send_file

    def send_once(request, wanted):
        if first.is_set():
            small_hub.statuses[:] = [503]
        first.set()
        return send_file(request, wanted)

    small_hub._send_file = send_once
    with pytest.raises(DownloadFailed, match=r"answers 503 .* 1\.0 MB of it are stored: run the same command again"):
        download_file(remote, tmp_path / "file")
    assert (tmp_path / "file.part").read_bytes() == content[:1_000_000]
    assert not (tmp_path / "file").exists()


def test_content_with_a_wrong_checksum_is_never_kept(small_hub, remote, content, tmp_path):
    small_hub.wrong_content = bytes(len(content))
    with pytest.raises(DownloadFailed, match=f"checksum mismatch for .*: expected sha256 {remote.digest}, got "):
        download_file(remote, tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []
    assert len(small_hub.transfers()) == 2


@pytest.mark.parametrize("announces_length", [True, False])
def test_no_more_than_the_announced_size_is_downloaded(small_hub, remote, content, tmp_path, announces_length):
    small_hub.wrong_content = content + content
    small_hub.announces_length = announces_length
    with pytest.raises(DownloadFailed, match=r"was not downloaded: the server (announces 6000000|sends more than)"):
        download_file(remote, tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []
    assert len(small_hub.transfers()) == 1


def test_a_size_that_nobody_announces_is_limited_too(small_hub, remote, tmp_path, monkeypatch):
    monkeypatch.setattr(limited_http, "MAX_UNANNOUNCED_SIZE", 2_000_000)
    small_hub.announces_length = False
    with pytest.raises(DownloadFailed, match="sends more than the expected 2000000 bytes"):
        download_file(replace(remote, size=None), tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "/etc/passwd", "me/things@1"])
def test_only_http_addresses_are_opened_also_after_a_redirect(small_hub, remote, tmp_path, url):
    with pytest.raises(DownloadFailed, match="is not an http or https address"):
        download_file(replace(remote, url=url), tmp_path / "file")
    if ":" in url:
        small_hub.redirect_to = url
        with pytest.raises(DownloadFailed, match=r"could not be downloaded"):
            download_file(remote, tmp_path / "file")
        assert len(small_hub.requests) == 1
    assert list(tmp_path.glob("file*")) == []


def test_a_refused_file_is_not_requested_again(small_hub, remote, tmp_path):
    small_hub.statuses[:] = [403, 403]
    with pytest.raises(DownloadFailed, match="HF_TOKEN"):
        download_file(remote, tmp_path / "file")
    assert len(small_hub.transfers()) == 1


def test_the_token_is_sent_to_the_hub_alone(small_hub, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert request_headers("http://somewhere.else/file") == {}
    download_file(remote, tmp_path / "file", headers=request_headers(remote.url))
    (_, _, to_hub), (path, _, to_store) = small_hub.requests
    assert to_hub == "Bearer secret"
    assert path.startswith("/cdn/")
    assert to_store is None


def test_the_token_stays_when_the_hub_redirects_to_itself(small_hub, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    small_hub.renamed["old/data"] = "some/data"
    renamed = replace(remote, url=remote.url.replace("some/data", "old/data"))
    download_file(renamed, tmp_path / "file", headers=request_headers(renamed.url))
    assert [token for _, _, token in small_hub.requests] == ["Bearer secret", "Bearer secret", None]


def test_a_full_disk_is_not_tried_again(small_hub, remote, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(limited_http.os, "fsync", fail)
    with pytest.raises(DownloadFailed, match="No space left on device"):
        download_file(remote, tmp_path / "file")
    assert len(small_hub.transfers()) == 1
