"""The networks of the experiments: trunks that end in features; the heads are `MultiHead`'s."""

from __future__ import annotations

from agscl.networks.cifar import CifarTrunk
from agscl.networks.mlp import MLP
from agscl.networks.omniglot import OmniglotTrunk

Trunk = MLP | CifarTrunk | OmniglotTrunk

NETWORKS: dict[str, type[Trunk]] = {"mlp": MLP, "cifar": CifarTrunk, "omniglot": OmniglotTrunk}
