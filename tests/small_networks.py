"""Small networks for the fast engines, and one training pass through them."""

from contextlib import nullcontext

import torch
from torch import nn

CHANNELS_LAST = {"memory_format": torch.channels_last}


def small_network():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
    layers += [nn.Linear(16 * 4 * 4, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers).to(**CHANNELS_LAST)


class LayerByLayer(nn.Module):
    """Calls its layers in a way of its own."""

    def __init__(self, inputs=8, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def random_tensor(*shape, device="cpu", dtype=torch.bfloat16, seed=0):
    """Normally distributed; channels last where there are channels."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return numbers.contiguous(**CHANNELS_LAST) if len(shape) == 4 else numbers


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def pass_through(trunk, x, within=None, precision=torch.bfloat16):
    """The output and all gradients, of a pass within a context."""
    trunk.zero_grad()
    with within or nullcontext(), torch.autocast(x.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
        output = trunk(x)
        output.float().square().mean().backward()
    return [output.detach(), *[parameter.grad for parameter in trunk.parameters()]]
