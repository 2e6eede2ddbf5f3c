"""Eight small datasets as eight tasks, all of them 3 × 32 × 32; and the five of them that need no own collecting."""

from __future__ import annotations

import numpy as np

from agscl.data.catalogue import DATASETS, examples
from agscl.data.images import Form
from agscl.tasks.task import Task, TaskSequence, cut

VALIDATION = 0.15
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
"""These get 2 black pixels around them."""


def eight(*, seed: int) -> TaskSequence:
    """(examples, 3, 32, 32) bytes, 293 classes, always in this order; the seed draws the 15 % for validation."""
    return tuple(_task(name, place, seed) for place, name in enumerate(EIGHT))


def five(*, seed: int) -> TaskSequence:
    """As `eight`, with `tinyimagenet32` in the place of CIFAR-100 and without SVHN, traffic signs and FaceScrub: 140
    classes."""
    return tuple(_task(name, place, seed) for place, name in enumerate(FIVE))


def form_of(name: str) -> Form:
    # What has another size is resized by Lanczos: notMNIST then has the mean and the deviation above.
    return Form(32, fit="pad" if name in PADDED else "squeeze", filter="lanczos")


def _task(name: str, place: int, seed: int) -> Task:
    train, test = (examples(name, split, form_of(name)) for split in ("train", "test"))
    mean, std = NORMALISATION[name]
    return cut(
        name,
        range(DATASETS[name].classes),
        train,
        np.arange(len(train.y)),
        test,
        np.arange(len(test.y)),
        validation=VALIDATION,
        random=np.random.default_rng([seed, place]),
        mean=mean,
        std=std,
    )
