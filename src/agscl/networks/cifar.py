"""The paper's network for CIFAR: 6 convolutions and one dense layer."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class CifarTrunk(nn.Module):
    """(batch, 3, 32, 32) → (batch, 256)."""

    features = 256
    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            blocks += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.25),
            ]
        self.conv = nn.Sequential(*blocks)
        self.dense = nn.Sequential(nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dense(self.conv(x)))
