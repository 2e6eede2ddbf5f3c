"""Download a dataset into its folder, from wherever the catalogue or the user says."""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agscl.data.catalogue import DATASETS, ArchiveSource, HubSource
from agscl.data.datasets import data_folders, find_dataset
from agscl.data.encoded_images import TEST_SPLITS
from agscl.data.errors import DataError, DownloadFailed
from agscl.data.hub_files import list_parquet_files, request_headers
from agscl.data.limited_http import download_file
from agscl.data.manifest import Manifest, is_complete, read_manifest, write_manifest
from agscl.data.progress_line import MakeProgress, ProgressLine
from agscl.data.remote_file import RemoteFile, check_file_name, compute_digest
from agscl.system.files import lock_file, open_for_writing


def download_dataset(name: str, make_progress: MakeProgress = ProgressLine) -> Path:
    """Download a dataset of the catalogue, unless it is there already, and return its folder."""
    source = DATASETS[name].source
    if isinstance(source, str):
        raise DataError(f"{name} cannot be downloaded: {source}")
    existing = find_dataset(name)
    if existing is not None:
        return existing
    folder, convert = data_folders()[0] / name, DATASETS[name].convert
    with lock_download_folder(folder):
        if find_dataset(name) is None:  # else another process downloaded it meanwhile
            download_folder = folder if convert is None else folder / f"{name}-raw"
            download_files(download_folder, lambda: _list_files(source), make_progress)
            if convert is not None:
                _convert_files(download_folder, folder, convert)
    return folder


def download_hub_dataset(name: str, config: str | None = None, test: str | None = None) -> Path:
    """Download the training and test split of any dataset on the hub, unless they are there, and return their folder.

    `config` chooses one of several configurations, `test` the split to test on.
    """
    try:
        for part in (*name.split("/"), *(each for each in (config, test) if each is not None)):
            check_file_name(part)
    except ValueError as error:
        raise DataError(f"this is not the name of a dataset on the hub: {error}") from error
    folder_name = "--".join([*name.split("/"), *(each for each in (config, test) if each)])
    candidates = [folder / "hub" / folder_name for folder in data_folders()]
    folder = next((each for each in candidates if is_complete(each)), None)
    if folder is None:
        folder = candidates[0]
        with lock_download_folder(folder):
            download_files(folder, lambda: _list_train_and_test_files(name, config, test))
    return folder


def download_files(
    folder: Path, list_files: Callable[[], Manifest], make_progress: MakeProgress = ProgressLine
) -> None:
    """Download the files that `list_files` names into `folder`, which must be locked.

    The list is stored beside them. If an earlier download is unfinished, a new list is made, since the files may have
    been moved or replaced; those that are still wanted are not downloaded again.
    """
    folder.mkdir(exist_ok=True)
    if is_complete(folder):
        return
    earlier = read_manifest(folder)
    try:
        manifest = list_files()
    except DownloadFailed:
        if earlier is None:
            raise
        manifest = earlier  # the files themselves may be available all the same
    wanted = {file.file: file.digest for file in manifest.files}
    for file in earlier.files if earlier else []:
        if wanted.get(file.file) != file.digest:
            for outdated in (folder / file.file, folder / f"{file.file}.part"):
                outdated.unlink(missing_ok=True)
    write_manifest(folder, manifest)
    missing = [file for file in manifest.files if not (folder / file.file).is_file()]
    needed = sum(file.size or 0 for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free + sum(part.stat().st_size for part in folder.glob("*.part")):
        raise DownloadFailed(f"{folder} has {free / 1e6:.0f} MB free, but the download takes {needed / 1e6:.0f} MB")
    for file in missing:
        download_file(file, folder / file.file, headers=request_headers(file.url), make_progress=make_progress)


@contextlib.contextmanager
def lock_download_folder(folder: Path) -> Iterator[None]:
    """Create `folder` if necessary and hold a lock on it, waiting for other processes. Left empty, it is removed."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_file(folder / ".lock", wait=True))
                break
            except FileNotFoundError:  # the process that held the lock removed the folder
                continue
            except OSError as error:
                raise DownloadFailed(
                    f"{folder} cannot be written: {error.strerror}. Unset AGSCL_DATA for this command to download to "
                    "~/.cache/agscl/data, which is searched too"
                ) from error
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [".lock"]:
                with contextlib.suppress(OSError):
                    (folder / ".lock").unlink()
                    folder.rmdir()


def _list_files(source: HubSource | tuple[ArchiveSource, ...]) -> Manifest:
    if isinstance(source, tuple):
        files = [RemoteFile(each.url, each.url.rsplit("/", 1)[1], each.md5, "md5") for each in source]
        return Manifest(source[0].url, files)
    revision, available = list_parquet_files(source.name)
    files = []
    for split, their_split in source.splits.items():
        try:
            files += _rename_shards(split, available[source.config][their_split])
        except KeyError as error:
            names = ", ".join(f"{config}/{each}" for config, splits in available.items() for each in splits)
            raise DownloadFailed(
                f"{source} no longer has {source.config}/{their_split}; it has: {names}. docs/data.md says how to put "
                "files into AGSCL_DATA yourself"
            ) from error
    return Manifest(f"{source.name}@{revision}", files)


def _list_train_and_test_files(name: str, config: str | None, test: str | None) -> Manifest:
    revision, available = list_parquet_files(name)
    config = config or (next(iter(available)) if len(available) == 1 else "default")
    if config not in available:
        raise DownloadFailed(f"choose a configuration of {name} with config=..., one of: {', '.join(available)}")
    splits = available[config]
    train = next(iter(splits)) if len(splits) == 1 else "train"
    for split in (train,) if test is None else (train, test):
        if split not in splits:
            raise DownloadFailed(f"{name} has no split called {split}; it has: {', '.join(splits)}")
    test = test or next((split for split in TEST_SPLITS if split in splits and split != train), None)
    files = _rename_shards("train", splits[train]) + (_rename_shards("test", splits[test]) if test else [])
    return Manifest(f"{name}@{revision}", files)


def _rename_shards(split: str, files: list[RemoteFile]) -> list[RemoteFile]:
    """Give the files of a split the names that `find_split` looks for."""
    if len(files) == 1:
        return [replace(files[0], file=f"{split}.parquet")]
    return [
        replace(file, file=f"{split}-{number:05d}-of-{len(files):05d}.parquet") for number, file in enumerate(files)
    ]


def _convert_files(source: Path, folder: Path, convert: Callable[[Path], dict[str, Any]]) -> None:
    """Convert the downloaded files in `source` to the Parquet files of `folder`, then delete `source`."""
    from pyarrow import parquet

    downloaded = read_manifest(source)
    origin = downloaded.origin if downloaded else ""
    files = []
    try:
        for split, table in convert(source).items():
            path = folder / f"{split}.parquet"
            temporary = path.with_name(path.name + ".tmp")
            with open_for_writing(temporary) as file:
                parquet.write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            files.append(RemoteFile(origin, path.name, compute_digest(path), size=path.stat().st_size))
        write_manifest(folder, Manifest(origin, files))
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{source} could not be converted to Parquet files in {folder}: {error}") from error
    shutil.rmtree(source)
