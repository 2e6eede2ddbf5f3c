"""Tasks from your own data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import small_images
from agscl import MultiHead, tasks


class TestOwnTensors:
    def tensors(self, classes=6, each=10):
        y = torch.arange(classes).repeat_interleave(each)
        return torch.stack([y.float(), torch.arange(len(y)).float()], 1), y

    def test_classes_are_cut_into_tasks_in_their_order(self):
        x, y = self.tensors()
        sequence = tasks.from_tensors(x, y, classes_per_task=2)
        assert [(task.name, task.classes) for task in sequence] == [("0-1", 2), ("2-3", 2), ("4-5", 2)]
        for place, task in enumerate(sequence):
            assert [len(each) for each in (task.train_y, task.valid_y, task.test_y)] == [15, 1, 4]
            assert torch.equal(task.train_x[:, 0] - 2 * place, task.train_y.float())
            rows = torch.cat([task.train_x, task.valid_x, task.test_x])[:, 1]
            assert len(rows.unique()) == 20
        assert sequence[0].mean is None

    def test_a_given_test_split_is_kept(self):
        x, y = self.tensors()
        sequence = tasks.from_tensors(x, y, test=(x[::5], y[::5]), classes_per_task=3, validation=0)
        assert [(len(task.train_y), task.valid_y, len(task.test_y)) for task in sequence] == [(30, None, 6)] * 2

    def test_a_value_for_each_example_makes_the_tasks(self):
        x, y = self.tensors(classes=2, each=30)
        where = ["south", "north", "south.west"] * 20
        sequence = tasks.from_tensors(x, y, by=where)
        assert [(task.name, task.classes) for task in sequence] == [("north", 2), ("south", 2), ("south_west", 2)]
        assert all(len(task.test_y) == 4 for task in sequence)
        assert {int(row) % 3 for row in sequence[0].train_x[:, 1]} == {1}
        tested = tasks.from_tensors(x, y, by=where, test=(x, y), test_by=where)
        assert [len(task.test_y) for task in tested] == [20, 20, 20]

    def test_names_are_labels_too(self):
        x, _ = self.tensors(classes=4, each=5)
        (first, second) = tasks.from_tensors(x, ["b10", "b9", "a", "c"] * 5, classes_per_task=2)
        assert (first.name, second.name) == ("a-b9", "b10-c")

    def test_the_seed_draws_splits_and_with_shuffle_the_order(self):
        x, y = self.tensors()
        names = [
            [task.name for task in tasks.from_tensors(x, y, classes_per_task=2, seed=seed, shuffle=shuffle)]
            for seed, shuffle in ((0, False), (1, False), (0, True), (0, True), (1, True))
        ]
        assert names[0] == names[1] != names[2] == names[3] != names[4]
        tests = [tasks.from_tensors(x, y, seed=seed)[0].test_x for seed in (0, 0, 1)]
        assert torch.equal(tests[0], tests[1])
        assert not torch.equal(tests[0], tests[2])

    def test_bytes_are_normalised_with_what_the_training_part_has(self):
        x = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
        x[:, 2] = 7
        sequence = tasks.from_tensors(x, torch.arange(4).repeat(10), classes_per_task=2)
        inputs = torch.cat([task.prepare_inputs(task.train_x) for task in sequence])
        assert inputs.mean((0, 2, 3)).abs().max() < 1e-5
        torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"classes_per_task": 5}, "'5-5' has only one class"),
            ({"classes_per_task": 1}, "at least 2"),
            ({"by": "colour"}, "a value for each example"),
            ({"by": [1, 2]}, "60 examples"),
            ({"by": [0] * 60, "test": (torch.zeros(1, 2), [0])}, "test_by"),
            ({"test": (torch.zeros(1, 2), [9])}, r"training does not have: \[9\]"),
            ({"test": (torch.zeros(1, 2), [3])}, "only one of training and test"),
            ({"test_share": 0.0}, "test_share"),
            ({"validation": 1.0}, "validation"),
            (
                {"test": (torch.zeros(60, 3), [0] * 60)},
                r"are torch.float32 of \(2,\), but test examples",
            ),
            ({"test": (torch.zeros(60, 1, 2, 2, dtype=torch.uint8), [0] * 60)}, "test examples torch.uint8"),
            ({"validation": 0.99}, "none is left for training"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options, message):
        x, y = self.tensors()
        with pytest.raises(ValueError, match=message):
            tasks.from_tensors(x, y, **options)

    def test_tasks_get_names_that_their_heads_can_have(self):
        x, y = self.tensors(classes=2, each=50)
        names = ["pop", "", "v1.0", "v1_0", "caf\udce9"]
        sequence = tasks.from_tensors(x, y, by=[name for name in names for _ in range(10)] * 2)
        assert [task.name for task in sequence] == ["unnamed", "caf\\udce9", "pop_", "v1_0", "v1_0-2"]
        model = MultiHead(torch.nn.Linear(2, 2), features=2)
        for task in sequence:
            model.add_head(task.name, task.classes)

    def test_floats_of_any_precision_become_those_of_networks(self):
        x, y = self.tensors()
        assert tasks.from_tensors(x.double(), y)[0].train_x.dtype == torch.float32

    def test_a_large_share_for_test_leaves_one_of_each_class_for_training(self):
        x, y = self.tensors(each=3)
        (task,) = tasks.from_tensors(x, y, test_share=0.9, validation=0)
        assert sorted(task.train_y.tolist()) == list(range(6))

    def test_a_class_of_one_example_is_refused(self):
        with pytest.raises(ValueError, match="only one example"):
            tasks.from_tensors(torch.zeros(3, 2), [0, 0, 1])


class TestOwnFolder:
    def fill(self, folder, classes, count=5, size=(16, 16, 3), kind="png"):
        for label, name in enumerate(classes):
            (folder / name).mkdir(parents=True)
            for number in range(count):
                content = small_images.encode_image(small_images.make_pixels(label, number, size))
                (folder / name / f"{number}.{kind}").write_bytes(content)

    def test_a_folder_per_class_in_one_line(self, data):
        self.fill(data / "flowers", ["rose", "tulip", "iris", "lily"])
        (data / "flowers" / "notes.txt").write_text("not a image")
        first, second = tasks.load(f"folder:{data / 'flowers'}", seed=0, classes_per_task=2)
        assert (first.name, second.name) == ("iris-lily", "rose-tulip")
        assert first.train_x.shape[1:] == (3, 16, 16)
        assert first.train_x.dtype == torch.uint8
        assert [len(first.train_y), len(first.valid_y), len(first.test_y)] == [7, 1, 2]

    def test_class_names_that_are_numbers_come_in_their_order(self, data):
        self.fill(data / "numbers", [str(number) for number in range(12)])
        assert [task.name for task in tasks.from_folder(data / "numbers", classes_per_task=4)] == ["0-3", "4-7", "8-11"]

    def test_a_folder_per_task(self, data):
        self.fill(data / "places" / "forest", ["ant", "bear"])
        self.fill(data / "places" / "city", ["cat", "dog", "pigeon"])
        city, forest = tasks.from_folder(data / "places", by="folder")
        assert (city.name, city.classes, forest.name, forest.classes) == ("city", 3, "forest", 2)
        assert tasks.from_folder(data / "places")[0].classes == 5

    def test_train_and_test_folders_keep_their_split(self, data):
        self.fill(data / "split" / "train", ["a", "b"], 10)
        self.fill(data / "split" / "test", ["a", "b"], 3)
        (task,) = tasks.from_folder(data / "split", validation=0.2)
        assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [16, 4, 6]

    def test_images_of_other_sizes_are_resized_and_cut(self, data):
        self.fill(data / "photos", ["a", "b"], size=(30, 20, 3))
        with pytest.raises(ValueError, match=r"choose a size, e\.g\. size=64"):
            tasks.from_folder(data / "photos")
        (task,) = tasks.from_folder(data / "photos", size=10, channels=1)
        assert task.train_x.shape[1:] == (1, 10, 10)

    def test_parquet_files_are_cut_by_a_column(self, data):
        labels = [0, 1, 2, 3] * 10
        column = ["day" if label < 2 else "night" for label in labels]
        small_images.write_parquet(
            small_images.make_table(labels, names=["w", "x", "y", "z"], when=column), data / "own" / "some.parquet"
        )
        assert [(task.name, task.classes) for task in tasks.from_folder(data / "own", by="when")] == [
            ("day", 2),
            ("night", 2),
        ]
        assert [task.name for task in tasks.from_folder(data / "own", classes_per_task=2)] == ["w-x", "y-z"]
        with pytest.raises(tasks.DataError, match="its columns are: image, label, when"):
            tasks.from_folder(data / "own", by="where")
        with pytest.raises(tasks.DataError, match=r"no column 'kind' .* label=\.\.\."):
            tasks.from_folder(data / "own", label="kind")

    def test_what_is_not_there_or_cannot_be_cut_is_refused(self, data):
        with pytest.raises(tasks.DataError, match="there is no folder"):
            tasks.from_folder(data / "nothing")
        (data / "empty").mkdir(parents=True)
        with pytest.raises(tasks.DataError, match="contains no images"):
            tasks.from_folder(data / "empty")
        self.fill(data / "mixed", ["a", "b"])
        self.fill(data / "mixed" / "deep", ["c"])
        with pytest.raises(tasks.DataError, match="different depths"):
            tasks.from_folder(data / "mixed")
        self.fill(data / "flat", ["a", "b"])
        with pytest.raises(tasks.DataError, match="no task folders"):
            tasks.from_folder(data / "flat", by="folder")

    def test_a_class_behind_a_link_counts_and_hidden_folders_do_not(self, data, tmp_path):
        self.fill(data / "linked", ["a", ".ipynb_checkpoints"])
        self.fill(tmp_path / "elsewhere", ["b"])
        (data / "linked" / "b").symlink_to(tmp_path / "elsewhere" / "b")
        (data / "linked" / "a" / "loop").symlink_to(data / "linked")
        (task,) = tasks.from_folder(data / "linked")
        assert (task.name, task.classes) == ("a-b", 2)

    def test_images_of_kinds_that_are_not_read_are_not_passed_over(self, data):
        self.fill(data / "some", ["a", "b"])
        (data / "some" / "a" / "notes.txt").touch()
        assert len(tasks.from_folder(data / "some")) == 1
        for name in ("a/1.HEIC", "b/2.avif"):
            (data / "some" / name).touch()
        with pytest.raises(tasks.DataError, match=r"2 images have a format .* not supported, for example .*a/1\.HEIC"):
            tasks.from_folder(data / "some")

    @pytest.mark.parametrize("inside", [None, "notes.txt"])
    def test_a_class_without_a_image_that_can_be_read_is_named(self, data, inside):
        self.fill(data / "some", ["a", "b"])
        (data / "some" / "c").mkdir()
        if inside:
            (data / "some" / "c" / inside).touch()
        with pytest.raises(tasks.DataError, match=r"some/c contains no images .* would be missing"):
            tasks.from_folder(data / "some")

    @pytest.mark.parametrize(("training", "test"), [("Train", "Test"), ("training", "val"), ("TRAIN", "Validation")])
    def test_splits_are_kept_whatever_they_are_called(self, data, training, test):
        self.fill(data / "split" / training, ["a", "b"], 10)
        self.fill(data / "split" / test, ["a", "b"], 3)
        (task,) = tasks.from_folder(data / "split", validation=0)
        assert [len(task.train_y), len(task.test_y)] == [20, 6]

    def test_a_class_or_a_task_may_be_called_train(self, data):
        self.fill(data / "vehicles", ["train", "bus", "test"])
        assert tasks.from_folder(data / "vehicles")[0].classes == 3
        self.fill(data / "both" / "train", ["a", "b"])
        self.fill(data / "both" / "bus", ["a", "b"])
        assert [task.name for task in tasks.from_folder(data / "both", by="folder")] == ["bus", "train_"]

    def test_parquet_files_numbered_in_any_way_keep_their_split(self, data):
        for name in ("train_0", "train_1", "test"):
            small_images.write_parquet(small_images.make_table([0, 1] * 10), data / "own" / f"{name}.parquet")
        (task,) = tasks.from_folder(data / "own", validation=0)
        assert [len(task.train_y), len(task.test_y)] == [40, 20]
        (data / "own" / "train_0.parquet").rename(data / "own" / "one.parquet")
        (data / "own" / "train_1.parquet").rename(data / "own" / "two.parquet")
        with pytest.raises(tasks.DataError, match=r"looks like a test split, but nothing in .* is called train"):
            tasks.from_folder(data / "own")

    @pytest.mark.parametrize("kind", ["png", "tiff"])
    def test_images_of_16_bits_keep_their_upper_8_and_of_32_bits_are_refused(self, data, kind):
        wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
        for label in "ab":
            (data / "deep" / label).mkdir(parents=True)
            for number in range(4):
                (data / "deep" / label / f"{number}.{kind}").write_bytes(small_images.encode_image(wide, kind))
        for channels in (1, 3):
            (task,) = tasks.from_folder(data / "deep", channels=channels)
            assert task.train_x[0, 0].flatten().tolist() == list(range(256))
        (data / "deep" / "a" / "0.tiff").write_bytes(small_images.encode_image(wide.astype(np.float32), "tiff"))
        with pytest.raises(tasks.DataError, match=r"0\.tiff cannot be decoded: its pixels are 32-bit numbers"):
            tasks.from_folder(data / "deep")

    def test_columns_that_cannot_be_labels_or_images_are_named(self, data):
        made = small_images.make_table(
            [0, 1] * 10, group=["x", None] * 10, parts=[[1], [2]] * 10, file=["a.png", "b.png"] * 10
        )
        small_images.write_parquet(made, data / "own" / "train.parquet")
        for options, message in (
            ({"by": "group"}, "'group' of .* has no value in 10 of its rows"),
            ({"label": "parts"}, "'parts' of .* holds list<.*> instead of single values"),
            ({"image": "file"}, "'file' of .* holds string, not encoded images"),
        ):
            with pytest.raises(tasks.DataError, match=message):
                tasks.from_folder(data / "own", size=8, **options)
        small_images.write_parquet(made[:0], data / "own" / "train.parquet")
        with pytest.raises(tasks.DataError, match="has no rows"):
            tasks.from_folder(data / "own", size=8)

    @pytest.mark.parametrize("options", [{"size": 0}, {"size": "big"}, {"channels": 2}])
    def test_sizes_and_channels_that_cannot_be_are_refused(self, data, options):
        self.fill(data / "some", ["a", "b"])
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be "):
            tasks.from_folder(data / "some", **options)

    def test_a_broken_image_is_named(self, data):
        self.fill(data / "broken", ["a", "b"])
        (data / "broken" / "b" / "3.png").write_bytes(b"nothing of the kind")
        with pytest.raises(tasks.DataError, match=r"b/3.png cannot be decoded"):
            tasks.from_folder(data / "broken", size=16)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([[1.0], [2.0]], "not list"),
        (torch.ones(2, 3, dtype=torch.long), "not torch.int64"),
        (torch.tensor([[0.0], [math.nan]]), "infinite or NaN"),
        (torch.zeros(2, 28, 28, dtype=torch.uint8), r"\(2, 28, 28\)\. Try x\[:, None\]"),
        (torch.zeros(2, 32, 32, 3, dtype=torch.uint8), r"Try x\.permute\(0, 3, 1, 2\)"),
    ],
)
def test_inputs_that_cannot_be_are_refused(x, words):
    with pytest.raises(ValueError, match=words):
        tasks.from_tensors(x, [0, 1], classes_per_task=2)


def test_numbers_are_sorted_as_numbers_and_names_as_a_person_would():
    x, y = torch.randn(40, 3), torch.tensor([-3, -1, 2, 10]).repeat(10)
    assert [task.name for task in tasks.from_tensors(x, y, classes_per_task=2)] == ["-3--1", "2-10"]
    names = [f"class{number}" for number in (10, 9, 2, 1)] * 10
    assert [task.name for task in tasks.from_tensors(x, names, classes_per_task=2)] == [
        "class1-class2",
        "class9-class10",
    ]


@pytest.mark.parametrize(
    ("x", "y", "options", "said"),
    [
        (torch.zeros(0, 3), [], {}, "there are no examples"),
        (torch.full((4, 3), 1e300, dtype=torch.float64), [0, 0, 1, 1], {}, "infinite or NaN, at least as float32"),
        (torch.zeros(4, 3), [0.0, 1.0, math.nan, 1.0], {}, "1 of the labels are NaN"),
        (
            torch.zeros(4, 3),
            [0, 1, 0, 1],
            {"by": [0.0, math.nan, 0.0, math.nan]},
            "2 of the values of by are NaN",
        ),
        (torch.zeros(4, 3), [0, 1, 0, 1], {"test_by": [0, 1]}, "test_by needs a by"),
    ],
)
def test_tensors_that_make_no_tasks_say_why(x, y, options, said):
    with pytest.raises(ValueError, match=said):
        tasks.from_tensors(x, y, **options)


def test_tensors_that_ask_for_gradients_are_taken_as_they_are():
    x = torch.randn(40, 3, requires_grad=True)
    (task,) = tasks.from_tensors(x, [0, 1] * 20)
    assert not task.train_x.requires_grad
