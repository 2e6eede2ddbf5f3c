"""Check a dataset on disk: files, images, classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agscl.data.catalogue import DATASETS
from agscl.data.datasets import find_dataset, open_split
from agscl.data.decoding import ImageDecoder, find_undecodable
from agscl.data.encoded_images import read_labels
from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.data.manifest import read_manifest


@dataclass(frozen=True)
class DatasetReport:
    """What a check of a dataset found: what it contains, and what is wrong with it."""

    counts: Mapping[str, Array]
    """Images of each class, by split."""
    problems: list[str]


def check_dataset(name: str) -> DatasetReport:
    """Read all of a dataset: are all images and classes there, and do the files have their checksums?"""
    dataset, folder = DATASETS[name], find_dataset(name)
    counts: dict[str, Array] = {}
    problems: list[str] = []
    try:
        for split in dataset.splits:
            images = open_split(name, split)
            problems += find_undecodable(images, ImageDecoder(32))
            if dataset.label_columns:
                columns = [images.read_column(column) for column in dataset.label_columns]
                _, labels = np.unique(columns, axis=1, return_inverse=True)
            else:
                labels = read_labels(images, dataset.classes)
            counts[split] = np.bincount(labels.ravel())
            classes = np.count_nonzero(counts[split])
            if classes != dataset.classes:
                problems.append(f"{images} has images of {classes} classes, expected {dataset.classes}")
        rows = sum(int(each.sum()) for each in counts.values())
        if dataset.rows and rows not in dataset.rows:
            problems.append(f"there are {rows} images, expected {' or '.join(map(str, dataset.rows))}")
        manifest = None if folder is None else read_manifest(folder)
    except DataError as error:
        return DatasetReport(counts, [*problems, str(error)])
    if folder is not None and manifest is not None:
        for file in manifest.files:
            path = folder / file.file
            if path.is_file() and not file.matches(path):
                problems.append(
                    f"checksum mismatch: {path} changed since it was downloaded. Delete it, then: agscl data get {name}"
                )
    return DatasetReport(counts, problems)
