"""Images in Parquet files and in folders."""

from __future__ import annotations

import shutil

import pytest

import small_images
from agscl import tasks
from agscl.data import encoded_images, image_libraries
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.tasks import DataError


def test_the_files_of_a_split_are_read_in_order_and_only_when_all_are_there(data):
    for part in range(3):
        table = small_images.make_table([2 * part, 2 * part + 1])
        small_images.write_parquet(table, data / "own" / f"train-{part:05d}-of-00003.parquet")
    images = encoded_images.find_split("own", data / "own", "train")
    assert images.read_column("label").tolist() == [0, 1, 2, 3, 4, 5]
    assert decode_images(images, ImageDecoder(32))[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert images.describe_row(3).endswith("train-00001-of-00003.parquet, row 1,")
    (data / "own" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match="contains 2 of the 3 files"):
        encoded_images.find_split("own", data / "own", "train")


def test_a_missing_one_of_several_files_is_what_the_error_is_about(data):
    small_images.write_dataset(data, "cifar100", 100, 3, 1)
    (data / "cifar100" / "train.parquet").rename(data / "cifar100" / "train-00000-of-00002.parquet")
    with pytest.raises(DataError, match=r"contains 1 of the 2 files train-00000-of-00002.parquet"):
        tasks.load("cifar100", seed=0)


def test_without_pyarrow_and_pillow_the_error_says_what_to_install(data, monkeypatch):
    small_images.write_dataset(data, "cifar100", 100, 3, 1)
    monkeypatch.setattr(image_libraries, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs pyarrow and Pillow: pip install 'agscl\[data\]'"):
        tasks.load("cifar100", seed=0)


def test_a_file_that_is_no_parquet_is_named(data):
    (data / "cifar100").mkdir(parents=True)
    for split in ("train", "test"):
        (data / "cifar100" / f"{split}.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read .* `agscl data get`"):
        tasks.load("cifar100", seed=0)


def test_class_folders_are_numbered_as_a_person_would(data):
    for split in ("train", "test"):
        for label in range(100):
            folder = data / "cifar100" / split / str(label)
            folder.mkdir(parents=True)
            for number in range(2):
                content = small_images.encode_image(small_images.make_pixels(label, number))
                (folder / f"{number}.png").write_bytes(content)
    for task in tasks.load("cifar100", seed=0):
        first, last = map(int, task.name.split("-"))
        assert set(task.test_x[:, 0, 0, 0].tolist()) == set(range(first, last + 1))
    shutil.rmtree(data / "cifar100" / "test" / "17")
    with pytest.raises(DataError, match="99 classes, but cifar100 should have 100"):
        tasks.load("cifar100", seed=0)


def test_labels_out_of_range_are_refused(data):
    small_images.write_dataset(data, "cifar100", 101, 1, 1)
    with pytest.raises(DataError, match="labels from 0 to 100, but those of cifar100 should be 0 to 99"):
        tasks.load("cifar100", seed=0)
