"""Eight small datasets as eight tasks, all 3 × 32 × 32; and `five`, made of datasets that are easy to get."""

from __future__ import annotations

import numpy as np

from agscl.data.catalogue import DATASETS
from agscl.data.datasets import load_examples
from agscl.data.decoding import ImageDecoder
from agscl.tasks.task import Task, TaskSequence, make_task

VALIDATION_SHARE = 0.15
EIGHT = ("cifar10", "cifar100", "mnist", "svhn", "fashion_mnist", "signs", "facescrub", "notmnist")
FIVE = ("cifar10", "tinyimagenet32", "mnist", "fashion_mnist", "notmnist")

_CIFAR = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
NORMALISATION = {
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "tinyimagenet32": _CIFAR,
    "mnist": ((0.1,) * 3, (0.2752,) * 3),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion_mnist": ((0.2190,) * 3, (0.3318,) * 3),
    "signs": ((0.3398, 0.3117, 0.3210), (0.2755, 0.2647, 0.2712)),
    "facescrub": ((0.5163, 0.5569, 0.4695), (0.2307, 0.2272, 0.2479)),
    "notmnist": ((0.4254,) * 3, (0.4501,) * 3),
}
PADDED = ("mnist", "fashion_mnist")
"""Images of 28 × 28 that get a black border of 2 pixels."""


def load_eight(*, seed: int) -> TaskSequence:
    """(examples, 3, 32, 32) bytes, 293 classes, always in this order; the seed draws the 15 % for validation."""
    return tuple(_load_task(name, position, seed) for position, name in enumerate(EIGHT))


def load_five(*, seed: int) -> TaskSequence:
    """As `load_eight`, with `tinyimagenet32` in the place of CIFAR-100 and without SVHN, traffic signs and FaceScrub:
    140 classes."""
    return tuple(_load_task(name, position, seed) for position, name in enumerate(FIVE))


def choose_decoder(name: str) -> ImageDecoder:
    # Images of other sizes are resized by Lanczos: notMNIST then has the mean and the deviation above.
    return ImageDecoder(32, fit="pad" if name in PADDED else "squeeze", filter="lanczos")


def _load_task(name: str, position: int, seed: int) -> Task:
    train, test = (load_examples(name, split, choose_decoder(name)) for split in ("train", "test"))
    mean, std = NORMALISATION[name]
    return make_task(
        name,
        range(DATASETS[name].classes),
        train,
        np.arange(len(train.y)),
        test,
        np.arange(len(test.y)),
        validation_share=VALIDATION_SHARE,
        rng=np.random.default_rng([seed, position]),
        mean=mean,
        std=std,
    )
