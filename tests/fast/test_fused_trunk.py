"""Networks of plain layers: Triton kernels on a GPU, and their counterparts in plain torch."""

import copy
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import fast
from agscl.fast import conv3x3, fused_trunk, triton_support
from agscl.fast.fused_trunk import (
    FusedTrunk,
    LinearFunction,
    Link,
    LinkFunction,
    compile_chain,
    link_backward,
    link_forward,
    run_chain,
    split_into_links,
    supports_network,
)
from agscl.networks import alexnet, cifar, eight, mlp, omniglot
from small_networks import CHANNELS_LAST, pass_through, random_tensor, relative_error, small_network

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
NO_SEEDS = torch.empty(0, dtype=torch.long)


SHAPES = [((5, 32, 6, 4), 2), ((3, 64, 5, 7), 1), ((2, 16, 8, 8), 4), ((3, 128, 9, 6), 3), ((7, 40), 1), ((9, 1024), 1)]
LARGE = [((256, 32, 32, 32), 2), ((256, 64, 16, 16), 1), ((148, 128, 8, 8), 2), ((500, 256), 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "size"), [*SHAPES, *LARGE])
def test_pooling_bias_and_relu_with_their_gradients_are_what_float64_gives(device, shape, size):
    if device == "cpu" and shape[0] > 16:
        pytest.skip("as the smaller ones, and slow")
    y = random_tensor(*shape, device=device).requires_grad_()
    bias = random_tensor(shape[1], device=device, dtype=torch.float32, seed=1).requires_grad_()
    z = LinkFunction.apply(y, bias, size, 0.0, NO_SEEDS.to(device), 0)
    exact, by = y.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    largest = F.max_pool2d(exact, size) if size > 1 else exact
    expected = F.relu(largest + by.view(-1, *[1] * (y.dim() - 2)))
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, expected.float().bfloat16())
    grad = random_tensor(*z.shape, device=device, seed=2)
    found = torch.autograd.grad(z, (y, bias), grad)
    wanted = torch.autograd.grad(expected, (exact, by), grad.double())
    assert torch.equal(found[0].double(), wanted[0]), "nothing is rounded on the way"
    assert found[0].stride() == y.stride()
    assert relative_error(found[1], wanted[1]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "size"), [((64, 32, 8, 8), 2), ((40, 64, 9, 7), 1), ((500, 100), 1)])
@pytest.mark.parametrize("dropout", [0.25, 0.5])
def test_dropout_keeps_as_much_as_it_should_scaled_up_and_the_gradient_follows(device, shape, size, dropout):
    y = random_tensor(*shape, device=device)
    bias = torch.full((shape[1],), 8.0, device=device)  # so that all are above 0
    seeds = torch.tensor([3, 2**61 + 5], device=device)
    whole, _ = link_forward(y, bias, size, 0.0, seeds, 0)
    found = [link_forward(y, bias, size, dropout, seeds, place)[0] for place in (0, 1, 1)]
    assert torch.equal(found[1], found[2]), "one seed draws one thing"
    kept = [z != 0 for z in found[:2]]
    for z, left in zip(found[:2], kept, strict=True):
        assert left.double().mean().item() == pytest.approx(1 - dropout, abs=0.015)
        assert left.flatten(2 if z.dim() == 4 else 1).double().mean(-1).min() > 0, "no channel goes as a whole"
        torch.testing.assert_close(z[left].float(), whole[left].float() / (1 - dropout), rtol=0.01, atol=0)
    both = (kept[0] & kept[1]).double().mean().item()
    assert both == pytest.approx((1 - dropout) ** 2, abs=0.015), "seeds draw independently"
    grad = random_tensor(*whole.shape, device=device, seed=1)
    z, argmax = link_forward(y, bias, size, dropout, seeds, 1)
    y_grad, bias_partials = link_backward(grad, z, argmax, size, dropout)
    expected = torch.where(kept[1], grad.float() / (1 - dropout), 0).bfloat16()
    at = F.max_pool2d(y_grad.abs().float(), size) if size > 1 else y_grad.abs().float()
    assert torch.equal(at, expected.abs().float())
    over = [side for side in range(z.dim()) if side != 1]
    assert relative_error(bias_partials.sum(0), expected.double().sum(over)) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, 2])
def test_nan_is_not_hidden_and_its_gradient_neither(device, size, dropout):
    y, seeds = random_tensor(2, 16, 4, 4, device=device), torch.zeros(1, dtype=torch.long, device=device)
    y[1, :, 3, 3] = float("nan")
    z, argmax = link_forward(y, torch.zeros(16, device=device), size, dropout, seeds, 0)
    assert bool(z[0].isfinite().all())
    assert bool(z[1, :, -1, -1].isnan().all())
    y_grad, _ = link_backward(torch.ones_like(z), z, argmax, size, dropout)
    assert bool((y_grad[1, :, 3, 3] == 1 / (1 - dropout)).all())


NETWORKS = {
    "cifar": (cifar.CifarTrunk, (8, 3, 32, 32)),
    "small": (small_network, (64, 1, 8, 8)),
    "dense": (lambda: mlp.MLP(20, (32, 16)), (64, 20)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own_convolutions", [True, False])
def test_a_fused_network_is_as_exact_as_torchs_own_and_left_alone_in_float32(device, name, precision, own_convolutions):
    torch.manual_seed(0)
    kind, shape = NETWORKS[name]
    trunk = kind().to(device, **CHANNELS_LAST).eval()
    x = random_tensor(*shape, device=device, dtype=torch.float32)
    within = FusedTrunk(trunk, own_convolutions).use_fused_layers()
    exact = pass_through(copy.deepcopy(trunk).double(), x.double(), precision=torch.float64)
    plain, other = pass_through(trunk, x, precision=precision), pass_through(trunk, x, within, precision)
    for true, usual, new in zip(exact, plain, other, strict=True):
        assert new.stride() == usual.stride() or new.shape[1] == 1  # then two layouts are one
        assert new.dtype == usual.dtype
        if precision == torch.bfloat16:
            assert relative_error(new, true) < 4 * relative_error(usual, true) + 3e-3
        else:
            assert relative_error(new, usual.double()) < 1e-4, "but for the order of sums on a GPU"
    usual, new = (
        sum(relative_error(one, true) for one, true in zip(way, exact, strict=True)) for way in (plain, other)
    )
    assert new < 2 * usual + 1e-5
    assert not any("forward" in vars(part) for part in trunk.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_each_pass_drops_other_nodes_drawn_by_torchs_generator(device):
    trunk = small_network().to(device, **CHANNELS_LAST)
    x = random_tensor(4, 1, 8, 8, device=device, dtype=torch.float32)
    fused = FusedTrunk(trunk)

    def outputs():
        torch.manual_seed(5)
        with torch.no_grad(), fused.use_fused_layers(), torch.autocast(device, torch.bfloat16):
            return trunk(x), trunk(x)

    first, second = outputs()
    assert not torch.equal(first, second)
    assert all(torch.equal(one, other) for one, other in zip(outputs(), (first, second), strict=True))
    trunk.eval()
    first, second = outputs()
    assert torch.equal(first, second)
    drawn_so_far = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    torch.manual_seed(5)
    before = drawn_so_far()
    outputs()
    assert torch.equal(drawn_so_far(), before), "nothing is drawn where nothing is dropped"


def test_the_links_of_the_papers_network_are_found_in_order():
    trunk = cifar.CifarTrunk()
    found = split_into_links(trunk.conv)
    assert [len(link.following) for link in found] == [1, 3] * 3
    assert [link.pool_size for link in found] == [1, 2] * 3
    assert [link.dropout for link in found] == [0, 0.25] * 3
    assert [layer for link in found for layer in (link.layer, *link.following)] == list(trunk.conv)
    flatten, dense = split_into_links(trunk.dense)
    assert (type(flatten), dense.dropout, dense.pool_size) == (nn.Flatten, 0.5, 1)
    trunk.eval()
    assert dense.dropout == 0
    x = torch.randn(2, 2048)
    assert torch.equal(dense(x), trunk.dense[1:](x))


@pytest.mark.parametrize(
    ("layers", "alone"),
    [
        ([nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.ReLU()], True),
        ([nn.Conv2d(16, 16, 3, padding=1)], True),
        ([nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2)], True),
        ([nn.Conv2d(16, 16, 3), nn.ReLU()], True),
        ([nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.5)], True),
        ([nn.Linear(4, 2048), nn.ReLU()], True),
        ([nn.Linear(4, 4), nn.ReLU(), nn.Dropout(1.0)], True),
        ([nn.Linear(4, 4), nn.LeakyReLU()], True),
        ([nn.ReLU(), nn.Dropout(0.5)], True),
        ([nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)], False),
        ([nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)], False),
        ([nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.5)], False),
        ([nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(16)], False),
    ],
)
def test_other_layers_belong_to_no_link_and_such_a_network_is_not_supported(layers, alone):
    chain = nn.Sequential(*layers)
    first, *rest = split_into_links(chain)
    assert isinstance(first, Link) != alone
    assert not any(isinstance(part, Link) for part in rest)
    assert not supports_network(chain)


def test_networks_of_links_and_reshapes_alone_are_supported():
    assert supports_network(cifar.CifarTrunk())
    assert supports_network(mlp.MLP())
    assert supports_network(small_network())
    assert not supports_network(omniglot.OmniglotTrunk())
    assert not supports_network(eight.EightTrunk())
    assert not supports_network(nn.Sequential(nn.Flatten()))
    with torch.device("meta"):
        assert not supports_network(alexnet.AlexNetTrunk())
    scaled = cifar.CifarTrunk()
    scaled.scale = nn.Parameter(torch.ones(()))
    assert not supports_network(scaled), "who knows what is done with it"
    named = cifar.CifarTrunk()
    named.relu = nn.ReLU()
    assert not supports_network(named)


def test_inputs_that_the_kernels_do_not_support_are_left_to_torch(monkeypatch):
    trunk = small_network().eval()
    x = torch.randn(2, 1, 8, 8)

    def same(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.equal(run_chain(trunk, x, set()), nn.Sequential.forward(trunk, x))

    x = random_tensor(2, 1, 8, 8, device="cpu", dtype=torch.float32)
    assert not same(x), "another rounding"
    used = []
    for kind in (LinkFunction, LinearFunction):
        apply = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *given, apply=apply: used.append(1) or apply(*given))
    monkeypatch.setattr(fused_trunk, "MAX_ELEMENTS", 0)
    monkeypatch.setattr(conv3x3, "MAX_ELEMENTS", 0)
    assert same(x)
    assert used == []


class OnGpu(list):
    """What is asked of a tensor."""

    is_cuda, dtype = True, torch.float32

    def dim(self):
        return 2

    def is_floating_point(self):
        return True


def test_without_triton_a_tensor_on_a_gpu_is_left_to_torch(monkeypatch):
    link = Link(nn.Linear(4, 4), (nn.ReLU(),))
    for there in (True, False):
        monkeypatch.setattr(fused_trunk, "HAS_TRITON", there)
        assert fused_trunk._supports_link_input(link, OnGpu([1, 2])) == there


@pytest.mark.parametrize("last", [nn.MaxPool2d(2), nn.Dropout(0.5)])
def test_what_comes_out_of_a_chain_may_be_changed_in_place_where_torch_allows_it(last):
    trunk = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), last).to(**CHANNELS_LAST)
    x = random_tensor(2, 16, 4, 4, device="cpu")
    for within in (nullcontext(), FusedTrunk(trunk).use_fused_layers()):
        with within, torch.autocast("cpu", torch.bfloat16):
            trunk(x).add_(1).sum().backward()


@pytest.mark.parametrize("trunk", [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), small_network()])
def test_an_empty_batch_gives_nothing_and_no_error(trunk):
    shape = (0, 4) if len(trunk) == 2 else (0, 1, 8, 8)
    with FusedTrunk(trunk).use_fused_layers(), torch.autocast("cpu", torch.bfloat16):
        output = trunk(torch.empty(shape))
        output.sum().backward()
    assert len(output) == 0


def test_second_derivatives_are_refused():
    x = random_tensor(2, 4, device="cpu", dtype=torch.float32)
    trunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autocast("cpu", torch.bfloat16):
        output = run_chain(trunk, x, set())
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(output.float().sum(), trunk[0].weight, create_graph=True)


@pytest.fixture
def launches(monkeypatch):
    """The kernels launched, by name, with shapes and dtypes: on a CPU, they compute nothing."""
    found = set()

    def record(name):
        def launch(*args, **options):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            options = {key: value for key, value in options.items() if key != "seed_index"}
            shapes = [(t.shape, t.dtype) for t in tensors if t.dtype != torch.long]  # seeds may be any number
            found.add((name, tuple(shapes), tuple(options.items())))
            if not tensors[-1].is_meta:
                tensors[-1].zero_()  # or what comes after might be NaN

        return launch

    names = ["conv3x3_weight_grad", "conv_relu_input_forward", "conv_relu_input_backward"]
    names += ["link_forward", "link_backward", "sum_partials"]
    kernels = SimpleNamespace(
        compiling_only=nullcontext, COMPILES_IN_PARALLEL=True, **{f"launch_{name}": record(name) for name in names}
    )
    monkeypatch.setitem(sys.modules, "agscl.fast.triton_kernels", kernels)
    monkeypatch.setattr(fast, "triton_kernels", kernels, raising=False)
    for module in (conv3x3, fused_trunk, triton_support):
        monkeypatch.setattr(module, "uses_triton", lambda x: True)
        monkeypatch.setattr(module, "autocasts_bf16", lambda x: True)
        monkeypatch.setattr(module, "HAS_TRITON", True)
    return found


@pytest.mark.parametrize("own_convolutions", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_kernels_compiled_in_advance_are_those_that_a_pass_launches(launches, training, own_convolutions):
    trunk = cifar.CifarTrunk().to(**CHANNELS_LAST).train(training)
    images = random_tensor(4, 3, 32, 32, dtype=torch.float32)
    with torch.set_grad_enabled(training):
        compile_chain(trunk.conv, images, own_convolutions)
        compile_chain(trunk.dense, torch.empty(4, 128, 4, 4, dtype=torch.bfloat16), own_convolutions)
        compiled = set(launches)
        launches.clear()
        with torch.autocast("cpu", torch.bfloat16), FusedTrunk(trunk, own_convolutions).use_fused_layers():
            output = trunk(images)
            if training:
                output.sum().backward()
    assert launches == compiled
    assert len(launches) > 5
