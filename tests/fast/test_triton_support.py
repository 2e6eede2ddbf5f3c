"""What the layers with Triton kernels share."""

import pytest
import torch

from agscl.fast.triton_support import sum_partials

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(1, 5), (512, 32), (37, 100), (128, 64, 3, 3, 32), (700, 20), (512, 864), (64, 1024)]
)
def test_partial_sums_are_added(device, shape):
    partials = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    assert sum_partials(partials).shape == shape[1:]
    torch.testing.assert_close(sum_partials(partials), partials.double().sum(0).float(), rtol=1e-4, atol=1e-4)
