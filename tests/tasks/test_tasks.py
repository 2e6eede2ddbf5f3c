import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import small_images
from agscl import AGSCL, FineTune, MultiHead, tasks
from agscl.data.images import ImageDecoder
from agscl.networks import NETWORKS
from agscl.tasks import Task, cub200, random_crop
from agscl.training import Trainer, TrainingConfig

DATA = Path(os.environ.get("AGSCL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def real(data, monkeypatch, request):
    """The real data, with a cache of its own."""
    if not (DATA / request.param).is_dir():
        pytest.skip(f"needs {request.param} in the folder AGSCL_DATA")
    monkeypatch.setenv("AGSCL_DATA", str(DATA))


def picture_task(x, **options):
    y = torch.zeros(len(x), dtype=torch.long)
    return Task("birds", 2, x, y, None, None, x, y, **options)


class TestDigits:
    def test_they_are_five_tasks_that_hold_every_digit_once(self):
        sequence = tasks.load("digits", seed=0)
        assert [task.classes for task in sequence] == [2] * 5
        assert sorted(digit for task in sequence for digit in task.name.split("-")) == sorted("0123456789")
        assert sum(len(task.train_y) + len(task.test_y) for task in sequence) == 1797

    def test_they_are_split_class_by_class_and_scaled_to_one(self):
        for task in tasks.load("digits", seed=3):
            assert task.train_x.min() >= 0
            assert task.train_x.max() <= 1
            assert task.valid_x is None
            for label in (0, 1):
                tested, learned = (task.test_y == label).sum(), (task.train_y == label).sum()
                assert abs(tested / (tested + learned) - 0.25) < 0.01

    def test_training_and_test_examples_are_kept_apart(self):
        for task in tasks.load("digits", seed=1):
            train = {x.numpy().tobytes() for x in task.train_x}
            assert not any(x.numpy().tobytes() in train for x in task.test_x)

    def test_without_scikit_learn_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(tasks.DataError, match="pip install scikit-learn"):
            tasks.load("digits", seed=0)

    @pytest.mark.parametrize("share", [0, 1, -0.1])
    def test_some_must_be_for_test_and_some_for_training(self, share):
        with pytest.raises(ValueError, match="test_share must be above 0 and below 1"):
            tasks.load("digits", seed=0, test_share=share)

    def test_the_seed_decides_pairs_and_split(self):
        first, again, other = (tasks.load("digits", seed=seed) for seed in (5, 5, 6))
        assert [task.name for task in first] == [task.name for task in again] != [task.name for task in other]
        assert all(torch.equal(a.train_x, b.train_x) for a, b in zip(first, again, strict=True))
        assert tasks.load("digits", seed=6, shuffle_classes=False)[0].name == "0-1"


def test_an_unknown_sequence_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"digits, cifar100, .*folder:PATH, hub:NAME"):
        tasks.load("imagenet", seed=0)


class TestInputs:
    def test_floats_are_read_as_they_are(self):
        x = torch.rand(3, 64)
        task = picture_task(x)
        assert task.prepare_inputs(x) is x
        assert torch.equal(task.make_batch(torch.tensor([2, 0]))[0], x[[2, 0]])

    def test_bytes_become_normalised_floats(self):
        x = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
        mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
        expected = (x.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
        task = picture_task(x, mean=mean, std=std)
        torch.testing.assert_close(task.prepare_inputs(x), expected.float())
        assert torch.equal(picture_task(x).prepare_inputs(x), x.float() / 255)

    def test_a_moved_task_takes_its_normalisation_along(self):
        task = picture_task(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), mean=torch.ones(3), std=torch.ones(3))
        moved = task.to("meta")
        assert {moved.mean.device.type, moved.std.device.type, moved.train_x.device.type} == {"meta"}
        assert moved.name == "birds"

    def test_pictures_kept_larger_are_read_at_the_size_of_the_crop(self):
        x = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
        task = picture_task(x, crop=24, shapes=torch.full((2, 2), 100))
        torch.testing.assert_close(task.prepare_inputs(x), torch.full((2, 3, 24, 24), 0.2))
        assert task.make_batch(torch.tensor([0]))[0].shape == (1, 3, 24, 24)

    def test_crops_are_drawn_by_the_global_generator(self):
        task = picture_task(
            torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), crop=16, shapes=torch.full((4, 2), 100)
        )
        rows = torch.arange(4)
        torch.manual_seed(3)
        first, other = task.make_batch(rows)[0], task.make_batch(rows)[0]
        torch.manual_seed(3)
        assert torch.equal(task.make_batch(rows)[0], first)
        assert not torch.equal(other, first)


class TestRandomCrops:
    @pytest.mark.parametrize("shape", [(300, 500), (500, 300), (120, 500), (100, 100)])
    def test_they_lie_within_the_picture_and_keep_to_area_and_ratio(self, shape):
        torch.manual_seed(0)
        boxes = random_crop.draw_boxes(torch.tensor([shape] * 5000))
        y, x, tall, broad = boxes.unbind(1)
        assert (tall <= 1).all()
        assert (broad <= 1).all()
        assert (y.abs() + tall <= 1 + 1e-6).all()
        assert (x.abs() + broad <= 1 + 1e-6).all()
        ratio = broad * shape[1] / (tall * shape[0])
        assert ratio.min() >= 3 / 4 - 1e-4
        assert ratio.max() <= 4 / 3 + 1e-4
        assert (tall * broad).min() >= 0.08 - 1e-4

    def test_area_and_place_are_uniform(self):
        torch.manual_seed(1)
        y, x, tall, broad = random_crop.draw_boxes(torch.full((20_000, 2), 100)).unbind(1)
        area = tall * broad
        small = area[area < 0.7]  # such a part fits in any of the ratios
        assert abs(small.mean() - (0.08 + 0.7) / 2) < 0.01
        for place, side in ((y, tall), (x, broad)):
            assert abs((place / (1 - side).clamp(min=1e-3)).mean()) < 0.02

    def test_a_picture_too_narrow_for_any_part_gives_its_middle(self):
        torch.manual_seed(0)
        boxes = random_crop.draw_boxes(torch.tensor([[1, 1000]] * 200))
        fell_back = boxes[:, 2] == 1
        assert fell_back.any()
        assert torch.equal(boxes[fell_back][:, :2], torch.zeros(int(fell_back.sum()), 2))
        torch.testing.assert_close(boxes[fell_back][:, 3] * 1000, torch.full((int(fell_back.sum()),), 4 / 3))

    def test_a_crop_shows_its_part_of_the_picture(self, monkeypatch):
        across = torch.linspace(0, 1, 64).repeat(64, 1)
        x = torch.stack([across, across.T])[None].repeat(200, 1, 1, 1)
        box = torch.tensor([[-0.25, 0.5, 0.5, 0.25]]).repeat(200, 1)  # y, x, height, width
        monkeypatch.setattr(random_crop, "draw_boxes", lambda shapes: box)
        torch.manual_seed(0)
        cut = random_crop.random_resized_crop(x, torch.full((200, 2), 100), 16)
        assert cut.shape == (200, 2, 16, 16)
        torch.testing.assert_close(cut[:, 0].mean((1, 2)), torch.full((200,), 0.75), atol=0.01, rtol=0)
        torch.testing.assert_close(cut[:, 1].mean((1, 2)), torch.full((200,), 0.375), atol=0.01, rtol=0)
        assert (cut[:, 1, -1] > cut[:, 1, 0]).all()
        mirrored = (cut[:, 0, :, 0] > cut[:, 0, :, -1]).all(1)
        assert 60 < mirrored.sum() < 140


class TestCifar:
    def test_classes_stay_together_and_the_seed_shuffles_the_tasks(self, data):
        small_images.write_dataset(data, "cifar100", 100, 10, 2)
        first, again, other = (tasks.load("cifar100", seed=seed) for seed in (0, 0, 1))
        names = [f"{ten}-{ten + 9}" for ten in range(0, 100, 10)]
        assert sorted(task.name for task in first) == sorted(names)
        assert [task.name for task in first] == [task.name for task in again] != [task.name for task in other]
        for task in first:
            assert task.classes == 10
            assert task.train_x.dtype == torch.uint8
            assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [90, 10, 20]
            start = int(task.name.split("-")[0])
            for x, y in ((task.train_x, task.train_y), (task.valid_x, task.valid_y), (task.test_x, task.test_y)):
                assert torch.equal(x[:, 0, 0, 0].long(), y + start)

    def test_a_picture_is_in_training_or_in_validation_and_none_is_lost(self, data):
        small_images.write_dataset(data, "cifar100", 100, 10, 2)
        for task in tasks.load("cifar100", seed=4):
            both = torch.cat([task.train_x, task.valid_x])[:, 0, 0, :2]
            assert len({tuple(each) for each in both.tolist()}) == 100

    def test_the_seed_draws_what_validates(self, data):
        small_images.write_dataset(data, "cifar100", 100, 10, 2)
        of = [{task.name: task for task in tasks.load("cifar100", seed=seed)} for seed in (0, 0, 1)]
        same, again, other = ({tuple(x) for x in each["0-9"].valid_x[:, 0, 0, :2].tolist()} for each in of)
        assert same == again != other

    def test_the_paper_s_normalisation_is_applied(self, data):
        small_images.write_dataset(data, "cifar100", 100, 10, 2)
        task = tasks.load("cifar100", seed=0)[0]
        red = task.prepare_inputs(task.test_x)[3, 0, 5, 5]
        assert red == pytest.approx((task.test_x[3, 0, 5, 5].item() / 255 - 0.5071) / 0.2675, abs=1e-5)

    def test_the_hub_s_column_names_are_understood(self, data):
        small_images.write_dataset(data, "cifar100", 100, 2, 1, image="img", label="fine_label")
        assert sum(len(task.test_y) for task in tasks.load("cifar100", seed=0)) == 100

    @pytest.mark.parametrize(("name", "hundred"), [("cifar10-100", "cifar100"), ("cifar10-tiny", "tinyimagenet32")])
    def test_cifar10_comes_first_with_a_normalisation_of_its_own(self, data, name, hundred):
        small_images.write_dataset(data, "cifar10", 10, 10, 3)
        small_images.write_dataset(data, hundred, 100, 10, 1)
        first, *rest = tasks.load(name, seed=1)
        assert (first.name, first.classes, len(first.train_y), len(first.valid_y)) == ("cifar10", 10, 90, 10)
        assert first.mean.tolist() == pytest.approx([125.3 / 255, 123.0 / 255, 113.9 / 255])
        assert [task.name for task in rest] == [task.name for task in tasks.load(hundred, seed=1)]
        assert rest[0].std.tolist() == pytest.approx([0.2675, 0.2565, 0.2761])

    @pytest.mark.parametrize("real", ["tinyimagenet32"], indirect=True)
    @pytest.mark.usefixtures("real")
    def test_tiny_imagenet_has_the_counts_of_cifar100(self):
        sequence = tasks.load("tinyimagenet32", seed=0)
        assert [(len(task.train_y), len(task.valid_y), len(task.test_y)) for task in sequence] == [
            (4500, 500, 500)
        ] * 10
        x = torch.cat([task.prepare_inputs(task.train_x) for task in sequence])
        assert x.shape[1:] == (3, 32, 32)
        assert x.mean().abs() < 0.2
        assert abs(x.std() - 1) < 0.1
        counts = torch.stack([torch.cat([task.train_y, task.valid_y]).bincount() for task in sequence])
        assert (counts == 500).all()


class TestEight:
    @pytest.fixture
    def all_eight(self, data):
        small_images.write_dataset(data, "cifar10", 10, 20, 1)
        for name in ("cifar100", "tinyimagenet32"):
            small_images.write_dataset(data, name, 100, 2, 1)
        for name in ("mnist", "fashion_mnist", "notmnist"):
            small_images.write_dataset(data, name, 10, 20, 1, size=(28, 28))
        small_images.write_dataset(data, "svhn", 10, 20, 1)
        small_images.write_dataset(data, "signs", 43, 2, 1, size=(50, 41, 3))
        small_images.write_dataset(data, "facescrub", 100, 2, 1)

    @pytest.mark.usefixtures("all_eight")
    def test_the_datasets_come_in_the_paper_s_order_whatever_the_seed(self):
        for seed in (0, 1):
            sequence = tasks.load("eight", seed=seed)
            assert [(task.name, task.classes) for task in sequence] == [
                ("cifar10", 10),
                ("cifar100", 100),
                ("mnist", 10),
                ("svhn", 10),
                ("fashion_mnist", 10),
                ("signs", 43),
                ("facescrub", 100),
                ("notmnist", 10),
            ]
        assert {task.train_x.shape[1:] for task in sequence} == {(3, 32, 32)}
        assert [len(task.valid_y) for task in sequence] == [30, 30, 30, 30, 30, 12, 30, 30]

    @pytest.mark.usefixtures("all_eight")
    def test_five_is_eight_without_those_that_are_hard_to_get(self):
        names = ["cifar10", "tinyimagenet32", "mnist", "fashion_mnist", "notmnist"]
        assert [task.name for task in tasks.load("five", seed=0)] == names

    @pytest.mark.usefixtures("all_eight")
    def test_digits_get_two_black_pixels_around_them_and_three_equal_channels(self):
        mnist = tasks.load("eight", seed=0)[2]
        x, y = mnist.test_x, mnist.test_y
        assert (x[:, :, :2] == 0).all()
        assert (x[:, :, -2:] == 0).all()
        assert (x[:, :, :, :2] == 0).all()
        assert (x[:, :, :, -2:] == 0).all()
        original = torch.from_numpy(np.stack([small_images.make_pixels(label, 0, (28, 28)) for label in y.tolist()]))
        for channel in range(3):
            assert torch.equal(x[:, channel, 2:-2, 2:-2], original)
        assert mnist.prepare_inputs(x)[0, 0, 0, 0].item() == pytest.approx(-0.1 / 0.2752)

    @pytest.mark.parametrize("real", ["notmnist"], indirect=True)
    @pytest.mark.usefixtures("real")
    def test_resized_letters_have_the_mean_and_deviation_that_the_authors_measured(self):
        from agscl.data.datasets import load_examples
        from agscl.tasks.eight import NORMALISATION, choose_decoder

        letters = load_examples("notmnist", "train", choose_decoder("notmnist"))
        (mean, *_), (std, *_) = NORMALISATION["notmnist"]
        assert letters.x.mean() / 255 == pytest.approx(mean, abs=0.001)
        assert letters.x.std() / 255 == pytest.approx(std, abs=0.002)


class TestBirds:
    @pytest.fixture
    def birds(self, data):
        """200 species, 7 pictures each, wide and tall ones; the rows are not in the order of the file names."""
        rows = [(species, number) for number in (3, 0, 6, 1, 5, 2, 4) for species in range(200)]
        made = []
        for species, number in rows:
            size = (40, 60, 3) if number % 2 else (70, 50, 3)
            pixels = np.full(size, 10 * number, dtype=np.uint8)
            pixels[..., 0] = species
            made.append({"bytes": small_images.encode_image(pixels), "path": None})
        table = small_images.pyarrow.table(
            {
                "image_file_path": [f"./images/{species:03d}/bird_{number:04d}.jpg" for species, number in rows],
                "image": made,
                "labels": [species for species, _ in rows],
            }
        )
        small_images.write_parquet(table, data / "cub200" / "all.parquet")

    @pytest.fixture
    def small(self, monkeypatch):
        """Pictures kept smaller: there are many."""
        monkeypatch.setattr(cub200, "TRAIN_DECODER", ImageDecoder(16))
        monkeypatch.setattr(cub200, "TEST_DECODER", ImageDecoder(14, fit="crop", short=16))

    @pytest.mark.usefixtures("birds", "small")
    def test_the_first_four_fifths_by_file_name_are_for_training(self):
        sequence = tasks.load("cub200", seed=0)
        assert [(task.classes, len(task.train_y), len(task.test_y)) for task in sequence] == [(20, 120, 20)] * 10
        assert all(task.valid_x is None for task in sequence)
        for task in sequence:
            numbers, tested = task.train_x[:, 1, 0, 0] // 10, task.test_x[:, 1, 0, 0] // 10
            for species in range(20):
                assert sorted(numbers[task.train_y == species].tolist()) == [0, 1, 2, 3, 4, 5]
                assert tested[task.test_y == species].tolist() == [6]

    @pytest.mark.usefixtures("birds", "small")
    def test_the_seed_shuffles_the_species(self):
        first, again, other = (tasks.load("cub200", seed=seed) for seed in (0, 0, 1))
        of = [[sorted(set(task.test_x[:, 0, 0, 0].tolist())) for task in each] for each in (first, again, other)]
        assert of[0] == of[1] != of[2]
        assert sorted(species for task in of[0] for species in task) == list(range(200))

    @pytest.mark.usefixtures("birds")
    def test_a_step_reads_random_crops_and_a_test_the_middle(self):
        task = tasks.load("cub200", seed=0)[0]
        assert task.train_x.shape[1:] == (3, 320, 320)
        assert task.test_x.shape[1:] == (3, 224, 224)
        heights = {(70, 50), (40, 60)}
        assert {tuple(shape) for shape in task.shapes.tolist()} == heights
        x, y = task.make_batch(torch.tensor([0, 5, 7]))
        assert x.shape == (3, 3, 224, 224)
        expected = (task.train_x[[0, 5, 7], 0, 0, 0] / 255 - 0.485) / 0.232
        torch.testing.assert_close(x[:, 0, 100, 100], expected)
        assert torch.equal(y, task.train_y[[0, 5, 7]])
        assert (
            task.prepare_inputs(task.test_x[:2]).shape
            == task.prepare_inputs(task.train_x[:2]).shape
            == (2, 3, 224, 224)
        )

    def test_the_middle_is_the_one_that_torchvision_cuts_out(self):
        made = np.random.default_rng(0).integers(0, 256, (333, 500, 3), dtype=np.uint8)
        whole = small_images.Image.fromarray(made).resize(
            (int(256 * 500 / 333), 256), small_images.Image.Resampling.BILINEAR
        )
        left = round((whole.width - 224) / 2)
        expected = np.asarray(whole.crop((left, 16, left + 224, 240)))
        assert np.array_equal(cub200.TEST_DECODER.decode(small_images.encode_image(made)).transpose(1, 2, 0), expected)

    @pytest.mark.usefixtures("small")
    def test_the_official_folder_of_pictures_is_read_too(self, data):
        for species in range(200):
            folder = data / "cub200" / "all" / f"{species + 1:03d}.Bird"
            folder.mkdir(parents=True)
            for number in range(5):
                made = np.full((30, 20, 3), species, dtype=np.uint8)
                (folder / f"bird_{number}.png").write_bytes(small_images.encode_image(made))
        sequence = tasks.load("cub200", seed=0)
        assert sum(len(task.train_y) for task in sequence) == 800
        assert sum(len(task.test_y) for task in sequence) == 200


class TestOmniglot:
    @pytest.fixture
    def omniglot(self, data):
        """Two alphabets of three and two characters, in the form of the real file."""

        def drawing(number):
            pixels = np.full((105, 105), 255, dtype=np.uint8)
            pixels[30 + 2 * number : 45 + 2 * number, 30:60] = 0
            file = io.BytesIO()
            small_images.Image.fromarray(pixels).convert("1").save(file, format="PNG")
            return {"bytes": file.getvalue(), "path": None}

        rows = [
            (alphabet, 10 * alphabet + c, n)
            for alphabet, count in ((0, 3), (1, 2))
            for c in range(count)
            for n in range(20)
        ]
        names = ["images_background/Greek", "images_background/St._Old"]
        table = small_images.pyarrow.table(
            {
                "image": [drawing(n) for _, _, n in rows],
                "alphabet": [alphabet for alphabet, _, _ in rows],
                "character": [character for _, character, _ in rows],
            }
        ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"alphabet": {"names": names}}}})})
        small_images.write_parquet(table, data / "omniglot" / "all.parquet")

    @pytest.mark.usefixtures("omniglot")
    def test_every_alphabet_is_a_task_split_80_10_10(self):
        greek, old = tasks.load("omniglot", seed=0, alphabets=2)
        assert (greek.name, greek.classes, old.name, old.classes) == ("Greek", 3, "St__Old", 2)
        assert [len(y) for y in (greek.train_y, greek.valid_y, greek.test_y)] == [48, 6, 6]
        assert greek.train_x.shape[1:] == (1, 28, 28)
        everything = torch.cat([greek.train_y, greek.valid_y, greek.test_y])
        assert torch.bincount(everything).tolist() == [20, 20, 20]

    @pytest.mark.usefixtures("omniglot")
    @pytest.mark.parametrize("copies", [1, 5])
    def test_strokes_are_one_on_zero(self, copies):
        (task,) = tasks.load("omniglot", seed=0, alphabets=1, copies=copies)
        x = task.prepare_inputs(task.train_x)
        assert x.max() == 1
        assert x.min() == 0
        assert x.mean() < 0.1

    @pytest.mark.usefixtures("omniglot")
    def test_all_copies_of_a_drawing_are_on_one_side(self):
        (plain,) = tasks.load("omniglot", seed=2, alphabets=1)
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        assert task.train_x.dtype == torch.uint8
        assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [240, 30, 30]
        for split in ("train", "valid", "test"):
            x, y = getattr(task, f"{split}_x"), getattr(task, f"{split}_y")
            torch.testing.assert_close(task.prepare_inputs(x[::5]), getattr(plain, f"{split}_x"))
            assert torch.equal(y, getattr(plain, f"{split}_y").repeat_interleave(5))

    @pytest.mark.usefixtures("omniglot")
    def test_copies_differ_but_keep_their_strokes(self):
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        first, *others = task.prepare_inputs(task.train_x).view(-1, 5, 28, 28).unbind(1)
        for other in others:
            assert (other - first).abs().amax((1, 2)).min() > 0.3
            assert ((other.sum((1, 2)) / first.sum((1, 2)) - 1).abs() < 0.05).all()

    @pytest.mark.usefixtures("omniglot")
    def test_the_paper_s_split_goes_over_all_pictures(self):
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5, split="paper")
        assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [240, 30, 30]
        (leakless,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        assert not torch.equal(task.test_x, leakless.test_x)
        (plain,) = tasks.load("omniglot", seed=2, alphabets=1)
        (same,) = tasks.load("omniglot", seed=2, alphabets=1, split="paper")
        assert torch.equal(plain.test_x, same.test_x)

    @pytest.mark.usefixtures("omniglot")
    def test_wrong_options_are_refused(self):
        for options in ({"alphabets": 51}, {"copies": 0}, {"split": "random"}):
            with pytest.raises(ValueError, match=next(iter(options))):
                tasks.load("omniglot", seed=0, **options)

    def test_missing_data_says_where_it_was_looked_for_and_how_to_get_it(self, data, monkeypatch):
        with pytest.raises(tasks.DataError) as missing:
            tasks.load("omniglot", seed=0)
        assert str(data / "omniglot") in str(missing.value)
        assert str(Path("~/.cache/agscl/data/omniglot").expanduser()) in str(missing.value)
        assert "agscl data get omniglot" in str(missing.value)
        monkeypatch.delenv("AGSCL_DATA")
        with pytest.raises(tasks.DataError, match=r"AGSCL_DATA.* is not set"):
            tasks.load("omniglot", seed=0)


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
        (data / "flowers" / "notes.txt").write_text("not a picture")
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

    def test_pictures_of_other_sizes_are_resized_and_cut(self, data):
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

    def test_pictures_of_kinds_that_are_not_read_are_not_passed_over(self, data):
        self.fill(data / "some", ["a", "b"])
        (data / "some" / "a" / "notes.txt").touch()
        assert len(tasks.from_folder(data / "some")) == 1
        for name in ("a/1.HEIC", "b/2.avif"):
            (data / "some" / name).touch()
        with pytest.raises(tasks.DataError, match=r"2 images have a format .* not supported, for example .*a/1\.HEIC"):
            tasks.from_folder(data / "some")

    @pytest.mark.parametrize("inside", [None, "notes.txt"])
    def test_a_class_without_a_picture_that_can_be_read_is_named(self, data, inside):
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
    def test_pictures_of_16_bits_keep_their_upper_8_and_of_32_bits_are_refused(self, data, kind):
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

    def test_columns_that_cannot_be_labels_or_pictures_are_named(self, data):
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

    def test_a_broken_picture_is_named(self, data):
        self.fill(data / "broken", ["a", "b"])
        (data / "broken" / "b" / "3.png").write_bytes(b"nothing of the kind")
        with pytest.raises(tasks.DataError, match=r"b/3.png cannot be decoded"):
            tasks.from_folder(data / "broken", size=16)


@pytest.mark.parametrize(("name", "shape"), [("mlp", (64,)), ("cifar", (3, 32, 32)), ("omniglot", (1, 28, 28))])
def test_each_network_yields_as_many_features_as_it_says(name, shape):
    trunk = NETWORKS[name]()
    assert trunk(torch.zeros(2, *shape)).shape == (2, trunk.features)


def test_a_small_task_keeps_at_least_one_example_for_validation_and_one_for_training():
    x, y = torch.randn(16, 3), torch.arange(16) % 2
    (task,) = tasks.from_tensors(x, y, classes_per_task=2, validation=0.01, test_share=0.5)
    assert len(task.valid_y) == 1
    assert len(task.train_y) == 7
    plain = tasks.Task("t", 2, x[:2], y[:2], None, None, x, y).with_validation(0.1, seed=0)
    assert (len(plain.valid_y), len(plain.train_y)) == (1, 1)
    with pytest.raises(ValueError, match=r"'t' has 1 training example\(s\): too few to set some apart for validation"):
        tasks.Task("t", 2, x[:1], y[:1], None, None, x, y).with_validation(0.1, seed=0)


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


def test_numpys_numbers_are_options_too():
    assert len(tasks.load("digits", seed=0, test_share=np.float32(0.3))) == 5
    with pytest.raises(ValueError, match="test_share must be a number, not 'x'"):
        tasks.load("digits", seed=0, test_share="x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"test_x": torch.full((4, 3), math.nan)},
            "the test examples of task 't' have inputs that are infinite or NaN",
        ),
        ({"test_y": torch.tensor([0, 1, 2, 0])}, "range from 0 to 2; with 2 classes they must be 0 to 1"),
        (
            {"train_y": torch.tensor([0, 1, -100, 0])},
            "the training examples of task 't' range from -100 to 1",
        ),
        ({"test_x": torch.zeros(0, 3), "test_y": torch.zeros(0).long()}, "task 't' has no test examples"),
        ({"train_x": torch.zeros(0, 3), "train_y": torch.zeros(0).long()}, "task 't' has no training examples"),
        ({"valid_x": torch.zeros(0, 3), "valid_y": torch.zeros(0).long()}, "task 't' has no validation examples"),
        ({"train_y": torch.tensor([0, 1, 0])}, r"are 4 inputs, but the labels have the shape \(3,\)"),
        ({"train_y": torch.tensor([0, 1, 0, 1], dtype=torch.int32)}, "torch.int32, not torch.long: use y.long"),
    ],
)
def test_a_trainer_looks_at_all_data_before_it_starts(change, said):
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    good = Task("first", 2, x, y, x, y, x, y)
    model = MultiHead(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), features=8)
    with pytest.raises(ValueError, match=said):
        Trainer(model, FineTune(model), (good, replace(good, name="t", **change)), TrainingConfig(epochs=1), seed=0)


def test_inputs_that_are_not_finite_are_named_where_the_nodes_are_looked_for():
    model = MultiHead(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), features=8)
    model.add_head("t", 2)
    method = AGSCL(model)
    method.begin_task("t", torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="Some inputs are infinite or NaN"):
        model(torch.tensor([[math.nan, 0.0, 0.0]]), "t")


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


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_is_laid_out_in_memory_as_the_data_is_and_holds_the_same(channels):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (6, channels, 4, 5), generator=draw, dtype=torch.uint8)
    y, some = torch.zeros(6, dtype=torch.long), torch.arange(1, channels + 1) / 4
    task = Task("t", 1, x, y, None, None, x, y, mean=some, std=some)
    other = task.with_layout(lambda x: x.contiguous(memory_format=torch.channels_last))
    assert other.valid_x is None
    rows = torch.tensor([4, 0, 4])
    (plain, labels), (batch, same) = task.make_batch(rows), other.make_batch(rows)
    assert torch.equal(batch, plain)
    assert torch.equal(labels, same)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert plain.is_contiguous()
