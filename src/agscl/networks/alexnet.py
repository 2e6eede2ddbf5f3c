"""AlexNet as in torchvision, without its last layer: the paper's network for birds, pretrained on ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import Tensor, nn

from agscl.data.remote_file import RemoteFile
from agscl.networks.pretrained_weights import find_weights, load_weights

IMAGENET = RemoteFile(
    "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
    "alexnet-owt-7be5be79.pth",
    "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
    size=244_408_911,
)
"""torchvision's own weights, IMAGENET1K_V1."""


class AlexNetTrunk(nn.Module):
    """(batch, 3, 224, 224) → (batch, 4096); other sizes from 63 on are averaged to the same 6×6 positions.

    `weights`: None for random ones; "imagenet" for torchvision's, downloaded once; or a file with torchvision's names
    of parameters (.safetensors, or saved by `torch.save`): its path, or hf://owner/repository/file on the hub.
    """

    features = 4096
    input_shape = (3, 224, 224)

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
        )
        self.dense = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
        )
        if weights is not None:
            path = find_weights(weights, {"imagenet": IMAGENET})
            load_weights(self, path, prefixes={"features.": "conv.", "classifier.": "dense."}, skip="classifier.6.")

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dense(self.conv(x)))
