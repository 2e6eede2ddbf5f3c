"""Omniglot: every alphabet is a task, every character a class (20 drawings each)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from agscl.data.cache import cached_array
from agscl.data.datasets import open_split
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.data.encoded_images import EncodedImages, ParquetImages
from agscl.data.errors import DataError
from agscl.data.examples import Array
from agscl.data.natural_order import sort_unique
from agscl.data.progress_line import ProgressLine
from agscl.heads import make_task_names
from agscl.tasks.task import Task, TaskSequence

MAX_DEGREES = 30.0
MAX_SHIFT = 0.1
"""The largest rotation and shift of a copy, either way; the shift as a share of the side."""
BATCH_SIZE = 100


def load_omniglot(
    *, seed: int, alphabets: int = 50, size: int = 28, copies: int = 1, split: Literal["drawing", "paper"] = "drawing"
) -> TaskSequence:
    """The first `alphabets` alphabets in the dataset's order, (examples, 1, size, size), strokes 1 on 0.

    Each task is split at random, by the seed, into 80 % training, 10 % validation and 10 % test. With `copies=20` every
    drawing comes 20 times: as it is, and in 19 random rotations and shifts, the same for every seed, stored as bytes.
    All copies of a drawing are on one side of the split, unless `split` is "paper": then all images are split at
    random, and copies of one drawing are in training and test alike.
    """
    if not 1 <= alphabets <= 50:
        raise ValueError(f"alphabets must be 1 to 50, not {alphabets}")
    if copies < 1:
        raise ValueError(f"copies must be at least 1 (the drawing alone), not {copies}")
    if split not in ("drawing", "paper"):
        raise ValueError(f'split must be "drawing" or "paper", not {split!r}')
    drawings, alphabet_of_row, character_of_row, names = open_drawings()
    if copies == 1:
        images = decode_images(drawings, ImageDecoder(size, 1, filter="box"))
    else:
        images = make_copies(drawings, size, copies)

    tasks = []
    for alphabet in range(alphabets):
        rows = np.flatnonzero(alphabet_of_row == alphabet)
        x = _to_strokes(images[rows]) if copies == 1 else torch.from_numpy(images[rows]).flatten(0, 1)
        characters, labels = np.unique(character_of_row[rows], return_inverse=True)
        y = torch.from_numpy(labels.astype(np.int64)).repeat_interleave(copies)
        rng = np.random.default_rng([seed, alphabet])
        if split == "paper":
            order = rng.permutation(len(y))
            tenth = len(order) // 10
        else:
            order = (rng.permutation(len(rows))[:, None] * copies + np.arange(copies)).ravel()
            tenth = len(rows) // 10 * copies
        test, valid, train = (torch.from_numpy(part) for part in np.split(order, [tenth, 2 * tenth]))
        name = names[alphabet] if names else f"alphabet-{alphabet}"
        tasks.append(Task(name, len(characters), x[train], y[train], x[valid], y[valid], x[test], y[test]))
    return tuple(tasks)


def open_drawings() -> tuple[ParquetImages, Array, Array, list[str]]:
    """All drawings of Omniglot; the alphabet of each, a number, and its character; the alphabets' names, if there."""
    drawings = open_split("omniglot", "all")
    if not isinstance(drawings, ParquetImages):
        raise DataError(f"Omniglot must be a Parquet file, all.parquet, not the folder {drawings}")
    alphabet_of_row, character_of_row = drawings.read_column("alphabet"), drawings.read_column("character")
    names = [name.rsplit("/", 1)[-1].replace(".", "_") for name in drawings.read_value_names("alphabet")]
    if alphabet_of_row.dtype.kind not in "iu":
        known = sort_unique(alphabet_of_row)
        names = make_task_names(known)
        alphabet_of_row = np.array([known.index(name) for name in alphabet_of_row.tolist()])
    return drawings, alphabet_of_row, character_of_row, names


def _to_strokes(images: Array) -> Tensor:
    """Black ink on white becomes strokes 1 on 0, between these at the edges of a stroke."""
    return 1 - torch.from_numpy(images.astype(np.float32) / 255)


def make_copies(drawings: EncodedImages, size: int, copies: int) -> Array:
    """(drawings, copies, 1, size, size) bytes, strokes 255 on 0: each drawing, then its rotated and shifted copies."""

    def compute() -> Array:
        originals = decode_images(drawings, ImageDecoder(size, 1, filter="box"))
        fine = decode_images(drawings, ImageDecoder(2 * size, 1, filter="box"))  # else thin strokes would be lost
        result = np.empty((len(originals), copies, 1, size, size), np.uint8)
        result[:, 0] = 255 - originals
        with ProgressLine("rotating and shifting omniglot (only once)", len(originals)) as progress:
            for start in range(0, len(originals), BATCH_SIZE):
                batch = slice(start, start + BATCH_SIZE)
                strokes = _to_strokes(fine[batch])
                result[batch, 1:] = _rotate_and_shift(strokes, size, copies - 1, np.random.default_rng([20, start]))
                progress.advance(len(strokes))
        return result

    identity = (str(drawings), size, copies, MAX_DEGREES, MAX_SHIFT)
    return cached_array("omniglot-moved", identity, drawings.describe_image_files(), compute)


def _rotate_and_shift(drawings: Tensor, size: int, copies: int, rng: np.random.Generator) -> Array:
    """(n, copies, 1, size, size) bytes from (n, 1, 2 size, 2 size) strokes."""
    n = len(drawings)
    angle = np.deg2rad(rng.uniform(-MAX_DEGREES, MAX_DEGREES, (n, copies)))
    shift = rng.uniform(-2 * MAX_SHIFT, 2 * MAX_SHIFT, (2, n, copies))  # in units of half the side
    cos, sin, shift_x, shift_y = (
        torch.from_numpy(part).float().view(-1, 1, 1) for part in (np.cos(angle), np.sin(angle), *shift)
    )
    x = (2 * torch.arange(2 * size) + 1) / (2 * size) - 1
    y = x[:, None]
    grid = torch.stack([cos * x - sin * y + shift_x, sin * x + cos * y + shift_y], -1)
    fine = F.grid_sample(drawings.repeat_interleave(copies, 0), grid, mode="bilinear", align_corners=False)
    images = F.avg_pool2d(fine, 2).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return images.view(n, copies, 1, size, size).numpy()
