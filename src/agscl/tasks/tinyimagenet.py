"""100 classes of Tiny ImageNet at 32 × 32 in the place of CIFAR-100, alone or after CIFAR-10."""

from __future__ import annotations

from agscl.tasks.cifar import load_cifar10_task, load_ten_tasks
from agscl.tasks.task import TaskSequence


def load_tinyimagenet32(*, seed: int) -> TaskSequence:
    """10 tasks of 10 classes, all else as in `load_cifar100`, its normalisation included."""
    return load_ten_tasks("tinyimagenet32", seed)


def load_cifar10_tiny(*, seed: int) -> TaskSequence:
    """CIFAR-10 first, then the tasks of `load_tinyimagenet32`; the seed shuffles those."""
    return (load_cifar10_task(seed), *load_ten_tasks("tinyimagenet32", seed))
