"""Ten unlike tasks in three orders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import small_images
from agscl import tasks
from agscl.cli import main as cli
from agscl.experiments.build import build_model
from agscl.experiments.presets import PRESETS
from agscl.experiments.run_config import configure
from agscl.tasks.digits import read_digits
from agscl.training import Trainer
from real_data import REAL_DATA, needs_dataset

SPLITS = ("train", "valid", "test")


def count_examples(sequence):
    """Of each task: its name, its classes, and how many examples train, validate and test."""
    return [(task.name, task.classes, len(task.train_y), len(task.valid_y), len(task.test_y)) for task in sequence]


def join_splits(task, part):
    return torch.cat([getattr(task, f"{split}_{part}") for split in SPLITS])


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """All datasets with few images, in the form of the real ones. Omniglot has alphabets of 3, 2 and 4 characters."""
    data = tmp_path_factory.mktemp("mixed")
    small_images.write_dataset(data, "tinyimagenet32", 100, 4, 1)
    for name, count in (("notmnist", 20), ("cifar10", 30), ("mnist", 40), ("fashion_mnist", 40)):
        small_images.write_dataset(data, name, 10, count, 1, size=(32, 32, 3) if name == "cifar10" else (28, 28))
    rows = [(alphabet, c) for alphabet, count in ((0, 3), (1, 2), (2, 4)) for c in range(count) for _ in range(20)]
    table = small_images.make_table(
        [10 * alphabet + c for alphabet, c in rows],
        (105, 105),
        label="character",
        alphabet=[alphabet for alphabet, _ in rows],
    )
    table = small_images.add_class_names(table, ["a/Greek", "a/St._Old", "b/Tengwar"], "alphabet")
    small_images.write_parquet(table, data / "omniglot" / "all.parquet")
    return data


@pytest.fixture
def small(data, small_data, monkeypatch):
    monkeypatch.setenv("AGSCL_DATA", str(small_data))
    monkeypatch.setenv("AGSCL_CACHE", str(small_data / "cache"))


@pytest.mark.usefixtures("small")
class TestMixed:
    def test_ten_tasks_from_the_fewest_training_images_to_the_most_and_back(self):
        sequence = tasks.load("mixed", seed=0, order="small-first")
        assert count_examples(sequence) == [
            ("tiny-0-1", 2, 7, 1, 2),
            ("St__Old", 2, 28, 4, 8),
            ("tiny-2-11", 10, 34, 6, 10),
            ("Tengwar", 4, 55, 9, 16),
            ("tiny-12-41", 30, 102, 18, 30),
            ("notmnist", 10, 170, 30, 10),
            ("cifar10", 10, 255, 45, 10),
            ("mnist", 10, 340, 60, 10),
            ("fashion_mnist", 10, 340, 60, 10),
            ("digits", 10, 1223, 215, 359),
        ]
        for task in sequence:
            task.check_data()
            assert (task.train_x.dtype, task.train_x.shape[1:]) == (torch.uint8, (3, 32, 32))
            assert len(task.test_y.unique()) == task.classes
        large_first = tasks.load("mixed", seed=0, order="large-first")
        assert [task.name for task in large_first] == [task.name for task in reversed(sequence)]

    def test_the_seed_shuffles_the_tasks_unless_another_order_is_chosen(self):
        first, again, other = ([task.name for task in tasks.load("mixed", seed=seed)] for seed in (0, 0, 1))
        assert first == again != other
        assert sorted(first) == sorted(other)

    def test_a_seed_gives_a_task_the_same_data_in_every_order_and_another_seed_gives_it_other_data(self):
        def sum_up(seed, **options):
            return {task.name: task.checksum() for task in tasks.load("mixed", seed=seed, **options)}

        same = [sum_up(0, order=order) for order in ("shuffled", "small-first", "large-first")]
        assert same[0] == same[1] == same[2]
        other = sum_up(1)
        assert all(other[name] != checksum for name, checksum in same[0].items())

    def test_every_image_is_in_one_split_and_none_is_lost(self):
        by_name = {task.name: task for task in tasks.load("mixed", seed=2)}
        digits, alphabet = by_name["digits"], by_name["St__Old"]
        images, labels = read_digits()
        pixels = join_splits(digits, "x")[:, 0, ::4, ::4].flatten(1)
        assert sorted(pixels.tolist()) == sorted(np.round(images * (255 / 16)).astype(int).tolist())
        assert join_splits(digits, "y").bincount().tolist() == np.bincount(labels).tolist()
        drawings = join_splits(alphabet, "x")
        assert len({drawing.numpy().tobytes() for drawing in drawings}) == len(drawings) == 40
        assert join_splits(alphabet, "y").bincount().tolist() == [20, 20]
        tiny = torch.cat([join_splits(by_name[f"tiny-{classes}"], "x") for classes in ("0-1", "2-11", "12-41")])
        assert tiny[:, 0, 0, 0].bincount().tolist() == [5] * 42, "the first pixel is the class"

    def test_digits_and_alphabets_are_normalised_with_their_own_training_images(self):
        by_name = {task.name: task for task in tasks.load("mixed", seed=0)}
        for name in ("digits", "St__Old", "Tengwar"):
            x = by_name[name].prepare_inputs(by_name[name].train_x)
            assert x.mean().item() == pytest.approx(0, abs=1e-3)
            assert x.std().item() == pytest.approx(1, abs=1e-3)
        assert by_name["tiny-2-11"].mean.tolist() == pytest.approx([125.3 / 255, 123.0 / 255, 113.9 / 255])
        assert by_name["mnist"].std.tolist() == pytest.approx([0.2752] * 3)

    @pytest.mark.parametrize("order", ["random", "", None, 3])
    def test_an_unknown_order_is_refused_with_the_known_ones(self, order):
        with pytest.raises(ValueError, match=f"order must be shuffled, small-first, large-first, not {order!r}"):
            tasks.load("mixed", seed=0, order=order)

    def test_an_unknown_order_on_the_command_line_is_a_usage_error_and_leaves_no_folder(self, tmp_path, capsys):
        runs = tmp_path / "runs"
        assert cli.main(["run", "mixed", "--runs", str(runs), "--task-options", "order=random"]) == 2
        assert "order must be shuffled, small-first, large-first, not 'random'" in capsys.readouterr().err
        assert not list(runs.glob("*"))

    @pytest.mark.parametrize("preset", ["mixed", "mixed-small-first", "mixed-large-first"])
    def test_presets_learn_their_order_as_tinyimagenet32_is_learned(self, preset):
        config = configure(preset, method="agscl")
        order = preset.removeprefix("mixed").removeprefix("-") or "shuffled"
        names = [task.name for task in tasks.load(config.tasks, seed=0, **config.task_options)]
        assert names == [task.name for task in tasks.load("mixed", seed=0, order=order)]
        tiny = PRESETS["tinyimagenet32"]
        assert (config.network, config.training) == (tiny.network, tiny.training)
        assert PRESETS[preset].methods == tiny.methods
        assert configure(preset, method="agscl").settings == configure("tinyimagenet32", method="agscl").settings

    def test_one_network_learns_small_and_large_tasks_of_different_class_counts(self):
        sequence = tasks.load("mixed", seed=0, order="small-first")[:3]
        config = configure("mixed", method="agscl", epochs=2)
        model, method = build_model(config, "agscl", sequence[0].prepare_inputs(sequence[0].train_x[:2]))
        trainer = Trainer(model, method, sequence, config.training, seed=0)
        while trainer.advance():
            pass
        assert [len(row) for row in trainer.accuracies] == [1, 2, 3]
        assert trainer.accuracies[2][0] == trainer.accuracies[0][0]

    def test_the_list_of_data_shows_it_as_ready(self, capsys):
        assert cli.main(["data", "list"]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["mixed"])
        assert line.split()[-1] == "ready"


def test_missing_datasets_are_all_named(data):
    small_images.write_dataset(data, "mnist", 10, 2, 1, size=(28, 28))
    with pytest.raises(tasks.DataError, match="agscl data get tinyimagenet32 notmnist cifar10 fashion_mnist omniglot"):
        tasks.load("mixed", seed=0)


@needs_dataset("cifar10")
@needs_dataset("fashion_mnist")
@needs_dataset("mnist")
@needs_dataset("notmnist")
@needs_dataset("omniglot")
@needs_dataset("tinyimagenet32")
@pytest.mark.slow
def test_the_real_tasks_have_the_documented_sizes(data, monkeypatch):
    monkeypatch.setenv("AGSCL_DATA", str(REAL_DATA))
    sequence = tasks.load("mixed", seed=0, order="small-first")
    assert count_examples(sequence) == [
        ("Blackfoot_(Canadian_Aboriginal_Syllabics)", 14, 191, 33, 56),
        ("Tifinagh", 55, 748, 132, 220),
        ("tiny-0-1", 2, 850, 150, 100),
        ("digits", 10, 1223, 215, 359),
        ("tiny-2-11", 10, 4250, 750, 500),
        ("tiny-12-41", 30, 12750, 2250, 1500),
        ("notmnist", 10, 13528, 2387, 2809),
        ("cifar10", 10, 42500, 7500, 10000),
        ("mnist", 10, 51000, 9000, 10000),
        ("fashion_mnist", 10, 51000, 9000, 10000),
    ]
