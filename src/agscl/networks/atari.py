"""The paper's network for Atari games: that of DQN with four times as many filters, and ReLU after each layer.

The paper's table prints 128, 128 and 256 filters, which do not lead to the 6272 inputs of its own dense layer; the
authors' code has 128, 256 and 128, which do.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class AtariTrunk(nn.Module):
    """(batch, 4, 84, 84) → (batch, 512): four grey frames, from 0 to 1."""

    features = 512
    input_shape = (4, 84, 84)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 128, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(128, 256, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(256, 128, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128 * 7 * 7, 512),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))
