"""Datasets on disk: found, listed, checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

import small_images
from agscl import tasks
from agscl.cli import main as cli
from agscl.data import catalogue
from agscl.data.check import check_dataset
from real_data import REAL_DATA, needs_dataset


def test_a_check_finds_undecodable_images_missing_classes_and_wrong_counts(data, capsys):
    small_images.write_dataset(data, "mnist", 10, 8, 2, size=(28, 28))
    assert cli.main(["data", "check", "mnist"]) == 1
    assert "there are 100 images, expected 70000" in capsys.readouterr().out

    table = small_images.make_table([label for label in range(9) for _ in range(8)], size=(28, 28))
    column = table.column("image").to_pylist()
    for row in range(7):
        column[row]["bytes"] = column[row]["bytes"][: 60 + row]
    small_images.write_parquet(table.set_column(0, "image", [column]), data / "mnist" / "train.parquet")
    report = check_dataset("mnist")
    assert {split: counts.sum() for split, counts in report.counts.items()} == {"train": 72, "test": 20}
    assert "train.parquet, row 0, cannot be decoded" in report.problems[0]
    assert "has images of 9 classes, expected 10" in report.problems[7]
    assert cli.main(["data", "check", "mnist"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("mnist: FAILED; 10 classes; images: train 72, test 20\n")
    assert "and 4 more" in output


def test_a_damaged_manifest_is_reported_by_a_check(data):
    small_images.write_dataset(data, "mnist", 10, 1, 1, size=(28, 28))
    entry = '{"url": "http://somewhere", "file": "../train.parquet", "digest": "00"}'
    (data / "mnist" / "source.json").write_text('{"from": "here", "files": [' + entry + "]}")
    assert "source.json is damaged" in check_dataset("mnist").problems[-1]


def test_a_check_without_names_takes_all_datasets_that_are_there(data, capsys, monkeypatch):
    small_images.write_dataset(data, "svhn", 10, 4, 2)
    monkeypatch.setitem(catalogue.DATASETS, "svhn", replace(catalogue.DATASETS["svhn"], rows=(60,)))
    assert cli.main(["data", "check"]) == 0
    assert capsys.readouterr().out == "svhn: OK; 10 classes; images: train 40, test 20\n"
    assert cli.main(["data", "get", "digits"]) == 0
    assert "nothing to download" in capsys.readouterr().out
    monkeypatch.setenv("AGSCL_DATA", str(data / "wrong"))
    assert cli.main(["data", "check"]) == 1
    assert str(data / "wrong") in capsys.readouterr().out
    monkeypatch.setenv("AGSCL_DATA", str(data))
    assert cli.main(["data", "check", "cifar100"]) == 1
    assert capsys.readouterr().out.startswith("cifar100: FAILED\n  cifar100 is missing: searched for")


def test_a_sequence_names_all_the_datasets_that_are_missing(data):
    small_images.write_dataset(data, "mnist", 10, 4, 2)
    with pytest.raises(tasks.DataError) as error:
        tasks.load("eight", seed=0)
    message = str(error.value)
    assert message.startswith(
        "cifar10, cifar100, svhn, fashion_mnist, signs, facescrub, notmnist are missing: searched"
    )
    assert str(data) in message
    assert "facescrub cannot be downloaded: its authors hand the images out" in message
    assert message.endswith(
        "Download the others with: agscl data get cifar10 cifar100 svhn fashion_mnist signs notmnist"
    )
    with pytest.raises(tasks.DataError, match=r"Download them with: agscl data get cifar10 tinyimagenet32$"):
        tasks.load("cifar10-tiny", seed=0)
    (data / "tinyimagenet32").mkdir()
    (data / "tinyimagenet32" / "train-00001-of-00002.parquet").touch()
    with pytest.raises(tasks.DataError, match="contains 1 of the 2 files"):
        tasks.load("cifar10-tiny", seed=0)


def test_the_list_says_what_is_there_and_where_the_rest_comes_from(data, capsys):
    small_images.write_dataset(data, "cifar100", 100, 1, 1)
    assert cli.main(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[:25])
    by_name = {line.split()[0]: line for line in lines if line.strip()}
    ready = [line.split()[0] for line in lines if line.rstrip().endswith("ready")]
    assert ready == ["digits", "cifar100"]
    assert "agscl data get cifar10-100" in by_name["cifar10-100"]
    assert "ylecun/mnist on the Hugging Face hub" in by_name["mnist"]
    assert "cannot be downloaded" in by_name["facescrub"]
    assert "docs/data.md" in by_name["eight"]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("arguments", [["get"], ["get", "mnst"], ["list", "mnist"]])
def test_wrong_use_says_what_is_possible(arguments, capsys):
    assert cli.main(["data", *arguments]) == 2
    assert capsys.readouterr().err.startswith("agscl: ")


@needs_dataset("notmnist")
def test_real_data_passes_the_check(monkeypatch, data, capsys):
    monkeypatch.setenv("AGSCL_DATA", str(REAL_DATA))
    assert cli.main(["data", "check", "notmnist"]) == 0
    assert capsys.readouterr().out == "notmnist: OK; 10 classes; images: train 15,915, test 2,809\n"


def test_every_sequence_is_made_of_datasets_of_the_catalogue():
    for info in tasks.SEQUENCES.values():
        assert set(info.datasets) <= set(catalogue.DATASETS)
        assert len(info.about) <= 31
