"""scikit-learn's 1797 handwritten digits (8×8, inside the package, no download) as 5 tasks of 2 classes."""

from __future__ import annotations

import numpy as np
import torch

from agscl.tasks import DataMissing, Task, TaskSequence


def load(*, seed: int, shuffle_classes: bool = True, test_share: float = 0.25) -> TaskSequence:
    """Pairs of digits, (examples, 64) floats in [0, 1], no validation split.

    The seed draws which digits form a pair, in which order the pairs come, and, class by class, the test examples.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share is above 0 and below 1, not {test_share}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataMissing("the digits are part of scikit-learn: pip install scikit-learn") from None
    random = np.random.default_rng([seed, 0])
    images, labels = load_digits(return_X_y=True)
    order = random.permutation(10) if shuffle_classes else np.arange(10)

    tasks = []
    for pair in order.reshape(5, 2):
        train, test = [], []
        for digit in pair:
            rows = random.permutation(np.flatnonzero(labels == digit))
            held_out = min(max(1, round(test_share * len(rows))), len(rows) - 1)
            test.append(rows[:held_out])
            train.append(rows[held_out:])
        train_x, train_y = _examples(images, train)
        test_x, test_y = _examples(images, test)
        name = f"{pair[0]}-{pair[1]}"
        tasks.append(Task(name, 2, train_x, train_y, None, None, test_x, test_y))
    return tuple(tasks)


def _examples(images: np.ndarray, rows_per_class: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(images[np.concatenate(rows_per_class)] / 16).float()
    y = torch.cat([torch.full((len(rows),), label) for label, rows in enumerate(rows_per_class)])
    return x, y
