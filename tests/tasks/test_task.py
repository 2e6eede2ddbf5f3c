"""The data of one task."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from agscl import AGSCL, FineTune, MultiHead, tasks
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig


def image_task(x, **options):
    y = torch.zeros(len(x), dtype=torch.long)
    return Task("birds", 2, x, y, None, None, x, y, **options)


class TestInputs:
    def test_floats_are_read_as_they_are(self):
        x = torch.rand(3, 64)
        task = image_task(x)
        assert task.prepare_inputs(x) is x
        assert torch.equal(task.make_batch(torch.tensor([2, 0]))[0], x[[2, 0]])

    def test_bytes_become_normalised_floats(self):
        x = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
        mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
        expected = (x.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
        task = image_task(x, mean=mean, std=std)
        torch.testing.assert_close(task.prepare_inputs(x), expected.float())
        assert torch.equal(image_task(x).prepare_inputs(x), x.float() / 255)

    def test_a_moved_task_takes_its_normalisation_along(self):
        task = image_task(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), mean=torch.ones(3), std=torch.ones(3))
        moved = task.to("meta")
        assert {moved.mean.device.type, moved.std.device.type, moved.train_x.device.type} == {"meta"}
        assert moved.name == "birds"

    def test_images_kept_larger_are_read_at_the_size_of_the_crop(self):
        x = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
        task = image_task(x, crop=24, shapes=torch.full((2, 2), 100))
        torch.testing.assert_close(task.prepare_inputs(x), torch.full((2, 3, 24, 24), 0.2))
        assert task.make_batch(torch.tensor([0]))[0].shape == (1, 3, 24, 24)

    def test_crops_are_drawn_by_the_global_generator(self):
        task = image_task(
            torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), crop=16, shapes=torch.full((4, 2), 100)
        )
        rows = torch.arange(4)
        torch.manual_seed(3)
        first, other = task.make_batch(rows)[0], task.make_batch(rows)[0]
        torch.manual_seed(3)
        assert torch.equal(task.make_batch(rows)[0], first)
        assert not torch.equal(other, first)


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
    with pytest.raises(ValueError, match="example_input must be finite"):
        AGSCL(model, torch.tensor([[math.nan, 0.0, 0.0]]))


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
