"""Kernels in Triton, which comes with torch for a GPU. All tensors lie in memory channels last."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    gradient,
    x,
    parts,
    PIXELS: tl.constexpr,
    SHARE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a share of all pixels adds to the gradient of one row of a 3 × 3 kernel; without `ROW`, of one place."""
    share, place = tl.program_id(0), tl.program_id(1)
    outputs, inputs = tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    if ROW:
        place *= 3
    down, right = place // 3 - 1, place % 3 - 1
    first = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    second = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    third = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, SHARE, BLOCK):
        pixels = share * SHARE + start + tl.arange(0, BLOCK)
        row, column = (pixels // WIDTH) % HEIGHT + down, pixels % WIDTH + right
        there = pixels < PIXELS
        inside = there & (row >= 0) & (row < HEIGHT)
        given = tl.load(gradient + pixels[:, None] * OUTPUTS + outputs[None, :], mask=there[:, None], other=0.0)
        given = tl.trans(given)
        read = x + (pixels + down * WIDTH + right)[:, None] * INPUTS + inputs[None, :]
        here = inside & (column >= 0) & (column < WIDTH)
        first = tl.dot(given, tl.load(read, mask=here[:, None], other=0.0), first)
        if ROW:
            second = tl.dot(given, tl.load(read + INPUTS, mask=inside[:, None], other=0.0), second)
            here = inside & (column + 2 < WIDTH)
            third = tl.dot(given, tl.load(read + 2 * INPUTS, mask=here[:, None], other=0.0), third)
    written = parts + share * (9 * OUTPUTS * INPUTS) + outputs[:, None] * (9 * INPUTS) + inputs[None, :]
    tl.store(written + place * INPUTS, first)
    if ROW:
        tl.store(written + (place + 1) * INPUTS, second)
        tl.store(written + (place + 2) * INPUTS, third)


def weights(gradient: Tensor, x: Tensor, parts: Tensor, *, row: bool, block: int, warps: int, stages: int) -> None:
    """Fill `parts` (shares, outputs, 3, 3, inputs), whose sum is the gradient of a convolution's weights."""
    examples, outputs, height, width = gradient.shape
    pixels = examples * height * width
    launch: Any = _weights[(len(parts), 3 if row else 9)]
    sizes = (pixels, _share(pixels, len(parts), block), height, width, x.shape[1], outputs, row, block)
    launch(gradient, x, parts, *sizes, num_warps=warps, num_stages=stages)


@triton.jit  # type: ignore[untyped-decorator]
def _laid_under(  # type: ignore[no-untyped-def]
    x,
    pixels,
    number,
    PIXELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """(pixels, numbers) what each weight of a 3 × 3 kernel is laid over, in bfloat16, and then 1 for the bias."""
    place, channel = number // CHANNELS, number % CHANNELS
    down, right = place // 3 - 1, place % 3 - 1
    row = ((pixels // WIDTH) % HEIGHT)[:, None] + down[None, :]
    column = (pixels % WIDTH)[:, None] + right[None, :]
    there = (pixels < PIXELS)[:, None] & (number < 9 * CHANNELS)[None, :]
    inside = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    at = (pixels[:, None] + (down * WIDTH + right)[None, :]) * CHANNELS + channel[None, :]
    one = (number == 9 * CHANNELS).to(tl.float32)[None, :]
    return tl.load(x + at, mask=inside, other=one).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _pictures(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    PIXELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number, outputs = tl.arange(0, DEPTH), tl.arange(0, OUTPUTS)
    under = _laid_under(x, pixels, number, PIXELS, HEIGHT, WIDTH, CHANNELS)
    of_weight, of_bias = (number < 9 * CHANNELS)[:, None], (number == 9 * CHANNELS)[:, None]
    by = tl.load(weight + outputs[None, :] * (9 * CHANNELS) + number[:, None], mask=of_weight, other=0.0)
    by += tl.load(bias + outputs[None, :] + 0 * number[:, None], mask=of_bias, other=0.0)
    found = tl.dot(under, by.to(tl.bfloat16))
    found = tl.where(found < 0, 0.0, found)  # which leaves NaN as it is
    there = (pixels < PIXELS)[:, None]
    tl.store(y + pixels[:, None] * OUTPUTS + outputs[None, :], found.to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _picture_weights(  # type: ignore[no-untyped-def]
    gradient,
    x,
    y,
    parts,
    sums,
    PIXELS: tl.constexpr,
    SHARE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share = tl.program_id(0)
    number, outputs = tl.arange(0, DEPTH), tl.arange(0, OUTPUTS)
    product = tl.zeros((OUTPUTS, DEPTH), tl.float32)
    for start in range(0, SHARE, BLOCK):
        pixels = share * SHARE + start + tl.arange(0, BLOCK)
        at = pixels[:, None] * OUTPUTS + outputs[None, :]
        there = (pixels < PIXELS)[:, None]
        given = tl.load(gradient + at, mask=there, other=0.0)
        given = tl.where(tl.load(y + at, mask=there, other=0.0) > 0, given, 0.0).to(tl.bfloat16)
        under = _laid_under(x, pixels, number, PIXELS, HEIGHT, WIDTH, CHANNELS)
        product = tl.dot(tl.trans(given), under, product)
    written = parts + share * (9 * CHANNELS * OUTPUTS) + outputs[:, None] * (9 * CHANNELS) + number[None, :]
    tl.store(written, product, mask=(number < 9 * CHANNELS)[None, :])
    written = sums + share * OUTPUTS + outputs[:, None] + 0 * number[None, :]
    tl.store(written, product, mask=(number == 9 * CHANNELS)[None, :])


def pictures(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, *, block: int) -> None:
    """Fill `y` (examples, outputs, height, width) with ReLU of a convolution of `x`, of at most three channels."""
    examples, channels, height, width = x.shape
    pixels = examples * height * width
    launch: Any = _pictures[(-(-pixels // block),)]
    launch(x, weight, bias, y, pixels, height, width, channels, len(weight), _depth(channels), block, num_warps=4)


def picture_weights(gradient: Tensor, x: Tensor, y: Tensor, parts: Tensor, sums: Tensor, *, block: int) -> None:
    """Of `pictures`, as `weights`, and `sums` (shares, outputs), whose sum is the gradient of the bias."""
    examples, channels, height, width = x.shape
    pixels, outputs = examples * height * width, gradient.shape[1]
    launch: Any = _picture_weights[(len(parts),)]
    sizes = (pixels, _share(pixels, len(parts), block), height, width, channels, outputs, _depth(channels), block)
    launch(gradient, x, y, parts, sums, *sizes, num_warps=4, num_stages=2)


def _depth(channels: int) -> int:
    """Weights of an output and its bias, in a power of two as tensor cores take them."""
    return max(16, 1 << (9 * channels).bit_length())


def _share(pixels: int, shares: int, block: int) -> int:
    """Pixels of a share, in whole blocks; the last shares may have fewer."""
    return -(-pixels // (shares * block)) * block
