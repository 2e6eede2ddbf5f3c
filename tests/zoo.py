"""Small plain networks, one per shape of data flow that the node graph must understand.

Every trunk maps an example input to features ``(B, F)`` and knows nothing of agscl.
Layers are at least eight nodes wide, so that free and important nodes can live in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 12)
        self.fc2 = nn.Linear(12, 10)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc2(self.relu(self.fc1(x))))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 10, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(10 * 2 * 2, 12)
        self.fc2 = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))))


class CifarNet(nn.Module):
    """The paper's CIFAR network, a quarter as wide: 6 conv, 3 pools, dropout, one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 10, 10, 12, 12]
        previous = 3
        for i, width in enumerate(widths, start=1):
            setattr(self, f"conv{i}", nn.Conv2d(previous, width, 3, padding=1))
            previous = width
        self.fc1 = nn.Linear(12 * 2 * 2, 16)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.drop1 = nn.Dropout(0.25)
        self.drop2 = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for i in (1, 3, 5):
            x = self.relu(getattr(self, f"conv{i}")(x))
            x = self.relu(getattr(self, f"conv{i + 1}")(x))
            x = self.drop1(self.pool(x))
        x = x.view(x.shape[0], -1)
        return self.drop2(self.relu(self.fc1(x)))


class OmniglotNet(nn.Module):
    """The paper's Omniglot network, an eighth as wide: 4 unpadded conv, 2 pools, heads on the map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.conv3 = nn.Conv2d(8, 8, 3)
        self.conv4 = nn.Conv2d(8, 8, 3)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(F.relu(self.conv1(x)))))
        x = self.pool(F.relu(self.conv4(F.relu(self.conv3(x)))))
        return torch.flatten(x, 1)


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(8, 10, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(10, 12, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 10, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(10, 10, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(10 * 2 * 2, 16),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(16, 12),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous = 3
        for width, pool in ((8, False), (8, True), (10, False), (10, True)):
            layers += [nn.Conv2d(previous, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            if pool:
                layers.append(nn.MaxPool2d(2))
            previous = width
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(10 * 2 * 2, 12)
        self.bn = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.fc(self.features(x).flatten(1))))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18 in shape: a stem, four stages of two basic blocks, global average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        previous = 8
        for i, width in enumerate((8, 8, 10, 12), start=1):
            stage = nn.Sequential(BasicBlock(previous, width, 1 if i == 1 else 2), BasicBlock(width, width, 1))
            setattr(self, f"stage{i}", stage)
            previous = width

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x)))
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class FunctionalNet(nn.Module):
    """No ReLU or pooling module anywhere; the shape is changed with ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.fc = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(-1, 8 * 3 * 3)
        return torch.relu(self.fc(x))


class DenseLayer(nn.Module):
    """BatchNorm and ReLU first, then the convolution; its channels are appended to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.dense1 = DenseLayer(8, 8)
        self.dense2 = DenseLayer(16, 8)
        self.bn = nn.BatchNorm2d(24)
        self.transition = nn.Conv2d(24, 10, 1)
        self.last = nn.BatchNorm2d(10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense2(self.dense1(self.stem(x)))
        x = F.avg_pool2d(self.transition(F.relu(self.bn(x))), 2)
        return F.adaptive_avg_pool2d(F.relu(self.last(x)), 1).flatten(1)


class FrozenBackbone(nn.Module):
    """A convolutional backbone that is not trained, under two dense layers that are."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.backbone.requires_grad_(False)
        self.fc1 = nn.Linear(8 * 2 * 2, 12)
        self.fc2 = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.fc1(self.backbone(x).flatten(1)))))


class OwnHeads(nn.Module):
    """A complete model: it holds its heads itself and asks for the task."""

    def __init__(self, outputs: int = 3, tasks: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU())
        self.last = nn.ModuleList(nn.Linear(10, outputs) for _ in range(tasks))

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.last[int(task)](self.body(x))


class Conv1dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(2, 8, 5, padding=2)
        self.bn1 = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 10, 3, stride=2)
        self.fc = nn.Linear(10 * 3, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        return F.relu(self.fc(F.relu(self.conv2(x)).flatten(1)))


class Conv3dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv3d(8, 10, 3)
        self.fc = nn.Linear(10 * 2 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.conv1(x)), (1, 2, 2))
        return F.relu(self.fc(F.relu(self.conv2(x)).flatten(1)))


class GroupedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.fc = nn.Linear(12 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.fc(F.avg_pool2d(x, 2).flatten(1)))


class SeparableNet(nn.Module):
    """A stem and two depthwise-separable pairs; the second depthwise has two filters a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(8)
        self.depth1 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.point1 = nn.Conv2d(8, 10, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(10)
        self.depth2 = nn.Conv2d(10, 20, 3, padding=1, groups=10)
        self.point2 = nn.Conv2d(20, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn2(self.point1(F.relu(self.bn1(self.depth1(x))))))
        x = F.relu(self.point2(F.relu(self.depth2(x))))
        return x.mean((2, 3))


class NhwcNet(nn.Module):
    """Flattened with the channels last: a channel owns every eighth column."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.relu(self.fc(x.permute(0, 2, 3, 1).flatten(1)))


class ShuffleNet(nn.Module):
    """Grouped convolutions with their channels dealt out like cards in between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.conv3 = nn.Conv2d(12, 10, 3, padding=1, groups=2)

    @staticmethod
    def shuffle(x: Tensor, groups: int) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, groups, c // groups, h, w).transpose(1, 2).reshape(b, c, h, w)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(F.relu(self.conv1(x)), 2)
        x = self.shuffle(F.relu(self.conv2(x)), 3)
        return F.relu(self.conv3(x)).mean((2, 3))


class PaddedShortcutNet(nn.Module):
    """ResNet option A: the shortcut is subsampled, with zero channels on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        x = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.relu(x + shortcut)
        return F.relu(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class SqueezeExcite(nn.Module):
    """A gate per channel, computed from all channels, multiplied in before the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.squeeze = nn.Linear(8, 8)
        self.excite = nn.Linear(8, 8)
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        x = F.relu(x * gate[:, :, None, None])
        return F.relu(self.conv2(x)).mean((2, 3))


class TiedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc2.weight = self.fc1.weight
        self.fc3 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return F.relu(self.again(F.relu(self.again(x))))


class TiedTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 10)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(F.linear(x, self.fc1.weight.t()))
        return F.relu(self.fc2(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        return F.relu(self.fc2(F.relu(weights @ self.value(x)))).mean(1)


class LayerNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.norm(self.fc1(x)))))


class NoReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc3(self.fc2(F.relu(self.fc1(x)))))


class GELUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(self.act(self.fc1(x))))


class CumulativeBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8, momentum=None)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3))))


class BareScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.fc1(x)) * self.scale))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class ScaleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.scale = Scale()
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.scale(self.fc1(x)))))


class WeightNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = weight_norm(nn.Linear(8, 8))
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class ReLU6Net(nn.Module):
    """Bounded ReLUs in all their forms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(10)
        self.relu6 = nn.ReLU6(inplace=True)
        self.fc1 = nn.Linear(10, 12)
        self.fc2 = nn.Linear(12, 12)
        self.fc3 = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu6(self.bn(self.conv2(F.relu6(self.conv1(x))))).mean((2, 3))
        return self.fc3(F.hardtanh(self.fc2(self.fc1(x).clamp(0, 6)), 0.0, 6.0)).clamp_(min=0, max=6)


class InvertedResiduals(nn.Module):
    """MobileNetV2 in shape: blocks that end without a ReLU and are added."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 16, 1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU6(),
                nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU6(),
                nn.Conv2d(16, 8, 1, bias=False),
                nn.BatchNorm2d(8),
            )
            for _ in range(blocks)
        )
        self.last = nn.Conv2d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        for block in self.blocks[1:]:
            x = x + block(x)
        return F.relu6(self.last(x)).mean((2, 3))


class RecurrentNet(nn.Module):
    """Reads what an LSTM puts out and the state that it ends in, which has its batch second."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 6)
        self.rnn = kind(6, 4, num_layers=2, batch_first=True)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.rnn(F.relu(self.fc1(x)))
        last = (state[0] if isinstance(state, tuple) else state)[-1]
        return F.relu(self.fc2(torch.cat([last, outputs.mean(1)], 1)))


class TransformerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(30, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(self.block(x).flatten(1)))


class TransposedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(8, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(F.relu(self.up(F.relu(self.conv(x)))))).mean((2, 3))


@dataclass(frozen=True)
class Entry:
    """A network of the zoo: how to build its trunk, and the shape of one example input."""

    trunk: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def example(self, batch: int = 4, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, *self.shape, generator=generator)


SUPPORTED: dict[str, Entry] = {
    "mlp": Entry(MLP, (10,)),
    "lenet": Entry(LeNet, (1, 16, 16)),
    "cifar": Entry(CifarNet, (3, 16, 16)),
    "omniglot": Entry(OmniglotNet, (1, 20, 20)),
    "alexnet": Entry(AlexNet, (3, 32, 32)),
    "vgg": Entry(VGG, (3, 8, 8)),
    "resnet": Entry(ResNet, (3, 16, 16)),
    "functional": Entry(FunctionalNet, (2, 8, 8)),
    "densenet": Entry(DenseNet, (3, 8, 8)),
    "frozen": Entry(FrozenBackbone, (3, 8, 8)),
    "conv1d": Entry(Conv1dNet, (2, 16)),
    "conv3d": Entry(Conv3dNet, (1, 4, 8, 8)),
    "grouped": Entry(GroupedNet, (4, 6, 6)),
    "separable": Entry(SeparableNet, (3, 8, 8)),
    "nhwc": Entry(NhwcNet, (3, 8, 8)),
    "shuffle": Entry(ShuffleNet, (3, 6, 6)),
    "padded": Entry(PaddedShortcutNet, (3, 8, 8)),
    "squeeze": Entry(SqueezeExcite, (3, 6, 6)),
    "relu6": Entry(ReLU6Net, (3, 6, 6)),
}


@dataclass(frozen=True)
class Difficult(Entry):
    """A network that must be refused: which layers may be blamed, and what to exclude instead (nothing will do)."""

    blamed: tuple[str, ...]
    exclude: tuple[str, ...]


DIFFICULT: dict[str, Difficult] = {
    "tied parameter": Difficult(TiedParameter, (8,), ("fc1", "fc2"), ("fc1", "fc2")),
    "called twice": Difficult(CalledTwice, (8,), ("again",), ("again",)),
    "tied transpose": Difficult(TiedTranspose, (8,), ("fc1",), ("fc1",)),
    "attention": Difficult(Attention, (5, 6), ("fc1", "query", "key", "value"), ("query", "key", "value")),
    "layer norm": Difficult(LayerNormNet, (8,), ("fc1", "norm"), ("fc1", "norm")),
    "no relu": Difficult(NoReLU, (8,), ("fc2",), ("fc2",)),
    "gelu": Difficult(GELUNet, (8,), ("fc1",), ("fc1",)),
    "cumulative batch norm": Difficult(CumulativeBatchNorm, (3, 6, 6), ("bn",), ("conv", "bn")),
    "bare scale": Difficult(BareScale, (8,), ("scale", ""), ()),
    "scale module": Difficult(ScaleNet, (8,), ("scale",), ("fc1", "scale")),
    "weight norm": Difficult(WeightNormNet, (8,), ("fc1",), ("fc1",)),
    "inverted residuals": Difficult(
        InvertedResiduals,
        (3, 6, 6),
        tuple(f"blocks.{block}.6" for block in range(3)),
        tuple(f"blocks.{block}.{part}" for block in range(3) for part in (6, 7)),
    ),
    "transposed": Difficult(TransposedNet, (3, 8, 8), ("up",), ("up",)),
    "lstm": Difficult(RecurrentNet, (5, 6), ("rnn",), ("fc1", "rnn")),
    "gru": Difficult(partial(RecurrentNet, nn.GRU), (5, 6), ("rnn",), ("fc1", "rnn")),
    "transformer": Difficult(TransformerNet, (5, 6), ("block.self_attn",), ("block",)),
}
