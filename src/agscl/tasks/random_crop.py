"""Random crops of a batch of images at once, on the batch's device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ATTEMPTS = 10
AREA_RANGE = (0.08, 1.0)
"""Smallest and largest share of the image's area."""
RATIO_RANGE = (3 / 4, 4 / 3)
"""Smallest and largest width / height, in the image's original shape."""


def random_resized_crop(x: Tensor, shapes: Tensor, size: int) -> Tensor:
    """(n, channels, size, size): a random crop of each image, mirrored half of the time.

    x (n, channels, h, w): images of any shape, each squeezed to h × w; shapes (n, 2): their original height and width.
    """
    boxes = draw_boxes(shapes)
    signed_width = torch.where(torch.rand(len(x), device=x.device) < 0.5, -boxes[:, 3], boxes[:, 3])
    zero = torch.zeros_like(signed_width)
    # From the coordinates of the crop, -1 to 1, to those of the image.
    transform = torch.stack([signed_width, zero, boxes[:, 1], zero, boxes[:, 2], boxes[:, 0]], 1).view(-1, 2, 3)
    grid = F.affine_grid(transform, [len(x), x.shape[1], size, size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def draw_boxes(shapes: Tensor) -> Tensor:
    """(n, 4) random boxes in images of these shapes: centre y and x from -1 to 1, shares of height and width.

    Area and ratio are drawn up to ten times until the box fits into the image; if none does, it is the largest centred
    box within the range of ratios.
    """
    height, width = shapes.float().unbind(1)
    draws = torch.rand(len(shapes), ATTEMPTS, 4, device=shapes.device)
    area = (height * width)[:, None] * (AREA_RANGE[0] + (AREA_RANGE[1] - AREA_RANGE[0]) * draws[..., 0])
    log_ratio = math.log(RATIO_RANGE[0]) + (math.log(RATIO_RANGE[1]) - math.log(RATIO_RANGE[0])) * draws[..., 1]
    ratio = torch.exp(log_ratio)
    box_height = (area / ratio).sqrt() / height[:, None]
    box_width = (area * ratio).sqrt() / width[:, None]
    fits = (box_height <= 1) & (box_width <= 1)
    # A box that covers the share s of a side can be moved by ±(1 − s), in units of half the side.
    centre_y = (1 - box_height) * (2 * draws[..., 2] - 1)
    centre_x = (1 - box_width) * (2 * draws[..., 3] - 1)
    boxes = torch.stack([centre_y, centre_x, box_height, box_width], 2)
    first_fitting = boxes[torch.arange(len(shapes), device=shapes.device), fits.int().argmax(1)]

    ratio = (width / height).clamp(*RATIO_RANGE)
    zero = torch.zeros_like(ratio)
    centred = torch.stack([zero, zero, (width / ratio / height).clamp(max=1), (height * ratio / width).clamp(max=1)], 1)
    return torch.where(fits.any(1, keepdim=True), first_fitting, centred)
