"""What the layers with Triton kernels share: whether kernels can run, what they refuse, and their partial sums."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
"""Whether Triton is installed; torch does not bring it on every system."""
MAX_ELEMENTS = 2**31
"""The kernels index tensors with 32 bits."""


def uses_triton(x: Tensor) -> bool:
    """Whether our Triton kernels run on `x`: on a GPU, or on the meta device, where they are compiled for one."""
    return x.is_cuda or x.is_meta


def autocasts_bf16(x: Tensor) -> bool:
    """Whether a layer that reads `x` computes in bfloat16, as our Triton kernels do."""
    kind = "cuda" if x.is_meta else x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return dtype == torch.bfloat16 and x.dtype != torch.float64


def refuse_double_backward() -> None:
    """Raise where second derivatives of a Triton kernel are asked for; a compiled network raises by itself."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the fast kernels have no second derivatives (create_graph=True): leave out --fast")


def sum_partials(partials: Tensor) -> Tensor:
    """(chunks, …) a Triton kernel's partial sums, summed over chunks."""
    if not uses_triton(partials) or torch.compiler.is_compiling():
        return partials.sum(0)
    from agscl.fast import triton_kernels

    total = torch.empty_like(partials[0])
    triton_kernels.launch_sum_partials(partials, total)
    return total
