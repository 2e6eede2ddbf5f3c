"""The paper's network for Atari games: that of DQN with four times as many filters, and ReLU after each layer.

The paper's table prints 128, 128 and 256 filters, which do not lead to the 6272 inputs of its own dense layer; the
authors' code has 128, 256 and 128, which do.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class AtariTrunk(nn.Module):
    """(batch, 4, 84, 84) → (batch, 4 · filters): four grey frames, from 0 to 1. `filters` 128 is the paper's."""

    input_shape = (4, 84, 84)

    def __init__(self, filters: int = 128) -> None:
        super().__init__()
        self.features = 4 * filters
        self.layers = nn.Sequential(
            nn.Conv2d(4, filters, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(filters, 2 * filters, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(2 * filters, filters, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(filters * 7 * 7, self.features),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))
