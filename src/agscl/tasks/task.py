"""One task's data, and how a task is made from a dataset."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from agscl.data.examples import Array, Examples
from agscl.tasks.random_crop import random_resized_crop


@dataclass(frozen=True)
class Task:
    """One task's data as it is stored; `prepare_inputs` and `make_batch` return what a model reads.

    Inputs are (examples, ...) floats or (examples, channels, height, width) bytes; labels (examples,) integers below
    `classes`.
    """

    name: str
    classes: int
    train_x: Tensor
    train_y: Tensor
    valid_x: Tensor | None
    valid_y: Tensor | None
    test_x: Tensor
    test_y: Tensor
    mean: Tensor | None = None
    """(channels,) mean of the inputs, bytes scaled to 0 to 1; None: inputs are not normalised."""
    std: Tensor | None = None
    """(channels,) standard deviation, likewise."""
    crop: int | None = None
    """The model reads images of `crop` × `crop`; None: as they are stored."""
    shapes: Tensor | None = None
    """(training examples, 2) original height and width of each image that is stored as a square; a training step then
    reads a random crop of it."""

    def to(self, device: torch.device | str) -> Task:
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def with_layout(self, change_layout: Callable[[Tensor], Tensor]) -> Task:
        """A copy whose inputs were passed through `change_layout`, which may change their memory layout only."""
        inputs = {name: getattr(self, name) for name in ("train_x", "valid_x", "test_x")}
        changed: dict[str, Any] = {name: change_layout(x) for name, x in inputs.items() if x is not None}
        return replace(self, **changed)

    def check_data(self) -> None:
        """Raise ValueError where part of the task's data cannot be learned from, or would give meaningless results."""
        parts = {
            "training": (self.train_x, self.train_y),
            "validation": (self.valid_x, self.valid_y),
            "test": (self.test_x, self.test_y),
        }
        for part, (x, y) in parts.items():
            if x is None or y is None:
                continue
            examples = f"the {part} examples of task {self.name!r}"
            if not len(x) or not len(y):
                raise ValueError(f"task {self.name!r} has no {part} examples")
            if y.shape != (len(x),):
                raise ValueError(f"{examples} are {len(x)} inputs, but the labels have the shape {tuple(y.shape)}")
            if y.dtype != torch.long:
                raise ValueError(f"labels of {examples} are {y.dtype}, not torch.long: use y.long()")
            if (low := int(y.min())) < 0 or int(y.max()) >= self.classes:
                raise ValueError(
                    f"labels of {examples} range from {low} to {int(y.max())}; with {self.classes} classes they must "
                    f"be 0 to {self.classes - 1}"
                )
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise ValueError(f"{examples} have inputs that are infinite or NaN")

    def with_validation(self, share: float, seed: int) -> Task:
        """A copy in which this share of the training examples, drawn by the seed, is the validation split; the task
        itself where it has one already."""
        if not share or self.valid_x is not None:
            return self
        rows = torch.from_numpy(np.random.default_rng([seed, len(self.train_y)]).permutation(len(self.train_y)))
        count = _limit_validation_count(round(share * len(rows)), len(rows), self.name)
        valid, train = rows[:count], rows[count:]
        return replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            valid_x=self.train_x[valid],
            valid_y=self.train_y[valid],
            shapes=None if self.shapes is None else self.shapes[train],
        )

    def prepare_inputs(self, x: Tensor) -> Tensor:
        """Some of this task's stored inputs as a model reads them: normalised floats. Nothing is random."""
        if x.dtype == torch.uint8 and self.crop is None and self.mean is not None and self.std is not None:
            mean, std = (each.view(-1, *[1] * (x.dim() - 2)) for each in self._byte_normalisation)
            return x.sub(mean).div_(std)  # two passes over the data instead of four
        x = _to_floats(x)
        if self.crop is not None and x.shape[-2:] != (self.crop, self.crop):
            x = F.interpolate(x, (self.crop, self.crop), mode="bilinear", antialias=True)
        return self._normalise(x)

    @cached_property
    def _byte_normalisation(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation on the scale of bytes, 0 to 255."""
        assert self.mean is not None
        assert self.std is not None
        return 255 * self.mean, 255 * self.std

    def make_batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of these rows of the task's training data, for a training step.

        Crops are drawn by torch's global generator of the data's device.
        """
        x, y = _select_rows(self.train_x, rows), self.train_y[rows]
        if self.crop is None or self.shapes is None:
            return self.prepare_inputs(x), y
        return self._normalise(random_resized_crop(_to_floats(x), self.shapes[rows], self.crop)), y

    def checksum(self) -> int:
        """CRC-32 of the task's name, its number of classes, and all examples in their split."""
        crc = zlib.crc32(f"{self.name} {self.classes}".encode())
        for part in (self.train_x, self.train_y, self.valid_x, self.valid_y, self.test_x, self.test_y):
            if part is not None:
                array: Any = part.contiguous().numpy()
                crc = zlib.crc32(array, crc)
        return crc

    def _normalise(self, x: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return x
        by_channel = (-1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(by_channel)) / self.std.view(by_channel)


TaskSequence = tuple[Task, ...]


def make_task(
    name: str,
    classes: Sequence[int],
    train: Examples,
    train_rows: Array,
    test: Examples,
    test_rows: Array,
    *,
    validation_share: float,
    rng: np.random.Generator,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Task:
    """The task of distinguishing `classes`, which get the labels 0, 1, ... in this order, made of these rows.

    `rng` draws which share of the training rows is the validation split; 0: there is none.
    """
    rows = rng.permutation(train_rows)
    valid_count = _limit_validation_count(int(validation_share * len(rows)), len(rows), name) if validation_share else 0
    valid_x, valid_y = _select_examples(train, rows[:valid_count], classes) if validation_share else (None, None)
    return Task(
        name,
        len(classes),
        *_select_examples(train, rows[valid_count:], classes),
        valid_x,
        valid_y,
        *_select_examples(test, test_rows, classes),
        mean=None if mean is None else torch.tensor(mean),
        std=None if std is None else torch.tensor(std),
    )


def _limit_validation_count(count: int, total: int, task: str) -> int:
    """At least one example for validation, and at least one left for training."""
    if total < 2:
        raise ValueError(
            f"task {task!r} has {total} training example(s): too few to set some apart for validation. Add examples, "
            "or train without a validation split"
        )
    return min(max(count, 1), total - 1)


def _select_examples(examples: Examples, rows: Array, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inputs of these rows, and their labels as positions in `classes`."""
    order = np.argsort(classes)
    positions = order[np.searchsorted(np.asarray(classes)[order], examples.y[rows])]
    y = torch.from_numpy(positions.astype(np.int64))
    if isinstance(examples.x, Tensor):
        return examples.x[torch.from_numpy(rows)], y
    return torch.from_numpy(examples.x[rows]), y


def _select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows, in the memory layout of `x`."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2)
    return x[rows]


def _to_floats(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x
