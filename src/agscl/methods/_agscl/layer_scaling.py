"""The factors of μ and λ for each group of nodes; their scaling by layer is beyond the paper."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agscl.graph.nodes import NodeGraph

__all__ = ["ByLayer", "scale_penalties"]

ByLayer = Literal["none", "mu", "lam", "both"]


def scale_penalties(graph: NodeGraph, omega: Tensor, free: Tensor, by_layer: ByLayer) -> tuple[Tensor, Tensor]:
    """(groups,) the factor of μ, √k for a group of k nodes, and Ω as the factor of λ.

    With `by_layer`, the factor of μ also grows with the root of a node's number of weights ("mu", "both"), and the
    importances of each layer get the same mean ("lam", "both"); the mean over all groups stays.
    """
    nodes = torch.cat([layer.groups for layer in graph.layers.values()]).bincount(minlength=graph.size)
    mu_factors, omega = nodes.sqrt().to(omega), omega.clone()
    if by_layer in ("mu", "both"):
        weight_counts = torch.zeros_like(mu_factors)
        for _, parameter, groups in graph.incoming_parameters():
            row_sizes = mu_factors.new_full((len(groups),), parameter[0].numel())
            weight_counts.index_add_(0, groups.to(mu_factors.device), row_sizes)
        roots = (weight_counts / nodes.to(mu_factors)).sqrt()  # of the mean number of weights of a group's nodes
        mu_factors *= roots / roots.mean()
    if by_layer in ("lam", "both"):
        mean = omega[~free].mean()
        for in_layer in graph.groups_by_layer():
            important = in_layer.to(omega.device) & ~free
            omega[important] *= mean / omega[important].mean()
    return mu_factors, omega
