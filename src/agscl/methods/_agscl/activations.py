"""Measuring the mean ReLU activation of every node over a task's data; which nodes are hardly active."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from agscl.graph.model_state import preserve_model_state
from agscl.graph.nodes import NodeGraph
from agscl.graph.relu_watcher import ReLUWatcher, watch_running
from agscl.system.distributed import sum_over_ranks_
from agscl.system.sums import sum_dtype

__all__ = ["find_less_active", "measure_activations"]


def measure_activations(
    graph: NodeGraph,
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    mode: Literal["eval", "train"] = "eval",
) -> Tensor:
    """Mean ReLU activation of every group over `batches`, (groups,) in float64 where the device has it.

    Over samples and positions at each ReLU a group reaches, summed over these ReLUs; over all ranks where
    torch.distributed runs. `forward(batch)` runs the model on one batch.
    """
    device = next(parameter.device for _, parameter, _ in graph.incoming_parameters())
    dtype = sum_dtype(device)
    sums = [torch.zeros(len(site.groups), dtype=dtype, device=device) for site in graph.relu_sites]
    counts = [0.0] * len(sums)
    site_numbers = {site.index: site_number for site_number, site in enumerate(graph.relu_sites)}
    relu_calls = 0

    def record_relu(output: Tensor) -> None:
        nonlocal relu_calls
        if running_heads:
            return
        site_number = site_numbers.get(relu_calls)
        relu_calls += 1
        if site_number is None:
            return
        site = graph.relu_sites[site_number]
        values = (
            output.detach() if site.rows_per_sample == 1 else output.detach().unflatten(0, (-1, site.rows_per_sample))
        )
        values = values.flatten(1).movedim(1, 0) if site.dim is None else values.movedim(site.dim, 0)
        if len(values) != len(site.groups):
            raise RuntimeError(
                f"ReLU number {site.index + 1} of the forward pass has {len(values)} channels; it had "
                f"{len(site.groups)} when the graph was built. Run the model as it ran then, or build a new method."
            )
        values = values.reshape(len(values), -1)
        sums[site_number] += values.sum(1, dtype=dtype)
        counts[site_number] += values.shape[1]

    def restart(*_: Any) -> None:
        nonlocal relu_calls
        relu_calls = 0

    with (
        preserve_model_state(graph.model, train=mode == "train"),
        graph.model.register_forward_pre_hook(restart),
        watch_running(graph.list_head_modules().values()) as running_heads,
    ):
        for batch in batches:
            with ReLUWatcher(on_output=record_relu):
                forward(batch)
    total = torch.cat([*sums, torch.tensor(counts, dtype=dtype, device=device)])
    sum_over_ranks_(total)
    missing = [site.index + 1 for site, count in zip(graph.relu_sites, total[-len(sums) :], strict=True) if not count]
    if missing:
        raise RuntimeError(
            f"No activation was measured at ReLU {', '.join(map(str, missing))} of the forward pass: `batches` was "
            "empty, or `forward` did not run the model. Importance cannot be measured without the task's data."
        )
    importance = torch.zeros(graph.size, dtype=dtype, device=device)
    site_sums = total[: -len(sums)].split([len(site_sum) for site_sum in sums])
    for site, site_sum, count in zip(graph.relu_sites, site_sums, total[-len(sums) :], strict=True):
        groups = site.groups.to(device)
        is_node = groups >= 0
        elements_per_group = torch.bincount(groups[is_node], minlength=graph.size).clamp(min=1)
        group_sums = torch.zeros_like(importance)
        group_sums.index_put_((groups[is_node],), site_sum[is_node], accumulate=True)
        importance += group_sums / count / elements_per_group
    return importance


def find_less_active(graph: NodeGraph, activations: Tensor, share: float) -> Tensor:
    """(groups,) mask of the groups that are active, but below `share` of the mean over their layer's active ones."""
    less_active = torch.zeros_like(activations, dtype=torch.bool)
    for in_layer in graph.groups_by_layer():
        active = in_layer.to(activations.device) & (activations > 0)
        less_active |= active & (activations < share * activations[active].mean())
    return less_active
