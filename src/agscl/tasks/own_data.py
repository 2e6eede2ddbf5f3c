"""Task sequences from your own data: a folder, a dataset on the Hugging Face hub, or tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agscl.data.decoding import ImageDecoder, decode_images, read_image_shapes
from agscl.data.download import download_hub_dataset
from agscl.data.encoded_images import (
    LABEL_COLUMNS,
    TEST_SPLITS,
    TRAIN_SPLITS,
    EncodedImages,
    FolderImages,
    ParquetImages,
    find_split,
)
from agscl.data.errors import DataError
from agscl.data.examples import Array, Examples
from agscl.data.natural_order import sort_unique
from agscl.heads import make_task_names
from agscl.tasks.task import TaskSequence, make_task


@dataclass(frozen=True)
class _RawExamples:
    """Examples before their classes are numbered."""

    x: Array | Tensor
    labels: Array
    """(examples,) integers or names."""
    groups: Array | None
    """(examples,) the task of each example; None where its class decides."""
    class_names: Sequence[str] = ()
    """The names behind integer labels, if known."""


@dataclass(frozen=True)
class _SplitOptions:
    """The options that say how examples are divided; see `from_folder`."""

    classes_per_task: int = 10
    seed: int = 0
    shuffle: bool = False
    validation: float = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        if self.classes_per_task < 2:
            raise ValueError(f"classes_per_task must be at least 2, not {self.classes_per_task}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a share, at least 0 and below 1, not {self.validation}")
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be above 0 and below 1, not {self.test_share}")


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
    """Tasks from your own images: PATH/CLASS/image.png, PATH/TASK/CLASS/image.png, or Parquet files in PATH.

    A split into PATH/train and PATH/test, or train.parquet and test.parquet, is kept.

    Args:
        by: What makes a task. "class": `classes_per_task` classes each, in the order of their names. "folder": each
            folder TASK. Otherwise a column of the Parquet files: each of its values is a task.
        size: Images become `size` × `size`: the shorter side is resized, the centre cropped. Not needed where all of
            them are squares of one size.
        channels: 3 for colour, 1 for grey.
        image: The column of the images in Parquet files, if it is not called image or img.
        label: The column of the labels, if it is not called label, fine_label or labels.
        seed: Draws the test and validation examples and, with `shuffle`, the order of the classes or tasks.
        validation: The share of each task's training examples set apart for validation; 0 for none.
        test_share: The share of each class set apart for test where there is no test split.
    """
    options = _SplitOptions(classes_per_task, seed, shuffle, validation, test_share)
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if size is not None and not (isinstance(size, int) and size >= 1):
        raise ValueError(f"size must be a number of pixels, at least 1, not {size!r}")
    if channels not in (1, 3):
        raise ValueError(f"channels must be 3 for colour or 1 for grey, not {channels!r}")
    train, test = _find_train_and_test(folder, image)
    train_examples = _load_examples(train, str(by), size, channels, label)
    test_examples = None if test is None else _load_examples(test, str(by), size, channels, label)
    return _make_sequence(train_examples, test_examples, options)


def _find_train_and_test(folder: Path, image: str | None) -> tuple[EncodedImages, EncodedImages | None]:
    """The images for training and for test; None for test where the folder is not split."""
    parquet_files: dict[str, list[Path]] = {}  # by the first word of their names
    for path in sorted(folder.glob("*.parquet")):
        parquet_files.setdefault(re.split(r"[-_.]", path.stem.lower())[0], []).append(path)
    entries = {path.name.lower(): path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
    subfolders = {name: path for name, path in entries.items() if path.is_dir()}
    # A subfolder called train is a split only if all others are splits too; else it is a class or a task.
    has_split_folders = bool(subfolders) and subfolders.keys() <= {*TRAIN_SPLITS, *TEST_SPLITS}

    def find_first(names: Sequence[str]) -> EncodedImages | None:
        for name in names:
            if name in parquet_files:
                shards = find_split(folder.name, folder, name, image)  # raises where one of several files is missing
                if isinstance(shards, ParquetImages):
                    return shards
                return ParquetImages(folder.name, tuple(parquet_files[name]), image)
            if has_split_folders and not parquet_files and name in subfolders:
                return FolderImages(folder.name, subfolders[name])
        return None

    train, test = find_first(TRAIN_SPLITS), find_first(TEST_SPLITS)
    if train is None and test is not None:
        raise DataError(f"{test} looks like a test split, but nothing in {folder} is called train")
    if train is not None:
        return train, test
    if parquet_files:
        return ParquetImages(
            folder.name, tuple(path for paths in parquet_files.values() for path in paths), image
        ), None
    return FolderImages(folder.name, folder), None


def from_hub(name: str, *, config: str | None = None, test: str | None = None, **options: Any) -> TaskSequence:
    """Tasks from a dataset of images on the Hugging Face hub, e.g. "uoft-cs/cifar100"; downloaded the first time.

    `config` chooses one of its configurations, where it has several; `test` the split to test on, by default its test
    or validation split; the options are those of `from_folder`.
    """
    _SplitOptions(**{each.name: options.get(each.name, each.default) for each in fields(_SplitOptions)})  # check first
    config, test = (None if each is None else str(each) for each in (config, test))
    return from_folder(download_hub_dataset(name, config, test), **options)


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
    """Tasks from your own inputs (examples, ...) and their labels, integers or names.

    Floats are used as they are; bytes are images, normalised with the mean and deviation of the training examples.

    Args:
        by: What makes a task. "class": `classes_per_task` classes each. Otherwise a value for each example: those with
            the same value are a task.
        test: Inputs and labels for test; where there are none, `test_share` of each class is set apart.
        test_by: As `by`, for `test`.

    The other arguments are those of `from_folder`.
    """
    options = _SplitOptions(classes_per_task, seed, shuffle, validation, test_share)
    if isinstance(by, str) and by != "class":
        raise ValueError(f'by must be "class", or a value for each example, not {by!r}')
    if not isinstance(by, str) and test is not None and test_by is None:
        raise ValueError("test_by is missing: it must say to which task each test example belongs, as by does for x")
    if isinstance(by, str) and test_by is not None:
        raise ValueError(
            'test_by needs a by: with by="class" the class of a test example says to which task it belongs'
        )
    train_examples = _check_tensors(x, y, None if isinstance(by, str) else by)
    return _make_sequence(train_examples, None if test is None else _check_tensors(*test, test_by), options)


def _check_tensors(x: Tensor, y: Tensor | Sequence[Any], groups: Tensor | Sequence[Any] | None) -> _RawExamples:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
        kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"inputs must be a tensor of floats, or of bytes (uint8) for images, not {kind}")
    x = x.detach().float() if x.is_floating_point() else x
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise ValueError("some inputs are infinite or NaN, at least as float32")
    if x.dtype == torch.uint8 and (x.dim() != 4 or (x.shape[1] > 4 and x.shape[3] <= 4)):
        remedy = "x.permute(0, 3, 1, 2)" if x.dim() == 4 else "x[:, None]" if x.dim() == 3 else "x.float()"
        raise ValueError(
            f"inputs of bytes must be images (examples, channels, height, width), but these have the shape "
            f"{tuple(x.shape)}. Try {remedy}"
        )
    if not len(x):
        raise ValueError("there are no examples")
    examples = _RawExamples(x, np.asarray(y), None if groups is None else np.asarray(groups))
    for description, values in _describe_columns(examples):
        if values.shape != (len(x),):
            raise ValueError(f"there are {len(x)} examples, but the {description} have the shape {values.shape}")
    return examples


def _describe_columns(examples: _RawExamples) -> list[tuple[str, Array]]:
    columns = [("labels", examples.labels)]
    return columns if examples.groups is None else [*columns, ("values of by", examples.groups)]


def _load_examples(
    images: EncodedImages, by: str, size: int | None, channels: Literal[1, 3], label: str | None
) -> _RawExamples:
    if isinstance(images, ParquetImages):
        label_column = images.choose_column(label, LABEL_COLUMNS, "labels", "label")
        task_column = None if by == "class" else images.choose_column(by, (), "tasks", "by")
    else:
        label_column, task_column = "label", {"class": None, "folder": "task"}.get(by, by)
    if not len(images):
        raise DataError(f"{images} has no rows")
    if size is None:
        shapes = np.unique(read_image_shapes(images), axis=0)
        if len(shapes) > 1 or shapes[0, 0] != shapes[0, 1]:
            raise ValueError(f"the images in {images} are not squares of one size: choose a size, e.g. size=64")
        size = int(shapes[0, 0])
    return _RawExamples(
        decode_images(images, ImageDecoder(size, channels, fit="crop")),
        images.read_column(label_column),
        None if task_column is None else images.read_column(task_column),
        images.read_value_names(label_column),
    )


def _make_sequence(train: _RawExamples, test: _RawExamples | None, options: _SplitOptions) -> TaskSequence:
    if test is not None and (test.x.shape[1:], test.x.dtype) != (train.x.shape[1:], train.x.dtype):
        kinds = [f"{part.x.dtype} of {tuple(part.x.shape[1:])}" for part in (train, test)]
        raise ValueError(
            f"training examples are {kinds[0]}, but test examples {kinds[1]}; for images, choose one size=..."
        )
    for part in (train,) if test is None else (train, test):
        for description, values in _describe_columns(part):
            if values.dtype.kind == "f" and bool(np.isnan(values).any()):
                raise ValueError(f"{int(np.isnan(values).sum())} of the {description} are NaN")
    labels = sort_unique(train.labels)
    train_examples = Examples(train.x, _number_values(train.labels, labels, "class"))
    test_examples = train_examples if test is None else Examples(test.x, _number_values(test.labels, labels, "class"))
    rng = np.random.default_rng([options.seed, 0]) if options.shuffle else None
    if train.groups is None:
        order = np.arange(len(labels)) if rng is None else rng.permutation(len(labels))
        task_of_class = np.argsort(order) // options.classes_per_task
        train_task, test_task = task_of_class[train_examples.y], task_of_class[test_examples.y]
        names = [
            _join_first_and_last(labels, train.class_names, np.flatnonzero(task_of_class == task))
            for task in np.unique(task_of_class)
        ]
    else:
        groups = sort_unique(train.groups)
        groups = groups if rng is None else [groups[position] for position in rng.permutation(len(groups))]
        train_task = _number_values(train.groups, groups, "task")
        test_task = train_task
        if test is not None and test.groups is not None:
            test_task = _number_values(test.groups, groups, "task")
        names = [str(group) for group in groups]

    if test is None:
        is_test = _draw_test_rows(train_examples.y, train_task, labels, options)
        train_task, test_task = np.where(is_test, -1, train_task), np.where(is_test, train_task, -1)
    tasks = []
    for number, name in enumerate(make_task_names(names)):
        train_rows, test_rows = np.flatnonzero(train_task == number), np.flatnonzero(test_task == number)
        classes = np.unique(train_examples.y[train_rows])
        if len(classes) < 2:
            raise ValueError(f"task {name!r} has only one class, {labels[classes[0]]!r}; a task needs at least two")
        if difference := set(classes.tolist()) ^ set(test_examples.y[test_rows].tolist()):
            affected = [labels[label] for label in sorted(difference)]
            raise ValueError(f"task {name!r} has examples of {affected} in only one of training and test")
        task = make_task(
            name,
            classes.tolist(),
            train_examples,
            train_rows,
            test_examples,
            test_rows,
            validation_share=options.validation,
            rng=np.random.default_rng([options.seed, 2, number]),
        )
        if missing := set(range(task.classes)) - set(task.train_y.tolist()):
            affected = [labels[classes[label]] for label in sorted(missing)]
            raise ValueError(
                f"task {name!r} has so few examples of {affected} that none is left for training: add some, or choose "
                "a smaller validation=..."
            )
        tasks.append(task)
    return add_normalisation(tuple(tasks))


def _number_values(values: Array, known: list[Any], kind: str) -> Array:
    """(examples,) the position of each value in `known`."""
    position = {value: position for position, value in enumerate(known)}
    if unknown := set(values.tolist()) - set(known):
        hint = ". These labels seem to be withheld: choose another split with from_hub(test=...)"
        raise ValueError(
            f"test examples are of a {kind} that training does not have: {sort_unique(np.array([*unknown]))}"
            f"{hint if unknown == {-1} else ''}"
        )
    return np.array([position[value] for value in values.tolist()])


def _join_first_and_last(labels: list[Any], class_names: Sequence[str], classes: Array) -> str:
    """A task's name: its first and its last class."""
    ends = [labels[classes[0]], labels[classes[-1]]]
    return "-".join(
        str(class_names[end] if isinstance(end, int) and 0 <= end < len(class_names) else end) for end in ends
    )


def _draw_test_rows(y: Array, task_of_row: Array, labels: list[Any], options: _SplitOptions) -> Array:
    """(examples,) whether a row is for test: a share of each class in each task."""
    rng = np.random.default_rng([options.seed, 1])
    is_test = np.zeros(len(y), bool)
    for task, label in np.unique(np.stack([task_of_row, y]), axis=1).T:
        rows = rng.permutation(np.flatnonzero((task_of_row == task) & (y == label)))
        if len(rows) < 2:
            raise ValueError(f"there is only one example of {labels[label]!r}: training and test need one each")
        is_test[rows[: min(max(1, round(options.test_share * len(rows))), len(rows) - 1)]] = True
    return is_test


def add_normalisation(tasks: TaskSequence) -> TaskSequence:
    """Give your own images, as bytes, the mean and the deviation of the training examples of all tasks."""
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
