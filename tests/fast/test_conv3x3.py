"""3 × 3 convolutions: Triton kernels on a GPU, and their counterparts in plain torch."""

from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl.fast import conv3x3 as module
from agscl.fast.conv3x3 import (
    IMAGE_CHUNKS,
    conv3x3,
    conv3x3_weight_grad,
    conv_relu_input,
    conv_relu_input_backward,
    conv_relu_input_forward,
    supports_conv_relu_input,
    supports_layer,
    weight_grad_tiling,
)
from agscl.fast.torch_compiled_trunk import TorchCompiledTrunk
from small_networks import random_tensor, relative_error

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture
def called(monkeypatch):
    """The names of our operators, as they are called."""
    names = []
    for name in ("conv3x3_weight_grad", "conv_relu_input_forward", "conv_relu_input_backward"):
        operator = getattr(module, name)
        recorded = wraps(operator)(lambda *args, name=name, operator=operator: names.append(name) or operator(*args))
        monkeypatch.setattr(module, name, recorded)
    return names


def float64_grads(grad, x, weight):
    """Gradients of weight and bias, computed in float64."""
    weight = weight.double().requires_grad_()
    bias = torch.zeros(len(weight), dtype=torch.double, device=weight.device, requires_grad=True)
    y = F.conv2d(x.double(), weight, bias, padding=1)
    return torch.autograd.grad(y, (weight, bias), grad.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 8, 8), (7, 5, 9), (16, 32, 32), (148, 32, 32), (256, 32, 32)])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
def test_the_weight_gradient_is_what_float64_gives(device, inputs, outputs, shape):
    examples, height, width = shape
    if device == "cpu" and inputs * outputs * examples > 2**16:
        pytest.skip("as the smaller ones, and slow")
    x = random_tensor(examples, inputs, height, width, device=device)
    grad = random_tensor(examples, outputs, height, width, device=device, seed=1)
    weight = torch.zeros(outputs, inputs, 3, 3, device=device)
    partials = conv3x3_weight_grad(grad, x, weight_grad_tiling(outputs, inputs).chunks)
    assert partials.dtype == torch.float32
    assert relative_error(partials.sum(0).permute(0, 3, 1, 2), float64_grads(grad, x, weight)[0]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 8, 8), (7, 5, 9), (16, 32, 32), (148, 32, 32), (256, 32, 32)])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 16), (2, 32), (3, 32), (3, 128)])
def test_the_convolution_of_images_and_its_gradients_are_what_float64_gives(device, channels, outputs, shape):
    examples, height, width = shape
    if device == "cpu" and examples > 16:
        pytest.skip("as the smaller ones, and slow")
    x = random_tensor(examples, channels, height, width, device=device, dtype=torch.float32)
    weight = random_tensor(outputs, channels, 3, 3, device=device, dtype=torch.float32, seed=1)
    bias = random_tensor(outputs, 1, 1, 1, device=device, dtype=torch.float32, seed=2).flatten()
    grad = random_tensor(examples, outputs, height, width, device=device, seed=3)
    rounded = [one.bfloat16().double() for one in (x, weight, bias)]
    y = conv_relu_input_forward(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(y, F.conv2d(*rounded, padding=1).relu()) < 4e-3  # bfloat16 keeps 8 bits
    partials, bias_partials = conv_relu_input_backward(grad, x, y, IMAGE_CHUNKS)
    weight_grad, bias_grad = float64_grads(torch.where(y > 0, grad, 0), rounded[0], weight)
    assert relative_error(partials.sum(0).permute(0, 3, 1, 2), weight_grad) < 1e-4
    assert relative_error(bias_partials.sum(0), bias_grad) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_relu_does_not_hide_nan(device):
    x = random_tensor(2, 3, 4, 4, device=device, dtype=torch.float32)
    x[1, 0, 2, 2] = float("nan")
    weight = random_tensor(16, 3, 3, 3, device=device, dtype=torch.float32)
    y = conv_relu_input_forward(x, weight, torch.zeros(16, device=device))
    assert bool(y[0].isfinite().all())
    assert bool(y[1, :, 1:, 1:].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
def test_the_custom_operators_are_registered_as_torch_expects(device):
    x, grad = random_tensor(2, 16, 4, 4, device=device), random_tensor(2, 32, 4, 4, device=device)
    known = torch.ops.agscl
    torch.library.opcheck(known.conv3x3_weight_grad.default, (grad, x, 5))
    x = random_tensor(2, 3, 4, 4, device=device, dtype=torch.float32)
    weight, bias = random_tensor(32, 3, 3, 3, device=device, dtype=torch.float32), torch.ones(32, device=device)
    torch.library.opcheck(known.conv_relu_input_forward.default, (x, weight, bias))
    y = conv_relu_input_forward(x, weight, bias)
    torch.library.opcheck(known.conv_relu_input_backward.default, (grad, x, y, 5))


def network():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Flatten()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_network_with_rewritten_layers_uses_them_in_bfloat16_alone_and_is_as_exact(called, precision):
    torch.manual_seed(0)
    trunk, x = network(), random_tensor(8, 3, 8, 8, device="cpu", dtype=torch.float32)
    rewritten = TorchCompiledTrunk(trunk, CPU, rewrite_layers=True)

    def learned(within, precision=precision):
        trunk.zero_grad()
        called.clear()
        with within, torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            output = trunk(x)
            output.float().square().mean().backward()
        return [output.detach(), *[parameter.grad for parameter in trunk.parameters()]], sorted(called)

    exact, _ = learned(nullcontext(), torch.float32)
    plain, none = learned(nullcontext())
    other, some = learned(rewritten.use_compiled_forward(full_batch=False))
    assert none == []
    ours = [*["conv3x3_weight_grad"] * 3, "conv_relu_input_backward", "conv_relu_input_forward"]
    assert some == (ours if precision == torch.bfloat16 else [])
    for true, usual, new in zip(exact, plain, other, strict=True):
        assert relative_error(new, true.double()) < 1.5 * relative_error(usual, true.double()) + 1e-6
        assert new.stride() == usual.stride()
    assert not any("forward" in vars(part) for part in trunk.modules())


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
    assert not supports_layer(layer)


@pytest.mark.parametrize(
    ("x", "given"),
    [
        (torch.randn(2, 16, 4, 6), "a picture laid out channel by channel"),
        (torch.randn(16, 4, 6), "one picture, not a batch"),
        (random_tensor(2, 16, 4, 6, device="cpu", dtype=torch.double), "twice the digits"),
    ],
)
def test_other_inputs_are_left_to_torch(called, x, given):
    layer = nn.Conv2d(16, 32, 3, padding=1).to(x.dtype if x.dtype == torch.double else torch.float32)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = conv3x3(layer, x)
        assert torch.equal(y, layer(x)), given
        y.sum().backward()
    assert called == []


def test_images_whose_own_gradient_is_wanted_are_left_to_torch():
    layer, x = nn.Conv2d(3, 16, 3, padding=1), random_tensor(2, 3, 4, 4, device="cpu")
    assert supports_conv_relu_input(layer, x)
    assert torch.equal(conv_relu_input(layer, x), conv_relu_input_forward(x, layer.weight, layer.bias))
    assert not supports_conv_relu_input(layer, x.clone().requires_grad_())
    assert not supports_conv_relu_input(nn.Conv2d(3, 16, 3, padding=1, bias=False), x)
    assert not supports_conv_relu_input(nn.Conv2d(16, 16, 3, padding=1), random_tensor(2, 16, 4, 4, device="cpu"))


def test_second_derivatives_are_refused():
    layer, first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
    inner = conv3x3(layer, random_tensor(2, 16, 4, 4, device="cpu").requires_grad_())
    outer = conv_relu_input(first, random_tensor(2, 3, 4, 4, device="cpu"))
    for y, weight in ((inner, layer.weight), (outer, first.weight)):
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(y.float().sum(), weight, create_graph=True)


def test_inputs_too_large_for_the_kernels_or_without_triton_are_left_to_torch(monkeypatch):
    layer, x = nn.Conv2d(3, 16, 3, padding=1), random_tensor(2, 3, 4, 4, device="cpu")
    assert supports_conv_relu_input(layer, x)
    monkeypatch.setattr(module, "MAX_ELEMENTS", 2 * 4 * 4 * 128)
    assert not supports_conv_relu_input(layer, x)
    monkeypatch.undo()
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert supports_conv_relu_input(layer, x), "a CPU needs none"
    on_gpu = SimpleNamespace(dim=lambda: 4, numel=lambda: 1, is_contiguous=lambda memory_format: True, is_cuda=True)
    assert not module.supports_input(on_gpu)
