"""Triton kernels. All tensors lie in memory channels last; a pixel is one position of one example.

Every value of a `tl.constexpr` argument is compiled for, which takes about a third of a second: what differs between
batch sizes is therefore no such argument, and not specialised on either (`do_not_specialize`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from agscl.fast.conv3x3 import Tiling

TILE = 1024
"""Elements that a program of an elementwise kernel computes at a time: eight for each of its threads."""
COMPILE_THREADS = min(8, os.cpu_count() or 1)
"""Threads in which kernels are compiled; a fifth of that work is Python's, which more threads would not speed up."""
COMPILES_IN_PARALLEL = hasattr(triton, "AsyncCompileMode")
"""Whether Triton can compile several kernels at a time; versions before 3.4 cannot."""


# Launching and compiling ----------------------------------------------------------------------------------------------

_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let the functions below compile their kernels, in parallel, instead of launching them.

    Tensors may then be on the meta device. A kernel that cannot be compiled raises its error when it is launched.
    """
    with ThreadPoolExecutor(COMPILE_THREADS) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        token = _compiles_only.set(True)
        try:
            yield
        finally:
            _compiles_only.reset(token)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if _compiles_only.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


# Weight gradient of a 3 × 3 convolution -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pixel_count", "chunk_size"])  # type: ignore[untyped-decorator]
def _conv3x3_weight_grad(  # type: ignore[no-untyped-def]
    grad,
    x,
    partials,
    pixel_count,
    chunk_size,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial sum of one chunk of pixels, for one row of the 3 × 3 kernel; without `ROW`, for one weight of it."""
    chunk, tap = tl.program_id(0), tl.program_id(1)
    outputs, inputs = tl.arange(0, OUT), tl.arange(0, IN)
    if ROW:
        tap *= 3
    down, right = tap // 3 - 1, tap % 3 - 1
    left_sum = tl.zeros((OUT, IN), tl.float32)
    middle_sum = tl.zeros((OUT, IN), tl.float32)
    right_sum = tl.zeros((OUT, IN), tl.float32)
    for start in range(0, chunk_size, BLOCK):
        pixels = chunk * chunk_size + start + tl.arange(0, BLOCK)
        row, column = (pixels // WIDTH) % HEIGHT + down, pixels % WIDTH + right
        valid = pixels < pixel_count
        inside = valid & (row >= 0) & (row < HEIGHT)
        block_grad = tl.load(grad + pixels[:, None] * OUT + outputs[None, :], mask=valid[:, None], other=0.0)
        block_grad = tl.trans(block_grad)
        read = x + (pixels + down * WIDTH + right)[:, None] * IN + inputs[None, :]
        inside_row = inside & (column >= 0) & (column < WIDTH)
        left_sum = tl.dot(block_grad, tl.load(read, mask=inside_row[:, None], other=0.0), left_sum)
        if ROW:
            middle_sum = tl.dot(block_grad, tl.load(read + IN, mask=inside[:, None], other=0.0), middle_sum)
            inside_row = inside & (column + 2 < WIDTH)
            right_sum = tl.dot(block_grad, tl.load(read + 2 * IN, mask=inside_row[:, None], other=0.0), right_sum)
    write = partials + chunk * (9 * OUT * IN) + outputs[:, None] * (9 * IN) + inputs[None, :]
    tl.store(write + tap * IN, left_sum)
    if ROW:
        tl.store(write + (tap + 1) * IN, middle_sum)
        tl.store(write + (tap + 2) * IN, right_sum)


def launch_conv3x3_weight_grad(grad: Tensor, x: Tensor, partials: Tensor, tiling: Tiling) -> None:
    """Launch a kernel to fill `partials` (chunks, out, 3, 3, in), whose sum is a convolution's weight gradient."""
    examples, out_channels, height, width = grad.shape
    pixel_count = examples * height * width
    grid = (len(partials), 3 if tiling.row else 9)
    counts = (pixel_count, _chunk_size(pixel_count, len(partials), tiling.block))
    constants = (height, width, x.shape[1], out_channels, tiling.row, tiling.block)
    _launch(
        _conv3x3_weight_grad,
        grid,
        grad,
        x,
        partials,
        *counts,
        *constants,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


# ReLU of a 3 × 3 convolution of images --------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _load_im2col(  # type: ignore[no-untyped-def]
    x,
    pixels,
    columns,
    pixel_count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """(pixels, columns) in bfloat16: the inputs of the 3 × 3 windows, then a column of ones for the bias."""
    tap, channel = columns // CHANNELS, columns % CHANNELS
    down, right = tap // 3 - 1, tap % 3 - 1
    row = ((pixels // WIDTH) % HEIGHT)[:, None] + down[None, :]
    column = (pixels % WIDTH)[:, None] + right[None, :]
    valid = (pixels < pixel_count)[:, None] & (columns < 9 * CHANNELS)[None, :]
    inside = valid & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    at = (pixels[:, None] + (down * WIDTH + right)[None, :]) * CHANNELS + channel[None, :]
    one = (columns == 9 * CHANNELS).to(tl.float32)[None, :]
    return tl.load(x + at, mask=inside, other=one).to(tl.bfloat16)


@triton.jit(do_not_specialize=["pixel_count"])  # type: ignore[untyped-decorator]
def _conv_relu_input_forward(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    pixel_count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns, outputs = tl.arange(0, COLUMNS), tl.arange(0, OUT)
    windows = _load_im2col(x, pixels, columns, pixel_count, HEIGHT, WIDTH, CHANNELS)
    is_weight, is_bias = (columns < 9 * CHANNELS)[:, None], (columns == 9 * CHANNELS)[:, None]
    matrix = tl.load(weight + outputs[None, :] * (9 * CHANNELS) + columns[:, None], mask=is_weight, other=0.0)
    matrix += tl.load(bias + outputs[None, :] + 0 * columns[:, None], mask=is_bias, other=0.0)
    result = tl.dot(windows, matrix.to(tl.bfloat16))
    result = tl.where(result < 0, 0.0, result)  # NaN stays NaN
    valid = (pixels < pixel_count)[:, None]
    tl.store(y + pixels[:, None] * OUT + outputs[None, :], result.to(tl.bfloat16), mask=valid)


def launch_conv_relu_input_forward(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, *, block: int) -> None:
    """Launch a kernel to fill `y` (examples, out, height, width) with ReLU of a convolution of up to three channels."""
    examples, channels, height, width = x.shape
    pixel_count = examples * height * width
    grid = (-(-pixel_count // block),)
    constants = (height, width, channels, len(weight), _im2col_columns(channels), block)
    _launch(_conv_relu_input_forward, grid, x, weight, bias, y, pixel_count, *constants, num_warps=4)


@triton.jit(do_not_specialize=["pixel_count", "chunk_size"])  # type: ignore[untyped-decorator]
def _conv_relu_input_backward(  # type: ignore[no-untyped-def]
    grad,
    x,
    y,
    weight_partials,
    bias_partials,
    pixel_count,
    chunk_size,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    columns, outputs = tl.arange(0, COLUMNS), tl.arange(0, OUT)
    total = tl.zeros((OUT, COLUMNS), tl.float32)
    for start in range(0, chunk_size, BLOCK):
        pixels = chunk * chunk_size + start + tl.arange(0, BLOCK)
        at = pixels[:, None] * OUT + outputs[None, :]
        valid = (pixels < pixel_count)[:, None]
        block_grad = tl.load(grad + at, mask=valid, other=0.0)
        block_grad = tl.where(tl.load(y + at, mask=valid, other=0.0) <= 0, 0.0, block_grad).to(tl.bfloat16)
        windows = _load_im2col(x, pixels, columns, pixel_count, HEIGHT, WIDTH, CHANNELS)
        total = tl.dot(tl.trans(block_grad), windows, total)
    write = weight_partials + chunk * (9 * CHANNELS * OUT) + outputs[:, None] * (9 * CHANNELS) + columns[None, :]
    tl.store(write, total, mask=(columns < 9 * CHANNELS)[None, :])
    write = bias_partials + chunk * OUT + outputs[:, None] + 0 * columns[None, :]
    tl.store(write, total, mask=(columns == 9 * CHANNELS)[None, :])


def launch_conv_relu_input_backward(
    grad: Tensor, x: Tensor, y: Tensor, weight_partials: Tensor, bias_partials: Tensor, *, block: int
) -> None:
    """Launch a kernel to fill partial sums of gradients: of weight (chunks, out, 3, 3, in), of bias (chunks, out)."""
    examples, channels, height, width = x.shape
    pixel_count, out_channels = examples * height * width, grad.shape[1]
    grid = (len(weight_partials),)
    counts = (pixel_count, _chunk_size(pixel_count, len(weight_partials), block))
    constants = (height, width, channels, out_channels, _im2col_columns(channels), block)
    _launch(
        _conv_relu_input_backward,
        grid,
        grad,
        x,
        y,
        weight_partials,
        bias_partials,
        *counts,
        *constants,
        num_warps=4,
        num_stages=2,
    )


def _im2col_columns(channels: int) -> int:
    """Weights per output and one bias, rounded up to a power of two that tensor cores support."""
    return max(16, 1 << (9 * channels).bit_length())


# All of a link behind its layer ---------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _first_of_block(pixels, WIDTH: tl.constexpr, POOL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The input pixel at the upper left of the block that each output pixel is pooled from."""
    return (pixels // WIDTH) * (POOL * POOL * WIDTH) + (pixels % WIDTH) * POOL


@triton.jit(do_not_specialize=["pixel_count", "seed_index"])  # type: ignore[untyped-decorator]
def _link_forward(  # type: ignore[no-untyped-def]
    y,
    bias,
    seeds,
    z,
    argmax,
    pixel_count,
    seed_index,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    POOL: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum of a block, bias, ReLU and dropout; `pixel_count` and `WIDTH` are those of `z`."""
    pixels, channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNEL_TILE)
    valid = (pixels < pixel_count)[:, None] & (channels < CHANNELS)[None, :]
    at = pixels[:, None] * CHANNELS + channels[None, :]
    read = y + _first_of_block(pixels, WIDTH, POOL)[:, None] * CHANNELS + channels[None, :]
    result = tl.load(read, mask=valid, other=0.0).to(tl.float32)
    place = tl.zeros((BLOCK, CHANNEL_TILE), tl.int32)
    if POOL > 1:
        for k in tl.static_range(1, POOL * POOL):
            offset = ((k // POOL) * (WIDTH * POOL) + k % POOL) * CHANNELS
            value = tl.load(read + offset, mask=valid, other=0.0).to(tl.float32)
            larger = (value > result) | (value != value)
            result, place = tl.where(larger, value, result), tl.where(larger, k, place)
    result += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    zeroed = result <= 0  # false for NaN
    if DROPOUT > 0:
        zeroed |= (tl.rand(tl.load(seeds + seed_index), at) < DROPOUT) & (result == result)
        result *= 1 / (1 - DROPOUT)
    result = tl.where(zeroed, 0.0, result)
    if POOL > 1 or DROPOUT > 0:
        tl.store(argmax + at, tl.where(zeroed, POOL * POOL, place).to(tl.uint8), mask=valid)
    tl.store(z + at, result.to(tl.bfloat16), mask=valid)


def launch_link_forward(
    y: Tensor,
    bias: Tensor,
    seeds: Tensor,
    z: Tensor,
    argmax: Tensor,
    *,
    pool_size: int,
    dropout: float,
    seed_index: int,
) -> None:
    """Launch a kernel to fill `z` and, with pooling or dropout, `argmax`: see `fused_trunk.link_forward`."""
    pixel_count, width, channels = _count_pixels(z)
    channel_tile, block = _tile(channels)
    grid = (-(-pixel_count // block),)
    constants = (width, channels, channel_tile, pool_size, dropout, block)
    _launch(_link_forward, grid, y, bias, seeds, z, argmax, pixel_count, seed_index, *constants, num_warps=4)


@triton.jit(do_not_specialize=["pixel_count", "chunk_size"])  # type: ignore[untyped-decorator]
def _link_backward(  # type: ignore[no-untyped-def]
    grad,
    z,
    argmax,
    y_grad,
    bias_partials,
    pixel_count,
    chunk_size,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    POOL: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, channels = tl.program_id(0), tl.arange(0, CHANNEL_TILE)
    total = tl.zeros((BLOCK, CHANNEL_TILE), tl.float32)
    for start in range(0, chunk_size, BLOCK):
        pixels = chunk * chunk_size + start + tl.arange(0, BLOCK)
        valid = (pixels < pixel_count)[:, None] & (channels < CHANNELS)[None, :]
        at = pixels[:, None] * CHANNELS + channels[None, :]
        block_grad = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        if POOL > 1 or DROPOUT > 0:
            place = tl.load(argmax + at, mask=valid, other=0)
            zeroed = place == POOL * POOL
        else:
            zeroed = tl.load(z + at, mask=valid, other=0.0) <= 0
        block_grad = tl.where(zeroed, 0.0, block_grad * (1 / (1 - DROPOUT))).to(tl.bfloat16)
        total += block_grad.to(tl.float32)
        if POOL > 1:
            write = y_grad + _first_of_block(pixels, WIDTH, POOL)[:, None] * CHANNELS + channels[None, :]
            for k in tl.static_range(POOL * POOL):
                offset = ((k // POOL) * (WIDTH * POOL) + k % POOL) * CHANNELS
                tl.store(write + offset, tl.where(place == k, block_grad, 0.0).to(tl.bfloat16), mask=valid)
        else:
            tl.store(y_grad + at, block_grad, mask=valid)
    tl.store(bias_partials + chunk * CHANNELS + channels, tl.sum(total, 0), mask=channels < CHANNELS)


def launch_link_backward(
    grad: Tensor, z: Tensor, argmax: Tensor, y_grad: Tensor, bias_partials: Tensor, *, pool_size: int, dropout: float
) -> None:
    """Launch a kernel to fill `y_grad`, and `bias_partials` (chunks, channels), whose sum is the bias' gradient."""
    pixel_count, width, channels = _count_pixels(z)
    channel_tile, block = _tile(channels)
    grid = (len(bias_partials),)
    counts = (pixel_count, _chunk_size(pixel_count, len(bias_partials), block))
    constants = (width, channels, channel_tile, pool_size, dropout, block)
    _launch(_link_backward, grid, grad, z, argmax, y_grad, bias_partials, *counts, *constants, num_warps=4)


# Partial sums ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_partials(partials, result, count, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = (rows < count)[:, None] & (columns < length)[None, :]
        total += tl.load(partials + rows[:, None] * length + columns[None, :], mask=valid, other=0.0)
    tl.store(result + columns, tl.sum(total, 0), mask=columns < length)


def launch_sum_partials(partials: Tensor, result: Tensor) -> None:
    """Launch a kernel to fill `result` (…) with the sum of `partials` (count, …) over the first dimension."""
    count, length = len(partials), result.numel()
    rows, columns = min(512, 1 << (count - 1).bit_length()), 16 if length <= 256 else 32
    grid = (-(-length // columns),)
    _launch(_sum_partials, grid, partials, result, count, length, rows, columns, num_warps=8)


# Sizes ----------------------------------------------------------------------------------------------------------------


def _count_pixels(z: Tensor) -> tuple[int, int, int]:
    """How many pixels, how many of them in a row, and how many channels."""
    return z.numel() // z.shape[1], z.shape[3] if z.dim() == 4 else 1, z.shape[1]


def _tile(channels: int) -> tuple[int, int]:
    """Channels and pixels that a program computes at a time."""
    channel_tile = 1 << (channels - 1).bit_length()
    return channel_tile, max(1, TILE // channel_tile)


def _chunk_size(pixel_count: int, chunks: int, block: int) -> int:
    """Pixels of a chunk, in whole blocks; the last chunks may have fewer."""
    return -(-pixel_count // (chunks * block)) * block
