"""Operations that have kernels of their own on a GPU, and twins in plain torch."""

import subprocess
import sys
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl.fast import compiled, convolution
from agscl.fast.compiled import Compiled
from agscl.fast.convolution import (
    SHARES,
    convolved,
    division,
    of_pictures,
    picture_gradients,
    pictures,
    seen,
    suits,
    total,
    weight_gradients,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture
def called(monkeypatch):
    """The operations of ours that are called, by name."""
    names = []
    for name in ("weight_gradients", "pictures", "picture_gradients"):
        operation = getattr(convolution, name)
        noted = wraps(operation)(lambda *given, name=name, operation=operation: names.append(name) or operation(*given))
        monkeypatch.setattr(convolution, name, noted)
    return names


def drawn(*shape, device, dtype=torch.bfloat16, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype).contiguous(memory_format=torch.channels_last)


def of_float64(gradient, x, weight):
    """Gradients of weight and bias, computed with twice the digits."""
    weight = weight.double().requires_grad_()
    bias = torch.zeros(len(weight), dtype=torch.double, device=weight.device, requires_grad=True)
    y = F.conv2d(x.double(), weight, bias, padding=1)
    return torch.autograd.grad(y, (weight, bias), gradient.double())


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 8, 8), (7, 5, 9), (16, 32, 32), (148, 32, 32), (256, 32, 32)])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
def test_the_gradient_of_weights_is_what_more_digits_give(device, inputs, outputs, shape):
    examples, height, width = shape
    if device == "cpu" and inputs * outputs * examples > 2**16:
        pytest.skip("as the smaller ones, and slow")
    x = drawn(examples, inputs, height, width, device=device)
    gradient = drawn(examples, outputs, height, width, device=device, seed=1)
    weight = torch.zeros(outputs, inputs, 3, 3, device=device)
    parts = weight_gradients(gradient, x, division(outputs, inputs).shares)
    assert parts.dtype == torch.float32
    assert error(parts.sum(0).permute(0, 3, 1, 2), of_float64(gradient, x, weight)[0]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 8, 8), (7, 5, 9), (16, 32, 32), (148, 32, 32), (256, 32, 32)])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 16), (2, 32), (3, 32), (3, 128)])
def test_pictures_and_their_gradients_are_what_more_digits_give(device, channels, outputs, shape):
    examples, height, width = shape
    if device == "cpu" and examples > 16:
        pytest.skip("as the smaller ones, and slow")
    x = drawn(examples, channels, height, width, device=device, dtype=torch.float32)
    weight = drawn(outputs, channels, 3, 3, device=device, dtype=torch.float32, seed=1)
    bias = drawn(outputs, 1, 1, 1, device=device, dtype=torch.float32, seed=2).flatten()
    gradient = drawn(examples, outputs, height, width, device=device, seed=3)
    rounded = [one.bfloat16().double() for one in (x, weight, bias)]
    y = pictures(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, F.conv2d(*rounded, padding=1).relu()) < 4e-3  # bfloat16 keeps 8 bits
    parts, sums = picture_gradients(gradient, x, y, SHARES)
    of_weight, of_bias = of_float64(torch.where(y > 0, gradient, 0), rounded[0], weight)
    assert error(parts.sum(0).permute(0, 3, 1, 2), of_weight) < 1e-4
    assert error(sums.sum(0), of_bias) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_a_picture_that_is_not_a_number_is_not_hidden_by_relu(device):
    x = drawn(2, 3, 4, 4, device=device, dtype=torch.float32)
    x[1, 0, 2, 2] = float("nan")
    y = pictures(x, drawn(16, 3, 3, 3, device=device, dtype=torch.float32), torch.zeros(16, device=device))
    assert bool(y[0].isfinite().all())
    assert bool(y[1, :, 1:, 1:].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
def test_torch_is_told_the_truth_about_the_operations(device):
    x, gradient = drawn(2, 16, 4, 4, device=device), drawn(2, 32, 4, 4, device=device)
    known = torch.ops.agscl
    torch.library.opcheck(known.weight_gradients.default, (gradient, x, 5))
    x = drawn(2, 3, 4, 4, device=device, dtype=torch.float32)
    weight, bias = drawn(32, 3, 3, 3, device=device, dtype=torch.float32), torch.ones(32, device=device)
    torch.library.opcheck(known.pictures.default, (x, weight, bias))
    torch.library.opcheck(known.picture_gradients.default, (gradient, x, pictures(x, weight, bias), 5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(1, 5), (512, 32), (37, 100), (128, 64, 3, 3, 32), (700, 20), (512, 864), (64, 1024)]
)
def test_parts_are_summed_up(device, shape):
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    assert total(parts).shape == shape[1:]
    torch.testing.assert_close(total(parts), parts.double().sum(0).float(), rtol=1e-4, atol=1e-4)


def network():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Flatten()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_rearranged_network_uses_them_in_bfloat16_alone_and_is_as_exact(called, precision):
    torch.manual_seed(0)
    trunk, x = network(), drawn(8, 3, 8, 8, device="cpu", dtype=torch.float32)
    rearranged = Compiled(trunk, rearranged=True)

    def learned(within, precision=precision):
        trunk.zero_grad()
        called.clear()
        with within, torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            output = trunk(x)
            output.float().square().mean().backward()
        return [output.detach(), *[parameter.grad for parameter in trunk.parameters()]], sorted(called)

    exact, _ = learned(nullcontext(), torch.float32)
    plain, none = learned(nullcontext())
    other, some = learned(rearranged.in_use(compiled=False))
    assert none == []
    three = ["weight_gradients"] * 3
    assert some == (["picture_gradients", "pictures", *three] if precision == torch.bfloat16 else [])
    for true, usual, new in zip(exact, plain, other, strict=True):
        assert error(new, true.double()) < 1.5 * error(usual, true.double()) + 1e-6
        assert new.stride() == usual.stride()
    assert not any("forward" in vars(part) for part in trunk.modules())


def test_hooks_within_a_network_are_called_rearranged_or_not():
    trunk, met = network(), []
    trunk[0].register_forward_hook(lambda *_: met.append(1))
    with Compiled(trunk, rearranged=True).in_use(compiled=False), torch.autocast("cpu", torch.bfloat16):
        trunk(drawn(4, 3, 8, 8, device="cpu", dtype=torch.float32))
    assert met == [1]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 5, padding=2),
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(16, 16, 3, padding=1, stride=2),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(20, 16, 3, padding=1),
        nn.Conv2d(16, 256, 3, padding=1),
        nn.ConvTranspose2d(16, 16, 3, padding=1),
    ],
)
def test_other_convolutions_are_left_to_torch(layer):
    assert not suits(layer)


@pytest.mark.parametrize(
    ("x", "given"),
    [
        (torch.randn(2, 16, 4, 6), "a picture laid out channel by channel"),
        (torch.randn(16, 4, 6), "one picture, not a batch"),
        (drawn(2, 16, 4, 6, device="cpu", dtype=torch.double), "twice the digits"),
    ],
)
def test_other_inputs_are_left_to_torch(called, x, given):
    layer = nn.Conv2d(16, 32, 3, padding=1).to(x.dtype if x.dtype == torch.double else torch.float32)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = convolved(layer, x)
        assert torch.equal(y, layer(x)), given
        y.sum().backward()
    assert called == []


def test_pictures_whose_own_gradient_is_wanted_are_left_to_torch():
    layer, x = nn.Conv2d(3, 16, 3, padding=1), drawn(2, 3, 4, 4, device="cpu")
    assert of_pictures(layer, x)
    assert torch.equal(seen(layer, x), pictures(x, layer.weight, layer.bias))
    assert not of_pictures(layer, x.clone().requires_grad_())
    assert not of_pictures(nn.Conv2d(3, 16, 3, padding=1, bias=False), x)
    assert not of_pictures(nn.Conv2d(16, 16, 3, padding=1), drawn(2, 16, 4, 4, device="cpu"))


def test_processes_that_compiled_are_ended_and_forgotten_and_nobody_waits(monkeypatch):
    ended = []
    pool = SimpleNamespace(shutdown=lambda: ended.append(pool))
    pools, started = [pool], []
    pooling = SimpleNamespace(_pool_set=pools, after_fork=pools.clear)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", pooling)

    def thread(target):
        return SimpleNamespace(start=lambda: started.append(target))

    monkeypatch.setattr(compiled, "Thread", thread)
    compiled.let_compilers_go()
    compiled.let_compilers_go()
    assert pools == []
    assert ended == []
    assert len(started) == 1
    started[0]()
    assert ended == [pool]


def test_where_torch_never_compiled_there_is_nothing_to_end(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    compiled.let_compilers_go()
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace())  # another version of it
    compiled.let_compilers_go()


WOKEN = """
import sys
from contextlib import nullcontext
import torch
from agscl.fast import compiled

compiled.suppress = lambda *_: nullcontext()  # or nothing would be seen to fail
before, known = torch.get_rng_state(), set(sys.modules)
compiled._wake("cpu")
assert torch.equal(torch.get_rng_state(), before)
print(sorted(set(sys.modules) - known), "torch._dynamo" in known)
"""


def test_waking_a_device_draws_no_random_numbers_and_imports_nothing():
    """Two threads that import the same may get it half made."""
    done = subprocess.run([sys.executable, "-c", WOKEN], capture_output=True, text=True)
    assert done.stdout.strip() == "[] False", done.stderr


def test_gradients_of_gradients_are_refused():
    layer, first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
    inner = convolved(layer, drawn(2, 16, 4, 4, device="cpu").requires_grad_())
    outer = seen(first, drawn(2, 3, 4, 4, device="cpu"))
    for y, weight in ((inner, layer.weight), (outer, first.weight)):
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(y.float().sum(), weight, create_graph=True)


def test_more_numbers_than_the_kernels_count_or_no_triton_are_left_to_torch(monkeypatch):
    layer, x = nn.Conv2d(3, 16, 3, padding=1), drawn(2, 3, 4, 4, device="cpu")
    assert of_pictures(layer, x)
    monkeypatch.setattr(convolution, "MOST", 2 * 4 * 4 * 128)
    assert not of_pictures(layer, x)
    monkeypatch.undo()
    monkeypatch.setattr(convolution, "TRITON", False)
    assert of_pictures(layer, x), "a CPU needs none"
    on_gpu = SimpleNamespace(dim=lambda: 4, numel=lambda: 1, is_contiguous=lambda memory_format: True, is_cuda=True)
    assert not convolution.takes(on_gpu)


def test_torch_still_has_what_is_hashed_in_advance():
    from torch._inductor import codecache

    assert len(codecache.torch_key()) > 0
    assert "hash" in codecache.CacheBase.get_system()
