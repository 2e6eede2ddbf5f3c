"""CIFAR-100 as 10 tasks of 10 classes, alone or after CIFAR-10, and the same with 100 classes of Tiny ImageNet."""

from __future__ import annotations

import numpy as np

from agscl.data.catalogue import examples
from agscl.data.images import Form
from agscl.tasks.task import Task, TaskSequence, cut

VALIDATION = 0.1
CIFAR100 = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}
CIFAR10 = {"mean": (125.3 / 255, 123.0 / 255, 113.9 / 255), "std": (63.0 / 255, 62.1 / 255, 66.7 / 255)}


def cifar100(*, seed: int) -> TaskSequence:
    """(examples, 3, 32, 32) bytes. The seed draws the order of the tasks and, in each of them, the 10 % for validation;
    classes 10k to 10k+9 stay together."""
    return _tens("cifar100", seed)


def tinyimagenet32(*, seed: int) -> TaskSequence:
    """100 classes of Tiny ImageNet at 32 × 32 in the place of CIFAR-100, its normalisation included."""
    return _tens("tinyimagenet32", seed)


def cifar10_100(*, seed: int) -> TaskSequence:
    """CIFAR-10 first, then the tasks of `cifar100`; the seed shuffles those."""
    return (_cifar10(seed), *_tens("cifar100", seed))


def cifar10_tiny(*, seed: int) -> TaskSequence:
    """CIFAR-10 first, then the tasks of `tinyimagenet32`; the seed shuffles those."""
    return (_cifar10(seed), *_tens("tinyimagenet32", seed))


def _tens(dataset: str, seed: int) -> TaskSequence:
    train, test = (examples(dataset, split, Form(32)) for split in ("train", "test"))
    tasks = []
    for ten in np.random.default_rng([seed, 0]).permutation(10):
        classes = range(10 * ten, 10 * ten + 10)
        task = cut(
            f"{classes[0]}-{classes[-1]}",
            classes,
            train,
            train.rows_of(classes),
            test,
            test.rows_of(classes),
            validation=VALIDATION,
            random=np.random.default_rng([seed, 1, ten]),
            **CIFAR100,
        )
        tasks.append(task)
    return tuple(tasks)


def _cifar10(seed: int) -> Task:
    train, test = (examples("cifar10", split, Form(32)) for split in ("train", "test"))
    return cut(
        "cifar10",
        range(10),
        train,
        np.arange(len(train.y)),
        test,
        np.arange(len(test.y)),
        validation=VALIDATION,
        random=np.random.default_rng([seed, 2]),
        **CIFAR10,
    )
