"""Outputs of learned tasks on a probe, remembered as digests: a later certificate says which of them changed.

Weights that are not where a method looks, a module with a running average of its own, a layer put in between, another
`eps`: whatever changes what an old head computes is seen here, if nowhere else.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from agscl.digests import digest_tensors
from agscl.heads import MultiHead
from agscl.probe_outputs import ProbeOutputs

__all__ = ["compare_outputs", "concat_tensors", "record_outputs"]

MAX_PROBES = 4  # probes, or environments, whose outputs are remembered; the oldest are dropped

Records = dict[str, dict[str, str]]  # inputs and environment -> task -> digest of its outputs


def record_outputs(records: Records, inputs: Any, model: nn.Module, outputs: Mapping[str, Tensor]) -> None:
    """Remember the digests of each task's `outputs` for these inputs, in place of those known so far."""
    key = _make_key(inputs, model)
    records[key] = {**records.pop(key, {}), **{task: _digest(output) for task, output in outputs.items()}}
    for oldest in list(records)[:-MAX_PROBES]:
        del records[oldest]


def compare_outputs(
    records: Records, inputs: Any, model: nn.Module, outputs: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Tasks whose outputs are no longer the recorded ones, and those without a record for these inputs.

    The latter are recorded now.
    """
    known = records.get(_make_key(inputs, model), {})
    changed = [task for task, output in outputs.items() if task in known and known[task] != _digest(output)]
    missing = [task for task in outputs if task not in known]
    if missing:
        record_outputs(records, inputs, model, {task: outputs[task] for task in missing})
    return changed, missing


def concat_tensors(output: Any) -> Tensor | None:
    """The tensors of an output to record, which may be nested, as one; None where there are none.

    (samples, values), or (1, values) where their lengths differ.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not tensors:
        return None
    lengths = {tensor.shape[:1] for tensor in tensors}
    rows = len(tensors[0]) if len(lengths) == 1 and tensors[0].dim() else 1
    return torch.cat([tensor.reshape(rows, tensor.numel() // max(1, rows)) for tensor in tensors], 1)


def _digest(output: Tensor) -> str:
    return digest_tensors({"output": output}, ["output"])


def _make_key(inputs: Any, model: nn.Module) -> str:
    """A digest of the inputs and of all that the bits of a forward pass depend on beside the weights."""
    tensors = {str(number): leaf for number, leaf in enumerate(tree_leaves(inputs)) if isinstance(leaf, Tensor)}
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors.values()]
    weights = model.trunk if isinstance(model, MultiHead) else model  # heads, maybe hundreds, lie as their trunk does
    environment: dict[str, Any] = ProbeOutputs.describe_environment(next(iter(tensors.values())), weights)
    device = next(iter(tensors.values())).device.type
    environment["processor"] = _name_processor() if device == "cpu" else ""
    environment["autocast"] = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
    environment["precision"] = torch.get_float32_matmul_precision()
    if device == "cuda" and torch.backends.cudnn.benchmark:  # the kernels are chosen anew in each process
        environment["process"] = os.getpid()
    text = json.dumps([digest_tensors(tensors, list(tensors)), shapes, environment], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def _name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
