"""Measuring how much a node matters: its mean ReLU activation over a task's data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from agscl.nodes import NodeGraph
from agscl.probing import relu_watch, undisturbed

__all__ = ["mean_activations"]


def mean_activations(
    graph: NodeGraph,
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    mode: Literal["eval", "train"] = "eval",
) -> Tensor:
    """Mean ReLU activation of every group over `batches`, (groups,) in float64.

    Over samples and positions at each ReLU a group reaches, summed over these ReLUs; over all ranks where
    torch.distributed runs. `forward(batch)` runs the model on one batch.
    """
    device = next(parameter.device for _, parameter, _ in graph.parameters())
    sums = [torch.zeros(len(site.groups), dtype=torch.float64, device=device) for site in graph.sites]
    counts = [0.0] * len(sums)
    by_index = {site.index: number for number, site in enumerate(graph.sites)}
    calls = 0

    def seen(before: Tensor, after: Tensor) -> None:
        nonlocal calls
        number = by_index.get(calls)
        calls += 1
        if number is None:
            return
        site = graph.sites[number]
        values = after.detach()
        values = values.flatten(1).movedim(1, 0) if site.dim is None else values.movedim(site.dim, 0)
        if len(values) != len(site.groups):
            raise RuntimeError(
                f"ReLU number {site.index + 1} of the forward pass has {len(values)} channels; {len(site.groups)} were "
                "found when the graph was built. The model must run as it did then."
            )
        values = values.reshape(len(values), -1)
        sums[number] += values.sum(1, dtype=torch.float64)
        counts[number] += values.shape[1]

    def restart(*_: Any) -> None:
        nonlocal calls
        calls = 0

    with undisturbed(graph.model, train=mode == "train"), graph.model.register_forward_pre_hook(restart):
        for batch in batches:
            with relu_watch(seen):
                forward(batch)
    total = torch.cat([*sums, torch.tensor(counts, dtype=torch.float64, device=device)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    missing = [site.index + 1 for site, count in zip(graph.sites, total[-len(sums) :], strict=True) if not count]
    if missing:
        raise RuntimeError(
            f"No activation was measured at ReLU {', '.join(map(str, missing))} of the forward pass: `batches` was "
            "empty, or `forward` did not run the model. Importance cannot be measured without the task's data."
        )
    importance = torch.zeros(graph.size, dtype=torch.float64, device=device)
    for site, part, count in zip(
        graph.sites, total[: -len(sums)].split([len(part) for part in sums]), total[-len(sums) :], strict=True
    ):
        mine = site.groups.to(device)
        share = torch.bincount(mine[mine >= 0], minlength=graph.size).clamp(min=1)
        here = torch.zeros_like(importance)
        here.index_put_((mine[mine >= 0],), part[mine >= 0], accumulate=True)
        importance += here / count / share
    return importance
