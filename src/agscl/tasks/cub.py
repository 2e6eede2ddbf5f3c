"""CUB-200-2011: 200 species of birds in 10 tasks of 20, in random crops of 224 × 224."""

from __future__ import annotations

import numpy as np
import torch

from agscl.data.catalogue import DATASETS, labels, source
from agscl.data.examples import Array
from agscl.data.images import Form, Shards, Source, decoded, shapes
from agscl.tasks.task import Task, TaskSequence

CROP = 224
KEPT = Form(320)
"""A training picture, whole, squeezed to a square: a crop of mean size then has about as many pixels as are read."""
TESTED = Form(CROP, fit="crop", short=256)
MEAN, STD = (0.485, 0.500, 0.432), (0.232, 0.227, 0.266)
PATHS = ("image_file_path", "path", "image.path")


def cub200(*, seed: int) -> TaskSequence:
    """The seed draws which species form a task, and the order of the tasks.

    The first 80 % of each species' pictures, rounded up, in the order of their file names, are for training, the rest
    for test; there is no validation split. A training step reads random crops of 8 to 100 % of the area, 3:4 to 4:3,
    mirrored half of the time; a test picture is its middle, after its shorter side was made 256.
    """
    birds = source("cub200", "all")
    y = labels(birds, DATASETS["cub200"].classes)
    train, test = _by_file_order(birds, y)
    train_x, test_x, train_shapes = decoded(birds, KEPT, train), decoded(birds, TESTED, test), shapes(birds, train)

    tasks: list[Task] = []
    for species in np.random.default_rng([seed, 0]).permutation(200).reshape(10, 20):
        new = np.full(200, -1)
        new[species] = np.arange(20)
        mine, tested = np.flatnonzero(np.isin(y[train], species)), np.flatnonzero(np.isin(y[test], species))
        tasks.append(
            Task(
                f"birds-{len(tasks) + 1}",
                20,
                torch.from_numpy(train_x[mine]),
                torch.from_numpy(new[y[train][mine]]),
                None,
                None,
                torch.from_numpy(test_x[tested]),
                torch.from_numpy(new[y[test][tested]]),
                mean=torch.tensor(MEAN),
                std=torch.tensor(STD),
                crop=CROP,
                shapes=torch.from_numpy(train_shapes[mine]),
            )
        )
    return tuple(tasks)


def _by_file_order(birds: Source, y: Array) -> tuple[Array, Array]:
    """The rows for training and for test."""
    leaves = birds.leaves if isinstance(birds, Shards) else ["path"]
    column = next((path for path in PATHS if path in leaves), None)
    paths = birds.column(column) if column else np.arange(len(y))
    train, test = [], []
    for species in range(200):
        rows = sorted(np.flatnonzero(y == species), key=lambda row: str(paths[row]) if column else row)
        cut = -(-4 * len(rows) // 5)
        train.extend(rows[:cut])
        test.extend(rows[cut:])
    return np.array(train), np.array(test)
