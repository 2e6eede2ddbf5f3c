"""Fresh weights for free nodes (I.2), without touching global random state."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from agscl.graph.nodes import NodeGraph
from agscl.system.distributed import synchronise_generator

__all__ = ["choose_groups", "reinitialise_"]


def choose_groups(
    graph: NodeGraph, free: Tensor, share: float, generator: torch.Generator, needed: Tensor | None = None
) -> Tensor:
    """(groups,) mask of n − ⌊n(1−share)⌋ random ones of each layer's n free groups, at most as many as `needed`.

    Where ranks train together, all choose the same.
    """
    synchronise_generator(generator, next(parameter.device for _, parameter, _ in graph.incoming_parameters()))
    chosen = torch.zeros_like(free)
    for in_layer in graph.groups_by_layer():
        candidates = (in_layer & free).nonzero().flatten()
        count = len(candidates) - math.floor(len(candidates) * (1 - share))
        if needed is not None:
            count = min(count, int((in_layer & needed).sum()))
        chosen[candidates[torch.randperm(len(candidates), generator=generator)[:count]]] = True
    return chosen


@torch.no_grad()
def reinitialise_(
    graph: NodeGraph,
    chosen: Tensor,
    generator: torch.Generator,
    optimizers: Iterable[Optimizer],
    initial_weights: Sequence[Tensor] = (),
) -> str:
    """Give the chosen groups fresh weights, BatchNorm statistics and optimizer moments; returns them, packed as text.

    Weights come from each layer's own initialiser, or from `initial_weights`: one tensor for each of
    `graph.incoming_parameters()`.
    """
    remaining = iter(initial_weights)
    for holder in graph.incoming_modules:
        rows = chosen[holder.groups].nonzero().flatten()
        fresh_layer = _make_fresh_layer(holder.module, int(torch.randint(2**62, (1,), generator=generator)))
        for key, parameter in holder.module.named_parameters(recurse=False):
            index = rows.to(parameter.device)
            fresh = next(remaining) if initial_weights else fresh_layer.get_parameter(key).to(parameter.device)
            if not parameter.requires_grad:
                continue
            parameter.index_copy_(0, index, fresh.detach().index_select(0, index))
            for optimizer in optimizers:
                for moment in optimizer.state.get(parameter, {}).values():
                    if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                        moment.index_fill_(0, index, 0.0)  # stale momentum would move fresh weights
        if isinstance(holder.module, _BatchNorm):
            for key in ("running_mean", "running_var"):
                buffer = holder.module.get_buffer(key)
                buffer.index_copy_(0, rows.to(buffer.device), fresh_layer.get_buffer(key)[rows].to(buffer.device))
    return pack_groups(chosen)


def pack_groups(chosen: Tensor) -> str:
    """(groups,) a mask as text: its bits in base64."""
    return base64.b64encode(np.packbits(chosen.cpu().numpy()).tobytes()).decode()


def _make_fresh_layer(module: nn.Module, seed: int) -> nn.Module:
    """A copy of one layer with freshly initialised weights, on the CPU."""
    fresh_layer = copy.copy(module)
    fresh_layer._parameters = {
        key: None if p is None else nn.Parameter(torch.empty_like(p, device="cpu"))
        for key, p in module._parameters.items()
    }
    fresh_layer._buffers = {key: None if b is None else b.detach().cpu().clone() for key, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that would seed the GPUs too
        fresh_layer.reset_parameters()  # type: ignore[operator]
    return fresh_layer
