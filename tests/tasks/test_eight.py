"""Eight datasets as eight tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import small_images
from agscl import tasks


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
