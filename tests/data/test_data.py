"""Getting datasets, keeping them decoded, and checking them."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as image

import pictures
from agscl import tasks
from agscl.cli import main as cli
from agscl.data import cache, catalogue, convert, download, images
from agscl.data.download import DownloadFailed, Remote
from small_hub import REVISION, SmallHub

DATA = Path(os.environ.get("AGSCL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder for data, and a cache of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AGSCL_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.001)
    return tmp_path / "data"


@pytest.fixture
def hub(data, monkeypatch):
    with SmallHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


class TestCache:
    @pytest.fixture
    def decodings(self, monkeypatch):
        """How many pictures were decoded."""
        counted = []
        read = images.Form.read
        monkeypatch.setattr(images.Form, "read", lambda form, encoded: counted.append(1) or read(form, encoded))
        return counted

    def load(self):
        return np.concatenate([task.train_x.numpy() for task in tasks.load("cifar100", seed=0)])

    def file(self):
        found = {path: np.load(path, "r").shape for path in (cache.home() / "decoded").glob("*.npy")}
        (of_training,) = [path for path, shape in found.items() if shape == (300, 3, 32, 32)]
        return of_training

    def test_pictures_are_decoded_once(self, data, decodings):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        first = self.load()
        assert len(decodings) == 400
        assert np.array_equal(self.load(), first)
        assert len(decodings) == 400
        assert isinstance(cache._open(self.file()), np.memmap)

    def test_a_file_that_was_decoded_is_not_opened_again_for_its_labels(self, data, monkeypatch):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        first = tasks.load("cifar100", seed=0)
        monkeypatch.setattr(images.Shards, "_opened", property(lambda shards: pytest.fail("it was opened")))
        again = tasks.load("cifar100", seed=0)
        assert [task.checksum() for task in again] == [task.checksum() for task in first]

    def test_two_splits_of_several_files_each_do_not_push_each_other_out(self, data, decodings):
        labels = [label for _ in range(2) for label in range(100)]
        for split in ("train", "test"):
            for part in range(2):
                name = f"{split}-{part:05d}-of-00002.parquet"
                pictures.stored(pictures.table(labels), data / "cifar100" / name)
        first = self.load()
        assert len(decodings) == 800
        assert np.array_equal(self.load(), first)
        assert len(decodings) == 800

    def test_a_file_of_several_that_has_not_come_is_what_the_error_is_about(self, data):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        (data / "cifar100" / "train.parquet").rename(data / "cifar100" / "train-00000-of-00002.parquet")
        with pytest.raises(tasks.DataMissing, match=r"holds 1 of the 2 files train-00000-of-00002.parquet"):
            tasks.load("cifar100", seed=0)

    def test_without_what_reads_pictures_the_error_is_about_that(self, data, monkeypatch):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        monkeypatch.setattr(images, "find_spec", lambda name: None)
        with pytest.raises(tasks.DataMissing, match=r"needs pyarrow and Pillow: pip install 'agscl\[data\]'"):
            tasks.load("cifar100", seed=0)

    def test_a_changed_file_is_decoded_anew_and_the_old_pictures_are_removed(self, data, decodings):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        self.load()
        old = self.file()
        labels = [label for _ in range(3) for label in reversed(range(100))]
        pictures.stored(pictures.table(labels), data / "cifar100" / "train.parquet")
        self.load()
        assert len(decodings) == 700
        assert self.file() != old

    @pytest.mark.parametrize("damage", ["a bit", "cut short", "cut in the header", "empty", "another file"])
    def test_a_damaged_file_is_made_anew(self, data, decodings, damage):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        first = self.load()
        path = self.file()
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
        assert np.array_equal(self.load(), first)
        assert len(decodings) == 700
        assert np.array_equal(self.load(), first)
        assert len(decodings) == 700

    def test_a_pickle_in_the_place_of_an_array_is_not_opened(self, tmp_path):
        path = tmp_path / "array.npy"
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with open(path, "ab") as file:
            file.write(b"0" * cache.DIGEST)
        assert cache._open(path) is None

    def test_without_a_place_to_keep_them_pictures_are_decoded_each_time(self, data, decodings, monkeypatch, tmp_path):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        (tmp_path / "file").touch()
        monkeypatch.setenv("AGSCL_CACHE", str(tmp_path / "file"))
        with pytest.warns(UserWarning, match=r"cifar100 could not be kept .* set AGSCL_CACHE to a folder with 1 MB"):
            self.load()
        assert len(decodings) == 400

    def test_of_several_that_ask_at_once_one_decodes_and_the_others_wait_for_it(self, tmp_path, monkeypatch):
        monkeypatch.setenv("AGSCL_CACHE", str(tmp_path))
        made = []

        def make():
            made.append(1)
            time.sleep(0.3)
            return np.arange(12)

        with ThreadPoolExecutor(4) as pool:  # a lock of an open file holds between threads as between processes
            found = list(pool.map(lambda _: cache.cached("a", 1, 2, make), range(4)))
        assert all(np.array_equal(each, np.arange(12)) for each in found)
        assert len(made) == 1
        assert [path.suffix for path in (tmp_path / "decoded").iterdir()] == [".npy"]

    def test_a_full_disk_leaves_no_half_written_file(self, data, monkeypatch):
        pictures.dataset(data, "cifar100", 100, 3, 1)

        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(cache.os, "fsync", full)
        with pytest.warns(UserWarning, match="No space left on device"):
            first = self.load()
        assert list((cache.home() / "decoded").iterdir()) == []
        monkeypatch.undo()
        monkeypatch.setenv("AGSCL_DATA", str(data))
        monkeypatch.setenv("AGSCL_CACHE", str(data.parent / "cache"))
        assert np.array_equal(self.load(), first)

    def test_what_a_dead_process_left_is_removed_after_a_day(self, data):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        folder = cache.home() / "decoded"
        folder.mkdir(parents=True)
        for name, age in (("old.tmp", 2 * cache.ABANDONED), ("new.tmp", 0)):
            (folder / name).touch()
            then = (folder / name).stat().st_mtime - age
            os.utime(folder / name, (then, then))
        self.load()
        assert {path.name for path in folder.glob("*.tmp")} == {"new.tmp"}

    def test_processes_at_the_same_time_do_not_disturb_each_other(self, data):
        pictures.dataset(data, "cifar100", 100, 3, 1)
        program = (
            "import hashlib; from agscl import tasks; d = hashlib.sha256(); "
            "[d.update(t.train_x.numpy().tobytes()) for t in tasks.load('cifar100', seed=0)]; print(d.hexdigest())"
        )
        running = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        digests = {process.communicate(timeout=120)[0].strip() for process in running}
        assert digests == {hashlib.sha256(self.load().tobytes()).hexdigest()}
        assert not list((cache.home() / "decoded").glob("*.tmp"))


class TestForms:
    def test_a_larger_picture_than_its_frame_is_refused(self):
        with pytest.raises(ValueError, match="40 × 30, larger than 32 × 32"):
            images.Form(32, fit="pad").read(pictures.encoded(np.zeros((30, 40), np.uint8)))

    def test_grey_palette_and_transparent_pictures_become_colours(self):
        made = image.fromarray(np.full((4, 4, 3), 204, np.uint8))
        for mode in ("L", "P", "RGBA"):
            file = io.BytesIO()
            made.convert(mode).save(file, format="PNG")
            read = images.Form(4).read(file.getvalue())
            assert read.shape == (3, 4, 4)
            assert (read == 204).all()

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF"])
    def test_all_usual_formats_are_read(self, kind):
        read = images.Form(4).read(pictures.encoded(np.full((4, 4, 3), 100, np.uint8), kind))
        assert np.abs(read.astype(int) - 100).max() <= 3

    @pytest.mark.parametrize("content", [b"", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x80\x04N.", b"\x89PNG and no more"])
    def test_nothing_else_is_opened(self, content):
        with pytest.raises(OSError, match=r"cannot identify|broken|truncated"):
            images.Form(4).read(content)

    def test_plain_bytes_are_pictures_too(self, data):
        made = pictures.table([0, 1])
        plain = made.set_column(0, "image", [[each["bytes"] for each in made.column("image").to_pylist()]])
        source = images.Shards("own", (pictures.stored(plain, data / "own.parquet"),))
        assert np.array_equal(images.decoded(source, images.Form(32))[1], pictures.pixels(1, 0).transpose(2, 0, 1))

    def test_shards_are_read_in_order_and_only_when_all_are_there(self, data):
        for part in range(3):
            made = pictures.table([2 * part, 2 * part + 1])
            pictures.stored(made, data / "own" / f"train-{part:05d}-of-00003.parquet")
        source = images.find("own", data / "own", "train")
        assert source.column("label").tolist() == [0, 1, 2, 3, 4, 5]
        assert images.decoded(source, images.Form(32))[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert source.where(3).endswith("train-00001-of-00003.parquet, row 1,")
        (data / "own" / "train-00001-of-00003.parquet").unlink()
        with pytest.raises(tasks.DataMissing, match="2 of the 3 files"):
            images.find("own", data / "own", "train")

    def test_chosen_rows_come_in_their_order(self, data):
        source = images.Shards("own", (pictures.stored(pictures.table(range(9)), data / "own.parquet"),))
        rows = np.array([7, 0, 3])
        assert images.decoded(source, images.Form(32), rows)[:, 0, 0, 0].tolist() == [7, 0, 3]

    def test_a_file_that_is_no_parquet_is_named(self, data):
        (data / "cifar100").mkdir(parents=True)
        for split in ("train", "test"):
            (data / "cifar100" / f"{split}.parquet").write_bytes(b"PAR1 not really")
        with pytest.raises(tasks.DataMissing, match=r"train\.parquet cannot be read .* `agscl data get`"):
            tasks.load("cifar100", seed=0)

    def test_class_folders_are_numbered_as_a_person_would(self, data):
        for split in ("train", "test"):
            for label in range(100):
                folder = data / "cifar100" / split / str(label)
                folder.mkdir(parents=True)
                for number in range(2):
                    content = pictures.encoded(pictures.pixels(label, number))
                    (folder / f"{number}.png").write_bytes(content)
        for task in tasks.load("cifar100", seed=0):
            assert set(task.test_x[:, 0, 0, 0].tolist()) == set(range(*map(int, task.name.split("-")))) | {
                int(task.name.split("-")[1])
            }
        shutil.rmtree(data / "cifar100" / "test" / "17")
        with pytest.raises(tasks.DataMissing, match="99 classes; cifar100 has 100"):
            tasks.load("cifar100", seed=0)

    def test_labels_out_of_range_are_refused(self, data):
        pictures.dataset(data, "cifar100", 101, 1, 1)
        with pytest.raises(tasks.DataMissing, match="labels from 0 to 100; cifar100 has them from 0 to 99"):
            tasks.load("cifar100", seed=0)


class TestDownload:
    @pytest.fixture
    def content(self):
        return np.random.default_rng(0).bytes(3_000_000)

    @pytest.fixture
    def remote(self, hub, content):
        hub.datasets["some/data"] = {"default/train/0000.parquet": content}
        _, found = download.on_the_hub("some/data")
        return found["default"]["train"][0]

    def test_the_hub_s_files_are_listed_page_by_page(self, hub):
        hub.datasets["some/data"] = {
            f"{config}/{split}/{part:04d}.parquet": f"{config}{split}{part}".encode()
            for config in ("small", "large")
            for split in ("train", "test")
            for part in reversed(range(2))
        }
        revision, found = download.on_the_hub("some/data")
        assert revision == REVISION
        assert {config: list(splits) for config, splits in found.items()} == {
            "small": ["train", "test"],
            "large": ["train", "test"],
        }
        first, second = found["large"]["test"]
        assert (first.file, second.file) == ("0000.parquet", "0001.parquet")
        assert first.digest == hashlib.sha256(b"largetest0").hexdigest()
        assert first.size == 10
        assert sum(path.startswith("/api/datasets/some/data/tree") for path, _, _ in hub.asked) == 5

    def test_a_file_comes_whole(self, hub, remote, content, tmp_path):
        seen = []

        class Bar(download.Bar):
            def advance(self, by):
                seen.append(by)

        download.fetch(remote, tmp_path / "file", Bar)
        assert (tmp_path / "file").read_bytes() == content
        assert sum(seen) == len(content)
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]

    def test_a_small_file_is_checked_by_its_git_object_id(self, hub, tmp_path):
        hub.datasets["some/data"] = {"default/train/0000.parquet": b"small"}
        hub.small.add("default/train/0000.parquet")
        remote = download.on_the_hub("some/data")[1]["default"]["train"][0]
        assert remote.algorithm == "git"
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"small"
        assert not download.matches(tmp_path / "file", replace(remote, digest="0" * 40))

    def test_a_broken_transfer_goes_on_where_it_stood(self, hub, remote, content, tmp_path):
        hub.cuts[:] = [1_000_000, 500_000]
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content
        assert hub.transfers() == [None, "bytes=1000000-", "bytes=1500000-"]

    def test_what_an_earlier_process_left_is_used(self, hub, remote, content, tmp_path):
        (tmp_path / "file.part").write_bytes(content[:2_999_000])
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content
        assert hub.transfers() == ["bytes=2999000-"]
        (tmp_path / "again.part").write_bytes(content)
        download.fetch(remote, tmp_path / "again")
        assert len(hub.transfers()) == 1

    @pytest.mark.parametrize("left", [b"other" * 1000, b"x" * 4_000_000])
    def test_what_is_left_of_another_file_is_thrown_away(self, hub, remote, content, tmp_path, left):
        (tmp_path / "file.part").write_bytes(left)
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content

    def test_a_server_without_ranges_sends_it_from_the_start(self, hub, remote, content, tmp_path):
        hub.ranges = False
        hub.cuts[:] = [1_000_000]
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content

    def test_busy_servers_are_asked_again(self, hub, remote, content, tmp_path):
        hub.answers[:] = [503, 429, 500]
        download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content

    def test_a_server_that_stays_broken_is_given_up_and_what_came_is_kept(self, hub, remote, content, tmp_path):
        hub.cuts[:] = [1_000_000]
        hub.answers[:] = []
        first = threading.Event()
        original = hub._file

        def then_broken(request, wanted):
            if first.is_set():
                hub.answers[:] = [503]
            first.set()
            return original(request, wanted)

        hub._file = then_broken
        with pytest.raises(DownloadFailed, match=r"answers 503 .* 1\.0 MB of it are kept; the same command goes on"):
            download.fetch(remote, tmp_path / "file")
        assert (tmp_path / "file.part").read_bytes() == content[:1_000_000]
        assert not (tmp_path / "file").exists()

    def test_a_wrong_checksum_is_never_kept(self, hub, remote, content, tmp_path):
        hub.lie = bytes(len(content))
        with pytest.raises(DownloadFailed, match="has not the checksum"):
            download.fetch(remote, tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert not (tmp_path / "file.part").exists()
        assert len(hub.transfers()) == 2

    def test_a_refused_file_is_not_asked_for_again(self, hub, remote, tmp_path):
        hub.answers[:] = [403, 403]
        with pytest.raises(DownloadFailed, match="HF_TOKEN"):
            download.fetch(remote, tmp_path / "file")
        assert len(hub.transfers()) == 1

    def test_the_token_goes_to_the_hub_alone(self, hub, remote, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "secret")
        hub.asked.clear()
        download.fetch(remote, tmp_path / "file")
        (_, _, first), (path, _, second) = hub.asked
        assert first == "Bearer secret"
        assert path.startswith("/cdn/")
        assert second is None

    def test_a_full_disk_is_not_tried_again(self, hub, remote, tmp_path, monkeypatch):
        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(download.os, "fsync", full)
        with pytest.raises(DownloadFailed, match="No space left on device"):
            download.fetch(remote, tmp_path / "file")
        assert len(hub.transfers()) == 1

    def test_too_large_a_download_does_not_begin(self, hub, remote, tmp_path, monkeypatch):
        monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
        with pytest.raises(DownloadFailed, match="has 1 MB left, and 3 MB are to come"):
            download.get(tmp_path / "some", lambda: ("here", [remote]))
        assert hub.transfers() == []

    def test_the_plan_is_kept_until_all_has_come(self, hub, remote, content, tmp_path):
        plans = []

        def plan():
            plans.append(1)
            if len(plans) == 2:
                raise DownloadFailed("the list of files cannot be had just now")
            return "here", [replace(remote, file="a"), replace(remote, file="b")]

        hub.answers[:] = [404]
        with pytest.raises(DownloadFailed):
            download.get(tmp_path / "some", plan)
        download.get(tmp_path / "some", plan)
        download.get(tmp_path / "some", plan)
        assert len(plans) == 2
        assert (tmp_path / "some" / "a").read_bytes() == (tmp_path / "some" / "b").read_bytes() == content
        assert download.read_plan(tmp_path / "some") == plan()

    def test_what_was_replaced_or_moved_meanwhile_is_had_from_where_it_is_now(self, hub, remote, content, tmp_path):
        gone = replace(remote, url=remote.url + "-gone")
        with pytest.raises(DownloadFailed):
            download.get(tmp_path / "some", lambda: ("then", [replace(remote, file="a"), replace(gone, file="b")]))
        (tmp_path / "some" / "c").write_text("of a file that is not wanted any more")
        begun = [replace(remote, file="a"), replace(gone, file="b"), replace(gone, file="c", digest="0")]
        download.keep_plan(tmp_path / "some", "then", begun)
        before = (tmp_path / "some" / "a").stat().st_mtime_ns
        download.get(tmp_path / "some", lambda: ("now", [replace(remote, file="a"), replace(remote, file="b")]))
        assert (tmp_path / "some" / "b").read_bytes() == content
        assert (tmp_path / "some" / "a").stat().st_mtime_ns == before, "not had again"
        assert not (tmp_path / "some" / "c").exists()

    def test_processes_at_the_same_time_share_one_download(self, hub, remote, content, tmp_path):
        program = (
            "import sys; from pathlib import Path; from agscl.data.download import Remote, get, held\n"
            "with held(Path(sys.argv[1])):\n"
            "  get(Path(sys.argv[1]), lambda: ('here', [Remote(sys.argv[2], 'file', sys.argv[3], size=3000000)]))"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "some"), remote.url, remote.digest]
        running = [subprocess.Popen(command) for _ in range(3)]
        assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
        assert (tmp_path / "some" / "file").read_bytes() == content
        assert len(hub.transfers()) == 1

    def test_an_unknown_dataset_and_an_unreachable_hub_say_so(self, hub, monkeypatch):
        with pytest.raises(DownloadFailed, match="no such dataset"):
            download.on_the_hub("no/such")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9: .*refused.* set HF_ENDPOINT to a mirror"):
            download.on_the_hub("some/data")
        monkeypatch.setenv("HF_ENDPOINT", "nonsense")
        with pytest.raises(DownloadFailed, match="unknown url type"):
            download.on_the_hub("some/data")

    def test_where_nothing_came_nothing_is_left(self, hub, tmp_path):
        with pytest.raises(DownloadFailed), download.held(tmp_path / "some"):
            download.get(tmp_path / "some", lambda: download.on_the_hub("no/such"))
        assert not (tmp_path / "some").exists()

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(DownloadFailed, match="Unset AGSCL_DATA"), download.held(tmp_path / "file" / "some"):
            pass


class TestFromHub:
    def test_one_line_downloads_it_and_later_needs_no_hub(self, hub):
        labels = [0, 1, 2, 3] * 5
        hub.datasets["me/things"] = {
            "default/train/0000.parquet": pictures.as_bytes(pictures.table(labels)),
            "default/train/0001.parquet": pictures.as_bytes(pictures.table(labels)),
            "default/test/0000.parquet": pictures.as_bytes(pictures.table(labels[:8])),
            "default/extra/0000.parquet": b"not wanted",
        }
        first, second = tasks.load("hub:me/things", seed=0, classes_per_task=2, validation=0.25)
        assert (first.name, second.name) == ("0-1", "2-3")
        assert [len(y) for y in (first.train_y, first.valid_y, first.test_y)] == [15, 5, 4]
        asked = len(hub.asked)
        tasks.load("hub:me/things", seed=1)
        assert len(hub.asked) == asked

    def test_a_configuration_must_be_chosen_where_there_are_several(self, hub):
        table = pictures.as_bytes(pictures.table([0, 1] * 5))
        hub.datasets["me/things"] = {"small/train/0000.parquet": table, "large/train/0000.parquet": table}
        with pytest.raises(DownloadFailed, match=r"config=\.\.\. is one of small, large"):
            tasks.from_hub("me/things")
        assert len(tasks.from_hub("me/things", config="large")) == 1

    def test_another_split_can_be_tested_on_where_labels_are_withheld(self, hub):
        withheld = pictures.table([0, 1] * 5)
        withheld = withheld.set_column(1, "label", [[-1] * 10])
        hub.datasets["me/things"] = {
            "default/train/0000.parquet": pictures.as_bytes(pictures.table([0, 1] * 5)),
            "default/test/0000.parquet": pictures.as_bytes(withheld),
            "default/held/0000.parquet": pictures.as_bytes(pictures.table([0, 1] * 2)),
        }
        with pytest.raises(ValueError, match=r"\[-1\] \(withheld, it seems: from_hub takes another split with test="):
            tasks.from_hub("me/things")
        assert len(tasks.load("hub:me/things", seed=0, test="held")[0].test_y) == 4
        with pytest.raises(DownloadFailed, match="no split called dev; it has: train, test, held"):
            tasks.from_hub("me/things", test="dev")

    def test_options_that_cannot_be_are_refused_before_anything_is_downloaded(self, hub):
        with pytest.raises(ValueError, match="classes_per_task"):
            tasks.from_hub("me/things", config=2023, classes_per_task=1)
        assert not hub.asked

    def test_a_dataset_without_a_training_split_says_what_it_has(self, hub):
        hub.datasets["me/things"] = {"default/a/0000.parquet": b"", "default/b/0000.parquet": b""}
        with pytest.raises(DownloadFailed, match="it has: a, b"):
            tasks.from_hub("me/things")


def on_hub(hub, name, classes, train=2, test=1, **options):
    """A dataset of the catalogue, on the small hub, under the names it has on the real one."""
    origin = catalogue.DATASETS[name].source
    files = {}
    for split, count in (("train", train), ("test", test)):
        made = pictures.table([label for _ in range(count) for label in range(classes)], **options)
        files[f"{origin.config}/{split}/0000.parquet"] = pictures.as_bytes(made)
    hub.datasets[origin.name] = files


class TestCommand:
    def test_get_then_load(self, hub, data, capsys):
        on_hub(hub, "cifar10", 10, 10, 2, image="img")
        on_hub(hub, "cifar100", 100, image="img", label="fine_label")
        assert cli.main(["data", "get", "cifar10-100"]) == 0
        said = capsys.readouterr().out
        assert "cifar100/train.parquet" in said
        assert f"cifar100 is now in {data / 'cifar100'}" in said
        assert tasks.load("cifar10-100", seed=0)[0].name == "cifar10"
        assert json.loads((data / "cifar100" / "source.json").read_text())["from"] == f"uoft-cs/cifar100@{REVISION}"
        asked = len(hub.asked)
        assert cli.main(["data", "get", "cifar100"]) == 0
        assert "cifar100 is there" in capsys.readouterr().out
        assert len(hub.asked) == asked

    def test_several_files_of_a_split_are_all_read_and_an_interrupted_get_goes_on(self, hub, data, capsys):
        rows = [[species] * 5 for species in range(200)]
        hub.datasets["Andron00e/CUB200-custom"] = {
            f"default/train/{part:04d}.parquet": pictures.as_bytes(
                pictures.table([label for each in rows[part::3] for label in each], size=(8, 8, 3), label="labels")
            )
            for part in range(3)
        }
        hub.answers[:] = [404]
        assert cli.main(["data", "get", "cub200"]) == 1
        assert "FAILED" in capsys.readouterr().out
        assert cli.main(["data", "get", "cub200"]) == 0
        names = sorted(path.name for path in (data / "cub200").glob("*.parquet"))
        assert names == [f"all-{part:05d}-of-00003.parquet" for part in range(3)]
        sequence = tasks.load("cub200", seed=0)
        assert [(len(task.train_y), len(task.test_y)) for task in sequence] == [(80, 20)] * 10

    def test_omniglot_is_made_from_its_official_archives(self, hub, data, monkeypatch, capsys):
        archives = {}
        for kind, alphabets in (("background", ["Latin", "Greek"]), ("evaluation", ["Tengwar"])):
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                for alphabet in alphabets:
                    for character in (1, 2):
                        for number in range(20):
                            drawing = image.fromarray(pictures.pixels(character, number, (105, 105)))
                            made = io.BytesIO()
                            drawing.convert("1").save(made, format="PNG")
                            where = (
                                f"images_{kind}/{alphabet}/character{character:02d}/{character:04d}_{number:02d}.png"
                            )
                            archive.writestr(where, made.getvalue())
            archives[kind] = file.getvalue()
            hub.others[f"/images_{kind}.zip"] = file.getvalue()
        real = catalogue.DATASETS["omniglot"]
        sources = tuple(
            catalogue.Archive(f"{hub.url}/images_{kind}.zip", hashlib.md5(content).hexdigest())
            for kind, content in archives.items()
        )
        monkeypatch.setitem(catalogue.DATASETS, "omniglot", replace(real, source=sources, classes=6, rows=(120,)))
        assert cli.main(["data", "get", "omniglot"]) == 0
        assert sorted(path.name for path in (data / "omniglot").glob("[!.]*")) == ["all.parquet", "source.json"]
        greek, latin, tengwar = tasks.load("omniglot", seed=0, alphabets=3)
        assert [(each.name, each.classes) for each in (greek, latin, tengwar)] == [
            ("Greek", 2),
            ("Latin", 2),
            ("Tengwar", 2),
        ]
        assert cli.main(["data", "check", "omniglot"]) == 0
        assert "omniglot: OK; 6 classes; pictures: all 120" in capsys.readouterr().out
        table = pictures.parquet.read_table(data / "omniglot" / "all.parquet")
        pictures.stored(table.slice(1, 119).append_column("new", [range(119)]), data / "omniglot" / "all.parquet")
        assert cli.main(["data", "check", "omniglot"]) == 1
        assert "all.parquet is not what was announced" in capsys.readouterr().out

    @pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
    def test_a_stopped_get_goes_on_where_it_stood(self, hub, data, stop):
        on_hub(hub, "mnist", 10, 200, 1, size=(28, 28))
        whole = hub.datasets["ylecun/mnist"]["mnist/train/0000.parquet"]
        hub.stalls[:] = [len(whole) // 2]
        command = [sys.executable, "-m", "agscl.cli.main", "data", "get", "mnist"]
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background may not hear SIGINT
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
        part = data / "mnist" / "train.parquet.part"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size == len(whole) // 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(stop)
        said, _ = running.communicate(timeout=60)
        hub.released.set()
        if stop == signal.SIGINT:
            assert running.returncode == 130
            assert "Stopped; what has come so far is kept" in said
        assert not (data / "mnist" / "train.parquet").exists()
        assert subprocess.run(command, check=True, timeout=120).returncode == 0
        assert (data / "mnist" / "train.parquet").read_bytes() == whole
        assert f"bytes={len(whole) // 2}-" in hub.transfers()

    @pytest.mark.skipif(not (DATA / "omniglot").is_dir(), reason="needs omniglot/all.parquet in the folder AGSCL_DATA")
    def test_the_archives_give_the_same_table_as_the_real_file(self, tmp_path):
        """The archives' own layout, filled from the real file."""
        real = pictures.parquet.read_table(DATA / "omniglot" / "all.parquet")
        names = json.loads(real.schema.metadata[b"huggingface"])["info"]["features"]["alphabet"]["names"]
        rows = real.to_pylist()[::7]
        paths = [tmp_path / "images_background.zip", tmp_path / "images_evaluation.zip"]
        opened = [zipfile.ZipFile(path, "w") for path in paths]
        for number, row in reversed(list(enumerate(rows))):
            where = f"{names[row['alphabet']]}/character{row['character']:02d}/{number:05d}.png"
            opened[row["evaluation"]].writestr(where, row["image"]["bytes"])
        for archive in opened:
            archive.close()
        made = convert.omniglot(tmp_path)["all"]
        for column in ("alphabet", "character", "evaluation"):
            assert made.column(column).to_pylist() == [row[column] for row in rows]
        assert [each["bytes"] for each in made.column("image").to_pylist()] == [row["image"]["bytes"] for row in rows]
        assert json.loads(made.schema.metadata[b"huggingface"])["info"]["features"]["alphabet"]["names"] == names

    def test_tinyimagenet32_is_made_from_tiny_imagenet(self, hub, data, capsys):
        wanted = [f"n{number}" for number in convert.TINY_IMAGENET.split()]
        names = sorted([*wanted, *(f"n9{number:07d}" for number in range(100))], reverse=True)
        files = {}
        for split, count in (("train", 2), ("valid", 1)):
            rows = [label for label in range(200) for _ in range(count)]
            made = [
                {"bytes": pictures.encoded(np.full((64, 64, 3), label, np.uint8), "JPEG"), "path": None}
                for label in rows
            ]
            table = pictures.pyarrow.table({"image": made, "label": rows})
            features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
            files[f"default/{split}/0000.parquet"] = pictures.as_bytes(
                table.replace_schema_metadata({"huggingface": json.dumps(features)})
            )
        hub.datasets["zh-plus/tiny-imagenet"] = files
        assert cli.main(["data", "get", "tinyimagenet32"]) == 0
        there = sorted(path.name for path in (data / "tinyimagenet32").glob("[!.]*"))
        assert there == ["source.json", "test.parquet", "train.parquet"]
        source = catalogue.source("tinyimagenet32", "train")
        assert source.names("label") == wanted
        assert np.bincount(source.column("label")).tolist() == [2] * 100
        small = images.decoded(source, images.Form(32))
        expected = [names.index(wanted[label]) for label in source.column("label")]
        assert np.abs(small.mean((1, 2, 3)) - expected).max() < 3
        assert len(tasks.load("tinyimagenet32", seed=0)) == 10

    @pytest.mark.skipif(not (DATA / "tinyimagenet32").is_dir(), reason="needs tinyimagenet32 in the folder AGSCL_DATA")
    def test_its_classes_are_those_of_the_file_that_was_measured_on(self):
        (found,) = {
            tuple(name.split()[0] for name in images.Shards("tiny", (path,)).names("label"))
            for path in (DATA / "tinyimagenet32").glob("*.parquet")
        }
        assert list(found) == [f"n{number}" for number in convert.TINY_IMAGENET.split()]

    def test_check_finds_broken_pictures_missing_classes_and_changed_files(self, hub, data, capsys):
        on_hub(hub, "mnist", 10, 8, 2, size=(28, 28))
        assert cli.main(["data", "get", "mnist"]) == 0
        assert cli.main(["data", "check", "mnist"]) == 1
        assert "there are 100 pictures; expected are 70000" in capsys.readouterr().out

        broken = pictures.table([label for label in range(9) for _ in range(8)], size=(28, 28))
        column = broken.column("image").to_pylist()
        for row in range(7):
            column[row]["bytes"] = column[row]["bytes"][: 60 + row]
        pictures.stored(broken.set_column(0, "image", [column]), data / "mnist" / "train.parquet")
        assert cli.main(["data", "check", "mnist"]) == 1
        said = capsys.readouterr().out
        assert said.startswith("mnist: FAILED; 10 classes; pictures: train 72, test 20\n")
        assert "train.parquet, row 0, cannot be decoded" in said
        assert "and 5 more" in said

    def test_check_without_names_takes_what_is_there(self, data, capsys, monkeypatch):
        pictures.dataset(data, "svhn", 10, 4, 2)
        monkeypatch.setitem(catalogue.DATASETS, "svhn", replace(catalogue.DATASETS["svhn"], rows=(60,)))
        assert cli.main(["data", "check"]) == 0
        assert capsys.readouterr().out == "svhn: OK; 10 classes; pictures: train 40, test 20\n"
        assert cli.main(["data", "get", "digits"]) == 0
        assert capsys.readouterr().out == "digits: nothing to download\n"
        monkeypatch.setenv("AGSCL_DATA", str(data / "wrong"))
        assert cli.main(["data", "check"]) == 1
        assert capsys.readouterr().out.startswith("there is no dataset in ")
        monkeypatch.setenv("AGSCL_DATA", str(data))
        assert cli.main(["data", "check", "cifar100"]) == 1
        assert capsys.readouterr().out.startswith("cifar100: FAILED\n  cifar100 is not there: looked for")

    def test_a_sequence_names_all_the_datasets_that_it_lacks(self, data):
        pictures.dataset(data, "mnist", 10, 4, 2)
        with pytest.raises(tasks.DataMissing) as lacking:
            tasks.load("eight", seed=0)
        said = str(lacking.value)
        assert said.startswith(
            "cifar10, cifar100, svhn, fashion_mnist, signs, facescrub, notmnist are not there: looked"
        )
        assert str(data) in said
        assert "facescrub cannot be downloaded: its pictures are handed out" in said
        assert said.endswith("Get the others with: agscl data get cifar10 cifar100 svhn fashion_mnist signs notmnist")
        with pytest.raises(tasks.DataMissing, match=r"Get them with: agscl data get cifar10 tinyimagenet32$"):
            tasks.load("cifar10-tiny", seed=0)
        (data / "tinyimagenet32").mkdir()
        (data / "tinyimagenet32" / "train-00001-of-00002.parquet").touch()
        with pytest.raises(tasks.DataMissing, match="holds 1 of the 2 files"):
            tasks.load("cifar10-tiny", seed=0)

    def test_list_says_what_is_ready_and_where_the_rest_is_from(self, data, capsys):
        pictures.dataset(data, "cifar100", 100, 1, 1)
        assert cli.main(["data"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 80 for line in lines[:25])
        said = {line.split()[0]: line for line in lines if line.strip()}
        ready = [line.split()[0] for line in lines if line.rstrip().endswith("ready")]
        assert ready == ["digits", "cifar100"]
        assert "agscl data get cifar10-100" in said["cifar10-100"]
        assert "ylecun/mnist on the Hugging Face hub" in said["mnist"]
        assert "cannot be downloaded" in said["facescrub"]
        assert "lacks facescrub: docs/data.md" in said["eight"]

    def test_what_cannot_be_had_says_why_and_the_others_are_got(self, hub, data, capsys):
        on_hub(hub, "notmnist", 10, size=(28, 28))
        assert cli.main(["data", "get", "facescrub", "notmnist"]) == 1
        said = capsys.readouterr().out
        assert "facescrub cannot be downloaded" in said
        assert "notmnist is now in" in said

    @pytest.mark.parametrize("arguments", [["get"], ["get", "mnst"], ["list", "mnist"]])
    def test_wrong_use_says_what_can_be(self, data, arguments, capsys):
        assert cli.main(["data", *arguments]) == 2
        assert capsys.readouterr().err.startswith("agscl: ")

    @pytest.mark.skipif(not (DATA / "notmnist").is_dir(), reason="needs notmnist in the folder AGSCL_DATA")
    def test_real_data_is_whole(self, monkeypatch, data, capsys):
        monkeypatch.setenv("AGSCL_DATA", str(DATA))
        assert cli.main(["data", "check", "notmnist"]) == 0
        assert capsys.readouterr().out == "notmnist: OK; 10 classes; pictures: train 15,915, test 2,809\n"


def test_every_sequence_is_made_of_datasets_that_are_known():
    for listed in tasks.SEQUENCES.values():
        assert set(listed.datasets) <= set(catalogue.DATASETS)
        assert len(listed.about) <= 36


def test_a_remote_file_is_kept_as_it_was_announced():
    remote = Remote("http://somewhere/x", "x", "00", "md5")
    assert Remote(**json.loads(json.dumps(vars(remote)))) == remote
