"""Convolutions of 3 × 3 pixels in bfloat16 with kernels of our own, where cuDNN's take about twice as long.

That is at few channels, as in the paper's networks: the first convolution, of pictures, with the ReLU behind it; and
the gradient of the others' weights. Weights' gradients are in float32, as the weights are. Each operation has a twin
in plain torch, which a CPU runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = (16, 32, 64, 128)
"""Numbers of channels that the kernels take: powers of two, of which an accumulator fits into registers."""
COLOURS = (1, 2, 3)
"""Numbers of channels of pictures: a 3 × 3 kernel then has at most 32 weights per output."""
MOST = 2**31
"""Numbers of a tensor that the kernels can count."""
TRITON = find_spec("triton") is not None
"""Whether there is what the kernels are written in; not on every system where torch has CUDA."""
SHARES, BLOCK = 512, 128
"""For pictures: shares of all pixels for which gradients are summed up by themselves, and pixels taken at a time."""


class Division(NamedTuple):
    """How the work is divided, as measured on an H200."""

    shares: int
    """Of all pixels; each has an accumulator of its own, and these are summed up at the end."""
    row: bool
    """Whether three places of the 3 × 3 are computed at a time."""
    block: int
    """Pixels taken at a time."""
    warps: int = 4
    stages: int = 3


def division(outputs: int, inputs: int) -> Division:
    if outputs * inputs <= 1024:
        return Division(128, row=True, block=128, warps=2, stages=2)
    if outputs * inputs <= 4096:
        return Division(128 if outputs * inputs <= 2048 else 64, row=True, block=32)
    return Division(16, row=False, block=32)


def suits(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of the kind."""
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (3, 3)
        and layer.stride == layer.dilation == layer.padding == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and layer.in_channels in (*CHANNELS, *COLOURS)
        and layer.out_channels in CHANNELS
    )


def of_pictures(convolution: nn.Conv2d, x: Tensor) -> bool:
    """Whether ReLU of the convolution may be computed as `seen` does."""
    kind = suits(convolution) and convolution.in_channels in COLOURS and convolution.bias is not None
    return kind and not x.requires_grad and takes(x)


def seen(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """ReLU of what the convolution gives of pictures."""
    y: Tensor = Seen.apply(x, convolution.weight, convolution.bias)  # type: ignore[no-untyped-call]
    return y


def convolved(convolution: nn.Conv2d, x: Tensor, with_bias: bool = True) -> Tensor:
    """What the convolution gives of `x`, or gives before its bias is added."""
    bias = convolution.bias if with_bias else None
    wide = suits(convolution) and convolution.in_channels in CHANNELS
    y: Tensor
    if not (wide and x.requires_grad and takes(x)):
        y = convolution._conv_forward(x, convolution.weight, bias)
        return y
    rounded = convolution.weight.detach().to(torch.bfloat16)
    y = Convolved.apply(x.to(torch.bfloat16), convolution.weight, rounded)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


def takes(x: Tensor) -> bool:
    """Whether the kernels can be used for these inputs: in bfloat16, channels last, some but not too many."""
    if (
        x.dim() != 4
        or not x.numel()
        or not x.is_contiguous(memory_format=torch.channels_last)
        or (x.is_cuda and not TRITON)
    ):
        return False
    return x[:, 0].numel() * max(CHANNELS) < MOST and rounds(x)


def rounds(x: Tensor) -> bool:
    """Whether numbers are rounded to bfloat16 now."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return dtype == torch.bfloat16 and x.dtype != torch.float64


class Convolved(torch.autograd.Function):
    """A convolution of numbers in bfloat16 by weights in float32, which are given rounded to bfloat16 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(x, rounded)
        return F.conv2d(x, rounded, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        refuse_second()
        x, weight = ctx.saved_tensors
        of_x = differentiated(gradient, x, weight, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        shares = division(gradient.shape[1], x.shape[1]).shares
        return of_x, _whole(weight_gradients(gradient, x, shares)), None


class Seen(torch.autograd.Function):
    """ReLU of a convolution of pictures."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = pictures(x, weight, bias)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        refuse_second()
        parts, sums = picture_gradients(gradient, *ctx.saved_tensors, SHARES)
        return None, _whole(parts), total(sums)


def refuse_second() -> None:
    """A compiled network refuses by itself."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("--fast has no gradients of gradients (create_graph=True): leave it out")


def _whole(parts: Tensor) -> Tensor:
    """The gradient of the weights, laid out as they are."""
    return total(parts).permute(0, 3, 1, 2)


def total(parts: Tensor) -> Tensor:
    """The sum of all parts."""
    if not parts.is_cuda or torch.compiler.is_compiling():
        return parts.sum(0)
    from agscl.fast import kernels

    found = torch.empty_like(parts[0])
    kernels.total(parts, found)
    return found


def differentiated(gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    """The gradients of `x` and weight that are wanted, as torch computes them."""
    once, none = [1, 1], [0, 0]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, once, once, once, False, none, 1, wanted
    )
    return found


# The operations ------------------------------------------------------------------------------------------------------


def operation(room: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Where torch compiles, let a function be one operation to it, of which `room` gives the form of the results.

    Elsewhere it is a function: as an operation its first call would import torch's compiler.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        known = torch.library.custom_op(f"agscl::{function.__name__}", function, mutates_args=())
        known.register_fake(room)

        @wraps(function)
        def call(*given: Any) -> Any:
            return known(*given) if torch.compiler.is_compiling() else function(*given)

        return call

    return made


def _weight_gradients_room(gradient: Tensor, x: Tensor, shares: int) -> Tensor:
    outputs, inputs = gradient.shape[1], x.shape[1]
    return x.new_empty((shares, outputs, 3, 3, inputs), dtype=torch.float32)


@operation(_weight_gradients_room)
def weight_gradients(gradient: Tensor, x: Tensor, shares: int) -> Tensor:
    """(shares, outputs, 3, 3, inputs) whose sum is the gradient of a convolution's weights."""
    gradient, x = laid_out(gradient), laid_out(x)
    parts = _weight_gradients_room(gradient, x, shares)
    if x.is_cuda:
        from agscl.fast.kernels import weights

        how = division(gradient.shape[1], x.shape[1])
        weights(gradient, x, parts, row=how.row, block=how.block, warps=how.warps, stages=how.stages)
    else:
        _in_one_share(parts, gradient, x)
    return parts


def _pictures_room(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    examples, _, height, width = x.shape
    return x.new_empty((examples, height, width, len(weight)), dtype=torch.bfloat16).permute(0, 3, 1, 2)


@operation(_pictures_room)
def pictures(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ReLU of a convolution, in bfloat16."""
    x, weight = laid_out(x), laid_out(weight)
    y = _pictures_room(x, weight, bias)
    if x.is_cuda:
        from agscl.fast import kernels

        kernels.pictures(x, weight, bias, y, block=BLOCK)
        return y
    x, weight, bias = (one.to(torch.bfloat16) for one in (x, weight, bias))
    return y.copy_(F.conv2d(x, weight, bias, padding=1).relu())


def _picture_gradients_room(gradient: Tensor, x: Tensor, y: Tensor, shares: int) -> tuple[Tensor, Tensor]:
    outputs, inputs = gradient.shape[1], x.shape[1]
    sums = x.new_empty((shares, outputs), dtype=torch.float32)
    return sums.new_empty((shares, outputs, 3, 3, inputs)), sums


@operation(_picture_gradients_room)
def picture_gradients(gradient: Tensor, x: Tensor, y: Tensor, shares: int) -> tuple[Tensor, Tensor]:
    """As `weight_gradients`, of `pictures`, which gave `y` of `x`; and the same of the bias, (shares, outputs)."""
    gradient, x, y = laid_out(gradient), laid_out(x), laid_out(y)
    parts, sums = _picture_gradients_room(gradient, x, y, shares)
    if x.is_cuda:
        from agscl.fast.kernels import picture_weights

        picture_weights(gradient, x, y, parts, sums, block=BLOCK)
    else:
        gradient = torch.where(y <= 0, 0, gradient)
        _in_one_share(parts, gradient, x.to(torch.bfloat16))
        sums.zero_()[0] = gradient.float().sum((0, 2, 3))
    return parts, sums


def _in_one_share(parts: Tensor, gradient: Tensor, x: Tensor) -> None:
    """The gradient of weights as torch computes it, and 0 for all shares but one."""
    weight = torch.zeros_like(parts[0].permute(0, 3, 1, 2))
    whole = differentiated(gradient.float(), x.float(), weight, [False, True, False])[1]
    parts.zero_()[0] = whole.permute(0, 2, 3, 1)


def laid_out(x: Tensor) -> Tensor:
    """Channels last."""
    return x.contiguous(memory_format=torch.channels_last)
