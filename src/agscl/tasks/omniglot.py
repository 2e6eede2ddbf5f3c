"""Omniglot: every alphabet is one task, every character one class (20 drawings each)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from agscl.data.cache import cached
from agscl.data.catalogue import source
from agscl.data.examples import Array, DataMissing
from agscl.data.images import Form, Shards, Source, decoded, in_order
from agscl.data.progress import Bar
from agscl.heads import task_names
from agscl.tasks.task import Task, TaskSequence

DEGREES = 30.0
SHIFT = 0.1
"""The largest rotation and shift of a copy, either way; the shift as a share of the side."""


def load(
    *, seed: int, alphabets: int = 50, size: int = 28, copies: int = 1, split: Literal["drawing", "paper"] = "drawing"
) -> TaskSequence:
    """The first `alphabets` alphabets in the set's own order, (examples, 1, size, size), strokes 1 on 0.

    Each task is split at random, by the seed, into 80 % training, 10 % validation and 10 % test. With `copies` 20 every
    drawing comes 20 times: as it is, and in 19 random rotations and shifts, the same for every seed. They are kept as
    bytes. All copies of a drawing are on one side of the split, unless `split` is "paper": then it goes over all
    pictures, and copies of one drawing are in training and test alike.
    """
    if not 1 <= alphabets <= 50:
        raise ValueError(f"Omniglot has 50 alphabets; asked for {alphabets}")
    if copies < 1:
        raise ValueError(f"copies must be at least 1, the drawing alone, not {copies}")
    if split not in ("drawing", "paper"):
        raise ValueError(f"split is drawing or paper, not {split!r}")
    drawings = source("omniglot", "all")
    if not isinstance(drawings, Shards):
        raise DataMissing(f"Omniglot is read from a Parquet file, not from the folder {drawings}")
    of_row, character = drawings.column("alphabet"), drawings.column("character")
    names = [name.rsplit("/", 1)[-1].replace(".", "_") for name in drawings.names("alphabet")]
    if of_row.dtype.kind not in "iu":
        known = in_order(of_row)
        names, of_row = task_names(known), np.array([known.index(name) for name in of_row.tolist()])
    pictures = decoded(drawings, Form(size, 1, filter="box")) if copies == 1 else moved(drawings, size, copies)

    tasks = []
    for alphabet in range(alphabets):
        rows = np.flatnonzero(of_row == alphabet)
        x = _strokes(pictures[rows]) if copies == 1 else torch.from_numpy(pictures[rows]).flatten(0, 1)
        characters, labels = np.unique(character[rows], return_inverse=True)
        y = torch.from_numpy(labels.astype(np.int64)).repeat_interleave(copies)
        random = np.random.default_rng([seed, alphabet])
        if split == "paper":
            order = random.permutation(len(y))
        else:
            order = (random.permutation(len(rows))[:, None] * copies + np.arange(copies)).ravel()
        tenth = len(order) // copies // 10 * copies if split == "drawing" else len(order) // 10
        test, valid, train = (torch.from_numpy(part) for part in np.split(order, [tenth, 2 * tenth]))
        name = names[alphabet] if names else f"alphabet-{alphabet}"
        tasks.append(Task(name, len(characters), x[train], y[train], x[valid], y[valid], x[test], y[test]))
    return tuple(tasks)


def _strokes(pictures: Array) -> Tensor:
    """Black ink on white as strokes 1 on 0, grey where a stroke's edge falls."""
    return 1 - torch.from_numpy(pictures.astype(np.float32) / 255)


def moved(drawings: Source, size: int, copies: int) -> Array:
    """(drawings, copies, 1, size, size) bytes, strokes 255 on 0: each drawing, then its rotated and shifted copies."""

    def make() -> Array:
        plain = decoded(drawings, Form(size, 1, filter="box"))
        fine = decoded(drawings, Form(2 * size, 1, filter="box"))  # thin strokes would be lost otherwise
        made = np.empty((len(plain), copies, 1, size, size), np.uint8)
        made[:, 0] = 255 - plain
        with Bar("rotating and shifting omniglot, once", len(plain)) as bar:
            for start in range(0, len(plain), 100):
                some = _strokes(fine[start : start + 100])
                made[start : start + 100, 1:] = _moved(some, size, copies - 1, np.random.default_rng([20, start]))
                bar.advance(len(some))
        return made

    identity = (str(drawings), size, copies, DEGREES, SHIFT)
    return cached("omniglot-moved", identity, drawings.state(), make)


def _moved(drawings: Tensor, size: int, copies: int, random: np.random.Generator) -> Array:
    """(n, copies, 1, size, size) bytes from (n, 1, 2 size, 2 size) strokes."""
    n = len(drawings)
    angle = np.deg2rad(random.uniform(-DEGREES, DEGREES, (n, copies)))
    shift = random.uniform(-2 * SHIFT, 2 * SHIFT, (2, n, copies))  # in units of half the side
    cos, sin, right, down = (
        torch.from_numpy(part).float().view(-1, 1, 1) for part in (np.cos(angle), np.sin(angle), *shift)
    )
    across = (2 * torch.arange(2 * size) + 1) / (2 * size) - 1
    along = across[:, None]
    grid = torch.stack([cos * across - sin * along + right, sin * across + cos * along + down], -1)
    fine = F.grid_sample(drawings.repeat_interleave(copies, 0), grid, mode="bilinear", align_corners=False)
    pictures = F.avg_pool2d(fine, 2).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return pictures.view(n, copies, 1, size, size).numpy()
