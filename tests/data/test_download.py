"""Downloading datasets, of the catalogue and of the hub."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import small_images
from agscl import tasks
from agscl.cli import main as cli
from agscl.data import catalogue, download
from agscl.data.convert import TINY_IMAGENET_CLASSES, convert_omniglot
from agscl.data.datasets import open_split
from agscl.data.decoding import ImageDecoder, decode_images
from agscl.data.download import download_files, download_hub_dataset, lock_download_folder
from agscl.data.encoded_images import ParquetImages
from agscl.data.errors import DataError, DownloadFailed
from agscl.data.hub_files import list_parquet_files
from agscl.data.manifest import Manifest, read_manifest, write_manifest
from real_data import REAL_DATA, needs_dataset
from small_hub import REVISION


def put_on_hub(small_hub, name, classes, train=2, test=1, **options):
    """A dataset of the catalogue, on the small hub, under the names it has on the real one."""
    source = catalogue.DATASETS[name].source
    files = {}
    for split, count in (("train", train), ("test", test)):
        table = small_images.make_table([label for _ in range(count) for label in range(classes)], **options)
        files[f"{source.config}/{split}/0000.parquet"] = small_images.to_parquet_bytes(table)
    small_hub.datasets[source.name] = files


class TestFiles:
    @pytest.fixture
    def content(self):
        return np.random.default_rng(0).bytes(3_000_000)

    @pytest.fixture
    def remote(self, small_hub, content):
        small_hub.datasets["some/data"] = {"default/train/0000.parquet": content}
        _, files = list_parquet_files("some/data")
        return files["default"]["train"][0]

    def test_a_download_that_does_not_fit_on_the_disk_does_not_begin(self, small_hub, remote, tmp_path, monkeypatch):
        monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
        with pytest.raises(DownloadFailed, match="has 1 MB free, but the download takes 3 MB"):
            download_files(tmp_path / "some", lambda: Manifest("here", [remote]))
        assert small_hub.transfers() == []

    def test_the_manifest_is_kept_until_all_files_are_there(self, small_hub, remote, content, tmp_path):
        calls = []

        def list_files():
            calls.append(1)
            if len(calls) == 2:
                raise DownloadFailed("the files cannot be listed just now")
            return Manifest("here", [replace(remote, file="a"), replace(remote, file="b")])

        small_hub.statuses[:] = [404]
        with pytest.raises(DownloadFailed):
            download_files(tmp_path / "some", list_files)
        download_files(tmp_path / "some", list_files)
        download_files(tmp_path / "some", list_files)
        assert len(calls) == 2
        assert (tmp_path / "some" / "a").read_bytes() == (tmp_path / "some" / "b").read_bytes() == content
        assert read_manifest(tmp_path / "some") == list_files()

    def test_files_that_were_moved_or_replaced_meanwhile_are_downloaded_from_their_new_place(
        self, remote, content, tmp_path
    ):
        gone = replace(remote, url=remote.url + "-gone")
        with pytest.raises(DownloadFailed):
            download_files(
                tmp_path / "some", lambda: Manifest("then", [replace(remote, file="a"), replace(gone, file="b")])
            )
        (tmp_path / "some" / "c").write_text("of a file that is not wanted any more")
        started = [replace(remote, file="a"), replace(gone, file="b"), replace(gone, file="c", digest="0" * 64)]
        write_manifest(tmp_path / "some", Manifest("then", started))
        before = (tmp_path / "some" / "a").stat().st_mtime_ns
        download_files(
            tmp_path / "some", lambda: Manifest("now", [replace(remote, file="a"), replace(remote, file="b")])
        )
        assert (tmp_path / "some" / "b").read_bytes() == content
        assert (tmp_path / "some" / "a").stat().st_mtime_ns == before, "not downloaded again"
        assert not (tmp_path / "some" / "c").exists()

    def test_processes_at_the_same_time_share_one_download(self, small_hub, remote, content, tmp_path):
        program = (
            "import sys; from pathlib import Path\n"
            "from agscl.data.download import Manifest, RemoteFile, download_files, lock_download_folder\n"
            "folder, file = Path(sys.argv[1]), RemoteFile(sys.argv[2], 'file', sys.argv[3], size=3000000)\n"
            "with lock_download_folder(folder):\n"
            "  download_files(folder, lambda: Manifest('here', [file]))"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "some"), remote.url, remote.digest]
        processes = [subprocess.Popen(command) for _ in range(3)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
        assert (tmp_path / "some" / "file").read_bytes() == content
        assert len(small_hub.transfers()) == 1

    @pytest.mark.usefixtures("small_hub")
    def test_where_nothing_was_downloaded_nothing_is_left(self, tmp_path):
        with pytest.raises(DownloadFailed), lock_download_folder(tmp_path / "some"):
            download_files(tmp_path / "some", lambda: list_parquet_files("no/such"))
        assert not (tmp_path / "some").exists()

    def test_a_process_that_waits_for_a_folder_that_is_removed_makes_it_anew(self, tmp_path):
        program = (
            "import sys; from pathlib import Path; from agscl.data.download import lock_download_folder\n"
            "print('starting', flush=True)\n"
            "with lock_download_folder(Path(sys.argv[1])): (Path(sys.argv[1]) / 'file').touch()"
        )
        with lock_download_folder(tmp_path / "some"):
            command = [sys.executable, "-c", program, str(tmp_path / "some")]
            waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert waiting.stdout.readline() == "starting\n"
            time.sleep(0.2)
        assert waiting.wait(timeout=60) == 0
        waiting.stdout.close()
        assert (tmp_path / "some" / "file").exists()

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(DownloadFailed, match="Unset AGSCL_DATA"), lock_download_folder(tmp_path / "file" / "some"):
            pass

    def test_a_manifest_with_another_address_gets_no_token(self, small_hub, remote, tmp_path, monkeypatch):
        """As if somebody had changed source.json while the hub cannot be reached."""
        monkeypatch.setenv("HF_TOKEN", "secret")
        small_hub.other_files["/elsewhere"] = b""
        elsewhere = f"http://localhost:{small_hub.port}/elsewhere"
        (tmp_path / "some").mkdir()
        write_manifest(tmp_path / "some", Manifest("then", [replace(remote, url=elsewhere)]))

        def fail():
            raise DownloadFailed("the hub cannot be reached")

        small_hub.requests.clear()
        with pytest.raises(DownloadFailed):
            download_files(tmp_path / "some", fail)
        assert {token for _, _, token in small_hub.requests} == {None}


@pytest.mark.usefixtures("data")
class TestHubDataset:
    def test_one_line_downloads_it_and_later_needs_no_hub(self, small_hub):
        labels = [0, 1, 2, 3] * 5
        small_hub.datasets["me/things"] = {
            "default/train/0000.parquet": small_images.to_parquet_bytes(small_images.make_table(labels)),
            "default/train/0001.parquet": small_images.to_parquet_bytes(small_images.make_table(labels)),
            "default/test/0000.parquet": small_images.to_parquet_bytes(small_images.make_table(labels[:8])),
            "default/extra/0000.parquet": b"not wanted",
        }
        first, second = tasks.load("hub:me/things", seed=0, classes_per_task=2, validation=0.25)
        assert (first.name, second.name) == ("0-1", "2-3")
        assert [len(y) for y in (first.train_y, first.valid_y, first.test_y)] == [15, 5, 4]
        requests = len(small_hub.requests)
        tasks.load("hub:me/things", seed=1)
        assert len(small_hub.requests) == requests

    def test_a_configuration_must_be_chosen_where_there_are_several(self, small_hub):
        table = small_images.to_parquet_bytes(small_images.make_table([0, 1] * 5))
        small_hub.datasets["me/things"] = {"small/train/0000.parquet": table, "large/train/0000.parquet": table}
        with pytest.raises(DownloadFailed, match=r"config=\.\.\., one of: small, large"):
            tasks.from_hub("me/things")
        assert len(tasks.from_hub("me/things", config="large")) == 1

    def test_another_split_can_be_tested_on_where_labels_are_withheld(self, small_hub):
        withheld = small_images.make_table([0, 1] * 5).set_column(1, "label", [[-1] * 10])
        small_hub.datasets["me/things"] = {
            "default/train/0000.parquet": small_images.to_parquet_bytes(small_images.make_table([0, 1] * 5)),
            "default/test/0000.parquet": small_images.to_parquet_bytes(withheld),
            "default/held/0000.parquet": small_images.to_parquet_bytes(small_images.make_table([0, 1] * 2)),
        }
        with pytest.raises(ValueError, match=r"\[-1\]\. These labels seem to be withheld: .* from_hub\(test=\.\.\.\)"):
            tasks.from_hub("me/things")
        assert len(tasks.load("hub:me/things", seed=0, test="held")[0].test_y) == 4
        with pytest.raises(DownloadFailed, match="no split called dev; it has: train, test, held"):
            tasks.from_hub("me/things", test="dev")

    def test_wrong_options_are_refused_before_anything_is_downloaded(self, small_hub):
        with pytest.raises(ValueError, match="classes_per_task"):
            tasks.from_hub("me/things", config=2023, classes_per_task=1)
        assert not small_hub.requests

    def test_a_dataset_without_a_training_split_says_what_it_has(self, small_hub):
        small_hub.datasets["me/things"] = {"default/a/0000.parquet": b"", "default/b/0000.parquet": b""}
        with pytest.raises(DownloadFailed, match="it has: a, b"):
            tasks.from_hub("me/things")

    @pytest.mark.parametrize("names", [("../../x",), ("me/..",), ("me/things", "../up"), ("me/things", None, "/etc")])
    def test_a_name_that_leads_out_of_the_data_folder_is_refused(self, small_hub, names):
        with pytest.raises(DataError, match=r"not the name of a dataset on the hub: .* is not a plain file name"):
            download_hub_dataset(*names)
        assert not small_hub.requests


class TestCommand:
    def test_get_then_load(self, small_hub, data, capsys):
        put_on_hub(small_hub, "cifar10", 10, 10, 2, image="img")
        put_on_hub(small_hub, "cifar100", 100, image="img", label="fine_label")
        assert cli.main(["data", "get", "cifar10-100"]) == 0
        output = capsys.readouterr().out
        assert "cifar100/train.parquet" in output
        assert str(data / "cifar100") in output
        assert tasks.load("cifar10-100", seed=0)[0].name == "cifar10"
        assert json.loads((data / "cifar100" / "source.json").read_text())["from"] == f"uoft-cs/cifar100@{REVISION}"
        requests = len(small_hub.requests)
        assert cli.main(["data", "get", "cifar100"]) == 0
        assert len(small_hub.requests) == requests

    def test_several_files_of_a_split_are_all_read_and_an_interrupted_download_is_continued(
        self, small_hub, data, capsys
    ):
        rows = [[species] * 5 for species in range(200)]
        small_hub.datasets["Andron00e/CUB200-custom"] = {
            f"default/train/{part:04d}.parquet": small_images.to_parquet_bytes(
                small_images.make_table(
                    [label for each in rows[part::3] for label in each], size=(8, 8, 3), label="labels"
                )
            )
            for part in range(3)
        }
        small_hub.statuses[:] = [404]
        assert cli.main(["data", "get", "cub200"]) == 1
        assert "answers 404" in capsys.readouterr().out
        assert cli.main(["data", "get", "cub200"]) == 0
        names = sorted(path.name for path in (data / "cub200").glob("*.parquet"))
        assert names == [f"all-{part:05d}-of-00003.parquet" for part in range(3)]
        sequence = tasks.load("cub200", seed=0)
        assert [(len(task.train_y), len(task.test_y)) for task in sequence] == [(80, 20)] * 10

    def test_omniglot_is_made_from_its_official_archives(self, small_hub, data, monkeypatch, capsys):
        archives = {}
        for part, alphabets in (("background", ["Latin", "Greek"]), ("evaluation", ["Tengwar"])):
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                for alphabet in alphabets:
                    for character in (1, 2):
                        for number in range(20):
                            pixels = small_images.make_pixels(character, number, (105, 105))
                            drawing = io.BytesIO()
                            small_images.Image.fromarray(pixels).convert("1").save(drawing, format="PNG")
                            folder = f"images_{part}/{alphabet}/character{character:02d}"
                            archive.writestr(f"{folder}/{character:04d}_{number:02d}.png", drawing.getvalue())
            archives[part] = file.getvalue()
            small_hub.other_files[f"/images_{part}.zip"] = file.getvalue()
        real = catalogue.DATASETS["omniglot"]
        sources = tuple(
            catalogue.ArchiveSource(f"{small_hub.url}/images_{part}.zip", hashlib.md5(content).hexdigest())
            for part, content in archives.items()
        )
        monkeypatch.setitem(catalogue.DATASETS, "omniglot", replace(real, source=sources, classes=6, rows=(120,)))
        assert cli.main(["data", "get", "omniglot"]) == 0
        assert sorted(path.name for path in (data / "omniglot").glob("[!.]*")) == ["all.parquet", "source.json"]
        sequence = tasks.load("omniglot", seed=0, alphabets=3)
        assert [(task.name, task.classes) for task in sequence] == [("Greek", 2), ("Latin", 2), ("Tengwar", 2)]
        assert cli.main(["data", "check", "omniglot"]) == 0
        capsys.readouterr()
        table = small_images.parquet.read_table(data / "omniglot" / "all.parquet")
        changed = table.slice(1, 119).append_column("new", [range(119)])
        small_images.write_parquet(changed, data / "omniglot" / "all.parquet")
        assert cli.main(["data", "check", "omniglot"]) == 1
        assert "checksum mismatch" in capsys.readouterr().out

    @pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
    def test_a_stopped_download_is_resumed_by_the_next_command(self, small_hub, data, stop):
        put_on_hub(small_hub, "mnist", 10, 200, 1, size=(28, 28))
        content = small_hub.datasets["ylecun/mnist"]["mnist/train/0000.parquet"]
        small_hub.stall_after[:] = [len(content) // 2]
        command = [sys.executable, "-m", "agscl", "data", "get", "mnist"]
        accept_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job may ignore it
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=accept_sigint)
        part = data / "mnist" / "train.parquet.part"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size == len(content) // 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(stop)
        output, _ = process.communicate(timeout=60)
        small_hub.stall_ends.set()
        if stop == signal.SIGINT:
            assert process.returncode == 130
            assert "Stopped" in output
        assert not (data / "mnist" / "train.parquet").exists()
        assert subprocess.run(command, check=True, timeout=120).returncode == 0
        assert (data / "mnist" / "train.parquet").read_bytes() == content
        assert f"bytes={len(content) // 2}-" in small_hub.transfers()

    @needs_dataset("omniglot")
    def test_the_archives_give_the_same_table_as_the_real_file(self, tmp_path):
        """The archives' own layout, filled from the real file."""
        real = small_images.parquet.read_table(REAL_DATA / "omniglot" / "all.parquet")
        names = json.loads(real.schema.metadata[b"huggingface"])["info"]["features"]["alphabet"]["names"]
        rows = real.to_pylist()[::7]
        paths = [tmp_path / "images_background.zip", tmp_path / "images_evaluation.zip"]
        archives = [zipfile.ZipFile(path, "w") for path in paths]
        for number, row in reversed(list(enumerate(rows))):
            name = f"{names[row['alphabet']]}/character{row['character']:02d}/{number:05d}.png"
            archives[row["evaluation"]].writestr(name, row["image"]["bytes"])
        for archive in archives:
            archive.close()
        table = convert_omniglot(tmp_path)["all"]
        for column in ("alphabet", "character", "evaluation"):
            assert table.column(column).to_pylist() == [row[column] for row in rows]
        assert [each["bytes"] for each in table.column("image").to_pylist()] == [row["image"]["bytes"] for row in rows]
        assert json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["alphabet"]["names"] == names

    def test_tinyimagenet32_is_made_from_tiny_imagenet(self, small_hub, data):
        wanted = [f"n{number}" for number in TINY_IMAGENET_CLASSES.split()]
        names = sorted([*wanted, *(f"n9{number:07d}" for number in range(100))], reverse=True)
        files = {}
        for split, count in (("train", 2), ("valid", 1)):
            labels = [label for label in range(200) for _ in range(count)]
            images = [
                {"bytes": small_images.encode_image(np.full((64, 64, 3), label, np.uint8), "JPEG"), "path": None}
                for label in labels
            ]
            table = small_images.pyarrow.table({"image": images, "label": labels})
            files[f"default/{split}/0000.parquet"] = small_images.to_parquet_bytes(
                small_images.add_class_names(table, names)
            )
        small_hub.datasets["zh-plus/tiny-imagenet"] = files
        assert cli.main(["data", "get", "tinyimagenet32"]) == 0
        stored = sorted(path.name for path in (data / "tinyimagenet32").glob("[!.]*"))
        assert stored == ["source.json", "test.parquet", "train.parquet"]
        stored_images = open_split("tinyimagenet32", "train")
        assert stored_images.read_value_names("label") == wanted
        assert np.bincount(stored_images.read_column("label")).tolist() == [2] * 100
        small = decode_images(stored_images, ImageDecoder(32))
        expected = [names.index(wanted[label]) for label in stored_images.read_column("label")]
        assert np.abs(small.mean((1, 2, 3)) - expected).max() < 3
        assert len(tasks.load("tinyimagenet32", seed=0)) == 10

    @needs_dataset("tinyimagenet32")
    def test_its_classes_are_those_of_the_file_that_was_measured_on(self):
        (names,) = {
            tuple(name.split()[0] for name in ParquetImages("tiny", (path,)).read_value_names("label"))
            for path in (REAL_DATA / "tinyimagenet32").glob("*.parquet")
        }
        assert list(names) == [f"n{number}" for number in TINY_IMAGENET_CLASSES.split()]

    def test_a_dataset_that_cannot_be_downloaded_says_why_and_the_others_are_downloaded(self, small_hub, data, capsys):
        put_on_hub(small_hub, "notmnist", 10, size=(28, 28))
        assert cli.main(["data", "get", "facescrub", "notmnist"]) == 1
        assert "facescrub cannot be downloaded" in capsys.readouterr().out
        assert (data / "notmnist" / "train.parquet").is_file()
