"""One task's data, and how it is cut out of a dataset."""

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
from agscl.tasks.crop import random_resized_crop


@dataclass(frozen=True)
class Task:
    """One task's data, as it is kept: `inputs` and `batch` make of it what a model reads.

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
    """(channels,) mean of the inputs, bytes taken as 0 to 1; none where they are not normalised."""
    std: Tensor | None = None
    """(channels,) standard deviation, likewise."""
    crop: int | None = None
    """Pictures are read as `crop` × `crop`; none: as they are."""
    shapes: Tensor | None = None
    """(training examples, 2) height and width of each original picture, kept as a square; a training step then reads
    a random crop of it."""

    def to(self, device: torch.device | str) -> Task:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def laid_out(self, layout: Callable[[Tensor], Tensor]) -> Task:
        """With its inputs laid out in memory by a function."""
        inputs = {name: getattr(self, name) for name in ("train_x", "valid_x", "test_x")}
        laid: dict[str, Any] = {name: layout(x) for name, x in inputs.items() if x is not None}
        return replace(self, **laid)

    def check(self) -> None:
        """Raise where a part of the data cannot be learned from, or would give figures that mean nothing."""
        parts = {
            "training": (self.train_x, self.train_y),
            "validation": (self.valid_x, self.valid_y),
            "test": (self.test_x, self.test_y),
        }
        for part, (x, y) in parts.items():
            if x is None or y is None:
                continue
            where = f"the {part} examples of task {self.name!r}"
            if not len(x) or not len(y):
                raise ValueError(f"task {self.name!r} has no {part} examples")
            if y.shape != (len(x),):
                raise ValueError(f"{where} are {len(x)} inputs, but the labels have the shape {tuple(y.shape)}")
            if y.dtype != torch.long:
                raise ValueError(f"labels of {where} are {y.dtype}, not torch.long: use y.long()")
            if (low := int(y.min())) < 0 or int(y.max()) >= self.classes:
                raise ValueError(
                    f"labels of {where} go from {low} to {int(y.max())}; with {self.classes} classes they are 0 to "
                    f"{self.classes - 1}"
                )
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise ValueError(f"{where} have inputs that are infinite or NaN")

    def with_validation(self, share: float, seed: int) -> Task:
        """With this share of the training examples set apart for validation, drawn by the seed, if there are none."""
        if not share or self.valid_x is not None:
            return self
        rows = torch.from_numpy(np.random.default_rng([seed, len(self.train_y)]).permutation(len(self.train_y)))
        count = _held_out(round(share * len(rows)), len(rows), self.name)
        held, kept = rows[:count], rows[count:]
        return replace(
            self,
            train_x=self.train_x[kept],
            train_y=self.train_y[kept],
            valid_x=self.train_x[held],
            valid_y=self.train_y[held],
            shapes=None if self.shapes is None else self.shapes[kept],
        )

    def inputs(self, x: Tensor) -> Tensor:
        """What a model reads of `x`, some of this task's inputs: floats, normalised. Nothing is drawn at random."""
        if x.dtype == torch.uint8 and self.crop is None and self.mean is not None and self.std is not None:
            mean, std = (one.view(-1, *[1] * (x.dim() - 2)) for one in self._of_bytes)
            return x.sub(mean).div_(std)  # in two passes over the data instead of four
        x = _floats(x)
        if self.crop is not None and x.shape[-2:] != (self.crop, self.crop):
            x = F.interpolate(x, (self.crop, self.crop), mode="bilinear", antialias=True)
        return self._normalised(x)

    @cached_property
    def _of_bytes(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of inputs that are bytes."""
        assert self.mean is not None
        assert self.std is not None
        return 255 * self.mean, 255 * self.std

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of these rows of the training data, for a training step.

        Crops are drawn by torch's global generator of the data's device.
        """
        x, y = _rows(self.train_x, rows), self.train_y[rows]
        if self.crop is None or self.shapes is None:
            return self.inputs(x), y
        return self._normalised(random_resized_crop(_floats(x), self.shapes[rows], self.crop)), y

    def checksum(self) -> int:
        """A number that another name, other examples or another split change."""
        found = zlib.crc32(f"{self.name} {self.classes}".encode())
        for part in (self.train_x, self.train_y, self.valid_x, self.valid_y, self.test_x, self.test_y):
            if part is not None:
                array: Any = part.contiguous().numpy()
                found = zlib.crc32(array, found)
        return found

    def _normalised(self, x: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return x
        by_channel = (-1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(by_channel)) / self.std.view(by_channel)


TaskSequence = tuple[Task, ...]


def cut(
    name: str,
    classes: Sequence[int],
    train: Examples,
    train_rows: Array,
    test: Examples,
    test_rows: Array,
    *,
    validation: float,
    random: np.random.Generator,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Task:
    """The task of telling `classes` apart, numbered in this order, on these rows.

    `random` draws which share `validation` of the training rows is set apart; 0: none is.
    """
    rows = random.permutation(train_rows)
    held = _held_out(int(validation * len(rows)), len(rows), name) if validation else 0
    valid_x, valid_y = _part(train, rows[:held], classes) if validation else (None, None)
    return Task(
        name,
        len(classes),
        *_part(train, rows[held:], classes),
        valid_x,
        valid_y,
        *_part(test, test_rows, classes),
        mean=None if mean is None else torch.tensor(mean),
        std=None if std is None else torch.tensor(std),
    )


def _held_out(count: int, of: int, task: str) -> int:
    """At least one example for validation, and one left for training."""
    if of < 2:
        raise ValueError(f"task {task!r} has {of} training example(s), of which none can be set apart for validation")
    return min(max(count, 1), of - 1)


def _part(examples: Examples, rows: Array, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    order = np.argsort(classes)
    places = order[np.searchsorted(np.asarray(classes)[order], examples.y[rows])]
    y = torch.from_numpy(places.astype(np.int64))
    if isinstance(examples.x, Tensor):
        return examples.x[torch.from_numpy(rows)], y
    return torch.from_numpy(examples.x[rows]), y


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows, laid out in memory as all are."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2)
    return x[rows]


def _floats(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x
