"""Max pooling over blocks."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agscl.fast import max_pool
from agscl.fast.max_pool import BlockMaxPoolFunction


@given(
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_maximum_of_each_block_is_what_max_pooling_gives_bit_for_bit(size, shape, dtype, channels_last, seed):
    generator = torch.Generator().manual_seed(seed)
    examples, channels, rows, columns = shape
    x = torch.randint(-2, 3, (examples, channels, rows * size, columns * size), generator=generator)  # often equal
    x = x.to(dtype).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    x[torch.rand(x.shape, generator=generator) < 0.05] = math.nan
    x.requires_grad_()
    plain, largest = F.max_pool2d(x, size), BlockMaxPoolFunction.apply(x, size)
    gradient = torch.randn(plain.shape, generator=generator).to(dtype)
    torch.testing.assert_close(largest, plain, rtol=0, atol=0, equal_nan=True)
    of_plain, of_largest = (torch.autograd.grad(output, x, gradient)[0] for output in (plain, largest))
    assert torch.equal(of_largest, of_plain)


@pytest.mark.parametrize(
    ("pool", "blocks"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(4, ceil_mode=True), True),
        (nn.MaxPool2d(17), False),  # more places than a byte tells
        (nn.MaxPool2d(2, stride=1), False),
        (nn.MaxPool2d((2, 2)), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, dilation=2, stride=2), False),
        (nn.MaxPool2d(3), False),  # does not divide the sides
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_only_windows_that_are_blocks_are_compared_block_by_block(monkeypatch, pool, blocks, batched):
    used = []
    apply = BlockMaxPoolFunction.apply
    monkeypatch.setattr(BlockMaxPoolFunction, "apply", lambda *given: used.append(1) or apply(*given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(*[2] * batched, 3, 68, 68, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain, other = pool(x), max_pool.max_pool(pool, x)
    assert torch.equal(other, plain)
    assert torch.equal(*[torch.autograd.grad(output.square().sum(), x)[0] for output in (other, plain)])
    assert bool(used) == (blocks and batched)
