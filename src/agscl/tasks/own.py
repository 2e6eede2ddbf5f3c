"""Task sequences from data of one's own: a folder, a dataset on the Hugging Face hub, or tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agscl.data.catalogue import folders, named
from agscl.data.download import DownloadFailed, Remote, get, held, is_whole, on_the_hub
from agscl.data.examples import Array, DataMissing, Examples
from agscl.data.images import LABEL_COLUMNS, Folder, Form, Shards, Source, decoded, find, in_order, shapes
from agscl.heads import task_names
from agscl.tasks.task import TaskSequence, cut

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing", "validation", "valid", "val")
"""What splits may be called, in upper or lower case; the first one present is taken."""


@dataclass(frozen=True)
class _Part:
    """Examples before their classes are numbered."""

    x: Array | Tensor
    label: Array
    group: Array | None
    """What tells the tasks apart, if it is not the class."""
    names: Sequence[str] = ()
    """What integer labels stand for, if known."""


@dataclass(frozen=True)
class _Split:
    classes_per_task: int = 10
    seed: int = 0
    shuffle: bool = False
    validation: float = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        if self.classes_per_task < 2:
            raise ValueError(f"classes_per_task must be at least 2, not {self.classes_per_task}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share, 0 or more and below 1, not {self.validation}")
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share is above 0 and below 1, not {self.test_share}")


def from_folder(
    path: str | Path,
    *,
    by: str = "class",
    classes_per_task: int = 10,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    image: str | None = None,
    label: str | None = None,
    seed: int = 0,
    shuffle: bool = False,
    validation: float = 0.1,
    test_share: float = 0.2,
) -> TaskSequence:
    """Tasks from pictures: PATH/CLASS/picture.png, PATH/TASK/CLASS/picture.png, or Parquet files in PATH.

    Where there are PATH/train and PATH/test, or train.parquet and test.parquet, their split is kept.

    Args:
        by: What makes a task. "class": `classes_per_task` classes each, in the order of their names. "folder": each
            folder TASK. Otherwise a column of the Parquet files: each of its values is a task.
        size: Pictures become `size` × `size`: the shorter side is resized, the middle kept. Not needed where all of
            them are squares of one size.
        channels: 3 for colours, 1 for grey.
        image: The column of the pictures in Parquet files, if it is not called image or img.
        label: The column of the labels, if it is not called label, fine_label or labels.
        seed: Draws what is set apart and, with `shuffle`, the order of the classes or tasks.
        validation: The share of each task's training examples set apart for validation; 0 for none.
        test_share: The share of each class set apart for test where there is no test split.
    """
    split = _Split(classes_per_task, seed, shuffle, validation, test_share)
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise DataMissing(f"there is no folder {folder}")
    if size is not None and not (isinstance(size, int) and size >= 1):
        raise ValueError(f"size is a number of pixels, at least 1, not {size!r}")
    if channels not in (1, 3):
        raise ValueError(f"channels is 3 for colours or 1 for grey, not {channels!r}")
    train, test = _splits(folder, image)
    learned = _read(train, str(by), size, channels, label)
    return _sequence(learned, None if test is None else _read(test, str(by), size, channels, label), split)


def _splits(folder: Path, image: str | None) -> tuple[Source, Source | None]:
    """What is for training and what is for test, if they are told apart."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")):
        files.setdefault(re.split(r"[-_.]", path.stem.lower())[0], []).append(path)
    inside = {path.name.lower(): path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
    below = {name: path for name, path in inside.items() if path.is_dir()}
    told_apart = bool(below) and below.keys() <= {*TRAIN_SPLITS, *TEST_SPLITS}  # or "train" is a class, or a task

    def found(names: Sequence[str]) -> Source | None:
        for name in names:
            if name in files:
                whole = find(folder.name, folder, name, image)  # says so where some of several files are missing
                return whole if isinstance(whole, Shards) else Shards(folder.name, tuple(files[name]), image)
            if told_apart and not files and name in below:
                return Folder(folder.name, below[name])
        return None

    train, test = found(TRAIN_SPLITS), found(TEST_SPLITS)
    if train is None and test is not None:
        raise DataMissing(f"{test} looks like a test split, but nothing in {folder} is called train")
    if train is not None:
        return train, test
    everything = [path for each in files.values() for path in each]
    return Shards(folder.name, tuple(everything), image) if files else Folder(folder.name, folder), None


def from_hub(name: str, *, config: str | None = None, test: str | None = None, **options: Any) -> TaskSequence:
    """Tasks from a dataset of pictures on the Hugging Face hub, e.g. "uoft-cs/cifar100"; downloaded the first time.

    `config` is which of its configurations, where it has several; `test` which split to test on, by default its test or
    validation split; the options are those of `from_folder`.
    """
    config, test = (None if each is None else str(each) for each in (config, test))
    _Split(**{each.name: options.get(each.name, each.default) for each in fields(_Split)})  # before all is downloaded
    kept = "--".join([*name.split("/"), *(each for each in (config, test) if each)])
    places = [folder / "hub" / kept for folder in folders()]
    folder = next((place for place in places if is_whole(place)), None)
    if folder is None:
        folder = places[0]
        with held(folder):
            get(folder, lambda: _planned(name, config, test))
    return from_folder(folder, **options)


def from_tensors(
    x: Tensor,
    y: Tensor | Sequence[Any],
    *,
    by: Literal["class"] | Tensor | Sequence[Any] = "class",
    test: tuple[Tensor, Tensor | Sequence[Any]] | None = None,
    test_by: Tensor | Sequence[Any] | None = None,
    classes_per_task: int = 10,
    seed: int = 0,
    shuffle: bool = False,
    validation: float = 0.1,
    test_share: float = 0.2,
) -> TaskSequence:
    """Tasks from inputs (examples, ...) and their labels, integers or names.

    Floats are taken as they are; bytes are pictures, normalised with the mean and deviation of the training part.

    Args:
        by: What makes a task. "class": `classes_per_task` classes each. Otherwise a value for each example: those with
            the same one are a task.
        test: Inputs and labels for test; where there are none, `test_share` of each class is set apart.
        test_by: As `by`, for `test`.

    The other arguments are those of `from_folder`.
    """
    split = _Split(classes_per_task, seed, shuffle, validation, test_share)
    if isinstance(by, str) and by != "class":
        raise ValueError(f'by is "class", or a value for each example, not {by!r}')
    if not isinstance(by, str) and test is not None and test_by is None:
        raise ValueError("test_by must say to which task each test example belongs, since by does so for training")
    if isinstance(by, str) and test_by is not None:
        raise ValueError('with by="class" it is their classes that say to which task test examples belong: no test_by')
    learned = _checked(x, y, None if isinstance(by, str) else by)
    return _sequence(learned, None if test is None else _checked(*test, test_by), split)


def _checked(x: Tensor, y: Tensor | Sequence[Any], group: Tensor | Sequence[Any] | None) -> _Part:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
        what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"inputs are a tensor of floats, or of bytes (uint8) for pictures, not {what}")
    x = x.detach().float() if x.is_floating_point() else x
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise ValueError("some inputs are infinite or NaN, as float32 at least")
    if x.dtype == torch.uint8 and (x.dim() != 4 or (x.shape[1] > 4 and x.shape[3] <= 4)):
        order = "x.permute(0, 3, 1, 2)" if x.dim() == 4 else "x[:, None] for grey ones" if x.dim() == 3 else "x.float()"
        raise ValueError(
            f"bytes are pictures (examples, channels, height, width); these have the shape {tuple(x.shape)}: {order}?"
        )
    if not len(x):
        raise ValueError("there are no examples")
    part = _Part(x, np.asarray(y), None if group is None else np.asarray(group))
    for what, values in (("labels", part.label), ("values that say which task they belong to", part.group)):
        if values is not None and values.shape != (len(x),):
            raise ValueError(f"there are {len(x)} examples, but the {what} have the shape {values.shape}")
    return part


def _read(source: Source, by: str, size: int | None, channels: Literal[1, 3], label: str | None) -> _Part:
    if isinstance(source, Shards):
        column = source.which(label, LABEL_COLUMNS, "labels", "label")
        task = None if by == "class" else source.which(by, (), "tasks", "by")
    else:
        column, task = "label", {"class": None, "folder": "task"}.get(by, by)
    if not len(source):
        raise DataMissing(f"{source} has no rows")
    if size is None:
        found = np.unique(shapes(source), axis=0)
        if len(found) > 1 or found[0, 0] != found[0, 1]:
            raise ValueError(f"the pictures in {source} are not squares of one size: give the size, e.g. size=64")
        size = int(found[0, 0])
    pictures = decoded(source, Form(size, channels, fit="crop"))
    return _Part(pictures, source.column(column), None if task is None else source.column(task), source.names(column))


def _sequence(train: _Part, test: _Part | None, split: _Split) -> TaskSequence:
    if test is not None and (test.x.shape[1:], test.x.dtype) != (train.x.shape[1:], train.x.dtype):
        kinds = [f"{part.x.dtype} of {tuple(part.x.shape[1:])}" for part in (train, test)]
        raise ValueError(
            f"training examples are {kinds[0]}, test examples {kinds[1]}; pictures can be given a size=..."
        )
    for part in (train,) if test is None else (train, test):
        for what, each in (("labels", part.label), ("values that say which task they belong to", part.group)):
            if each is not None and each.dtype.kind == "f" and bool(np.isnan(each).any()):
                raise ValueError(f"{int(np.isnan(each).sum())} of the {what} are NaN")
    labels = in_order(train.label)
    learned = Examples(train.x, _places(train.label, labels, "class"))
    tested = learned if test is None else Examples(test.x, _places(test.label, labels, "class"))
    random = np.random.default_rng([split.seed, 0]) if split.shuffle else None
    if train.group is None:
        order = np.arange(len(labels)) if random is None else random.permutation(len(labels))
        task_of_class = np.argsort(order) // split.classes_per_task
        of, test_of = task_of_class[learned.y], task_of_class[tested.y]
        names = [_ends(labels, train.names, np.flatnonzero(task_of_class == task)) for task in np.unique(task_of_class)]
    else:
        values = in_order(train.group)
        values = values if random is None else [values[place] for place in random.permutation(len(values))]
        of = _places(train.group, values, "task")
        test_of = of if test is None or test.group is None else _places(test.group, values, "task")
        names = [str(value) for value in values]

    tests = np.ones(len(tested.y), bool) if test is not None else _set_apart(learned.y, of, labels, split)
    tasks = []
    for task, name in enumerate(task_names(names)):
        train_rows = np.flatnonzero((of == task) & ~tests if test is None else of == task)
        test_rows = np.flatnonzero((test_of == task) & tests)
        classes = np.unique(learned.y[train_rows])
        if len(classes) < 2:
            raise ValueError(f"task {name!r} has one class only, {labels[classes[0]]!r}; a task takes two or more")
        if lacking := set(classes.tolist()) ^ set(tested.y[test_rows].tolist()):
            which = [labels[label] for label in sorted(lacking)]
            raise ValueError(f"task {name!r} has examples of {which} in only one of training and test")
        made = cut(
            name,
            classes.tolist(),
            learned,
            train_rows,
            tested,
            test_rows,
            validation=split.validation,
            random=np.random.default_rng([split.seed, 2, task]),
        )
        if lacking := set(range(made.classes)) - set(made.train_y.tolist()):
            which = [labels[classes[label]] for label in sorted(lacking)]
            raise ValueError(
                f"task {name!r} has so few examples of {which} that none is left for training: more of them, or a "
                "smaller validation"
            )
        tasks.append(made)
    return _normalised(tuple(tasks))


def _places(values: Array, known: list[Any], what: str) -> Array:
    place = {value: place for place, value in enumerate(known)}
    if strange := set(values.tolist()) - set(known):
        withheld = " (withheld, it seems: from_hub takes another split with test=...)" if strange == {-1} else ""
        raise ValueError(
            f"the test examples are of a {what} that training does not have: {in_order(np.array([*strange]))}{withheld}"
        )
    return np.array([place[value] for value in values.tolist()])


def _ends(labels: list[Any], names: Sequence[str], classes: Array) -> str:
    """The first and the last class of a task, as its name."""
    ends = [labels[classes[0]], labels[classes[-1]]]
    return "-".join(str(names[end] if isinstance(end, int) and 0 <= end < len(names) else end) for end in ends)


def _set_apart(y: Array, of: Array, labels: list[Any], split: _Split) -> Array:
    """Which rows are for test: a share of each class in each task."""
    random = np.random.default_rng([split.seed, 1])
    tests = np.zeros(len(y), bool)
    for task, label in np.unique(np.stack([of, y]), axis=1).T:
        rows = random.permutation(np.flatnonzero((of == task) & (y == label)))
        if len(rows) < 2:
            raise ValueError(f"there is one example only of {labels[label]!r}: it cannot be in training and in test")
        tests[rows[: min(max(1, round(split.test_share * len(rows))), len(rows) - 1)]] = True
    return tests


def _normalised(tasks: TaskSequence) -> TaskSequence:
    """Bytes get the mean and the deviation of the training part of all tasks."""
    if tasks[0].train_x.dtype != torch.uint8:
        return tasks
    channels = tasks[0].train_x.shape[1]
    counts = torch.zeros(channels, 256, dtype=torch.float64)
    for task in tasks:
        for channel in range(channels):
            counts[channel] += torch.bincount(task.train_x[:, channel].flatten().int(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(1).sqrt()
    std[std == 0] = 1
    return tuple(replace(task, mean=mean.float(), std=std.float()) for task in tasks)


def _planned(name: str, config: str | None, test: str | None) -> tuple[str, list[Remote]]:
    revision, found = on_the_hub(name)
    chosen = config or (next(iter(found)) if len(found) == 1 else "default")
    if chosen not in found:
        raise DownloadFailed(f"choose a configuration of {name}: config=... is one of {', '.join(found)}")
    splits = found[chosen]
    train = next(iter(splits)) if len(splits) == 1 else "train"
    if train not in splits:
        raise DownloadFailed(f"{name} has no split called train; it has: {', '.join(splits)}")
    if test is not None and test not in splits:
        raise DownloadFailed(f"{name} has no split called {test}; it has: {', '.join(splits)}")
    test = test or next((split for split in TEST_SPLITS if split in splits and split != train), None)
    files = named("train", splits[train]) + (named("test", splits[test]) if test else [])
    return f"{name}@{revision}", files
