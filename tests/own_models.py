"""Models that `agscl inspect` is given in tests, as a user would give their own."""

import torch
from torch import nn


def raises() -> nn.Module:
    raise ImportError("no flux capacitor")


def number() -> int:
    return 3


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def two_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU())


def with_example() -> tuple[nn.Module, torch.Tensor]:
    return convolution(), torch.zeros(2, 3, 8, 8)
