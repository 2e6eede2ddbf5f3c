"""CIFAR, and Tiny ImageNet in its place."""

from __future__ import annotations

import pytest
import torch

import small_images
from agscl import tasks


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

    def test_a_image_is_in_training_or_in_validation_and_none_is_lost(self, data):
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
