"""Images are decoded once and stored; damaged or outdated arrays are computed again."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import small_images
from agscl import tasks
from agscl.data import cache, decoding, encoded_images


@pytest.fixture
def cifar100(data):
    """3 training images and 1 test image of each class."""
    small_images.write_dataset(data, "cifar100", 100, 3, 1)


@pytest.fixture
def decoded(monkeypatch):
    """An entry for each image that was decoded."""
    count = []
    decode = decoding.ImageDecoder.decode
    monkeypatch.setattr(
        decoding.ImageDecoder, "decode", lambda decoder, encoded: count.append(1) or decode(decoder, encoded)
    )
    return count


def load_images():
    return np.concatenate([task.train_x.numpy() for task in tasks.load("cifar100", seed=0)])


def find_training_file():
    shapes = {path: np.load(path, "r").shape for path in (cache.cache_folder() / "decoded").glob("*.npy")}
    (training_file,) = [path for path, shape in shapes.items() if shape == (300, 3, 32, 32)]
    return training_file


@pytest.mark.usefixtures("cifar100")
def test_images_are_decoded_once(decoded):
    first = load_images()
    assert len(decoded) == 400
    assert np.array_equal(load_images(), first)
    assert len(decoded) == 400
    assert isinstance(cache._load(find_training_file()), np.memmap)


@pytest.mark.usefixtures("cifar100")
def test_a_file_that_was_decoded_is_not_opened_again_for_its_labels(monkeypatch):
    first = tasks.load("cifar100", seed=0)
    monkeypatch.setattr(
        encoded_images.ParquetImages, "_parquet_files", property(lambda _: pytest.fail("it was opened"))
    )
    again = tasks.load("cifar100", seed=0)
    assert [task.checksum() for task in again] == [task.checksum() for task in first]


def test_two_splits_of_several_files_each_do_not_replace_each_other(data, decoded):
    labels = [label for _ in range(2) for label in range(100)]
    for split in ("train", "test"):
        for part in range(2):
            name = f"{split}-{part:05d}-of-00002.parquet"
            small_images.write_parquet(small_images.make_table(labels), data / "cifar100" / name)
    first = load_images()
    assert len(decoded) == 800
    assert np.array_equal(load_images(), first)
    assert len(decoded) == 800


@pytest.mark.usefixtures("cifar100")
def test_a_changed_file_is_decoded_again_and_the_old_array_is_removed(data, decoded):
    load_images()
    old = find_training_file()
    labels = [label for _ in range(3) for label in reversed(range(100))]
    small_images.write_parquet(small_images.make_table(labels), data / "cifar100" / "train.parquet")
    load_images()
    assert len(decoded) == 700
    assert find_training_file() != old


@pytest.mark.usefixtures("cifar100")
@pytest.mark.parametrize("damage", ["a bit", "cut short", "cut in the header", "empty", "another file"])
def test_a_damaged_file_is_computed_again(decoded, damage):
    first = load_images()
    path = find_training_file()
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    damaged = {
        "a bit": bytes(content),
        "cut short": content[:-1],
        "cut in the header": content[:50],
        "empty": b"",
        "another file": b"not an array" * 100,
    }
    path.write_bytes(damaged[damage])
    assert np.array_equal(load_images(), first)
    assert len(decoded) == 700
    assert np.array_equal(load_images(), first)
    assert len(decoded) == 700


def test_a_pickle_in_the_place_of_an_array_is_not_opened(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with open(path, "ab") as file:
        file.write(b"0" * cache.CHECKSUM_BYTES)
    assert cache._load(path) is None


@pytest.mark.usefixtures("cifar100")
def test_without_a_place_to_store_them_images_are_decoded_each_time(decoded, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cifar100 could not be stored .* set AGSCL_CACHE to a folder with 1 MB free"):
        load_images()
    assert len(decoded) == 400


def test_of_several_that_want_an_array_at_once_one_computes_it_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path))
    computed = []

    def compute():
        computed.append(1)
        time.sleep(0.3)
        return np.arange(12)

    with ThreadPoolExecutor(4) as pool:  # the lock works between threads as between processes
        arrays = list(pool.map(lambda _: cache.cached_array("a", 1, 2, compute), range(4)))
    assert all(np.array_equal(array, np.arange(12)) for array in arrays)
    assert len(computed) == 1
    assert [path.suffix for path in (tmp_path / "decoded").iterdir()] == [".npy"]


@pytest.mark.usefixtures("cifar100")
def test_a_full_disk_leaves_no_half_written_file(data, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", fail)
        with pytest.warns(UserWarning, match="No space left on device"):
            first = load_images()
    assert list((cache.cache_folder() / "decoded").iterdir()) == []
    assert np.array_equal(load_images(), first)


@pytest.mark.usefixtures("cifar100")
def test_unfinished_files_of_dead_processes_are_removed_after_a_day():
    folder = cache.cache_folder() / "decoded"
    folder.mkdir(parents=True)
    for name, age in (("old.tmp", 2 * cache.ABANDONED_AFTER), ("new.tmp", 0)):
        (folder / name).touch()
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    load_images()
    assert {path.name for path in folder.glob("*.tmp")} == {"new.tmp"}


@pytest.mark.usefixtures("cifar100")
def test_processes_at_the_same_time_do_not_disturb_each_other():
    program = (
        "import hashlib; from agscl import tasks; d = hashlib.sha256(); "
        "[d.update(t.train_x.numpy().tobytes()) for t in tasks.load('cifar100', seed=0)]; print(d.hexdigest())"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert digests == {hashlib.sha256(load_images().tobytes()).hexdigest()}
    assert not list((cache.cache_folder() / "decoded").glob("*.tmp"))
