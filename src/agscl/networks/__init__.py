"""The networks of the experiments: trunks that end in features; the heads are `MultiHead`'s."""

from __future__ import annotations

from agscl.networks.alexnet import AlexNetTrunk
from agscl.networks.atari import AtariTrunk
from agscl.networks.cifar import CifarTrunk
from agscl.networks.eight import EightTrunk
from agscl.networks.mlp import MLP
from agscl.networks.omniglot import OmniglotTrunk
from agscl.networks.weights import WeightsMissing

__all__ = ["NETWORKS", "Trunk", "WeightsMissing"]

Trunk = MLP | CifarTrunk | OmniglotTrunk | AlexNetTrunk | EightTrunk | AtariTrunk

NETWORKS: dict[str, type[Trunk]] = {
    "mlp": MLP,
    "cifar": CifarTrunk,
    "omniglot": OmniglotTrunk,
    "alexnet": AlexNetTrunk,
    "eight": EightTrunk,
    "atari": AtariTrunk,
}
