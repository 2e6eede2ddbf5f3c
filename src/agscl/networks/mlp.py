"""A small ReLU network for flat inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn


class MLP(nn.Module):
    """(batch, inputs) → (batch, widths[-1])."""

    def __init__(self, inputs: int = 64, widths: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip([inputs, *widths], widths, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.features = widths[-1]
        self.input_shape = (inputs,)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))
