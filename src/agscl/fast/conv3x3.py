"""3 × 3 convolutions in bfloat16 with Triton kernels, where cuDNN's take about twice as long.

That is with few channels, as in the paper's networks: the whole first convolution, which reads the images, fused with
its ReLU; and the weight gradient of the others. Weight gradients are float32, as the weights are. Each operation has a
counterpart in plain torch, which runs on a CPU and which the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.fast.triton_support import (
    HAS_TRITON,
    MAX_ELEMENTS,
    autocasts_bf16,
    refuse_double_backward,
    sum_partials,
    uses_triton,
)

CHANNELS = (16, 32, 64, 128)
"""Numbers of channels that the kernels support: powers of two whose accumulators fit into registers."""
IMAGE_CHANNELS = (1, 2, 3)
"""Numbers of channels of an image: a 3 × 3 kernel then has at most 32 weights per output, bias included."""
IMAGE_CHUNKS, IMAGE_BLOCK = 512, 128
"""For the first convolution: chunks of pixels with partial sums of their own, and pixels computed at a time."""


class Tiling(NamedTuple):
    """How the weight gradient of a 3 × 3 convolution is divided among programs, as tuned on an H200."""

    chunks: int
    """Chunks of pixels, each with partial sums of its own, which are added at the end."""
    row: bool
    """Whether a program computes three of the nine weights of a 3 × 3 kernel, or one."""
    block: int
    """Pixels processed at a time."""
    warps: int = 4
    stages: int = 3


def weight_grad_tiling(out_channels: int, in_channels: int) -> Tiling:
    size = out_channels * in_channels
    if size <= 1024:
        return Tiling(128, row=True, block=128, warps=2, stages=2)
    if size <= 4096:
        return Tiling(128 if size <= 2048 else 64, row=True, block=32)
    return Tiling(16, row=False, block=32)


# Which layers and inputs are supported --------------------------------------------------------------------------------


def supports_layer(layer: nn.Module) -> bool:
    """Whether the layer is a 3 × 3 convolution with zero padding 1 and numbers of channels that the kernels support."""
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (3, 3)
        and layer.stride == layer.dilation == layer.padding == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and layer.in_channels in (*CHANNELS, *IMAGE_CHANNELS)
        and layer.out_channels in CHANNELS
    )


def supports_input(x: Tensor) -> bool:
    """Whether our convolutions can read a batch: channels last, computed in bfloat16, neither empty nor too large."""
    if (
        x.dim() != 4
        or not x.numel()
        or not x.is_contiguous(memory_format=torch.channels_last)
        or (uses_triton(x) and not HAS_TRITON)
    ):
        return False
    return x[:, 0].numel() * max(CHANNELS) < MAX_ELEMENTS and autocasts_bf16(x)


def supports_conv_relu_input(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether `conv_relu_input`, our first 3 × 3 convolution, can be used: on images that need no gradient."""
    reads_images = supports_layer(layer) and layer.in_channels in IMAGE_CHANNELS and layer.bias is not None
    return reads_images and not x.requires_grad and supports_input(x)


# Layers ---------------------------------------------------------------------------------------------------------------


def conv_relu_input(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """ReLU of a network's first 3 × 3 convolution, on images."""
    y: Tensor = ConvReluInputFunction.apply(images, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return y


def conv3x3(layer: nn.Conv2d, x: Tensor, with_bias: bool = True) -> Tensor:
    """The 3 × 3 convolution of `x`, with our weight gradient where it is supported, else torch's."""
    bias = layer.bias if with_bias else None
    if not (supports_layer(layer) and layer.in_channels in CHANNELS and x.requires_grad and supports_input(x)):
        return F.conv2d(x, layer.weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    weight_bf16 = layer.weight.detach().to(torch.bfloat16)
    y: Tensor = Conv3x3Function.apply(x.to(torch.bfloat16), layer.weight, weight_bf16, True)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


class Conv3x3Function(torch.autograd.Function):
    """A 3 × 3 convolution in bfloat16 with a float32 weight, which is also given rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_bf16: Tensor, own_weight_grad: bool) -> Tensor:
        ctx.save_for_backward(x, weight_bf16)
        ctx.own_weight_grad = own_weight_grad
        return F.conv2d(x, weight_bf16, padding=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        refuse_double_backward()
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], not ctx.own_weight_grad, False]
        x_grad, weight_grad, _ = _conv_backward(grad, x, weight, wanted) if any(wanted) else (None, None, None)
        if ctx.own_weight_grad:
            chunks = weight_grad_tiling(grad.shape[1], x.shape[1]).chunks
            weight_grad = _sum_weight_grad(conv3x3_weight_grad(grad, x, chunks))
        else:
            assert weight_grad is not None
            weight_grad = weight_grad.float()
        return x_grad, weight_grad, None, None


class ConvReluInputFunction(torch.autograd.Function):
    """ReLU of a 3 × 3 convolution of images, which need no gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = conv_relu_input_forward(images, weight, bias)
        ctx.save_for_backward(images, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        refuse_double_backward()
        weight_partials, bias_partials = conv_relu_input_backward(grad, *ctx.saved_tensors, IMAGE_CHUNKS)
        return None, _sum_weight_grad(weight_partials), sum_partials(bias_partials)


def _sum_weight_grad(partials: Tensor) -> Tensor:
    """(chunks, out, 3, 3, in) to the weight gradient, (out, in, 3, 3) channels last."""
    return sum_partials(partials).permute(0, 3, 1, 2)


def _conv_backward(grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    """Torch's gradients of `x`, weight and bias, those that are wanted."""
    ones, zeros = [1, 1], [0, 0]
    grads: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, ones, ones, ones, False, zeros, 1, wanted
    )
    return grads


# Custom operators -----------------------------------------------------------------------------------------------------


def custom_op(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function with a kernel one operator to torch's compiler; `fake` allocates its outputs without computing.

    Outside a compilation the function is called as it is: calling an operator would import torch's compiler.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(f"agscl::{function.__name__}", function, mutates_args=())
        operator.register_fake(fake)

        @wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate


def _fake_weight_grad(grad: Tensor, x: Tensor, chunks: int) -> Tensor:
    return x.new_empty((chunks, grad.shape[1], 3, 3, x.shape[1]), dtype=torch.float32)


@custom_op(_fake_weight_grad)
def conv3x3_weight_grad(grad: Tensor, x: Tensor, chunks: int) -> Tensor:
    """(chunks, out, 3, 3, in) partial sums of the weight gradient of a 3 × 3 convolution of `x`."""
    grad, x = to_channels_last(grad), to_channels_last(x)
    partials = _fake_weight_grad(grad, x, chunks)
    if uses_triton(x):
        from agscl.fast import triton_kernels

        triton_kernels.launch_conv3x3_weight_grad(grad, x, partials, weight_grad_tiling(grad.shape[1], x.shape[1]))
    else:
        _fill_first_chunk(partials, grad, x)
    return partials


def _fake_conv_relu_input(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    examples, _, height, width = images.shape
    return images.new_empty((examples, height, width, len(weight)), dtype=torch.bfloat16).permute(0, 3, 1, 2)


@custom_op(_fake_conv_relu_input)
def conv_relu_input_forward(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ReLU of the 3 × 3 convolution of images, in bfloat16."""
    images, weight = to_channels_last(images), to_channels_last(weight)
    y = _fake_conv_relu_input(images, weight, bias)
    if uses_triton(images):
        from agscl.fast import triton_kernels

        triton_kernels.launch_conv_relu_input_forward(images, weight, bias, y, block=IMAGE_BLOCK)
        return y
    images, weight, bias = (one.to(torch.bfloat16) for one in (images, weight, bias))
    return y.copy_(F.conv2d(images, weight, bias, padding=1).relu())


def _fake_conv_relu_input_backward(grad: Tensor, images: Tensor, y: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    out_channels, in_channels = grad.shape[1], images.shape[1]
    bias_partials = images.new_empty((chunks, out_channels), dtype=torch.float32)
    return bias_partials.new_empty((chunks, out_channels, 3, 3, in_channels)), bias_partials


@custom_op(_fake_conv_relu_input_backward)
def conv_relu_input_backward(grad: Tensor, images: Tensor, y: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Of a 3 × 3 convolution of images, partial sums of the gradients of weight, (chunks, out, 3, 3, in), and bias.

    Those of the bias are (chunks, out). `y` is what `conv_relu_input_forward` returned, `grad` its gradient.
    """
    grad, images, y = to_channels_last(grad), to_channels_last(images), to_channels_last(y)
    weight_partials, bias_partials = _fake_conv_relu_input_backward(grad, images, y, chunks)
    if uses_triton(images):
        from agscl.fast import triton_kernels

        triton_kernels.launch_conv_relu_input_backward(
            grad, images, y, weight_partials, bias_partials, block=IMAGE_BLOCK
        )
    else:
        grad = torch.where(y <= 0, 0, grad)
        _fill_first_chunk(weight_partials, grad, images.to(torch.bfloat16))
        bias_partials.zero_()[0] = grad.float().sum((0, 2, 3))
    return weight_partials, bias_partials


def _fill_first_chunk(partials: Tensor, grad: Tensor, x: Tensor) -> None:
    """Put torch's weight gradient into the first chunk and 0 into all others."""
    weight = torch.zeros_like(partials[0].permute(0, 3, 1, 2))
    weight_grad = _conv_backward(grad.float(), x.float(), weight, [False, True, False])[1]
    assert weight_grad is not None
    partials.zero_()[0] = weight_grad.permute(0, 2, 3, 1)


def to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
