"""What became of each layer's nodes while an agent learned: how many hardly fire, how many have no weights left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DORMANT = 0.025
"""A node is dormant if its mean activation is at most this share of its layer's mean (Sokar et al., 2023)."""


@torch.no_grad()
def measure_layers(model: nn.Module, run_model: Callable[[], object]) -> list[dict[str, Any]]:
    """For each layer that `run_model` uses, heads left out: `nodes`, `dormant` ones, and those whose weights are 0.

    All layers of the networks for agents are followed by a ReLU.
    """
    activations: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            activations[name] = output.relu().transpose(0, 1).flatten(1).mean(1)  # (nodes,)

        return hook

    handles = [
        module.register_forward_hook(record(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and not name.endswith((".actor", ".critic"))
    ]
    try:
        run_model()
    finally:
        for handle in handles:
            handle.remove()
    return [_describe_layer(name, model.get_submodule(name), mean) for name, mean in activations.items()]


def _describe_layer(name: str, layer: nn.Module, activation: Tensor) -> dict[str, Any]:
    weights = torch.cat(
        [parameter.flatten(1) if parameter.dim() > 1 else parameter[:, None] for parameter in layer.parameters()], 1
    )
    return {
        "layer": name,
        "nodes": len(activation),
        "dormant": int((activation <= DORMANT * activation.mean()).sum()),
        "zero": int((weights == 0).all(1).sum()),
    }
