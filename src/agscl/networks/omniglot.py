"""The paper's network for Omniglot: 4 convolutions, no dense layer, no dropout."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class OmniglotTrunk(nn.Module):
    """(batch, 1, 28, 28) → (batch, 1024), 16 columns per channel."""

    features = 1024
    input_shape = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 64, 3),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))
