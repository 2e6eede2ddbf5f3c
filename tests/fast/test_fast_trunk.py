"""Which way a trunk is computed, and what happens where that way fails."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import fast
from agscl.fast import conv3x3, fast_trunk, fused_trunk
from agscl.fast.fast_trunk import FastTrunk
from agscl.fast.fused_trunk import find_links
from agscl.networks import cifar, omniglot
from agscl.training import CompileFailed
from small_networks import LayerByLayer, pass_through, random_tensor, small_network

AS_ON_GPU = {"rewrite_layers": True, "bf16_channels_last": True}


def make_trunk(network, device="cpu", **options):
    return FastTrunk(network, torch.device(device), **{**AS_ON_GPU, **options})


def test_torchs_compiler_is_used_for_all_other_networks_and_precisions():
    for options in ({"rewrite_layers": False}, {"bf16_channels_last": False}, {"fused_layers": False}):
        assert make_trunk(cifar.CifarTrunk(), **options).fused is None
    assert make_trunk(omniglot.OmniglotTrunk()).fused is None


def test_the_first_pass_runs_with_our_kernels_like_every_other():
    network = small_network()
    trunk = make_trunk(network)
    x = random_tensor(2, 1, 8, 8, dtype=torch.float32)
    for _ in range(2):
        pass_through(network, x, trunk.use_fast_forward())
        assert trunk.fused.all_layers_fused
        assert trunk.version == 0


def test_a_hook_or_a_forward_of_the_users_is_not_passed_over():
    network, called = small_network(), []
    x = random_tensor(2, 1, 8, 8, dtype=torch.float32)
    trunk = make_trunk(network)
    handle = network[2].register_forward_hook(lambda *_: called.append("forward hook"))
    pass_through(network, x, trunk.use_fast_forward())
    handle.remove()
    handle = network[9].register_full_backward_hook(lambda *_: called.append("backward hook"))
    pass_through(network, x, trunk.use_fast_forward())
    handle.remove()
    trunk = make_trunk(network)
    network[0].forward = lambda x: (
        called.append("forward") or F.conv2d(x, network[0].weight, network[0].bias, padding=1)
    )
    pass_through(network, x, trunk.use_fast_forward())
    assert called == ["forward hook", "backward hook", "forward"]


def test_hooks_are_called_where_torchs_compiler_is_used_too():
    network, called = small_network(), []
    network[0].register_forward_hook(lambda *_: called.append(1))
    trunk = make_trunk(network, fused_layers=False)
    with trunk.use_fast_forward(full_batch=False), torch.autocast("cpu", torch.bfloat16):
        network(random_tensor(4, 1, 8, 8, dtype=torch.float32))
    assert called == [1]


def make_failing_trunk(monkeypatch, error):
    """A compiled trunk on a machine where Triton fails."""

    def fail(*args):
        raise error

    kernels = SimpleNamespace(launch_sum_partials=fail)
    monkeypatch.setitem(sys.modules, "agscl.fast.triton_kernels", kernels)
    monkeypatch.setattr(fast, "triton_kernels", kernels, raising=False)
    trunk = make_trunk(small_network())
    trunk._triton_checked = False  # as on a GPU
    return trunk


def test_where_triton_cannot_compile_the_error_is_one_line_each_time(monkeypatch):
    trunk = make_failing_trunk(monkeypatch, RuntimeError("Failed to find C compiler.\nPlease specify via CC"))
    for _ in range(2):
        expected = r"--set compile=false. Torch said: Failed to find C compiler\.$"
        with pytest.raises(CompileFailed, match=expected), trunk.use_fast_forward():
            raise AssertionError("never reached")
    trunk.network[0].register_forward_hook(lambda *_: None)
    with trunk.use_fast_forward():  # needs no Triton
        pass


def test_a_lack_of_memory_is_not_taken_for_a_lack_of_a_compiler(monkeypatch):
    trunk = make_failing_trunk(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError), trunk.use_fast_forward():
        raise AssertionError("never reached")


def test_a_later_error_of_tritons_is_one_line_too():
    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    trunk = make_trunk(small_network())
    with pytest.raises(CompileFailed, match="Torch said: shared memory"), trunk.use_fast_forward():
        raise OutOfResources("shared memory")
    with pytest.raises(KeyError), trunk.use_fast_forward():
        raise KeyError("of the user's")


@pytest.mark.parametrize(
    ("make_network", "shape"),
    [(LayerByLayer, (4, 8)), (lambda: LayerByLayer().layers, (4, 5, 8))],
)
def test_a_network_that_calls_its_layers_in_another_way_is_compiled_by_torch_after_all(make_network, shape):
    network = make_network()
    trunk = make_trunk(network)
    assert trunk.fused
    version = trunk.version
    x = random_tensor(*shape, dtype=torch.float32)
    with trunk.use_fast_forward(), torch.autocast("cpu", torch.bfloat16):
        first = network(x)
    assert trunk.fused is None
    assert trunk.version == version + 1
    with trunk.use_fast_forward(full_batch=False), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network(x), first)


@pytest.mark.parametrize("own_convolutions", [True, False])
def test_a_network_used_as_it_is_keeps_our_kernels(own_convolutions):
    network = small_network()
    trunk = make_trunk(network, own_convolutions=own_convolutions)
    for _ in range(2):
        pass_through(network, random_tensor(2, 1, 8, 8, dtype=torch.float32), trunk.use_fast_forward())
        assert trunk.fused.fused_layers == {link.layer for link in find_links(network)}
    assert trunk.torch_compiled is None


def test_without_triton_a_gpu_has_torchs_compiler(monkeypatch):
    for module in (fast_trunk, fused_trunk, conv3x3):
        monkeypatch.setattr(module, "HAS_TRITON", False)
    monkeypatch.setattr(FastTrunk, "_compile_with_torch", lambda self: None)
    assert FastTrunk(small_network(), torch.device("cuda"), **AS_ON_GPU).fused is None
    assert FastTrunk(small_network(), torch.device("cpu"), **AS_ON_GPU).fused


def test_a_forward_given_by_the_user_comes_back_when_torch_compiles_the_trunk(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    network = nn.Sequential(nn.Linear(2, 2))
    own_forward = lambda x: x + 1  # noqa: E731
    network.forward = own_forward
    trunk = make_trunk(network, rewrite_layers=False)
    with trunk.use_fast_forward():
        assert torch.equal(network(torch.zeros(1)), torch.ones(1))
        assert network.forward is not own_forward
    assert network.forward is own_forward
