"""CUB-200-2011: 200 species of birds in 10 tasks of 20, in random crops of 224 × 224."""

from __future__ import annotations

import numpy as np
import torch

from agscl.data.catalogue import DATASETS
from agscl.data.datasets import open_split
from agscl.data.decoding import ImageDecoder, decode_images, read_image_shapes
from agscl.data.encoded_images import EncodedImages, ParquetImages, read_labels
from agscl.data.examples import Array
from agscl.tasks.task import Task, TaskSequence

CROP_SIZE = 224
TRAIN_DECODER = ImageDecoder(320)
"""A training image is stored complete, squeezed to a square: a crop of average size then has about as many pixels as
the network reads."""
TEST_DECODER = ImageDecoder(CROP_SIZE, fit="crop", short=256)
MEAN, STD = (0.485, 0.500, 0.432), (0.232, 0.227, 0.266)
PATH_COLUMNS = ("image_file_path", "path", "image.path")


def load_cub200(*, seed: int) -> TaskSequence:
    """The seed draws which species form a task, and the order of the tasks.

    The first 80 % of each species' images, rounded up, in the order of their file names, are for training, the rest for
    test; there is no validation split. A training step reads random crops of 8 to 100 % of the area, 3:4 to 4:3,
    mirrored half of the time; a test image is its centre, after its shorter side was resized to 256.
    """
    birds = open_split("cub200", "all")
    labels = read_labels(birds, DATASETS["cub200"].classes)
    train, test = _split_by_file_name(birds, labels)
    train_x, test_x = decode_images(birds, TRAIN_DECODER, train), decode_images(birds, TEST_DECODER, test)
    train_shapes = read_image_shapes(birds, train)

    tasks: list[Task] = []
    for species in np.random.default_rng([seed, 0]).permutation(200).reshape(10, 20):
        new_label = np.full(200, -1)
        new_label[species] = np.arange(20)
        train_rows = np.flatnonzero(np.isin(labels[train], species))
        test_rows = np.flatnonzero(np.isin(labels[test], species))
        tasks.append(
            Task(
                f"birds-{len(tasks) + 1}",
                20,
                torch.from_numpy(train_x[train_rows]),
                torch.from_numpy(new_label[labels[train][train_rows]]),
                None,
                None,
                torch.from_numpy(test_x[test_rows]),
                torch.from_numpy(new_label[labels[test][test_rows]]),
                mean=torch.tensor(MEAN),
                std=torch.tensor(STD),
                crop=CROP_SIZE,
                shapes=torch.from_numpy(train_shapes[train_rows]),
            )
        )
    return tuple(tasks)


def _split_by_file_name(birds: EncodedImages, labels: Array) -> tuple[Array, Array]:
    """The rows for training and for test."""
    columns = birds.nested_columns if isinstance(birds, ParquetImages) else ["path"]
    column = next((path for path in PATH_COLUMNS if path in columns), None)
    paths = birds.read_column(column) if column else np.arange(len(labels))
    train, test = [], []
    for species in range(200):
        rows = sorted(np.flatnonzero(labels == species), key=lambda row: str(paths[row]) if column else row)
        train_count = -(-4 * len(rows) // 5)
        train.extend(rows[:train_count])
        test.extend(rows[train_count:])
    return np.array(train), np.array(test)
