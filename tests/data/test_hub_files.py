"""What the Hugging Face hub says about its files."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from agscl.data import hub_files
from agscl.data.errors import DownloadFailed
from agscl.data.hub_files import describe_model_file, list_parquet_files
from agscl.data.limited_http import download_file
from small_hub import REVISION


def test_files_are_listed_by_configuration_and_split(small_hub):
    small_hub.datasets["some/data"] = {
        f"{config}/{split}/{part:04d}.parquet": f"{config}{split}{part}".encode()
        for config in ("small", "large")
        for split in ("train", "test")
        for part in reversed(range(2))
    }
    revision, files = list_parquet_files("some/data")
    assert revision == REVISION
    assert {config: list(splits) for config, splits in files.items()} == {
        "small": ["train", "test"],
        "large": ["train", "test"],
    }
    first, second = files["large"]["test"]
    assert (first.file, second.file) == ("0000.parquet", "0001.parquet")
    assert first.digest == hashlib.sha256(b"largetest0").hexdigest()
    assert first.size == 10
    assert first.url == f"{small_hub.url}/datasets/some/data/resolve/{REVISION}/large/test/0000.parquet"


def test_a_small_file_is_verified_by_its_git_object_id(small_hub, tmp_path):
    small_hub.datasets["some/data"] = {"default/train/0000.parquet": b"small"}
    small_hub.stored_in_git.add("default/train/0000.parquet")
    (file,) = list_parquet_files("some/data")[1]["default"]["train"]
    assert file.algorithm == "git"
    download_file(file, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"small"
    small_hub.wrong_content = b"other"
    with pytest.raises(DownloadFailed, match="checksum mismatch"):
        download_file(file, tmp_path / "again")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rfilename": "default/train/..\\x.parquet"},
        {"rfilename": "../train/0000.parquet"},
        {"rfilename": "default/../0000.parquet"},
        {"size": -1},
        {"lfs": {"sha256": "00", "size": 5}},
    ],
)
def test_a_listing_that_cannot_be_is_refused(small_hub, wrong):
    small_hub.datasets["some/data"] = {}
    entry = {"rfilename": "default/train/0000.parquet", "size": 5, "blobId": "0" * 40, **wrong}
    if "lfs" in wrong:
        entry["lfs"] = {"pointerSize": 1, **wrong["lfs"]}
    small_hub.siblings = [entry]
    with pytest.raises(DownloadFailed, match="describes a file of some/data wrongly"):
        list_parquet_files("some/data")


def test_an_unknown_dataset_an_empty_one_and_an_unreachable_hub_say_so(small_hub, monkeypatch):
    with pytest.raises(DownloadFailed, match="no such repository, or it needs a login"):
        list_parquet_files("no/such")
    small_hub.datasets["some/data"] = {}
    with pytest.raises(DownloadFailed, match="the hub has no Parquet files of some/data"):
        list_parquet_files("some/data")
    with pytest.raises(DownloadFailed, match=r"\.\./\.\. was not found"):
        list_parquet_files("../..")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9: .*refused.* set HF_ENDPOINT to a mirror"):
        list_parquet_files("some/data")
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    with pytest.raises(DownloadFailed, match="HF_ENDPOINT must begin with http:// or https://, but it is 'nonsense'"):
        list_parquet_files("some/data")


def test_a_busy_hub_is_asked_again_and_a_refusal_explained(small_hub):
    small_hub.datasets["some/data"] = {"default/train/0000.parquet": b"small"}
    small_hub.listing_statuses[:] = [503, 429]
    assert list_parquet_files("some/data")[0] == REVISION
    small_hub.listing_statuses[:] = [500] * 3
    with pytest.raises(DownloadFailed, match="the server answers 500"):
        list_parquet_files("some/data")
    small_hub.listing_statuses[:] = [403]
    with pytest.raises(DownloadFailed, match="accept the terms on its page, and set HF_TOKEN"):
        list_parquet_files("some/data")


def test_a_model_file_comes_with_the_checksum_that_the_hub_states(small_hub):
    small_hub.models["me/nets"] = {"deep/a.safetensors": b"weights"}
    file = describe_model_file("me/nets", "v1", "deep/a.safetensors", "here")
    assert (file.file, file.size, file.digest) == ("here", 7, hashlib.sha256(b"weights").hexdigest())
    assert file.url == f"{small_hub.url}/me/nets/resolve/v1/deep/a.safetensors"
    small_hub.checksum = ""
    with pytest.raises(DownloadFailed, match="the hub states no checksum for"):
        describe_model_file("me/nets", "v1", "deep/a.safetensors", "here")


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r"need huggingface_hub: pip install 'agscl\[data\]'"):
        hub_files.list_parquet_files("some/data")


def test_tasks_and_networks_load_without_the_client():
    program = (
        "import sys; from agscl import tasks, networks; tasks.load('digits', seed=0); "
        "assert 'huggingface_hub' not in sys.modules; assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
