"""Kernels in Triton, which comes with torch for a GPU. All tensors lie in memory channels last."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Numbers that a program of elementwise kernels computes at a time: eight for each of its threads."""


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
        given = tl.where(tl.load(y + at, mask=there, other=0.0) <= 0, 0.0, given).to(tl.bfloat16)
        under = _laid_under(x, pixels, number, PIXELS, HEIGHT, WIDTH, CHANNELS)
        product = tl.dot(tl.trans(given), under, product)
    written = parts + share * (9 * CHANNELS * OUTPUTS) + outputs[:, None] * (9 * CHANNELS) + number[None, :]
    tl.store(written, product, mask=(number < 9 * CHANNELS)[None, :])
    written = sums + share * OUTPUTS + outputs[:, None] + 0 * number[None, :]
    tl.store(written, product, mask=(number == 9 * CHANNELS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    y,
    bias,
    seeds,
    z,
    which,
    PIXELS,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    DROPPED: tl.constexpr,
    PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest of a block, bias, ReLU and dropout of the share `DROPPED`; `PIXELS` and `WIDTH` are those of `z`.

    The number of pixels is no constant: each constant is compiled for, and there are several sizes of batches.
    """
    pixels, channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    there = (pixels < PIXELS)[:, None] & (channels < CHANNELS)[None, :]
    at = pixels[:, None] * CHANNELS + channels[None, :]
    read = y + _first_of_block(pixels, WIDTH, SIZE)[:, None] * CHANNELS + channels[None, :]
    found = tl.load(read, mask=there, other=0.0).to(tl.float32)
    place = tl.zeros((BLOCK, WIDE), tl.int32)
    if SIZE > 1:
        for k in tl.static_range(1, SIZE * SIZE):
            beside = ((k // SIZE) * (WIDTH * SIZE) + k % SIZE) * CHANNELS
            value = tl.load(read + beside, mask=there, other=0.0).to(tl.float32)
            larger = (value > found) | (value != value)
            found, place = tl.where(larger, value, found), tl.where(larger, k, place)
    found += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    dead = found <= 0  # NaN is not
    if DROPPED > 0:
        dead |= (tl.rand(tl.load(seeds + PLACE), at) < DROPPED) & (found == found)
        found *= 1 / (1 - DROPPED)
    found = tl.where(dead, 0.0, found)
    if SIZE > 1 or DROPPED > 0:
        tl.store(which + at, tl.where(dead, SIZE * SIZE, place).to(tl.uint8), mask=there)
    tl.store(z + at, found.to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(  # type: ignore[no-untyped-def]
    gradient,
    z,
    which,
    of_y,
    sums,
    PIXELS,
    SHARE,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share, channels = tl.program_id(0), tl.arange(0, WIDE)
    total = tl.zeros((BLOCK, WIDE), tl.float32)
    for start in range(0, SHARE, BLOCK):
        pixels = share * SHARE + start + tl.arange(0, BLOCK)
        there = (pixels < PIXELS)[:, None] & (channels < CHANNELS)[None, :]
        at = pixels[:, None] * CHANNELS + channels[None, :]
        given = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
        if SIZE > 1 or DROPPED > 0:
            place = tl.load(which + at, mask=there, other=0)
            dead = place == SIZE * SIZE
        else:
            dead = tl.load(z + at, mask=there, other=0.0) <= 0
        given = tl.where(dead, 0.0, given * (1 / (1 - DROPPED))).to(tl.bfloat16)
        total += given.to(tl.float32)
        if SIZE > 1:
            written = of_y + _first_of_block(pixels, WIDTH, SIZE)[:, None] * CHANNELS + channels[None, :]
            for k in tl.static_range(SIZE * SIZE):
                beside = ((k // SIZE) * (WIDTH * SIZE) + k % SIZE) * CHANNELS
                tl.store(written + beside, tl.where(place == k, given, 0.0).to(tl.bfloat16), mask=there)
        else:
            tl.store(of_y + at, given, mask=there)
    tl.store(sums + share * CHANNELS + channels, tl.sum(total, 0), mask=channels < CHANNELS)


@triton.jit  # type: ignore[untyped-decorator]
def _first_of_block(pixels, WIDTH: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each pixel, the first one of the block it was made of."""
    return (pixels // WIDTH) * (SIZE * SIZE * WIDTH) + (pixels % WIDTH) * SIZE


def activate(
    y: Tensor, bias: Tensor, seeds: Tensor, z: Tensor, which: Tensor, *, size: int, dropped: float, place: int
) -> None:
    """Fill `z` with the largest of each block, with a bias, ReLU and dropout.

    `y` and `z` are (examples, channels, height, width) or (examples, channels). Where there are blocks or is dropout,
    `which` tells a number's place in its block; of what ReLU or dropout set to zero it is behind the last.
    """
    pixels, width, channels = _pixels(z)
    wide, block = _tile(channels)
    launch: Any = _activate[(-(-pixels // block),)]
    launch(y, bias, seeds, z, which, pixels, width, channels, wide, size, dropped, place, block, num_warps=4)


def activated(
    gradient: Tensor, z: Tensor, which: Tensor, of_y: Tensor, sums: Tensor, *, size: int, dropped: float
) -> None:
    """Of `activate`, the gradient of `y`, and `sums` (shares, channels), whose sum is that of the bias."""
    pixels, width, channels = _pixels(z)
    wide, block = _tile(channels)
    launch: Any = _activated[(len(sums),)]
    sizes = (pixels, _share(pixels, len(sums), block), width, channels, wide, size, dropped, block)
    launch(gradient, z, which, of_y, sums, *sizes, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _total(parts, found, COUNT, LENGTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, COUNT, ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows < COUNT)[:, None] & (columns < LENGTH)[None, :]
        total += tl.load(parts + rows[:, None] * LENGTH + columns[None, :], mask=there, other=0.0)
    tl.store(found + columns, tl.sum(total, 0), mask=columns < LENGTH)


def total(parts: Tensor, found: Tensor) -> None:
    """Fill `found` (…) with the sum of `parts` (count, …)."""
    count, length = len(parts), found.numel()
    rows, columns = min(512, 1 << (count - 1).bit_length()), 16 if length <= 256 else 32
    launch: Any = _total[(-(-length // columns),)]
    launch(parts, found, count, length, rows, columns, num_warps=8)


def _pixels(z: Tensor) -> tuple[int, int, int]:
    """How many pixels, of how many in a row, with how many channels."""
    return z.numel() // z.shape[1], z.shape[3] if z.dim() == 4 else 1, z.shape[1]


def _tile(channels: int) -> tuple[int, int]:
    """Channels and pixels that are computed at a time."""
    wide = 1 << (channels - 1).bit_length()
    return wide, max(1, TILE // wide)


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
