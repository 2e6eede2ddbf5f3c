"""SPG: importances between 0 and 1, and steps masked by them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from agscl import SPG, MultiHead
from agscl.methods.spg import normalise_gradient
from loops import adam, bits, blobs, learn, mlp, same

X, Y = (torch.cat(parts) for parts in zip(*blobs(0), strict=True))


def fresh(trunk=None, features=32, **settings):
    torch.manual_seed(0)
    model = MultiHead(trunk or mlp(), features=features)
    return SPG(model, **settings), model


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def linear():
    """A method whose trunk is one linear layer: its gradients can be written down."""
    return fresh(nn.Linear(16, 4, bias=False), 4)


# Importance -----------------------------------------------------------------------------------------------------------


def test_importance_is_the_tanh_of_how_many_deviations_a_gradient_is_from_the_mean():
    gradient = torch.tensor([[0.0, 1.0], [2.0, 3.0]])  # mean 1.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 3
    deviation = math.sqrt(5 / 3)
    expected = torch.tensor([[-1.5, -0.5], [0.5, 1.5]], dtype=torch.float64).div(deviation).tanh()
    torch.testing.assert_close(normalise_gradient(gradient), expected)
    torch.testing.assert_close(normalise_gradient(1e-6 * gradient), expected)
    for even in (torch.tensor([3.0]), torch.ones(2, 2), torch.zeros(3)):
        assert not normalise_gradient(even).any()


def test_the_importance_of_a_linear_layer_is_that_worked_out_by_hand():
    method, model = linear()
    learn(method, sgd(model), 0)
    head, trunk = model.heads["t0"], model.trunk.weight
    errors = (X @ trunk.T @ head.weight.T + head.bias).softmax(1) - nn.functional.one_hot(Y, 3)
    gradient = (errors @ head.weight).T @ X / len(X)
    expected = ((gradient - gradient.mean()) / gradient.std()).tanh().abs()
    torch.testing.assert_close(method.knowledge.importances["trunk.weight"], expected.detach())


def test_outputs_of_earlier_heads_on_new_data_count_and_the_largest_is_kept():
    method, model = linear()
    optimizer = sgd(model)
    learn(method, optimizer, 0)
    first = method.knowledge.importances["trunk.weight"].clone()
    learn(method, optimizer, 1)
    x, y = (torch.cat(parts) for parts in zip(*blobs(1), strict=True))
    own, old = model.heads["t1"], model.heads["t0"]
    errors = (x @ model.trunk.weight.T @ own.weight.T + own.bias).softmax(1) - nn.functional.one_hot(y, 3)
    loss_gradient = (errors @ own.weight).T @ x / len(x)
    cross_head = torch.outer(old.weight.sum(0), x.mean(0))  # of the sum of the outputs of the first head
    expected = [((g - g.mean()) / g.std()).tanh().abs().detach() for g in (loss_gradient, cross_head)]
    largest = torch.stack([first, *expected]).amax(0)
    torch.testing.assert_close(method.knowledge.importances["trunk.weight"], largest)
    assert not torch.allclose(largest, torch.stack([first, expected[0]]).amax(0))


def test_importances_lie_between_0_and_1_and_never_fall():
    method, model = fresh()
    optimizer, before = adam(model), {}
    for number in range(3):
        learn(method, optimizer, number)
        for name, importance in method.knowledge.importances.items():
            assert 0 <= float(importance.min()) <= float(importance.max()) <= 1
            assert bool((importance >= before.get(name, torch.zeros(()))).all())
        before = dict(method.knowledge.importances)
    assert method.memory()["importances"] == sum(p.numel() for p in model.trunk.parameters())


def test_importance_does_not_depend_on_how_the_data_is_cut_into_batches():
    method, model = fresh()
    learn(method, adam(model), 0, end=False)
    twin = copy.deepcopy(method)
    method.end_task(blobs(0))
    twin.end_task((X[rows], Y[rows]) for rows in torch.arange(len(X)).split(5))
    for name, importance in method.knowledge.importances.items():
        torch.testing.assert_close(importance, twin.knowledge.importances[name], atol=1e-4, rtol=1e-4)


def test_data_that_can_be_read_once_serves_all_heads():
    method, model = fresh()
    optimizer = adam(model)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    twin = copy.deepcopy(method)
    method.end_task(blobs(1))
    twin.end_task(iter(blobs(1)))
    assert same(method.knowledge.importances, twin.knowledge.importances)


# Mask -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["gradient", "update"])
def test_a_step_is_the_gradient_times_what_the_importance_leaves(mask):
    method, model = fresh(mask=mask)
    learn(method, sgd(model), 0)
    model.add_head("t1", 3)
    optimizer = sgd(model)
    method.begin_task("t1", optimizer)
    importances, before = method.knowledge.importances, bits(model)
    x, y = blobs(1)[0]
    nn.functional.cross_entropy(model(x, "t1"), y).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    flat = torch.cat([importance.flatten() for importance in importances.values()])
    for name, gradient in gradients.items():
        share = 1 - importances[name] if name in importances else 1 - flat.mean()
        expected = before[name] - 0.1 * share * gradient
        torch.testing.assert_close(model.state_dict()[name], expected, atol=1e-7, rtol=1e-5)


def with_pinned_entry(mask, make_optimizer):
    """The trunk's first layer before and after a task in which its first entry has importance 1."""
    method, model = fresh(mask=mask)
    learn(method, sgd(model), 0)
    method.knowledge.importances["trunk.0.weight"][0, 0] = 1.0
    before = model.trunk[0].weight.detach().clone()
    learn(method, make_optimizer(model), 1)
    return before, model.trunk[0].weight


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mask", ["gradient", "update"])
def test_a_weight_with_importance_1_never_moves_under_sgd_without_decay(mask, momentum):
    before, after = with_pinned_entry(mask, lambda model: sgd(model, momentum=momentum))
    assert torch.equal(before[0, 0], after[0, 0])
    assert float((before != after).float().mean()) > 0.9


def test_weight_decay_moves_every_weight_where_gradients_are_masked_and_none_pinned_where_updates_are():
    before, after = with_pinned_entry("gradient", lambda model: sgd(model, weight_decay=0.01))
    torch.testing.assert_close(after[0, 0], before[0, 0] * (1 - 0.1 * 0.01) ** 32)
    for make in (lambda m: sgd(m, weight_decay=0.01), lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1)):
        before, after = with_pinned_entry("update", make)
        assert torch.equal(before[0, 0], after[0, 0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_under_sgd_without_decay_both_masks_give_the_same_weights(momentum):
    trained = []
    for mask in ("gradient", "update"):
        method, model = fresh(mask=mask)
        learn(method, sgd(model), 0)
        learn(method, sgd(model, momentum=momentum), 1)
        trained.append(bits(model))
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", ["gradient", "update"])
def test_resumed_within_a_task_it_ends_with_the_same_bits(mask):
    whole, model = fresh(mask=mask)
    optimizer = sgd(model, momentum=0.9)
    learn(whole, optimizer, 0)
    learn(whole, optimizer, 1, steps=range(10), end=False)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), whole.state_dict()))
    learn(whole, optimizer, 1, steps=range(10, 32), begin=False)

    resumed, second = fresh(mask=mask)
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    optimizer = sgd(second, momentum=0.9)
    resumed.load_state_dict(saved[2], optimizer)
    optimizer.load_state_dict(saved[1])
    learn(resumed, optimizer, 1, steps=range(10, 32), begin=False)
    assert same(bits(model), bits(second))
    assert same(whole.knowledge.importances, resumed.knowledge.importances)
