"""Measuring how much a node matters (its mean activation), or a weight (Fisher information, output sensitivity)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from agscl.graph.forward import WatchReLUs, preserve_model_state
from agscl.graph.nodes import NodeGraph

__all__ = ["Score", "count_samples", "measure_activations", "measure_gradients"]

Score = Callable[[Any], tuple[Tensor, Tensor]]

MAX_SAMPLES = 256  # samples differentiated side by side at the most
MAX_FLOATS = {"cpu": 2**25}  # numbers that their gradients may take: 128 MiB in float32,
MAX_FLOATS_ELSEWHERE = 2**28  # and 1 GiB on an accelerator
STRIP_COLUMNS = 2**12  # columns summed up at a time


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
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = [torch.zeros(len(site.groups), dtype=wide, device=device) for site in graph.relu_sites]
    counts = [0.0] * len(sums)
    by_index = {site.index: number for number, site in enumerate(graph.relu_sites)}
    calls = 0

    def record_relu(before: Tensor, after: Tensor) -> None:
        nonlocal calls
        number = by_index.get(calls)
        calls += 1
        if number is None:
            return
        site = graph.relu_sites[number]
        values = after.detach() if site.folded == 1 else after.detach().unflatten(0, (-1, site.folded))
        values = values.flatten(1).movedim(1, 0) if site.dim is None else values.movedim(site.dim, 0)
        if len(values) != len(site.groups):
            raise RuntimeError(
                f"ReLU number {site.index + 1} of the forward pass has {len(values)} channels; {len(site.groups)} were "
                "found when the graph was built. The model must run as it did then."
            )
        values = values.reshape(len(values), -1)
        sums[number] += values.sum(1, dtype=wide)
        counts[number] += values.shape[1]

    def restart(*_: Any) -> None:
        nonlocal calls
        calls = 0

    with preserve_model_state(graph.model, train=mode == "train"), graph.model.register_forward_pre_hook(restart):
        for batch in batches:
            with WatchReLUs(record_relu):
                forward(batch)
    total = torch.cat([*sums, torch.tensor(counts, dtype=wide, device=device)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    missing = [site.index + 1 for site, count in zip(graph.relu_sites, total[-len(sums) :], strict=True) if not count]
    if missing:
        raise RuntimeError(
            f"No activation was measured at ReLU {', '.join(map(str, missing))} of the forward pass: `batches` was "
            "empty, or `forward` did not run the model. Importance cannot be measured without the task's data."
        )
    importance = torch.zeros(graph.size, dtype=wide, device=device)
    for site, part, count in zip(
        graph.relu_sites, total[: -len(sums)].split([len(part) for part in sums]), total[-len(sums) :], strict=True
    ):
        mine = site.groups.to(device)
        share = torch.bincount(mine[mine >= 0], minlength=graph.size).clamp(min=1)
        here = torch.zeros_like(importance)
        here.index_put_((mine[mine >= 0],), part[mine >= 0], accumulate=True)
        importance += here / count / share
    return importance


def measure_gradients(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Any],
    score: Score,
    *,
    power: Literal[1, 2],
    batch: int | None = None,
    train: bool = False,
) -> dict[str, Tensor]:
    """Mean over the samples of `batches` of Σ_k w_k·|∂v_k/∂θ|^power, for every parameter by name.

    `score(batch)` runs the model on a batch of one sample and returns the values v (k,) and their weights w (k,). With
    `batch`, it is given mini-batches of that size instead (cut anew from `batches`) and returns v (1,), their mean
    value. Over all ranks where torch.distributed runs. Needs data, else it is an error.
    """
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in parameters.items()
    }
    runner = _Runner(model, score)
    weights = {f"model.{name}": p.detach() for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    size = sum(p.numel() for p in parameters.values())
    room = MAX_FLOATS.get(device.type, MAX_FLOATS_ELSEWHERE) // max(1, size)
    count = 0
    with preserve_model_state(model, train=train):
        for part, samples in _rebatch(batches, batch or max(1, min(MAX_SAMPLES, room))):
            if batch is None:
                found = _sum_sample_gradients(runner, weights, part, power, min(MAX_SAMPLES, room))
            else:
                found = _batch_gradients(runner, list(parameters.values()), part, power)
                torch._foreach_mul_(found, samples)
            torch._foreach_add_(list(sums.values()), found)
            count += samples
    total = torch.tensor(float(count), device=device)
    if dist.is_available() and dist.is_initialized():
        for tensor in (total, *sums.values()):
            dist.all_reduce(tensor)
    if not total:
        raise RuntimeError("`batches` was empty. Importance cannot be measured without the task's data.")
    return {name: tensor / total for name, tensor in sums.items()}


class _Runner(nn.Module):
    """Runs the score of a model whose parameters `functional_call` can replace."""

    def __init__(self, model: nn.Module, score: Score) -> None:
        super().__init__()
        self.model, self.score = model, score

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.score(batch)


def _sum_sample_gradients(
    runner: _Runner, weights: dict[str, Tensor], part: Any, power: Literal[1, 2], room: int
) -> list[Tensor]:
    """Σ over the samples of `part` and the values of each, at most `room` gradients at a time."""
    leaves, shape = tree_flatten(part)
    samples = count_samples(leaves)
    has_samples = [_has_samples(leaf, samples) for leaf in leaves]

    def one(rows: Tensor, *sample: Any) -> list[Tensor]:
        """Gradients of a sample's values, a row for each, times what makes their size^power count by their weights."""
        batch = tree_unflatten(
            [x.unsqueeze(0) if cut else x for x, cut in zip(sample, has_samples, strict=True)], shape
        )

        def counted(w: dict[str, Tensor]) -> Tensor:
            values, shares = functional_call(runner, w, (batch,))
            weighed: Tensor = values * shares.detach() ** (1 / power)
            return weighed

        back = vjp(counted, weights)[1]
        found = vmap(back)(rows)[0] if len(rows) > 1 else back(rows[0])[0]
        return list(found.values())

    first = tree_unflatten([_slice_samples(leaf, samples, 0, 1) for leaf in leaves], shape)
    values = runner(first)[0]
    total: list[Tensor] | None = None
    try:
        for rows in torch.eye(len(values), dtype=values.dtype, device=values.device).split(max(1, room)):
            width = max(1, room // len(rows))
            for at in range(0, samples, width):
                taken = [_slice_samples(leaf, samples, at, at + width) for leaf in leaves]
                found = vmap(one, in_dims=(None, *(0 if cut else None for cut in has_samples)))(rows, *taken)
                found = [each.flatten(0, 1) for each in found] if len(rows) > 1 else found
                sums = [_sum_of_powers(each, power) for each in found]
                total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"Gradients per sample could not be taken with torch.func.vmap: {error}\nMeasure by mini-batches instead "
            "(EWC: fisher='batched'; MAS: batch=20)."
        ) from error
    assert total is not None
    return total


def _sum_of_powers(each: Tensor, power: Literal[1, 2]) -> Tensor:
    """Σ over the first dimension of |each|^power; on a CPU in strips that stay in its cache."""
    rows = each.flatten(1) if each.dim() > 1 else each[:, None]
    strips = rows.split(STRIP_COLUMNS, 1) if each.device.type == "cpu" else [rows]
    sums = [(strip.square() if power == 2 else strip.abs()).sum(0) for strip in strips]
    return torch.cat(sums).view(each.shape[1:])


def _batch_gradients(runner: _Runner, parameters: list[nn.Parameter], part: Any, power: Literal[1, 2]) -> list[Tensor]:
    with torch.enable_grad():
        values, _ = runner(part)
        found = torch.autograd.grad(values.sum(), parameters, allow_unused=True, materialize_grads=True)
    return list(torch._foreach_pow(found, 2) if power == 2 else torch._foreach_abs(found))


def _rebatch(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, int]]:
    """The samples of `batches` in parts of `size` (the last one may be smaller), with the number in each."""
    rest: list[Any] | None = None
    samples, shape = 0, None
    for batch in batches:
        leaves, shape = tree_flatten(batch)
        new = count_samples(leaves)
        if rest is not None:
            leaves = [torch.cat([a, b]) if _has_samples(b, new) else b for a, b in zip(rest, leaves, strict=True)]
        samples = count_samples(leaves)
        whole = samples - samples % size
        for at in range(0, whole, size):
            yield tree_unflatten([_slice_samples(leaf, samples, at, at + size) for leaf in leaves], shape), size
        rest = [_slice_samples(leaf, samples, whole, samples) for leaf in leaves] if whole < samples else None
    if rest is not None and shape is not None:
        yield tree_unflatten(rest, shape), samples % size


def count_samples(leaves: list[Any]) -> int:
    """The number of samples in a batch, by its first tensor; `leaves` are all it consists of."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError("A batch must be a tensor of samples, or a tuple, list or dict with one.")


def _has_samples(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def _slice_samples(leaf: Any, samples: int, start: int, stop: int) -> Any:
    return leaf[start:stop] if _has_samples(leaf, samples) else leaf
