"""The catalogue's datasets on disk: find them, open a split, load its images and labels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from agscl.data.cache import cached_array
from agscl.data.catalogue import DATASETS
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.data.encoded_images import EncodedImages, find_split, read_labels
from agscl.data.errors import DataError
from agscl.data.examples import Examples


def data_folders() -> list[Path]:
    """Where datasets are looked for: `AGSCL_DATA` if it is set, then ~/.cache/agscl/data."""
    own = os.environ.get("AGSCL_DATA")
    return [*([Path(own).expanduser().absolute()] if own else []), Path("~/.cache/agscl/data").expanduser()]


def find_dataset(name: str) -> Path | None:
    """The first folder that contains all splits of a dataset, if there is one."""
    for folder in data_folders():
        with contextlib.suppress(DataError):  # some of its files are missing
            if all(find_split(name, folder / name, split) is not None for split in DATASETS[name].splits):
                return folder / name
    return None


def open_split(name: str, split: str) -> EncodedImages:
    """The encoded images of a split; raises DataError where the dataset is missing."""
    folder = find_dataset(name)
    images = None if folder is None else find_split(name, folder, split)
    if images is not None:
        return images
    _raise_if_incomplete(name)
    files = " and ".join(f"{each}.parquet" for each in DATASETS[name].splits)
    searched = " and in ".join(str(folder / name) for folder in data_folders())
    source = DATASETS[name].source
    remedy = (
        f"It cannot be downloaded: {source}" if isinstance(source, str) else f"Download it with: agscl data get {name}"
    )
    raise DataError(f"{name} is missing: searched for {files} in {searched}{_hint_if_unset()}. {remedy}")


def require_datasets(names: Sequence[str]) -> None:
    """Raise DataError where several datasets are missing, and name all of them."""
    missing = [name for name in names if find_dataset(name) is None]
    if len(missing) < 2:
        return  # `open_split` says more about a single one
    for name in missing:
        _raise_if_incomplete(name)
    searched = " and ".join(str(folder) for folder in data_folders())
    sources = {name: DATASETS[name].source for name in missing}
    downloadable = [name for name, source in sources.items() if not isinstance(source, str)]
    remedies = [f"{name} cannot be downloaded: {source}" for name, source in sources.items() if isinstance(source, str)]
    if downloadable:
        which = "them" if downloadable == missing else "the others"
        remedies.append(f"Download {which} with: agscl data get {' '.join(downloadable)}")
    raise DataError(
        f"{', '.join(missing)} are missing: searched in {searched}{_hint_if_unset()}. {'. '.join(remedies)}"
    )


def _raise_if_incomplete(name: str) -> None:
    """Raise DataError where a part of a dataset is there, but not all of it."""
    for folder in data_folders():
        for split in DATASETS[name].splits:
            find_split(name, folder / name, split)


def _hint_if_unset() -> str:
    return "" if os.environ.get("AGSCL_DATA") else " (AGSCL_DATA, a folder for data of your choice, is not set)"


def load_examples(name: str, split: str, decoder: ImageDecoder) -> Examples:
    """Load a split of a dataset: its decoded images and its labels."""
    images, classes = open_split(name, split), DATASETS[name].classes
    # Labels are cached too: reading them means importing pyarrow, which takes longer than all the rest.
    labels = cached_array(
        f"{name}-labels",
        (images.identity, classes),
        images.describe_image_files(),
        lambda: read_labels(images, classes),
        warn=False,
    )
    return Examples(decode_images(images, decoder), labels)
