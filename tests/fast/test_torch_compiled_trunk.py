"""Trunks compiled by torch, with layers rewritten."""

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from agscl.fast.torch_compiled_trunk import TorchCompiledTrunk
from agscl.networks.cifar import CifarTrunk

CPU = torch.device("cpu")


def assert_same_compiled(compiled, trunk, x):
    """Output and gradients."""
    found = []
    for context in (nullcontext(), compiled.use_compiled_forward(True)):
        trunk.zero_grad()
        with context:
            output = trunk(x)
        output.square().sum().backward()
        found.append([output.detach(), *[parameter.grad for parameter in trunk.parameters()]])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)


@pytest.mark.parametrize(("channels", "padding"), [(3, 1), (1, 0), (2, (1, 0))])
def test_a_compiled_trunks_first_convolution_gives_the_same_as_a_matrix_product(monkeypatch, channels, padding):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(channels, 5, 3, padding=padding), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten())
    trunk.double().to(memory_format=torch.channels_last)
    x = torch.randn(6, channels, 8, 9, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    compiled = TorchCompiledTrunk(trunk, CPU, rewrite_layers=True)
    assert compiled.im2col_layers == [trunk[0]]
    assert_same_compiled(compiled, trunk, x)
    assert "forward" not in vars(trunk[0])
    assert "forward" not in vars(trunk)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 5),  # reads more than 32 numbers
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(3, 4, 3),
    ],
)
def test_convolutions_that_are_no_plain_product_stay_as_they_are(layer):
    assert TorchCompiledTrunk(nn.Sequential(layer), CPU, rewrite_layers=True).im2col_layers == []


@pytest.mark.parametrize("side", [9, 10])  # a pool of two has blocks of 10, and not of 9
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1), nn.MaxPool2d(2, ceil_mode=True)]
)
def test_a_compiled_trunk_takes_the_maximum_before_bias_and_relu_and_gives_the_same(monkeypatch, bias, pool, side):
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1, bias=bias), nn.ReLU(), pool, nn.Conv2d(8, 6, 3, bias=bias), nn.ReLU()]
    trunk = nn.Sequential(nn.Sequential(*layers), nn.MaxPool2d(2), nn.Flatten()).double()
    x = torch.randn(6, 4, side, side, dtype=torch.double)
    compiled = TorchCompiledTrunk(trunk, CPU, rewrite_layers=True)
    assert compiled.pool_chains == [trunk[0]]  # the second maximum is not of the same chain
    assert_same_compiled(compiled, trunk, x)
    called = {"conv2d": "conv", "relu": "relu", "boolean_dispatch": "maximum", "autograd_function": "maximum"}
    order = [kind for name in names for part, kind in called.items() if part in name]
    assert order == ["conv", "maximum", "relu", "conv", "relu", "maximum"]
    assert "forward" not in vars(trunk[0])


def test_a_trunk_with_rewritten_layers_is_compiled_once_for_all_its_copies(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        trunk = CifarTrunk()
        compiled = TorchCompiledTrunk(trunk, CPU, rewrite_layers=True)
        assert compiled.im2col_layers == [trunk.conv[0]]
        assert compiled.pool_chains == [trunk.conv]
        for _ in range(2):  # of each of two tasks, say
            with compiled.use_compiled_forward(True):
                trunk(torch.zeros(2, 3, 32, 32))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("maximum", [True, False])
def test_torch_may_keep_what_it_compiles_with_blocks_in_it_and_nothing_else(monkeypatch, maximum):
    from torch._functorch import config

    allowed = []

    def backend(graph, inputs):
        allowed.append(config.autograd_cache_allow_custom_autograd_functions)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    trunk = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2) if maximum else nn.AvgPool2d(2))
    with TorchCompiledTrunk(trunk, CPU, rewrite_layers=True).use_compiled_forward(True):
        trunk(torch.zeros(2, 4, 8, 8))
    assert allowed == [maximum]
    assert not config.autograd_cache_allow_custom_autograd_functions


COMPILED_ONCE_MORE = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from agscl.fast.torch_compiled_trunk import TorchCompiledTrunk

torch.manual_seed(0)
trunk = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
with TorchCompiledTrunk(trunk, torch.device("cpu"), rewrite_layers=True).use_compiled_forward(True):
    output = trunk(torch.ones(2, 4, 8, 8))
output.square().sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], trunk[0].weight.grad.sum().item())
"""


@pytest.mark.slow
def test_a_new_process_finds_a_trunk_compiled_and_computes_the_same(tmp_path):
    """Needs a C++ compiler."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", COMPILED_ONCE_MORE]
    first, second = (subprocess.run(words, env=environment, capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.split()[0] == "0"
    assert second.stdout.split() == ["1", first.stdout.split()[1]]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.LeakyReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AvgPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)],
        [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)],  # computed as a product
    ],
)
def test_other_chains_of_layers_stay_as_they_are(layers):
    assert TorchCompiledTrunk(nn.Sequential(*layers), CPU, rewrite_layers=True).pool_chains == []
    assert (
        TorchCompiledTrunk(
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), CPU, rewrite_layers=False
        ).pool_chains
        == []
    )


def test_a_forward_pass_that_a_user_gave_to_a_convolution_stays(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3))
    own = lambda x: x.new_full((2,), 7.0)  # noqa: E731
    trunk[0].forward = own
    compiled = TorchCompiledTrunk(trunk, CPU, rewrite_layers=True)
    with compiled.use_compiled_forward(True), compiled.use_compiled_forward(True):
        assert trunk(torch.zeros(1, 1, 4, 4)).tolist() == [7, 7]
    assert trunk[0].forward is own
