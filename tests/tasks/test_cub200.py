"""Birds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import small_images
from agscl import tasks
from agscl.data.decoding import ImageDecoder
from agscl.tasks import cub200


class TestBirds:
    @pytest.fixture
    def birds(self, data):
        """200 species, 7 images each, wide and tall ones; the rows are not in the order of the file names."""
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
    def test_the_official_folder_of_images_is_read_too(self, data):
        for species in range(200):
            folder = data / "cub200" / "all" / f"{species + 1:03d}.Bird"
            folder.mkdir(parents=True)
            for number in range(5):
                made = np.full((30, 20, 3), species, dtype=np.uint8)
                (folder / f"bird_{number}.png").write_bytes(small_images.encode_image(made))
        sequence = tasks.load("cub200", seed=0)
        assert sum(len(task.train_y) for task in sequence) == 800
        assert sum(len(task.test_y) for task in sequence) == 200
