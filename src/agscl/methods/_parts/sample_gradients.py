"""Measuring how the loss or the output depends on each weight: gradients per sample or per mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from agscl.graph.model_state import preserve_model_state
from agscl.system.distributed import sum_over_ranks_

__all__ = ["Score", "as_single_score", "count_samples", "measure_gradients"]

Score = Callable[[Any], tuple[Tensor, Tensor]]
"""Runs the model on a batch; returns the values to differentiate, (k,), and their weights, (k,)."""

MAX_SAMPLES = 256  # most samples differentiated at once
MAX_FLOATS = {"cpu": 2**25}  # most numbers in their gradients: 128 MiB in float32,
MAX_FLOATS_ELSEWHERE = 2**28  # and 1 GiB on an accelerator
STRIP_COLUMNS = 2**12  # columns summed at a time


def measure_gradients(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Any],
    score: Score,
    *,
    power: Literal[1, 2] | None,
    batch_size: int | None = None,
    train: bool = False,
) -> dict[str, Tensor]:
    """Mean over the samples of `batches` of Σ_k w_k·|∂v_k/∂θ|^power, for every parameter by name.

    `score(batch)` runs the model on a batch of one sample and returns the values v (k,) and their weights w (k,). With
    `batch_size`, it is given mini-batches of that size instead (`batches` is split again) and returns v (1,), their
    mean value; only then may `power` be None, for the gradients themselves, with their signs. Over all ranks where
    torch.distributed runs. Raises RuntimeError without data.
    """
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in parameters.items()
    }
    scorer = _ScoredModel(model, score, _find_places(model, parameters) if batch_size is None else {})
    weights = {name: p.detach() for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    size = sum(p.numel() for p in parameters.values())
    max_gradients = min(MAX_SAMPLES, MAX_FLOATS.get(device.type, MAX_FLOATS_ELSEWHERE) // max(1, size))
    count = 0
    with preserve_model_state(model, train=train):
        for batch, samples in _rebatch(batches, batch_size or max(1, max_gradients)):
            if batch_size is None:
                assert power is not None
                gradients = _sum_sample_gradients(scorer, weights, batch, power, max_gradients)
            else:
                gradients = _batch_gradients(scorer, list(parameters.values()), batch, power)
                torch._foreach_mul_(gradients, samples)
            torch._foreach_add_(list(sums.values()), gradients)
            count += samples
    total = torch.tensor(float(count), device=device)
    sum_over_ranks_(total, *sums.values())
    if not total:
        raise RuntimeError("`batches` was empty. Importance cannot be measured without the task's data.")
    return {name: tensor / total for name, tensor in sums.items()}


def as_single_score(value: Any) -> tuple[Tensor, Tensor]:
    """The loss of a batch as the score of one sample, whose gradient is measured."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        description = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"Importance needs a loss to differentiate; the forward pass returned {description}. Give end_task batches "
            "of (x, y), or a `forward` that returns the loss."
        )
    return value.mean().reshape(1), torch.ones(1, dtype=value.dtype, device=value.device)


class _ScoredModel(nn.Module):
    """`score` as a module around the model, so that `functional_call` can replace the parameters."""

    def __init__(self, model: nn.Module, score: Score, places: Mapping[str, list[str]]) -> None:
        super().__init__()
        self.model, self.score, self._places = model, score, places

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.score(batch)

    def call_with(self, weights: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        """The scores of a batch's samples with other values of some parameters."""
        replaced = {f"model.{place}": weight for name, weight in weights.items() for place in self._places[name]}
        result: tuple[Tensor, Tensor] = functional_call(self, replaced, (batch,), tie_weights=False)
        return result


def _find_places(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """All names of each parameter, of which a tied one has several: `functional_call` would look for them in every
    call, in all heads."""
    names = {id(p): name for name, p in parameters.items()}
    places: dict[str, list[str]] = {name: [] for name in parameters}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        seen.add(id(module))
        for key, p in module._parameters.items():
            if id(p) in names:
                places[names[id(p)]].append(prefix + key)
        for key, child in module._modules.items():
            if child is not None and id(child) not in seen:
                visit(child, f"{prefix}{key}.")

    visit(model, "")
    return places


def _sum_sample_gradients(
    scorer: _ScoredModel, weights: dict[str, Tensor], batch: Any, power: Literal[1, 2], max_gradients: int
) -> list[Tensor]:
    """Σ over the samples of `batch` and the values of each, at most `max_gradients` gradients at a time."""
    leaves, shape = tree_flatten(batch)
    samples = count_samples(leaves)
    has_samples = [_has_samples(leaf, samples) for leaf in leaves]
    in_dims = (None, *(0 if per_sample else None for per_sample in has_samples))

    def sample_gradients(one_hot: Tensor, *sample: Any) -> list[Tensor]:
        """Gradients of one sample's values, a row for each of `one_hot`, times w^(1/power)."""
        batch = tree_unflatten(
            [x.unsqueeze(0) if per_sample else x for x, per_sample in zip(sample, has_samples, strict=True)], shape
        )

        def weighted_values(parameters: dict[str, Tensor]) -> Tensor:
            values, value_weights = scorer.call_with(parameters, batch)
            weighted: Tensor = values * value_weights.detach() ** (1 / power)
            return weighted

        backward = vjp(weighted_values, weights)[1]
        gradients = vmap(backward)(one_hot)[0] if len(one_hot) > 1 else backward(one_hot[0])[0]
        return list(gradients.values())

    def gradients_of(one_hot: Tensor, sliced: list[Any]) -> list[Tensor]:
        """Per weight (samples, …) the gradients of several samples."""
        try:
            return list(vmap(sample_gradients, in_dims=in_dims)(one_hot, *sliced))
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error):
                raise
        # The forward pass asks what is in a tensor, as the attention masks of Transformers do: one sample at a time.
        count = next(len(leaf) for leaf, per_sample in zip(sliced, has_samples, strict=True) if per_sample)
        by_sample = [
            sample_gradients(
                one_hot, *(x[i] if per_sample else x for x, per_sample in zip(sliced, has_samples, strict=True))
            )
            for i in range(count)
        ]
        return [torch.stack(of_weight) for of_weight in zip(*by_sample, strict=True)]

    first = tree_unflatten([_slice_samples(leaf, samples, 0, 1) for leaf in leaves], shape)
    total: list[Tensor] | None = None
    try:
        values = scorer(first)[0]
        for one_hot in torch.eye(len(values), dtype=values.dtype, device=values.device).split(max(1, max_gradients)):
            width = max(1, max_gradients // len(one_hot))
            for start in range(0, samples, width):
                sliced = [_slice_samples(leaf, samples, start, start + width) for leaf in leaves]
                gradients = gradients_of(one_hot, sliced)
                gradients = [g.flatten(0, 1) for g in gradients] if len(one_hot) > 1 else gradients
                sums = [_sum_of_powers(gradient, power) for gradient in gradients]
                total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"Gradients of single examples could not be computed (with torch.func.vmap): {error}\nWhere the model "
            "needs several examples at once, measure by mini-batches instead (EWC: fisher='batched'; MAS: batch=20)."
        ) from error
    assert total is not None
    return total


def _sum_of_powers(gradients: Tensor, power: Literal[1, 2]) -> Tensor:
    """Σ over the first dimension of |gradients|^power; on a CPU in strips that stay in its cache."""
    rows = gradients.flatten(1) if gradients.dim() > 1 else gradients[:, None]
    strips = rows.split(STRIP_COLUMNS, 1) if gradients.device.type == "cpu" else [rows]
    sums = [(strip.square() if power == 2 else strip.abs()).sum(0) for strip in strips]
    return torch.cat(sums).view(gradients.shape[1:])


def _batch_gradients(
    scorer: _ScoredModel, parameters: list[nn.Parameter], batch: Any, power: Literal[1, 2] | None
) -> list[Tensor]:
    """|gradient|^power of the score of one mini-batch; with None the gradient itself."""
    with torch.enable_grad():
        values, _ = scorer(batch)
        gradients = torch.autograd.grad(values.sum(), parameters, allow_unused=True, materialize_grads=True)
    if power is None:
        return [gradient.clone() for gradient in gradients]
    return list(torch._foreach_pow(gradients, 2) if power == 2 else torch._foreach_abs(gradients))


def _rebatch(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, int]]:
    """Split the samples of `batches` into batches of `size` (the last may be smaller); yields (batch, its size)."""
    leftover: list[Any] | None = None
    samples, shape = 0, None
    for batch in batches:
        leaves, shape = tree_flatten(batch)
        new_samples = count_samples(leaves)
        if leftover is not None:
            leaves = [
                torch.cat([a, b]) if _has_samples(b, new_samples) else b for a, b in zip(leftover, leaves, strict=True)
            ]
        samples = count_samples(leaves)
        full = samples - samples % size
        for start in range(0, full, size):
            yield tree_unflatten([_slice_samples(leaf, samples, start, start + size) for leaf in leaves], shape), size
        leftover = [_slice_samples(leaf, samples, full, samples) for leaf in leaves] if full < samples else None
    if leftover is not None and shape is not None:
        yield tree_unflatten(leftover, shape), samples % size


def count_samples(leaves: list[Any]) -> int:
    """How many samples' gradients a batch has, given its flattened `leaves`: the length of the first tensor."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError("A batch must be a tensor of samples, or a tuple, list or dict that holds one; got no tensor.")


def _has_samples(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def _slice_samples(leaf: Any, samples: int, start: int, stop: int) -> Any:
    return leaf[start:stop] if _has_samples(leaf, samples) else leaf
