"""The paper's network for the sequence of eight data sets: AlexNet with 3×3 kernels, for small images."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class EightTrunk(nn.Module):
    """(batch, 3, 32, 32) → (batch, 4096). One position per channel is left for the dense layers: they read 256."""

    features = 4096
    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Flatten(),
        )
        self.dense = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dense(self.conv(x)))
