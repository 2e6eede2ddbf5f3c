"""What multiplies μ and λ for each group of nodes; by layer, which is beyond the paper."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agscl.graph.nodes import NodeGraph

__all__ = ["ByLayer", "find_less_active", "scale_penalties"]

ByLayer = Literal["none", "mu", "lam", "both"]


def scale_penalties(graph: NodeGraph, omega: Tensor, free: Tensor, by_layer: ByLayer) -> tuple[Tensor, Tensor]:
    """(groups,) the factor of μ, √k for a group of k nodes, and Ω as the factor of λ.

    With `by_layer`, the factor of μ also grows with the root of a node's number of weights ("mu", "both"), and the
    importances of each layer get the same mean ("lam", "both"); the mean over all groups stays.
    """
    nodes = torch.cat([layer.groups for layer in graph.layers.values()]).bincount(minlength=graph.size)
    mu, omega = nodes.sqrt().to(omega), omega.clone()
    if by_layer in ("mu", "both"):
        weights = torch.zeros_like(mu)
        for _, parameter, groups in graph.incoming_parameters():
            size = mu.new_full((len(groups),), parameter[0].numel())
            weights.index_add_(0, groups.to(mu.device), size)
        weights = (weights / nodes.to(mu)).sqrt()  # of one of the nodes that are one group
        mu *= weights / weights.mean()
    if by_layer in ("lam", "both"):
        mean = omega[~free].mean()
        for layer in graph.groups_by_layer():
            important = layer.to(omega.device) & ~free
            omega[important] *= mean / omega[important].mean()
    return mu, omega


def find_less_active(graph: NodeGraph, activations: Tensor, share: float) -> Tensor:
    """(groups,) those that are active, but less than `share` of the mean of the active ones in their layer."""
    less = torch.zeros_like(activations, dtype=torch.bool)
    for layer in graph.groups_by_layer():
        active = layer.to(activations.device) & (activations > 0)
        less |= active & (activations < share * activations[active].mean())
    return less
