"""What may be downloaded, and how it is verified."""

from __future__ import annotations

import hashlib
import json

import pytest

from agscl.data.errors import DataError
from agscl.data.manifest import Manifest, is_complete, read_manifest, write_manifest
from agscl.data.remote_file import RemoteFile

SHA256 = hashlib.sha256(b"content").hexdigest()
BAD_NAMES = ["../up", "a/b", "/etc/passwd", "..", ".", ".lock", "", "a\\b", "C:x", "a\0b", "line\nbreak"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leads_out_of_its_folder_is_refused(name):
    with pytest.raises(ValueError, match="is not a plain file name"):
        RemoteFile("http://somewhere/x", name, SHA256)


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "00"},
        {"digest": None},
        {"digest": SHA256.upper()},
        {"algorithm": "crc32"},
        {"algorithm": "md5"},
        {"size": -1},
        {"size": 1.5},
        {"size": "9"},
        {"size": True},
    ],
)
def test_a_checksum_or_size_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"checksum|is not a file size"):
        RemoteFile(**{"url": "http://somewhere/x", "file": "x", "digest": SHA256, **wrong})


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "git"])
def test_content_is_compared_by_checksum_and_size(tmp_path, algorithm):
    digests = {
        "sha256": SHA256,
        "md5": hashlib.md5(b"content").hexdigest(),
        "git": hashlib.sha1(b"blob 7\0content").hexdigest(),
    }
    (tmp_path / "x").write_bytes(b"content")
    assert RemoteFile("", "x", digests[algorithm], algorithm, 7).matches(tmp_path / "x")
    assert not RemoteFile("", "x", digests[algorithm], algorithm, 8).matches(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"CONTENT")
    assert not RemoteFile("", "x", digests[algorithm], algorithm).matches(tmp_path / "x")


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = Manifest("me/things@1", [RemoteFile("http://somewhere/x", "x", SHA256, size=7)])
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert json.loads((tmp_path / "source.json").read_text()) == {
        "from": "me/things@1",
        "files": [
            {"url": "http://somewhere/x", "file": "x", "digest": SHA256, "algorithm": "sha256", "size": 7},
        ],
    }
    assert not is_complete(tmp_path)
    (tmp_path / "x").touch()
    assert is_complete(tmp_path)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_manifest_that_names_a_file_elsewhere_is_an_error(tmp_path, name):
    entry = {"url": "http://somewhere/x", "file": name, "digest": SHA256, "algorithm": "sha256", "size": 7}
    (tmp_path / "source.json").write_text(json.dumps({"from": "here", "files": [entry]}))
    with pytest.raises(DataError, match=r"source\.json is damaged: .* is not a plain file name.*Delete it"):
        read_manifest(tmp_path)
