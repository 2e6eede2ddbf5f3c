"""The networks of the experiments: trunks that compute features. `MultiHead` adds the heads."""

from __future__ import annotations

from agscl.networks.alexnet import AlexNetTrunk
from agscl.networks.atari import AtariTrunk
from agscl.networks.cifar import CifarTrunk
from agscl.networks.eight import EightTrunk
from agscl.networks.mlp import MLP
from agscl.networks.omniglot import OmniglotTrunk
from agscl.networks.pretrained_weights import WeightsError

__all__ = ["NETWORKS", "Trunk", "WeightsError"]

Trunk = MLP | CifarTrunk | OmniglotTrunk | AlexNetTrunk | EightTrunk | AtariTrunk

NETWORKS: dict[str, type[Trunk]] = {
    "mlp": MLP,
    "cifar": CifarTrunk,
    "omniglot": OmniglotTrunk,
    "alexnet": AlexNetTrunk,
    "eight": EightTrunk,
    "atari": AtariTrunk,
}
