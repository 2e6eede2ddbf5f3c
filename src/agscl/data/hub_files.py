"""The Hugging Face hub: which files a dataset or a model has there, and their checksums.

The hub's own client says who the user is (`HF_TOKEN`, or a login). Requests are made by `agscl.data.limited_http`: the
client reads answers of any length and believes what they contain.
"""

from __future__ import annotations

import itertools
import os
import re
import time
import urllib.error
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from agscl.data.errors import DownloadFailed
from agscl.data.limited_http import REQUEST_ERRORS, describe_error, fetch_headers, fetch_json, make_printable
from agscl.data.remote_file import Algorithm, RemoteFile, check_file_name, parse_size

PARQUET_BRANCH = "refs/convert/parquet"
"""The branch in which the hub stores every dataset as CONFIG/SPLIT/0000.parquet, 0001.parquet ..."""
ATTEMPTS = 3
RETRY_DELAY = 1.0
"""Seconds before the second attempt; doubled before the third."""
SHA256_DIGITS, GIT_DIGITS = 64, 40
REPOSITORY = re.compile(r"[\w.-]{1,100}(/[\w.-]{1,100})?", re.ASCII)

T = TypeVar("T")


def hub_endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, or https://huggingface.co."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise DownloadFailed(f"HF_ENDPOINT must begin with http:// or https://, but it is {endpoint!r}")
    return endpoint


def list_parquet_files(name: str) -> tuple[str, dict[str, dict[str, list[RemoteFile]]]]:
    """The newest revision of a dataset as Parquet, and its files by configuration and split."""
    url = f"{hub_endpoint()}/api/datasets/{quote(name)}/revision/{quote(PARQUET_BRANCH, safe='')}?blobs=True"
    headers = request_headers(url)
    answer = _ask(
        name,
        name,
        lambda: fetch_json(url, headers),
        no_revision="the hub has no Parquet files of this dataset",
    )
    try:
        revision, files = _read_listing(name, answer)
    except ValueError as error:
        raise DownloadFailed(f"{hub_endpoint()} describes a file of {name} wrongly: {error}") from error
    if not files:
        raise DownloadFailed(f"the hub has no Parquet files of {name}: see {hub_endpoint()}/datasets/{name}")
    return revision, files


def _read_listing(name: str, answer: Any) -> tuple[str, dict[str, dict[str, list[RemoteFile]]]]:
    """Revision and files in the hub's answer; raises ValueError where something is missing or of a wrong type."""
    if not isinstance(answer, dict):
        raise ValueError(f"its answer is a {type(answer).__name__}, not an object")
    revision, entries = answer.get("sha"), answer.get("siblings")
    if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40,64}", revision):
        raise ValueError(f"its revision (sha) is {_quote(revision)}")
    if entries is None:
        return revision, {}
    if not isinstance(entries, list):
        raise ValueError(f"its list of files (siblings) is a {type(entries).__name__}")
    files: dict[str, dict[str, list[RemoteFile]]] = {}
    for entry in entries:
        path = entry.get("rfilename") if isinstance(entry, dict) else None
        if not isinstance(path, str):
            raise ValueError(f"the name of a file (rfilename) is {_quote(path)}")
        parts = path.split("/")
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            for part in parts:
                check_file_name(part)
            config, split, _ = parts
            url = f"{hub_endpoint()}/datasets/{name}/resolve/{revision}/{quote(path)}"
            files.setdefault(config, {}).setdefault(split, []).append(_read_entry(entry, url, parts[2]))
    for splits in files.values():
        for shards in splits.values():
            shards.sort(key=lambda shard: shard.file)
            for shard, following in itertools.pairwise(shards):
                if shard.file == following.file:
                    raise ValueError(f"{shard.file!r} is listed twice")
    return revision, files


def _read_entry(entry: dict[str, Any], url: str, file_name: str) -> RemoteFile:
    lfs, size = entry.get("lfs"), entry.get("size")
    if size is None:
        raise ValueError(f"{file_name!r} has no size")
    if lfs is None:  # small: stored by git itself
        return RemoteFile(url, file_name, entry.get("blobId"), "git", size)  # type: ignore[arg-type]  # it checks
    if not isinstance(lfs, dict):
        raise ValueError(f"the checksum of {file_name!r} (lfs) is {_quote(lfs)}")
    return RemoteFile(url, file_name, lfs.get("sha256", lfs.get("oid")), "sha256", size)  # type: ignore[arg-type]


def _quote(value: object) -> str:
    return "missing" if value is None else make_printable(repr(value), 100)


def describe_model_file(repository: str, revision: str, path: str, save_as: str) -> RemoteFile:
    """A file of a model repository with the checksum that the hub states for it."""
    url = f"{hub_endpoint()}/{repository}/resolve/{quote(revision, safe='')}/{quote(path)}"
    headers = request_headers(url)
    status, answer = _ask(
        url,
        repository,
        lambda: fetch_headers(url, headers),
        no_revision=f"there is no revision {revision!r}",
    )
    etag = (answer.get("X-Linked-Etag") or answer.get("ETag") or "").removeprefix("W/").strip('"').lower()
    length = answer.get("X-Linked-Size") or (None if status >= 300 else answer.get("Content-Length"))
    algorithms: dict[int, Algorithm] = {SHA256_DIGITS: "sha256", GIT_DIGITS: "git"}  # large files, small files
    try:
        check_file_name(save_as)
        size = None if length is None else parse_size(length)
    except ValueError as error:
        raise DownloadFailed(f"{url} cannot be downloaded: {error}") from error
    try:
        return RemoteFile(url, save_as, etag, algorithms[len(etag)], size)
    except (KeyError, ValueError) as error:
        raise DownloadFailed(
            f"the hub states no checksum for {url}, so it cannot be verified. Download it yourself and give the path "
            "of the file"
        ) from error


def request_headers(url: str) -> dict[str, str]:
    """The headers that let this user read `url`, the token among them; none where `url` is not on the hub."""
    if not url.startswith(hub_endpoint() + "/"):
        return {}
    headers: dict[str, str] = _import_client().utils.build_hf_headers(library_name="agscl")
    return headers


def _import_client() -> Any:
    try:
        import huggingface_hub.utils  # slow, so only when it is needed
    except ImportError as error:
        raise DownloadFailed(
            "downloads from the Hugging Face hub need huggingface_hub: pip install 'agscl[data]'"
        ) from error
    return huggingface_hub


def _ask(subject: str, repository: str, request: Callable[[], T], no_revision: str) -> T:
    """What `request` returns, tried again after a temporary failure; `no_revision` explains a missing revision."""
    for attempt in range(ATTEMPTS):
        try:
            if not REPOSITORY.fullmatch(repository) or ".." in repository:
                raise ValueError("this is not the name of a repository")
            if _import_client().constants.HF_HUB_OFFLINE:
                raise ConnectionError("HF_HUB_OFFLINE is set")
            return request()
        except REQUEST_ERRORS as error:
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            if attempt + 1 < ATTEMPTS and status is not None and (status in (408, 429) or status >= 500):
                time.sleep(RETRY_DELAY * 2.0**attempt)
                continue
            reason = _describe_error(error, no_revision)
            raise DownloadFailed(
                f"{subject} was not found on {hub_endpoint()}: {reason}. If the hub cannot be reached from here, set "
                "HF_ENDPOINT to a mirror, or download the files elsewhere and put them into AGSCL_DATA: docs/data.md"
            ) from error
    raise AssertionError("unreachable")


def _describe_error(error: BaseException, no_revision: str) -> str:
    if not isinstance(error, urllib.error.HTTPError) or 300 <= error.code < 400:
        return describe_error(error).rstrip(".")
    error.close()
    code = error.headers.get("X-Error-Code")
    if code == "GatedRepo" or error.code == 403:
        return "access is refused: accept the terms on its page, and set HF_TOKEN"
    if code == "RevisionNotFound":
        return no_revision
    if code == "RepoNotFound" or error.code == 401:
        return "there is no such repository, or it needs a login: check the name, or set HF_TOKEN"
    return f"the server answers {error.code}"
