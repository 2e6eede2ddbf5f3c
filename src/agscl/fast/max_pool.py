"""Max pooling over blocks, that is over windows that do not overlap: less work than torch's, which may overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MAX_BLOCK = 4
"""The widest block whose elements are compared one by one."""


def pools_blocks(pool: nn.MaxPool2d) -> bool:
    """Whether the windows of the pool are square blocks side by side."""
    size = pool.kernel_size
    plain = not pool.return_indices and (pool.stride, pool.padding, pool.dilation) == (size, 0, 1)
    return isinstance(size, int) and size <= MAX_BLOCK and plain


def max_pool(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    """The pool's output; over blocks with `BlockMaxPoolFunction` where torch compiles it, which is where that pays."""
    size: Any = pool.kernel_size
    fits = pools_blocks(pool) and x.dim() == 4 and not any(side % size for side in x.shape[2:])
    return BlockMaxPoolFunction.apply(x, size) if fits and torch.compiler.is_compiling() else pool(x)  # type: ignore[no-untyped-call,no-any-return]


class BlockMaxPoolFunction(torch.autograd.Function):
    """As `F.max_pool2d(x, size)`; of equal elements the first is the maximum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        maximum, argmax = block_max(x, size)
        ctx.size = size
        ctx.save_for_backward(argmax)
        return maximum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (argmax,) = ctx.saved_tensors
        return block_max_backward(grad, argmax, ctx.size), None


def block_max(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The maximum of each block of `size` × `size` elements and its place in the block, a byte; of equals the first."""
    maximum = x[:, :, ::size, ::size]
    argmax = torch.zeros_like(maximum, dtype=torch.uint8)
    for place in range(1, size * size):
        value = x[:, :, place // size :: size, place % size :: size]
        larger = (value > maximum) | value.isnan()
        maximum, argmax = torch.where(larger, value, maximum), torch.where(larger, place, argmax)
    return maximum, argmax


def block_max_backward(grad: Tensor, argmax: Tensor, size: int) -> Tensor:
    """The gradient of the input of `block_max`, channels last."""
    rows, columns = (torch.arange(size, device=argmax.device).view(shape) for shape in ((size, 1, 1, 1), (size, 1)))
    argmax, grad = (one.permute(0, 2, 3, 1)[:, :, None, :, None] for one in (argmax, grad))
    spread = torch.where(argmax == rows * size + columns, grad, 0)
    return spread.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
