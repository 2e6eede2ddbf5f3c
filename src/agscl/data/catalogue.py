"""The datasets that task sequences are made of, and where each can be downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agscl.data.convert import convert_omniglot, convert_tinyimagenet32


@dataclass(frozen=True)
class HubSource:
    """Where a dataset of the catalogue is on the Hugging Face hub."""

    name: str
    config: str = "default"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """Our split: theirs."""

    def __str__(self) -> str:
        return f"{self.name} on the Hugging Face hub"


@dataclass(frozen=True)
class ArchiveSource:
    """Where a dataset of the catalogue is as an archive of images at a web address."""

    url: str
    md5: str


@dataclass(frozen=True)
class Dataset:
    """A dataset of the catalogue, stored in a folder of its name: Parquet files or a folder of images per split."""

    classes: int
    rows: tuple[int, ...]
    """Images in all splits together; several numbers where several editions exist."""
    source: HubSource | tuple[ArchiveSource, ...] | str
    """Where it can be downloaded; a text says why it cannot."""
    megabytes: int
    """Approximate size of the download."""
    splits: tuple[str, ...] = ("train", "test")
    convert: Callable[[Path], dict[str, Any]] | None = None
    """Makes a table for each split from the downloaded files; none where these are used as they are."""
    label_columns: tuple[str, ...] = ()
    """The columns that together identify the class, where there is more than one."""


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(10, (60_000,), HubSource("uoft-cs/cifar10", "plain_text"), 144),
    "cifar100": Dataset(100, (60_000,), HubSource("uoft-cs/cifar100", "cifar100"), 143),
    "tinyimagenet32": Dataset(
        100,
        (55_000,),
        HubSource("zh-plus/tiny-imagenet", splits={"train": "train", "test": "valid"}),
        161,
        convert=convert_tinyimagenet32,
    ),
    "mnist": Dataset(10, (70_000,), HubSource("ylecun/mnist", "mnist"), 18),
    "svhn": Dataset(10, (99_289,), HubSource("ufldl-stanford/svhn", "cropped_digits"), 183),
    "fashion_mnist": Dataset(10, (70_000,), HubSource("zalando-datasets/fashion_mnist", "fashion_mnist"), 36),
    "signs": Dataset(43, (39_270, 51_839), HubSource("tanganke/gtsrb"), 333),
    "facescrub": Dataset(
        100,
        (),
        "its authors hand the images out on request, or as a pickle, which agscl does not open. docs/data.md says how "
        "to prepare it",
        0,
    ),
    "notmnist": Dataset(10, (18_724,), HubSource("anubhavmaity/notMNIST"), 9),
    "omniglot": Dataset(
        1623,
        (32_460,),
        (
            ArchiveSource(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
                "68d2efa1b9178cc56df9314c21c6e718",
            ),
            ArchiveSource(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
                "6b91aef0f799c5bb55b94e3f2daec811",
            ),
        ),
        16,
        ("all",),
        convert_omniglot,
        ("alphabet", "character"),
    ),
    "cub200": Dataset(200, (11_788,), HubSource("Andron00e/CUB200-custom", splits={"all": "train"}), 1145, ("all",)),
}
