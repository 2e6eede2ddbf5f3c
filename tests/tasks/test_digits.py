"""The digits that come with scikit-learn."""

from __future__ import annotations

import sys

import pytest
import torch

from agscl import tasks


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
