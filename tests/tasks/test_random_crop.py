"""Random crops."""

from __future__ import annotations

import pytest
import torch

from agscl.tasks import random_crop


class TestRandomCrops:
    @pytest.mark.parametrize("shape", [(300, 500), (500, 300), (120, 500), (100, 100)])
    def test_they_lie_within_the_image_and_keep_to_area_and_ratio(self, shape):
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

    def test_a_image_too_narrow_for_any_part_gives_its_middle(self):
        torch.manual_seed(0)
        boxes = random_crop.draw_boxes(torch.tensor([[1, 1000]] * 200))
        fell_back = boxes[:, 2] == 1
        assert fell_back.any()
        assert torch.equal(boxes[fell_back][:, :2], torch.zeros(int(fell_back.sum()), 2))
        torch.testing.assert_close(boxes[fell_back][:, 3] * 1000, torch.full((int(fell_back.sum()),), 4 / 3))

    def test_a_crop_shows_its_part_of_the_image(self, monkeypatch):
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
