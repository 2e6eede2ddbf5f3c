"""Chains of layers that have kernels of their own all along."""

import copy
import subprocess
import sys
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import FineTune, MultiHead, fast
from agscl.fast import captured, chains, compiled, convolution
from agscl.fast.chains import Activated, Link, Weighed, activate, activated, chained, covers, links, links_of
from agscl.fast.compiled import Compiled, CompileFailed
from agscl.networks import alexnet, cifar, eight, mlp, omniglot
from agscl.tasks import Task
from agscl.training import trainer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
CHANNELS_LAST = {"memory_format": torch.channels_last}
NO_SEEDS = torch.empty(0, dtype=torch.long)


def drawn(*shape, device, dtype=torch.bfloat16, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return numbers.contiguous(**CHANNELS_LAST) if len(shape) == 4 else numbers


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


SHAPES = [((5, 32, 6, 4), 2), ((3, 64, 5, 7), 1), ((2, 16, 8, 8), 4), ((3, 128, 9, 6), 3), ((7, 40), 1), ((9, 1024), 1)]
LARGE = [((256, 32, 32, 32), 2), ((256, 64, 16, 16), 1), ((148, 128, 8, 8), 2), ((500, 256), 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "size"), [*SHAPES, *LARGE])
def test_maximum_bias_and_relu_with_their_gradients_are_what_more_digits_give(device, shape, size):
    if device == "cpu" and shape[0] > 16:
        pytest.skip("as the smaller ones, and slow")
    y = drawn(*shape, device=device).requires_grad_()
    bias = drawn(shape[1], device=device, dtype=torch.float32, seed=1).requires_grad_()
    z = Activated.apply(y, bias, size, 0.0, NO_SEEDS.to(device), 0)
    exact, by = y.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    largest = F.max_pool2d(exact, size) if size > 1 else exact
    expected = F.relu(largest + by.view(-1, *[1] * (y.dim() - 2)))
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, expected.float().bfloat16())
    gradient = drawn(*z.shape, device=device, seed=2)
    found = torch.autograd.grad(z, (y, bias), gradient)
    wanted = torch.autograd.grad(expected, (exact, by), gradient.double())
    assert torch.equal(found[0].double(), wanted[0]), "nothing is rounded on the way"
    assert found[0].stride() == y.stride()
    assert error(found[1], wanted[1]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "size"), [((64, 32, 8, 8), 2), ((40, 64, 9, 7), 1), ((500, 100), 1)])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_dropout_keeps_the_share_it_should_scaled_up_and_the_gradient_follows(device, shape, size, share):
    y, bias = drawn(*shape, device=device), torch.full((shape[1],), 8.0, device=device)  # so that all are above 0
    seeds = torch.tensor([3, 2**61 + 5], device=device)
    whole, _ = activate(y, bias, size, 0.0, seeds, 0)
    found = [activate(y, bias, size, share, seeds, place)[0] for place in (0, 1, 1)]
    assert torch.equal(found[1], found[2]), "one seed draws one thing"
    kept = [z != 0 for z in found[:2]]
    for z, left in zip(found[:2], kept, strict=True):
        assert left.double().mean().item() == pytest.approx(1 - share, abs=0.015)
        assert left.flatten(2 if z.dim() == 4 else 1).double().mean(-1).min() > 0, "no channel goes as a whole"
        torch.testing.assert_close(z[left].float(), whole[left].float() / (1 - share), rtol=0.01, atol=0)
    both = (kept[0] & kept[1]).double().mean().item()
    assert both == pytest.approx((1 - share) ** 2, abs=0.015), "seeds draw independently"
    gradient = drawn(*whole.shape, device=device, seed=1)
    z, which = activate(y, bias, size, share, seeds, 1)
    of_y, sums = activated(gradient, z, which, size, share)
    expected = torch.where(kept[1], gradient.float() / (1 - share), 0).bfloat16()
    at = F.max_pool2d(of_y.abs().float(), size) if size > 1 else of_y.abs().float()
    assert torch.equal(at, expected.abs().float())
    over = [side for side in range(z.dim()) if side != 1]
    assert error(sums.sum(0), expected.double().sum(over)) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_not_a_number_is_not_hidden_and_its_gradient_neither(device, size, share):
    y, seeds = drawn(2, 16, 4, 4, device=device), torch.zeros(1, dtype=torch.long, device=device)
    y[1, :, 3, 3] = float("nan")
    z, which = activate(y, torch.zeros(16, device=device), size, share, seeds, 0)
    assert bool(z[0].isfinite().all())
    assert bool(z[1, :, -1, -1].isnan().all())
    of_y, _ = activated(torch.ones_like(z), z, which, size, share)
    assert bool((of_y[1, :, 3, 3] == 1 / (1 - share)).all())


def learned(trunk, x, within=None, precision=torch.bfloat16):
    """Output and gradients."""
    trunk.zero_grad()
    with within or nullcontext(), torch.autocast(x.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
        output = trunk(x)
        output.float().square().mean().backward()
    return [output.detach(), *[parameter.grad for parameter in trunk.parameters()]]


def small():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
    layers += [nn.Linear(16 * 4 * 4, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers)


NETWORKS = {
    "cifar": (cifar.CifarTrunk, (8, 3, 32, 32)),
    "small": (small, (64, 1, 8, 8)),
    "dense": (lambda: mlp.MLP(20, (32, 16)), (64, 20)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_network_of_chains_is_as_exact_as_torchs_own_and_left_alone_in_float32(device, name, precision):
    torch.manual_seed(0)
    kind, shape = NETWORKS[name]
    trunk = kind().to(device, **CHANNELS_LAST).eval()
    x = drawn(*shape, device=device, dtype=torch.float32)
    within = Compiled(trunk, rearranged=True, rounded=True).in_use()
    exact = learned(copy.deepcopy(trunk).double(), x.double(), precision=torch.float64)
    plain, other = learned(trunk, x, precision=precision), learned(trunk, x, within, precision)
    for true, usual, new in zip(exact, plain, other, strict=True):
        assert new.stride() == usual.stride() or new.shape[1] == 1  # which may be laid out in two ways
        assert new.dtype == usual.dtype
        if precision == torch.bfloat16:
            assert error(new, true) < 4 * error(usual, true) + 3e-3
        else:
            assert error(new, usual.double()) < 1e-4, "but for the order of sums on a GPU"
    usual, new = (sum(error(one, true) for one, true in zip(way, exact, strict=True)) for way in (plain, other))
    assert new < 2 * usual + 1e-5
    assert not any("forward" in vars(part) for part in trunk.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_each_pass_drops_other_nodes_drawn_by_torchs_generator(device):
    trunk = small().to(device, **CHANNELS_LAST)
    x = drawn(4, 1, 8, 8, device=device, dtype=torch.float32)
    ours = Compiled(trunk, rearranged=True, rounded=True)

    def outputs():
        torch.manual_seed(5)
        with torch.no_grad(), ours.in_use(), torch.autocast(device, torch.bfloat16):
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
    found = links(trunk.conv)
    assert [len(link.others) for link in found] == [1, 3] * 3
    assert [link.size for link in found] == [1, 2] * 3
    assert [link.dropped for link in found] == [0, 0.25] * 3
    assert [layer for link in found for layer in (link.layer, *link.others)] == list(trunk.conv)
    flatten, dense = links(trunk.dense)
    assert (type(flatten), dense.dropped, dense.size) == (nn.Flatten, 0.5, 1)
    trunk.eval()
    assert dense.dropped == 0
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
def test_other_layers_belong_to_no_link_and_such_a_network_is_not_covered(layers, alone):
    chain = nn.Sequential(*layers)
    first, *rest = links(chain)
    assert isinstance(first, Link) != alone
    assert not any(isinstance(part, Link) for part in rest)
    assert not covers(chain)


def test_networks_are_covered_that_are_links_and_shapes_alone():
    assert covers(cifar.CifarTrunk())
    assert covers(mlp.MLP())
    assert covers(small())
    assert not covers(omniglot.OmniglotTrunk())
    assert not covers(eight.EightTrunk())
    assert not covers(nn.Sequential(nn.Flatten()))
    with torch.device("meta"):
        assert not covers(alexnet.AlexNetTrunk())
    scaled = cifar.CifarTrunk()
    scaled.scale = nn.Parameter(torch.ones(()))
    assert not covers(scaled), "who knows what is done with it"
    named = cifar.CifarTrunk()
    named.relu = nn.ReLU()
    assert not covers(named)


def test_torchs_compiler_is_used_for_all_other_networks_and_arithmetic():
    for options in ({"rearranged": False, "rounded": True}, {"rearranged": True}):
        assert not Compiled(cifar.CifarTrunk(), **options).ours
    assert not Compiled(omniglot.OmniglotTrunk(), rearranged=True, rounded=True).ours


def test_a_hook_or_a_forward_pass_of_the_users_is_not_passed_over():
    trunk, met = small(), []
    x = drawn(2, 1, 8, 8, device="cpu", dtype=torch.float32)
    ours = Compiled(trunk.to(**CHANNELS_LAST), rearranged=True, rounded=True)
    handle = trunk[2].register_forward_hook(lambda *_: met.append("forward hook"))
    learned(trunk, x, ours.in_use())
    handle.remove()
    handle = trunk[9].register_full_backward_hook(lambda *_: met.append("backward hook"))
    learned(trunk, x, ours.in_use())
    handle.remove()
    trunk[0].forward = lambda x: met.append("forward") or F.conv2d(x, trunk[0].weight, trunk[0].bias, padding=1)
    learned(trunk, x, ours.in_use())
    assert met == ["forward hook", "backward hook", "forward"]


def test_inputs_that_the_kernels_do_not_take_are_left_to_torch(monkeypatch):
    trunk = small().eval()
    x = torch.randn(2, 1, 8, 8)

    def same(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.equal(chained(trunk, x, set()), nn.Sequential.forward(trunk, x))

    x = drawn(2, 1, 8, 8, device="cpu", dtype=torch.float32)
    assert not same(x), "another rounding"
    used = []
    for kind in (Activated, Weighed):
        apply = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *given, apply=apply: used.append(1) or apply(*given))
    monkeypatch.setattr(chains, "MOST", 0)
    monkeypatch.setattr(convolution, "MOST", 0)
    assert same(x)
    assert used == []


def failing(monkeypatch, error):
    """A compiled network on a machine where Triton fails."""

    def fail(*given):
        raise error

    monkeypatch.setitem(sys.modules, "agscl.fast.kernels", SimpleNamespace(total=fail))
    monkeypatch.setattr(fast, "kernels", SimpleNamespace(total=fail), raising=False)
    ours = Compiled(small(), rearranged=True, rounded=True)
    ours.tried, ours.waking = False, Thread(target=lambda: None)  # as on a GPU
    ours.waking.start()
    return ours


def test_where_triton_cannot_compile_it_is_said_in_one_line_each_time(monkeypatch):
    ours = failing(monkeypatch, RuntimeError("Failed to find C compiler.\nPlease specify via CC"))
    for _ in range(2):
        expected = r"--set compile=false. Torch said: Failed to find C compiler\.$"
        with pytest.raises(CompileFailed, match=expected), ours.in_use():
            raise AssertionError("never reached")
    ours.module[0].register_forward_hook(lambda *_: None)
    with ours.in_use():  # which needs none
        pass


def test_a_lack_of_memory_is_not_taken_for_a_lack_of_a_compiler(monkeypatch):
    ours = failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError), ours.in_use():
        raise AssertionError("never reached")


def test_what_triton_says_later_is_told_in_one_line_too():
    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    ours = Compiled(small(), rearranged=True, rounded=True)
    with pytest.raises(CompileFailed, match="Torch said: shared memory"), ours.in_use():
        raise OutOfResources("shared memory")
    with pytest.raises(KeyError), ours.in_use():
        raise KeyError("of the user's")


class OneByOne(nn.Module):
    """Calls its layers in its own way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("trunk", "shape"),
    [(OneByOne, (4, 8)), (lambda: OneByOne().layers, (4, 5, 8))],
)
def test_a_network_that_calls_its_layers_in_another_way_is_compiled_by_torch_after_all(trunk, shape):
    trunk = trunk()
    ours = Compiled(trunk, rearranged=True, rounded=True)
    assert ours.ours
    x = drawn(*shape, device="cpu", dtype=torch.float32)
    with ours.in_use(), torch.autocast("cpu", torch.bfloat16):
        first = trunk(x)
    assert not ours.ours
    assert callable(ours.call)
    with ours.in_use(compiled=False), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trunk(x), first)


def test_a_network_used_as_it_is_keeps_our_kernels():
    trunk = small().to(**CHANNELS_LAST)
    ours = Compiled(trunk, rearranged=True, rounded=True)
    for _ in range(2):
        learned(trunk, drawn(2, 1, 8, 8, device="cpu", dtype=torch.float32), ours.in_use())
        assert ours.used == {link.layer for link in links_of(trunk)}
        assert ours.ours
    assert not hasattr(ours, "call")


def test_without_triton_a_gpu_has_torchs_compiler(monkeypatch):
    for module in (compiled, chains, convolution):
        monkeypatch.setattr(module, "TRITON", False)
    monkeypatch.setattr(compiled.Compiled, "_use_torch", lambda self: None)
    trunk = small()
    assert not Compiled(trunk, rearranged=True, rounded=True, device=torch.device("cuda")).ours
    assert Compiled(trunk, rearranged=True, rounded=True, device=torch.device("cpu")).ours


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
        monkeypatch.setattr(chains, "TRITON", there)
        assert chains._fits(link, OnGpu([1, 2])) == there


@pytest.mark.parametrize("last", [nn.MaxPool2d(2), nn.Dropout(0.5)])
def test_what_comes_out_of_a_chain_may_be_changed_in_place_where_torch_allows_it(last):
    trunk = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), last).to(**CHANNELS_LAST)
    x = drawn(2, 16, 4, 4, device="cpu")
    for within in (nullcontext(), Compiled(trunk, rearranged=True, rounded=True).in_use()):
        with within, torch.autocast("cpu", torch.bfloat16):
            trunk(x).add_(1).sum().backward()


@pytest.mark.parametrize("trunk", [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), small()])
def test_an_empty_batch_gives_nothing_and_no_error(trunk):
    shape = (0, 4) if len(trunk) == 2 else (0, 1, 8, 8)
    with Compiled(trunk, rearranged=True, rounded=True).in_use(), torch.autocast("cpu", torch.bfloat16):
        output = trunk(torch.empty(shape))
        output.sum().backward()
    assert len(output) == 0


def test_gradients_of_gradients_are_refused():
    x = drawn(2, 4, device="cpu", dtype=torch.float32)
    trunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autocast("cpu", torch.bfloat16):
        output = chained(trunk, x, set())
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(output.float().sum(), trunk[0].weight, create_graph=True)


WITHOUT_COMPILER = """
import sys
import torch
from agscl import AGSCL, MultiHead
from agscl.networks.cifar import CifarTrunk
from agscl.training import trainer
from agscl.fast.adam import Adam
from agscl.fast.compiled import Compiled
from agscl.tasks import Task

trainer.Compiled = lambda trunk, rounded, **other: Compiled(trunk, rearranged=True, rounded=rounded)  # as on a GPU
trainer.Trainer._new_optimizer = lambda self: Adam(self.model.parameters(), lr=torch.tensor(1e-3), fused=True)
torch.set_num_threads(1)
model = MultiHead(CifarTrunk(), features=256)
x, y = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
tasks = tuple(Task(name, 3, x, y, x, y, x, y) for name in ("a", "b"))
fast = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
config = trainer.TrainingConfig(epochs=2, batch_size=4, **fast)
one = trainer.Trainer(model, AGSCL(model), tasks, config, seed=0)
while one.advance():
    pass
print(len(one.accuracies), "torch._dynamo" in sys.modules)
"""


def test_a_covered_network_is_trained_without_an_import_of_torchs_compiler():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_what_torch_compiles_after_all_has_run_once_before_it_is_captured(monkeypatch):
    """Within a capture nothing can be compiled. Without a GPU: a capture is noted, and is the step itself."""
    called, captured_after = [], []

    def compile(call, **options):
        return lambda *inputs, **named: called.append(1) or call(*inputs, **named)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(
        trainer, "Compiled", lambda trunk, rounded, **other: Compiled(trunk, rearranged=True, rounded=rounded)
    )
    monkeypatch.setattr(captured, "_on", lambda stream: nullcontext())
    monkeypatch.setattr(captured.Captured, "_note_figures", lambda self: None)
    monkeypatch.setattr(captured.Captured, "_drop_graphs", lambda self: None)

    def capture(self, work):
        captured_after.append(len(called))
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(captured.Captured, "_capture", capture)
    x, y = torch.randn(24, 8), torch.arange(24) % 3
    model = MultiHead(OneByOne(), features=8)
    fast = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
    config = trainer.TrainingConfig(epochs=1, batch_size=4, patience=None, restore_best=False, **fast)
    one = trainer.Trainer(model, FineTune(model), (Task("t", 3, x, y, None, None, x, y),), config, seed=0)
    order = one._order
    monkeypatch.setattr(one, "_order", lambda pin_memory: order())
    one.advance()
    one._captured = captured.Captured(one, one._optimizer)
    one._captured.stream = object()
    one._captured.run_epoch()
    assert one._compiled.version == 1
    assert captured_after[0] == 1, "the first step is the method's, the second ours, the third torch's, and warms up"
    assert len(called) == 4
