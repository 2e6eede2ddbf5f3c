"""scikit-learn's 1797 handwritten digits (8×8, inside the package, no download) as 5 tasks of 2 classes."""

from __future__ import annotations

import numpy as np
import torch

from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.tasks.task import Task, TaskSequence


def load_digits_tasks(*, seed: int, shuffle_classes: bool = True, test_share: float = 0.25) -> TaskSequence:
    """Pairs of digits, (examples, 64) floats in [0, 1], no validation split.

    The seed draws which digits form a pair, in which order the pairs come, and, class by class, the test examples.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must be above 0 and below 1, not {test_share}")
    rng = np.random.default_rng([seed, 0])
    images, labels = read_digits()
    order = rng.permutation(10) if shuffle_classes else np.arange(10)

    tasks = []
    for pair in order.reshape(5, 2):
        train, test = [], []
        for digit in pair:
            rows = rng.permutation(np.flatnonzero(labels == digit))
            test_count = min(max(1, round(test_share * len(rows))), len(rows) - 1)
            test.append(rows[:test_count])
            train.append(rows[test_count:])
        train_x, train_y = _stack_examples(images, train)
        test_x, test_y = _stack_examples(images, test)
        name = f"{pair[0]}-{pair[1]}"
        tasks.append(Task(name, 2, train_x, train_y, None, None, test_x, test_y))
    return tuple(tasks)


def read_digits() -> tuple[Array, Array]:
    """(1797, 64) images with pixels from 0 to 16, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits are part of scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    return images, labels


def _stack_examples(images: np.ndarray, rows_per_class: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(images[np.concatenate(rows_per_class)] / 16).float()
    y = torch.cat([torch.full((len(rows),), label) for label, rows in enumerate(rows_per_class)])
    return x, y
