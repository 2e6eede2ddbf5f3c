"""Random crops of a whole batch at once, on the batch's device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

TRIES = 10
SHARE = (0.08, 1.0)
"""Smallest and largest share of the picture's area."""
RATIO = (3 / 4, 4 / 3)
"""Smallest and largest width / height, in the picture's own shape."""


def random_resized_crop(x: Tensor, shapes: Tensor, size: int) -> Tensor:
    """A random part of each picture as `size` × `size`, mirrored half of the time.

    x (n, channels, h, w): pictures of any shape, each squeezed to h × w; shapes (n, 2): their own height and width.
    """
    boxes = random_boxes(shapes)
    across = torch.where(torch.rand(len(x), device=x.device) < 0.5, -boxes[:, 3], boxes[:, 3])
    zero = torch.zeros_like(across)
    # From the crop's coordinates, -1 to 1, to the picture's.
    turn = torch.stack([across, zero, boxes[:, 1], zero, boxes[:, 2], boxes[:, 0]], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, [len(x), x.shape[1], size, size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def random_boxes(shapes: Tensor) -> Tensor:
    """(n, 4) parts of pictures of these heights and widths: centre y and x from -1 to 1, share of height and of width.

    Area and ratio are drawn up to ten times until the part fits; if none does, it is the largest one in the middle
    that keeps the limits of the ratio.
    """
    high, wide = shapes.float().unbind(1)
    draws = torch.rand(len(shapes), TRIES, 4, device=shapes.device)
    area = (high * wide)[:, None] * (SHARE[0] + (SHARE[1] - SHARE[0]) * draws[..., 0])
    ratio = torch.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * draws[..., 1])
    tall, broad = (area / ratio).sqrt() / high[:, None], (area * ratio).sqrt() / wide[:, None]
    fits = (tall <= 1) & (broad <= 1)
    # A part that covers the share s can be moved by ±(1 − s), in units of half the picture.
    found = torch.stack([(1 - tall) * (2 * draws[..., 2] - 1), (1 - broad) * (2 * draws[..., 3] - 1), tall, broad], 2)
    first = found[torch.arange(len(shapes), device=shapes.device), fits.int().argmax(1)]

    clamped = (wide / high).clamp(*RATIO)
    zero = torch.zeros_like(clamped)
    middle = torch.stack([zero, zero, (wide / clamped / high).clamp(max=1), (high * clamped / wide).clamp(max=1)], 1)
    return torch.where(fits.any(1, keepdim=True), first, middle)
