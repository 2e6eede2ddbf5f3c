"""The Hugging Face hub: which files a dataset or a model has there, and their checksums."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from agscl.data.errors import DownloadFailed
from agscl.data.remote import Algorithm, RemoteFile

PARQUET_BRANCH = "refs/convert/parquet"
"""The branch in which the hub stores every dataset as CONFIG/SPLIT/0000.parquet, 0001.parquet ..."""
ATTEMPTS = 3
RETRY_DELAY = 1.0
"""Seconds before the second attempt; doubled before the third."""
TIMEOUT = 30.0
SHA256_DIGITS, GIT_DIGITS = 64, 40

T = TypeVar("T")


def hub_endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, or https://huggingface.co."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise DownloadFailed(f"HF_ENDPOINT must begin with http:// or https://, but it is {endpoint!r}")
    return endpoint


def list_parquet_files(name: str) -> tuple[str, dict[str, dict[str, list[RemoteFile]]]]:
    """The newest revision of a dataset as Parquet, and its files by configuration and split."""
    hub = _import_client()
    api = hub.HfApi(endpoint=hub_endpoint(), library_name="agscl")
    info = _ask(
        name,
        lambda: api.dataset_info(name, revision=PARQUET_BRANCH, files_metadata=True, timeout=TIMEOUT),
        no_revision="the hub has no Parquet files of this dataset",
    )
    files: dict[str, dict[str, list[RemoteFile]]] = {}
    for entry in info.siblings or []:
        parts = entry.rfilename.split("/")
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            config, split, file_name = parts
            url = hub.hf_hub_url(name, entry.rfilename, repo_type="dataset", revision=info.sha, endpoint=hub_endpoint())
            try:
                if entry.lfs is None:  # small: stored by git itself
                    file = RemoteFile(url, file_name, entry.blob_id, "git", entry.size)
                else:
                    file = RemoteFile(url, file_name, entry.lfs.sha256, "sha256", entry.size)
            except ValueError as error:
                raise DownloadFailed(f"{hub_endpoint()} describes a file of {name} wrongly: {error}") from error
            files.setdefault(config, {}).setdefault(split, []).append(file)
    for splits in files.values():
        for shards in splits.values():
            shards.sort(key=lambda shard: shard.file)
    if not files:
        raise DownloadFailed(f"the hub has no Parquet files of {name}: see {hub_endpoint()}/datasets/{name}")
    return info.sha, files


def describe_model_file(repository: str, revision: str, path: str, save_as: str) -> RemoteFile:
    """A file of a model repository with the checksum that the hub states for it."""
    hub = _import_client()
    url = hub.hf_hub_url(repository, path, revision=revision, endpoint=hub_endpoint())
    metadata = _ask(
        url,
        lambda: hub.get_hf_file_metadata(url, timeout=TIMEOUT, endpoint=hub_endpoint()),
        no_revision=f"there is no revision {revision!r}",
    )
    etag = (metadata.etag or "").lower()
    algorithms: dict[int, Algorithm] = {SHA256_DIGITS: "sha256", GIT_DIGITS: "git"}  # large files, small files
    try:
        return RemoteFile(url, save_as, etag, algorithms[len(etag)], metadata.size)
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


def _ask(subject: str, request: Callable[[], T], no_revision: str) -> T:
    """What `request` returns, tried again after a temporary failure; `no_revision` explains a missing revision."""
    for attempt in range(ATTEMPTS):
        try:
            return request()
        except Exception as error:  # the client's versions use different HTTP libraries, each with errors of its own
            status = _status(error)
            if attempt + 1 < ATTEMPTS and status is not None and (status in (408, 429) or status >= 500):
                time.sleep(RETRY_DELAY * 2.0**attempt)
                continue
            reason = _describe_error(error, no_revision)
            raise DownloadFailed(
                f"{subject} was not found on {hub_endpoint()}: {reason}. If the hub cannot be reached from here, set "
                "HF_ENDPOINT to a mirror, or download the files elsewhere and put them into AGSCL_DATA: docs/data.md"
            ) from error
    raise AssertionError("unreachable")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _describe_error(error: Exception, no_revision: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError) or _status(error) == 403:
        return "access is refused: accept the terms on its page, and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return no_revision
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it needs a login: check the name, or set HF_TOKEN"
    if (status := _status(error)) is not None:
        return f"the server answers {status}"
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
