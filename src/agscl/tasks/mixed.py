"""Ten unlike tasks, from two hundred to fifty thousand training images and from 2 to 55 classes, all 3 × 32 × 32."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from agscl.data.datasets import load_examples
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.data.examples import Array, Examples
from agscl.tasks.digits import read_digits
from agscl.tasks.eight import NORMALISATION, VALIDATION_SHARE, choose_decoder
from agscl.tasks.omniglot import open_drawings
from agscl.tasks.own_data import add_normalisation
from agscl.tasks.task import Task, TaskSequence, make_task

Order = Literal["shuffled", "small-first", "large-first"]

TINY = {"tiny-0-1": range(2), "tiny-2-11": range(2, 12), "tiny-12-41": range(12, 42)}
"""Three tasks of Tiny ImageNet, and the classes of each."""
WHOLE = ("notmnist", "cifar10", "mnist", "fashion_mnist")
"""Datasets of 10 classes that are a task each."""
MIXED = ("tinyimagenet32", *WHOLE, "omniglot")
TEST_SHARE = 0.2
"""Of each class, where a dataset has no test split."""


def load_mixed(*, seed: int, order: Order = "shuffled") -> TaskSequence:
    """(examples, 3, 32, 32) bytes: scikit-learn's digits, the alphabets of Omniglot with the fewest and the most
    characters, 2, 10 and 30 classes of Tiny ImageNet, notMNIST, CIFAR-10, MNIST and Fashion-MNIST; 161 classes.

    `order` is drawn by the seed, or goes by the number of training images. The seed also draws 15 % of each task for
    validation and, from the digits and the alphabets, 20 % of each class for test, the same in every order.
    """
    if order not in get_args(Order):
        raise ValueError(f"order must be {', '.join(get_args(Order))}, not {order!r}")
    tasks = [
        _split_examples("digits", _load_digits(), np.random.default_rng([seed, 1])),
        *_load_alphabets(seed),
        *_load_dataset("tinyimagenet32", TINY, np.random.default_rng([seed, 3])),
    ]
    for position, name in enumerate(WHOLE):
        tasks += _load_dataset(name, {name: range(10)}, np.random.default_rng([seed, 4, position]))
    if order == "shuffled":
        return tuple(tasks[position] for position in np.random.default_rng([seed, 0]).permutation(len(tasks)))
    tasks.sort(key=lambda task: len(task.train_y))
    return tuple(tasks if order == "small-first" else reversed(tasks))


def _load_digits() -> Examples:
    """8 × 8 pixels from 0 to 16, each of which becomes 4 × 4 pixels from 0 to 255."""
    images, labels = read_digits()
    pixels = (images.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    return Examples(pixels.repeat(3, 1).repeat(4, 2).repeat(4, 3), labels.astype(np.int64))


def _load_alphabets(seed: int) -> list[Task]:
    """The first alphabet of those with the fewest characters, and of those with the most; strokes 255 on 0."""
    drawings, alphabet_of_row, character_of_row, names = open_drawings()
    known = np.unique(alphabet_of_row)
    sizes = [len(np.unique(character_of_row[alphabet_of_row == alphabet])) for alphabet in known]
    tasks = []
    for alphabet in (known[np.argmin(sizes)], known[np.argmax(sizes)]):
        rows = np.flatnonzero(alphabet_of_row == alphabet)
        _, labels = np.unique(character_of_row[rows], return_inverse=True)
        strokes = 255 - decode_images(drawings, ImageDecoder(32, filter="box"), rows)
        name = names[alphabet] if names else f"alphabet-{alphabet}"
        tasks.append(_split_examples(name, Examples(strokes, labels), np.random.default_rng([seed, 2, int(alphabet)])))
    return tasks


def _load_dataset(name: str, classes_of_task: dict[str, range], rng: np.random.Generator) -> list[Task]:
    """Tasks from a dataset that has a test split."""
    train, test = (load_examples(name, split, choose_decoder(name)) for split in ("train", "test"))
    mean, std = NORMALISATION[name]
    return [
        make_task(
            task,
            classes,
            train,
            train.find_rows(classes),
            test,
            test.find_rows(classes),
            validation_share=VALIDATION_SHARE,
            rng=rng,
            mean=mean,
            std=std,
        )
        for task, classes in classes_of_task.items()
    ]


def _split_examples(name: str, examples: Examples, rng: np.random.Generator) -> Task:
    """A task of all examples, normalised with the mean and deviation of those for training."""
    test_rows = np.concatenate([_draw_share(np.flatnonzero(examples.y == y), rng) for y in np.unique(examples.y)])
    task = make_task(
        name,
        np.unique(examples.y).tolist(),
        examples,
        np.setdiff1d(np.arange(len(examples.y)), test_rows),
        examples,
        test_rows,
        validation_share=VALIDATION_SHARE,
        rng=rng,
    )
    return add_normalisation((task,))[0]


def _draw_share(rows: Array, rng: np.random.Generator) -> Array:
    return rng.permutation(rows)[: max(1, round(TEST_SHARE * len(rows)))]
