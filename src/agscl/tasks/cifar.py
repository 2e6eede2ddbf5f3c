"""CIFAR-100 as 10 tasks of 10 classes, alone or after CIFAR-10."""

from __future__ import annotations

import numpy as np

from agscl.data.datasets import load_examples
from agscl.data.decoding import ImageDecoder
from agscl.tasks.task import Task, TaskSequence, make_task

VALIDATION_SHARE = 0.1
CIFAR100_NORMALISATION = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}
CIFAR10_NORMALISATION = {
    "mean": (125.3 / 255, 123.0 / 255, 113.9 / 255),
    "std": (63.0 / 255, 62.1 / 255, 66.7 / 255),
}


def load_cifar100(*, seed: int) -> TaskSequence:
    """(examples, 3, 32, 32) bytes. Classes 10k to 10k+9 are a task.

    The seed draws the order of the tasks and, within each, the 10 % for validation.
    """
    return load_ten_tasks("cifar100", seed)


def load_cifar10_100(*, seed: int) -> TaskSequence:
    """CIFAR-10 first, then the tasks of `load_cifar100`; the seed shuffles those."""
    return (load_cifar10_task(seed), *load_ten_tasks("cifar100", seed))


def load_ten_tasks(dataset: str, seed: int) -> TaskSequence:
    """A dataset of 100 classes as 10 tasks in random order, with the normalisation of CIFAR-100."""
    train, test = (load_examples(dataset, split, ImageDecoder(32)) for split in ("train", "test"))
    tasks = []
    for ten in np.random.default_rng([seed, 0]).permutation(10):
        classes = range(10 * ten, 10 * ten + 10)
        task = make_task(
            f"{classes[0]}-{classes[-1]}",
            classes,
            train,
            train.find_rows(classes),
            test,
            test.find_rows(classes),
            validation_share=VALIDATION_SHARE,
            rng=np.random.default_rng([seed, 1, ten]),
            **CIFAR100_NORMALISATION,
        )
        tasks.append(task)
    return tuple(tasks)


def load_cifar10_task(seed: int) -> Task:
    """All of CIFAR-10 as one task."""
    train, test = (load_examples("cifar10", split, ImageDecoder(32)) for split in ("train", "test"))
    return make_task(
        "cifar10",
        range(10),
        train,
        np.arange(len(train.y)),
        test,
        np.arange(len(test.y)),
        validation_share=VALIDATION_SHARE,
        rng=np.random.default_rng([seed, 2]),
        **CIFAR10_NORMALISATION,
    )
