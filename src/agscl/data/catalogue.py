"""The datasets that task sequences are made of: where they are, or where they can be had."""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agscl.data import convert
from agscl.data.cache import cached
from agscl.data.download import DownloadFailed, Remote, digest, get, held, keep_plan, matches, on_the_hub, read_plan
from agscl.data.examples import Array, DataMissing, Examples
from agscl.data.images import LABEL_COLUMNS, Form, Shards, Source, decoded, find, in_order, unreadable
from agscl.data.progress import Bar


@dataclass(frozen=True)
class Hub:
    """A dataset on the Hugging Face hub."""

    name: str
    config: str = "default"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """Our split: theirs."""

    def __str__(self) -> str:
        return f"{self.name} on the Hugging Face hub"


@dataclass(frozen=True)
class Archive:
    """A file of pictures."""

    url: str
    md5: str


@dataclass(frozen=True)
class Dataset:
    """A folder of this name, with a Parquet file (or several, or a folder of pictures) for each split."""

    classes: int
    rows: tuple[int, ...]
    """Pictures in all splits together; several numbers where there are several editions."""
    source: Hub | tuple[Archive, ...] | str
    """Where it can be had; a text says why it cannot."""
    megabytes: int
    """What is downloaded, about."""
    splits: tuple[str, ...] = ("train", "test")
    convert: Callable[[Path], dict[str, Any]] | None = None
    """What makes the Parquet files of a folder of files that are not used as they come."""
    labels: tuple[str, ...] = ()
    """The columns that together are the class, where it is more than one."""


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(10, (60_000,), Hub("uoft-cs/cifar10", "plain_text"), 144),
    "cifar100": Dataset(100, (60_000,), Hub("uoft-cs/cifar100", "cifar100"), 143),
    "tinyimagenet32": Dataset(
        100,
        (55_000,),
        Hub("zh-plus/tiny-imagenet", splits={"train": "train", "test": "valid"}),
        161,
        convert=convert.tinyimagenet32,
    ),
    "mnist": Dataset(10, (70_000,), Hub("ylecun/mnist", "mnist"), 18),
    "svhn": Dataset(10, (99_289,), Hub("ufldl-stanford/svhn", "cropped_digits"), 183),
    "fashion_mnist": Dataset(10, (70_000,), Hub("zalando-datasets/fashion_mnist", "fashion_mnist"), 36),
    "signs": Dataset(43, (39_270, 51_839), Hub("tanganke/gtsrb"), 333),
    "facescrub": Dataset(
        100,
        (),
        "its pictures are handed out by its authors, or as a pickle, which is not opened: docs/data.md says what to do",
        0,
    ),
    "notmnist": Dataset(10, (18_724,), Hub("anubhavmaity/notMNIST"), 9),
    "omniglot": Dataset(
        1623,
        (32_460,),
        (
            Archive(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
                "68d2efa1b9178cc56df9314c21c6e718",
            ),
            Archive(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
                "6b91aef0f799c5bb55b94e3f2daec811",
            ),
        ),
        16,
        ("all",),
        convert.omniglot,
        ("alphabet", "character"),
    ),
    "cub200": Dataset(200, (11_788,), Hub("Andron00e/CUB200-custom", splits={"all": "train"}), 1145, ("all",)),
}


def folders() -> list[Path]:
    """Where datasets are looked for: `AGSCL_DATA` where it is set, then ~/.cache/agscl/data."""
    given = os.environ.get("AGSCL_DATA")
    return [*([Path(given).expanduser().absolute()] if given else []), Path("~/.cache/agscl/data").expanduser()]


def folder_of(name: str) -> Path | None:
    """The first folder that holds a dataset whole, if there is one."""
    for folder in folders():
        with contextlib.suppress(DataMissing):  # not all of its files have come
            if all(find(name, folder / name, split) is not None for split in DATASETS[name].splits):
                return folder / name
    return None


def source(name: str, split: str) -> Source:
    """The encoded pictures of a split."""
    folder = folder_of(name)
    found = None if folder is None else find(name, folder, split)
    if found is not None:
        return found
    _complain(name)
    files = " and ".join(f"{each}.parquet" for each in DATASETS[name].splits)
    looked = " and in ".join(str(folder / name) for folder in folders())
    origin = DATASETS[name].source
    way = f"It cannot be downloaded: {origin}" if isinstance(origin, str) else f"Get it with: agscl data get {name}"
    raise DataMissing(f"{name} is not there: looked for {files} in {looked}{_unset()}. {way}")


def need(names: Sequence[str]) -> None:
    """Raise where a dataset is missing, and name all that are."""
    missing = [name for name in names if folder_of(name) is None]
    if len(missing) < 2:
        return  # `source` says more about a single one
    for name in missing:
        _complain(name)
    looked = " and in ".join(str(folder) for folder in folders())
    origins = {name: DATASETS[name].source for name in missing}
    to_be_had = [name for name, origin in origins.items() if not isinstance(origin, str)]
    them = "them" if to_be_had == missing else "the others"
    ways = [f"Get {them} with: agscl data get {' '.join(to_be_had)}"] if to_be_had else []
    ways[:0] = [f"{name} cannot be downloaded: {origin}" for name, origin in origins.items() if isinstance(origin, str)]
    raise DataMissing(f"{', '.join(missing)} are not there: looked in {looked}{_unset()}. {'. '.join(ways)}")


def _complain(name: str) -> None:
    """Raise where something of a dataset is there, but not as it should be."""
    for folder in folders():
        for split in DATASETS[name].splits:
            find(name, folder / name, split)


def _unset() -> str:
    return "" if os.environ.get("AGSCL_DATA") else " (AGSCL_DATA, the folder of your own data, is not set)"


def labels(source: Source, classes: int) -> Array:
    """(pictures,) integers below `classes`."""
    column = source.which(None, LABEL_COLUMNS, "labels", "label") if isinstance(source, Shards) else "label"
    values = source.column(column)
    if values.dtype.kind not in "iu":
        known = in_order(values)
        if len(known) != classes:  # they could not be numbered alike in all splits
            raise DataMissing(f"{source} has {len(known)} classes; {source.name} has {classes}")
        number = {value: place for place, value in enumerate(known)}
        values = np.array([number[value] for value in values.tolist()])
    if len(values) and not 0 <= values.min() <= values.max() < classes:
        raise DataMissing(
            f"{source} has labels from {values.min()} to {values.max()}; {source.name} has them from 0 to {classes - 1}"
        )
    return values.astype(np.int64)


def examples(name: str, split: str, form: Form) -> Examples:
    """The decoded pictures and the labels of a split."""
    found, classes = source(name, split), DATASETS[name].classes
    of = (found.identity, classes), found.state()
    # Labels too: to read them means to import pyarrow, which takes longer than all the rest.
    numbers = cached(f"{name}-labels", *of, lambda: labels(found, classes), warn=False)
    return Examples(decoded(found, form), numbers)


def obtain(name: str, bar: Callable[[str, int], Any] = Bar) -> Path:
    """Download a dataset, unless it is there, and return its folder."""
    origin = DATASETS[name].source
    if isinstance(origin, str):
        raise DataMissing(f"{name} cannot be downloaded: {origin}")
    found = folder_of(name)
    if found is not None:
        return found
    folder, made_by = folders()[0] / name, DATASETS[name].convert
    with held(folder):
        if folder_of(name) is None:  # no other process got it meanwhile
            raw = folder if made_by is None else folder / f"{name}-raw"
            get(raw, lambda: _planned(origin), bar)
            if made_by is not None:
                _convert(raw, folder, made_by)
    return folder


@dataclass(frozen=True)
class Checked:
    """What was found of a dataset, and what is wrong with it."""

    counts: Mapping[str, Array]
    """Pictures of each class, by split."""
    wrong: list[str]


def check(name: str) -> Checked:
    """Read a dataset whole: are all pictures and classes there, and the files those that were announced?"""
    dataset, folder = DATASETS[name], folder_of(name)
    counts: dict[str, Array] = {}
    wrong: list[str] = []
    try:
        for split in dataset.splits:
            found = source(name, split)
            wrong += unreadable(found, Form(32))
            if dataset.labels:
                _, numbers = np.unique([found.column(each) for each in dataset.labels], axis=1, return_inverse=True)
            else:
                numbers = labels(found, dataset.classes)
            counts[split] = np.bincount(numbers.ravel())
            classes = np.count_nonzero(counts[split])
            if classes != dataset.classes:
                wrong.append(f"{found} has pictures of {classes} classes; expected are {dataset.classes}")
    except DataMissing as error:
        return Checked(counts, [*wrong, str(error)])
    rows = sum(int(each.sum()) for each in counts.values())
    if dataset.rows and rows not in dataset.rows:
        wrong.append(f"there are {rows} pictures; expected are {' or '.join(map(str, dataset.rows))}")
    if folder is not None and (plan := read_plan(folder)):
        for file in plan[1]:
            if (folder / file.file).is_file() and not matches(folder / file.file, file):
                wrong.append(f"{folder / file.file} is not what was announced: remove it, and agscl data get {name}")
    return Checked(counts, wrong)


def _planned(origin: Hub | tuple[Archive, ...]) -> tuple[str, list[Remote]]:
    if isinstance(origin, tuple):
        return origin[0].url, [Remote(each.url, each.url.rsplit("/", 1)[1], each.md5, "md5") for each in origin]
    revision, found = on_the_hub(origin.name)
    files = []
    for ours, theirs in origin.splits.items():
        try:
            files += named(ours, found[origin.config][theirs])
        except KeyError as error:
            there = ", ".join(f"{config}/{split}" for config, splits in found.items() for split in splits)
            raise DownloadFailed(
                f"{origin} has no {origin.config}/{theirs} any more; it has: {there}. docs/data.md says how to put "
                "files into AGSCL_DATA yourself"
            ) from error
    return f"{origin.name}@{revision}", files


def named(split: str, files: list[Remote]) -> list[Remote]:
    """The files of a split under the names that `find` looks for."""
    if len(files) == 1:
        return [replace(files[0], file=f"{split}.parquet")]
    return [replace(each, file=f"{split}-{place:05d}-of-{len(files):05d}.parquet") for place, each in enumerate(files)]


def _convert(raw: Path, folder: Path, made_by: Callable[[Path], dict[str, Any]]) -> None:
    """Make the files of `folder` from those in `raw`, and remove these."""
    from pyarrow import parquet

    origin, _ = read_plan(raw) or ("", [])
    files = []
    try:
        for split, table in made_by(raw).items():
            path = folder / f"{split}.parquet"
            temporary = path.with_name(path.name + ".tmp")
            with open(temporary, "wb") as file:
                parquet.write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            files.append(Remote(origin, path.name, digest(path), size=path.stat().st_size))
        keep_plan(folder, origin, files)
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{raw} could not be turned into Parquet files in {folder}: {error}") from error
    shutil.rmtree(raw)
