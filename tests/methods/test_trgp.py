"""TRGP: projected updates, and scales on the subspaces of related tasks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import GPM, TRGP, MultiHead
from agscl.methods.trgp import (
    choose_trgp_directions,
    compute_scale_gradient,
    run_layer,
    scale_weight,
    select_directions,
)
from loops import bits, blobs, learn, mlp, same

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, weight_decay=1e-3),
}
X = torch.cat([x for x, _ in blobs(0)])

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def fresh(kind=TRGP, optimizer="adam", trunk=None, **settings):
    torch.manual_seed(0)
    model = MultiHead(trunk or mlp(48), features=None if trunk else 48)
    return kind(model, **settings), model, OPTIMIZERS[optimizer](model.parameters())


def logits(model, x, task):
    model.eval()
    with torch.no_grad():
        return model(x, task)


def scales_of(method):
    return [scale for scales in method.plan.scale_values.values() for scale in scales.values()]


# What the paper promises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_change_at_right_angles_to_all_old_directions_while_scales_are_trained(optimizer):
    method, model, step = fresh(optimizer=optimizer)
    learn(method, step, 0)
    before, bases = bits(model), dict(method.knowledge.bases)
    learn(method, step, 1, end=False)
    for name, basis in bases.items():
        change = model.state_dict()[name] - before[name]
        assert float(change.norm()) > 1e-2
        assert float((change @ basis[0]).abs().max()) < 1e-5
    assert torch.equal(model.trunk[0].bias, before["trunk.0.bias"])
    assert scales_of(method)
    assert all(float((scale - torch.eye(scale.shape[-1])).abs().max()) > 1e-2 for scale in scales_of(method))


def test_old_tasks_keep_their_outputs_to_rounding_where_the_basis_holds_all_their_inputs():
    method, model, optimizer = fresh(threshold=1.0, trunk=mlp(200))
    x = [torch.cat([x for x, _ in blobs(number)])[:4] for number in range(3)]
    was = []
    for number in range(3):
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer)
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(x[number], f"t{number}"), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
        method.end_task([x[number]])
        was.append(logits(model, x[number], f"t{number}"))
        model.train()
    assert method.knowledge.scales["t1"], "the second task has scales"
    for number in range(3):
        torch.testing.assert_close(logits(model, x[number], f"t{number}"), was[number], atol=2e-5, rtol=1e-4)


def test_without_related_tasks_the_second_task_is_that_of_gpm_to_the_bit():
    trained = []
    for kind, settings in ((GPM, {}), (TRGP, {"related": 0})):
        method, model, optimizer = fresh(kind, **settings)
        for number in range(2):
            learn(method, optimizer, number)
        trained.append(bits(model))
    assert same(*trained)


def test_identity_scales_change_no_bit_of_a_weight():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 8, generator=draw)
    basis = torch.linalg.qr(torch.randn(8, 3, generator=draw))[0][None]
    assert torch.equal(scale_weight(weight, [(basis, torch.eye(3)[None])]), weight)


def test_a_task_runs_with_the_scaled_weight_of_the_paper():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    weight, expected = model.trunk[0].weight.detach(), model.trunk[0].weight.detach().clone()
    for task, scale in method.plan.scale_values["trunk.0.weight"].items():
        basis = method.find_subspace("trunk.0.weight", task)[0]
        projected, scaled = weight @ basis @ basis.T, weight @ basis @ scale[0] @ basis.T
        expected += scaled - projected
    with torch.no_grad():
        torch.testing.assert_close(model.trunk[0](X), X @ expected.T + model.trunk[0].bias, atol=1e-5, rtol=1e-4)
    assert float((expected - weight).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(4, 6), nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.Conv1d(4, 6, 3, padding_mode="circular", padding=1)],
)
def test_a_layer_run_with_its_own_weight_gives_its_own_bits(layer):
    x = torch.randn(3, 4, *[5] * (layer.weight.dim() - 2))
    assert torch.equal(run_layer(layer, x, layer.weight), layer(x))


# The trust region -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trust", "related", "chosen"), [(0.5, 2, ["b", "a"]), (0.5, 1, ["b"]), (0.7, 2, ["b"]), (0.9, 2, [])]
)
def test_related_are_the_tasks_whose_subspaces_hold_most_of_the_first_gradient(trust, related, chosen):
    method = TRGP(MultiHead(nn.Linear(3, 1, bias=False), features=1), trust=trust, related=related)
    method.knowledge.bases = {"trunk.weight": torch.eye(3)[None]}
    method.knowledge.used = {
        task: {"trunk.weight": torch.tensor([[column == number for column in range(3)]])}
        for number, task in enumerate("abc")
    }
    method.tasks.extend("abc")
    gradient = torch.tensor([[3.0, 4.0, 0.0]])  # shares 0.6, 0.8, 0
    assert method.measure_shares("trunk.weight", gradient) == pytest.approx({"a": 0.6, "b": 0.8, "c": 0.0})
    assert method.measure_shares("trunk.weight", 0 * gradient) is None
    assert method.measure_shares("trunk.weight", gradient / 0) is None
    for task in "abcd":
        method.model.add_head(task, 2)
    optimizer = torch.optim.SGD(method.model.parameters(), lr=0.0)
    method.begin_task("d", optimizer)
    method.model.trunk.weight.grad = gradient
    optimizer.step()
    assert list(method.plan.scales["trunk.weight"]) == chosen


def test_shares_are_measured_over_all_groups_whatever_number_of_directions_a_task_knew():
    generator = torch.Generator().manual_seed(0)
    method = TRGP(MultiHead(nn.Conv1d(8, 6, 1, groups=2), features=6))
    bases = torch.linalg.qr(torch.randn(2, 4, 4, generator=generator))[0]
    masks = {"a": [[1, 0], [0, 1]], "b": [[1, 1, 0], [0, 1, 1]], "c": [[0, 0, 0], [0, 0, 0]], "d": [[0] * 3 + [1]] * 2}
    method.knowledge.bases = {"trunk.weight": bases}
    method.knowledge.used = {task: {"trunk.weight": torch.tensor(mask).bool()} for task, mask in masks.items()}
    gradient = torch.randn(6, 4, 1, generator=generator)
    rows, total = gradient.reshape(2, 3, 4).double(), float(gradient.double().norm())
    expected = {}
    for task in "abd":  # c owns nothing
        parts = select_directions(bases, method.knowledge.used[task]["trunk.weight"]).double()
        expected[task] = float((rows @ parts).norm()) / total
    assert method.measure_shares("trunk.weight", gradient) == pytest.approx(expected)


def test_the_first_gradient_of_the_scales_is_that_of_autograd():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 8, generator=draw, requires_grad=True)
    basis = torch.linalg.qr(torch.randn(8, 3, generator=draw))[0][None]
    scale = torch.eye(3)[None].requires_grad_()
    x, y = torch.randn(7, 8, generator=draw), torch.arange(7) % 5
    F.cross_entropy(x @ scale_weight(weight, [(basis, scale)]).T, y).backward()
    plain = weight.detach().clone().requires_grad_()
    F.cross_entropy(x @ plain.T, y).backward()
    torch.testing.assert_close(compute_scale_gradient(plain.detach(), plain.grad, basis), scale.grad)


def test_old_and_new_directions_compete_for_the_energy_of_a_task():
    old = torch.eye(4)[None, :, :2]
    inputs = torch.diag(torch.tensor([4.0, 1.0, 2.0, 3.0]))[None]  # energies 16, 1 (old), 4, 9 (new) of 30
    basis, used = choose_trgp_directions(old, inputs, 0.8)  # 16 + 9 of 30
    assert used.tolist() == [[True, False, True]]
    assert torch.equal(basis[..., :2], old), "old directions keep their bits"
    torch.testing.assert_close(basis[0].abs(), torch.eye(4)[:, [0, 1, 3]])
    basis, used = choose_trgp_directions(old, inputs, 1.0)
    assert used.all()
    torch.testing.assert_close(basis[0].T @ basis[0], torch.eye(4))
    assert torch.equal(select_directions(basis, torch.tensor([[False, True, True]]))[0], basis[0][:, 1:3])
    basis, used = choose_trgp_directions(None, torch.zeros(1, 4, 3), 0.97)
    assert basis.shape == (1, 4, 0)
    assert used.shape == (1, 0)


def test_groups_of_a_convolution_have_directions_and_scales_of_their_own():
    trunk = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Flatten())
    method, model, optimizer = fresh(trunk=trunk, threshold=0.9)
    draw = torch.Generator().manual_seed(0)
    for number in range(3):
        x, y = torch.randn(12, 2, 6, 6, generator=draw), torch.arange(12) % 3
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x, f"t{number}"), y).backward()
            optimizer.step()
        method.end_task([(x, y)])
    scales = method.knowledge.scales["t2"]["trunk.2.weight"]
    assert all(scale.shape[0] == 2 for scale in scales.values())
    assert bool(logits(model, x, "t1").isfinite().all())


def test_a_layer_with_a_forward_pass_of_its_own_gets_no_scales():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    method, _, optimizer = fresh(trunk=nn.Sequential(nn.Linear(16, 96), nn.ReLU(), Doubled(96, 96), nn.ReLU()))
    for number in range(2):
        learn(method, optimizer, number)
    assert list(method.knowledge.scales["t1"]) == ["trunk.0.weight"]


# Looking at tasks -----------------------------------------------------------------------------------------------------


def test_threads_that_look_at_different_tasks_at_once_see_each_its_own():
    method, model, optimizer = fresh()
    for number in range(3):
        learn(method, optimizer, number)
    expected = {task: logits(model, X, task) for task in method.tasks}
    before, right, meeting = bits(model), [], threading.Barrier(2)

    def wait(*_):
        meeting.wait(10)  # until both passes are under way

    inside = model.trunk[1].register_forward_hook(wait)

    def look(task):
        right.extend(torch.equal(logits(model, X, task), expected[task]) for _ in range(20))

    threads = [threading.Thread(target=look, args=(task,)) for task in ("t1", "t2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inside.remove()
    assert right == [True] * 40
    assert same(before, bits(model))


def test_within_a_pass_the_models_own_parameters_stay_in_place():
    method, model, optimizer = fresh()
    for number in range(2):
        learn(method, optimizer, number)
    seen, own = [], dict(model.named_parameters())
    handle = model.trunk[-1].register_forward_hook(lambda *_: seen.append(dict(model.named_parameters())))
    with_scales = logits(model, X, "t1")
    handle.remove()
    assert all(seen[0][name] is parameter for name, parameter in own.items())
    method.close()
    assert not torch.equal(with_scales, logits(model, X, "t1")), "the second task needs its scales"


def test_a_copy_of_a_model_has_scales_of_its_own():
    method, model, optimizer = fresh()
    for number in range(2):
        learn(method, optimizer, number)
    twin, expected = copy.deepcopy(model), logits(model, X, "t1")
    assert torch.equal(logits(twin, X, "t1"), expected)
    method.close()
    assert torch.equal(logits(twin, X, "t1"), expected)


# Within a task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 1, 18])
def test_resumed_before_or_after_the_trust_region_is_chosen_it_ends_with_the_same_bits(at, optimizer):
    whole, model, step = fresh(optimizer=optimizer)
    for number in range(3):
        learn(whole, step, number)

    method, first, step = fresh(optimizer=optimizer)
    learn(method, step, 0)
    learn(method, step, 1, steps=range(at), end=False)
    saved = copy.deepcopy((first.state_dict(), step.state_dict(), method.state_dict()))
    resumed, second, _ = fresh()
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    step = OPTIMIZERS[optimizer](second.parameters())
    resumed.load_state_dict(saved[2], step)
    step.load_state_dict(saved[1])
    learn(resumed, step, 1, steps=range(at, 32), begin=False)
    learn(resumed, step, 2)
    assert same(bits(model), bits(second))
    for task in whole.tasks:
        assert torch.equal(logits(model, X, task), logits(second, X, task))


def test_scales_are_in_the_optimizer_during_their_task_and_leave_no_trace_in_it():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(q) for scales in method.plan.scales.values() for q in scales.values()} <= held
    method.end_task(blobs(1))
    own = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own
    assert {id(p) for p in optimizer.state} <= own


def test_memory_within_a_task_counts_scales_their_moments_and_subspaces():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0)
    between = method.memory()
    learn(method, optimizer, 1, end=False)
    within, count = method.memory(), sum(scale.numel() for scale in scales_of(method))
    subspaces = [b for bases in method.plan.subspaces.values() for b in bases.values()]
    assert within["scales"] == 3 * count > 0
    assert within["bases"] == between["bases"] + sum(basis.numel() for basis in subspaces)


def test_cleared_moments_let_the_scales_start_anew():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    method.clear_moments()
    assert not any(bool(m.any()) for moments in method.plan.moments.values() for pair in moments.values() for m in pair)
    assert method.plan.moment_ages == {}
