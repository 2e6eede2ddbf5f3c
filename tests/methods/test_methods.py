"""The life cycle of a method in somebody's training loop."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import FineTune, MultiHead, NodeGraph, PaperAGSCL
from agscl.methods._agscl.reinit import choose_groups
from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.runs.nested_state import hash_state
from loops import OneHead, adam, bits, blobs, learn, make, mlp, same

SETTINGS = {"mu": 12, "lam": 1000, "rho": 0.3}


def fresh(cls=PaperAGSCL, seed=0, width=32, **settings):
    torch.manual_seed(seed)
    model = MultiHead(mlp(width))
    optimizer = adam(model)
    return make(cls, model, **(settings or (SETTINGS if cls is PaperAGSCL else {}))), model, optimizer


# The seams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [PaperAGSCL, FineTune])
def test_the_loop_of_the_readme_learns_three_tasks(cls):
    method, model, optimizer = fresh(cls, width=64)
    for number in range(3):
        learn(method, optimizer, number)
    assert method.tasks == ["t0", "t1", "t2"]
    assert method.task is None
    with torch.no_grad():
        right = torch.cat([model(x, "t2").argmax(1) == y for x, y in blobs(2)])
    assert right.float().mean() > 0.8


def test_a_new_heads_parameters_join_the_optimizer_once():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert len(optimizer.param_groups) == 1


def test_a_new_head_goes_to_the_group_where_the_heads_are():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    model.add_head("t0", 3)
    optimizer = torch.optim.SGD(
        [{"params": model.trunk.parameters(), "lr": 0.1}, {"params": model.heads.parameters(), "lr": 0.01}]
    )
    method = FineTune(model)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1)
    assert len(optimizer.param_groups[1]["params"]) == 4


def test_a_head_that_joins_a_group_with_a_lower_rate_than_another_is_warned_about():
    model = MultiHead(mlp())
    model.add_head("t0", 3)
    groups = [{"params": model.trunk[0].parameters(), "lr": 1e-5}, {"params": model.trunk[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    with pytest.warns(UserWarning, match="first parameter group, whose rate is 1e-05; another group has 0.01"):
        FineTune(model).begin_task("t0", optimizer)
    own = MultiHead(mlp())
    own.add_head("t0", 3)
    optimizer = torch.optim.Adam([{"params": own.trunk.parameters(), "lr": 1e-5}, {"params": own.heads.parameters()}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FineTune(own).begin_task("t0", optimizer)


def test_a_head_joins_a_group_without_a_rate_of_its_own():
    model = MultiHead(mlp())
    model.add_head("t0", 3)
    optimizer = torch.optim.Adam([{"params": model.trunk[0].parameters()}, {"params": model.trunk[2].parameters()}])
    for group in optimizer.param_groups:
        group["lr"] = None  # as in optimizers that find their own
    FineTune(model).begin_task("t0", optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, o: m.end_epoch(), "begin_task"),
        (lambda m, o: m.end_task([]), "begin_task"),
        (lambda m, o: m.begin_task("t0"), "optimizer"),
        (lambda m, o: m.begin_task("t0", o), "add_head"),
        (lambda m, o: m.certificate(), "No task"),
        (lambda m, o: m.begin_task("t0", "adam"), "torch.optim"),
        (lambda m, o: m.begin_task("t0", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)), "none of the model"),
    ],
)
def test_wrong_use_is_an_error_that_says_what_to_do(call, words):
    method, _, optimizer = fresh()
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        call(method, optimizer)
    assert method.tasks == []
    assert StepHooks.get(optimizer) is None


def test_a_task_cannot_begin_while_another_is_under_way_nor_a_second_time():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    model.add_head("t1", 3)
    with pytest.raises(RuntimeError, match="end_task"):
        method.begin_task("t1", optimizer)
    method.end_task(blobs(0))
    with pytest.raises(ValueError, match="another task name"):
        method.begin_task("t0", optimizer)


def test_a_plain_model_must_say_where_its_heads_are():
    with pytest.raises(ValueError, match="heads="):
        PaperAGSCL(mlp(), torch.zeros(2, 16), **SETTINGS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mu": -1},
        {"lam": -1},
        {"rho": 0},
        {"rho": 1.5},
        {"eta": 0},
        {"prox_every": 0},
        {"zero_init": "no"},
        {"by_layer": "no"},
        {"min_activity": 1.0},
        {"rand_init": "no"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PaperAGSCL(MultiHead(mlp()), torch.zeros(2, 16), **wrong)


@pytest.mark.parametrize("cls", [PaperAGSCL, FineTune])
def test_the_models_state_dict_keys_stay_as_they_are_and_close_leaves_no_hook_behind(cls):
    method, model, optimizer = fresh(cls)
    model.add_head("t0", 3)
    model(blobs(0)[0][0], "t0")  # the head takes its shape
    keys = list(model.state_dict())
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    assert [k for k in model.state_dict() if "t1" not in k] == keys
    assert not any(p.requires_grad for p in model.heads["t0"].parameters())
    method.close()
    assert all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_method_is_a_context_manager_that_closes_itself():
    method, _model, optimizer = fresh()
    with method:
        learn(method, optimizer, 0, end=False)
    assert not optimizer._optimizer_step_post_hooks


def test_step_with_a_closure_gives_the_same_weights_as_step():
    plain, model_a, optimizer_a = fresh()
    closed, model_b, optimizer_b = fresh()
    learn(plain, optimizer_a, 0)
    learn(plain, optimizer_a, 1)
    for number in range(2):
        task, data = f"t{number}", blobs(number)
        torch.manual_seed(number)
        model_b.add_head(task, 3)
        closed.begin_task(task, optimizer_b)
        for _ in range(8):
            for x, y in data:

                def closure(x=x, y=y, task=task):
                    optimizer_b.zero_grad()
                    loss = F.cross_entropy(model_b(x, task), y)
                    loss.backward()
                    return loss

                optimizer_b.step(closure)
            closed.end_epoch()
        closed.end_task(data)
    assert same(bits(model_a), bits(model_b))


@pytest.mark.parametrize("prox", [True, False])
def test_penalties_may_be_added_before_a_clip_and_are_not_added_twice(prox):
    def run(early):
        method, model, optimizer = fresh(mu=1, lam=1, prox=prox)
        for number in range(2):
            task, data = f"t{number}", blobs(number)
            model.add_head(task, 3)
            method.begin_task(task, optimizer)
            for x, y in data * 4:
                optimizer.zero_grad()
                F.cross_entropy(model(x, task), y).backward()
                if early:
                    method.add_penalty_gradients()
                optimizer.step()
            method.end_epoch()
            method.end_task(data)
        return bits(model)

    assert same(run(True), run(False))


def test_the_ablation_without_proximal_steps_does_not_warn_of_what_these_could_reach():
    method, _, optimizer = fresh(mu=0.001, lam=3.0, prox=False)
    assert not any("too small to free a node" in m for m in warned(lambda: learn(method, optimizer, 0)))


def test_the_ablation_without_proximal_steps_adds_the_gradient_of_the_penalised_loss():
    method, model, optimizer = fresh(mu=0.7, lam=3.0, prox=False)
    learn(method, optimizer, 0, epochs=2)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    x, y = blobs(1)[0]
    loss = F.cross_entropy(model(x, "t1"), y)
    groups = {g: [] for g in range(method.graph.size)}
    anchors = iter(method.knowledge.anchors)
    important = ~method.free
    for _, p, rows in method.graph.incoming_parameters():
        anchor = next(anchors) if bool(important[rows].any()) else None
        place = 0
        for r, g in enumerate(rows.tolist()):
            if important[g]:
                groups[g].append((p[r] - anchor[place]).flatten())
                place += 1
            else:
                groups[g].append(p[r].flatten())
    penalty = sum(
        (3.0 * method.knowledge.omega[g] if important[g] else 0.7) * torch.cat(parts).norm()
        for g, parts in groups.items()
        if torch.cat(parts).norm() > 0
    )
    parameters = [p for _, p, _ in method.graph.incoming_parameters()]
    expected = torch.autograd.grad(loss + penalty, parameters)
    optimizer.zero_grad()
    F.cross_entropy(model(x, "t1"), y).backward()
    method.add_penalty_gradients()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# Resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [SETTINGS, {**SETTINGS, "prox_every": 3, "by_layer": "both"}, {**SETTINGS, "prox": False}]
)
def test_resumed_in_the_middle_of_a_task_it_continues_bit_identically(settings):
    whole, model, optimizer = fresh(**settings)
    for number in range(3):
        learn(whole, optimizer, number)

    method, first, optimizer = fresh(**settings)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(13), end=False)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), method.state_dict()))

    torch.manual_seed(99)
    second = MultiHead(mlp(), features=32)
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    optimizer = torch.optim.Adam([*second.trunk.parameters(), *second.heads.parameters()], lr=1e-2)
    resumed = PaperAGSCL(second, torch.zeros(1, 16), **settings)
    resumed.load_state_dict(saved[2], optimizer)
    optimizer.load_state_dict(saved[1])
    learn(resumed, optimizer, 1, steps=range(13, 32), begin=False)
    learn(resumed, optimizer, 2)

    assert same(bits(model), bits(second))
    assert torch.equal(whole.knowledge.omega, resumed.knowledge.omega)
    assert str(whole.certificate()) == str(resumed.certificate())
    assert whole.certificate().digests == resumed.certificate().digests
    assert whole.statistics() == resumed.statistics()


def test_a_state_between_tasks_needs_no_optimizer():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    other = PaperAGSCL(copy.deepcopy(model), example_input=torch.zeros(1, 16), **SETTINGS)
    other.load_state_dict(method.state_dict())
    assert other.certificate().digests == method.certificate().digests


def test_the_state_of_another_method_or_network_is_refused():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    with pytest.raises(ValueError, match="PaperAGSCL"):
        FineTune(model).load_state_dict(method.state_dict())
    wide = MultiHead(mlp(40))
    wide.add_head("t0", 3)
    with pytest.raises(ValueError, match="64 groups"):
        PaperAGSCL(wide, example_input=torch.zeros(1, 16), **SETTINGS).load_state_dict(method.state_dict())


# What AGS-CL promises of its figures ---------------------------------------------------------------------------------


def test_a_state_saved_with_other_settings_is_taken_up_with_a_warning():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    other = PaperAGSCL(copy.deepcopy(model), example_input=torch.zeros(1, 16), **{**SETTINGS, "lam": 7})
    with pytest.warns(SelfCheckWarning, match=r"other settings: lam 1000 → 7\. Training continues"):
        other.load_state_dict(method.state_dict())
    again = PaperAGSCL(copy.deepcopy(model), example_input=torch.zeros(1, 16), **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(method.state_dict())


def test_free_nodes_never_come_back_once_important_and_the_figures_add_up():
    method, _, optimizer = fresh()
    before = None
    for number in range(4):
        learn(method, optimizer, number)
        free = method.free.clone()
        figures = method.statistics()
        assert figures["free"] == int(free.sum())
        assert figures["sparsity"] == figures["free"] / 64
        assert figures["frozen"] <= figures["important_before"]
        assert figures["used_capacity"] >= figures["frozen_capacity"]
        if before is not None:
            assert not bool((free & ~before).any())
        before = free
    assert 0 < figures["free"] < 64


def test_anchors_are_held_for_important_nodes_only_and_nothing_as_large_as_the_model_besides():
    method, _model, optimizer = fresh()
    learn(method, optimizer, 0)
    memory, important = method.memory(), int((~method.free).sum())
    rows = {name: (p[0].numel(), groups) for name, p, groups in method.graph.incoming_parameters()}
    assert memory["anchors"] == sum(size * int((~method.free)[groups].sum()) for size, groups in rows.values())
    assert memory["importances"] == 64
    held = [t for t in vars(method).values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in held) <= 2 * 64 + 1
    assert 0 < important < 64


@pytest.mark.parametrize("every", ["step", 1, 2, 4])
def test_thresholds_are_divided_among_the_proximal_steps_of_an_epoch(every):
    def shrunk(every):
        method, model, optimizer = fresh(mu=1.0, lam=1.0, prox_every=every)
        model.add_head("t0", 3)
        for group in optimizer.param_groups:
            group["lr"] = 1e-12  # the optimizer leaves the weights alone; the rate in force is set below
        method.begin_task("t0", optimizer, steps_per_epoch=4)
        weight = model.trunk[0].weight
        norm = torch.cat([weight, model.trunk[0].bias[:, None]], 1).norm(dim=1).detach()
        for x, y in blobs(0):
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            method.plan.schedule.rates.record = lambda o: method.plan.schedule.rates.means.__setitem__(0, [0.1])
            optimizer.step()
        method.end_epoch()
        after = torch.cat([weight, model.trunk[0].bias[:, None]], 1).norm(dim=1).detach()
        return norm - after

    torch.testing.assert_close(shrunk(every), torch.full((32,), 0.1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("by_layer", ["none", "mu", "lam", "both"])
def test_each_layer_can_have_its_own_strengths_with_the_mean_over_all_nodes_kept(by_layer):
    method, model, optimizer = fresh(mu=8.0, lam=1000.0, by_layer=by_layer)
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    free, important = method.free, ~method.free
    first = torch.arange(64) < 32  # 16 weights and a bias per node there, 32 and a bias in the second layer
    assert all(bool((rows & layer).any()) for rows in (free, important) for layer in (first, ~first))
    sizes = torch.where(first, 17.0, 33.0).sqrt()
    mu = sizes / sizes.mean() if by_layer in ("mu", "both") else torch.ones(64)
    torch.testing.assert_close(method.plan.mu_factors, mu[free])
    omega = method.knowledge.omega.clone()
    if by_layer in ("lam", "both"):
        for layer in (first, ~first):
            omega[layer & important] *= (
                method.knowledge.omega[important].mean() / method.knowledge.omega[layer & important].mean()
            )
    torch.testing.assert_close(method.plan.omega, omega[important])
    assert torch.equal(method.plan.omega, method.knowledge.omega[important]) == (by_layer in ("none", "mu"))


def test_layers_with_strengths_of_their_own_shrink_by_these():
    method, model, optimizer = fresh(mu=1.0, lam=1.0, by_layer="mu")
    model.add_head("t0", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def norms():
        return torch.stack(
            [torch.cat([layer.weight, layer.bias[:, None]], 1).norm(dim=1).detach() for layer in model.trunk[::2]]
        )

    method.begin_task("t0", optimizer)
    for x, y in blobs(0):
        F.cross_entropy(model(x, "t0"), y).backward()
        optimizer.zero_grad()  # no gradient: the step moves nothing
        optimizer.step()
    before = norms()
    method.end_epoch()
    sizes = torch.tensor([17.0, 33.0]).sqrt()
    expected = (0.1 * sizes / sizes.mean())[:, None].expand(2, 32)
    torch.testing.assert_close(before - norms(), expected, atol=1e-6, rtol=1e-4)


def test_fresh_weights_can_be_limited_to_what_a_layer_has_just_put_to_use():
    method, model, optimizer = fresh(**{**SETTINGS, "rho": 1.0}, rand_init="needed")
    learn(method, optimizer, 0)
    free, new = method.free.view(2, 32), ~method.free.view(2, 32)
    alive = torch.stack([layer.weight.detach().norm(dim=1) > 0 for layer in model.trunk[::2]])
    assert (alive & free).sum(1).tolist() == torch.minimum(free.sum(1), new.sum(1)).tolist()
    every = torch.ones(64, dtype=torch.bool)
    some = torch.arange(64) >= 59  # 5 of the second layer, none of the first
    chosen = choose_groups(method.graph, every, 0.5, torch.Generator(), some)
    assert chosen.view(2, 32).sum(1).tolist() == [0, 5]
    assert choose_groups(method.graph, every, 0.5, torch.Generator()).view(2, 32).sum(1).tolist() == [16, 16]


def test_nodes_that_matter_little_can_be_kept_free_and_old_outputs_stay_exact_all_the_same():
    def learned(spare):
        method, model, optimizer = fresh(mu=8.0, lam=math.inf, rho=0.3, min_activity=spare)
        learn(method, optimizer, 0)
        return method, model, optimizer

    every, _, _ = learned(0.0)
    method, model, optimizer = learned(0.5)
    spared = method.free & ~every.free
    assert bool(spared.any())
    for layer in range(2):
        rows = slice(32 * layer, 32 * layer + 32)
        limit = 0.5 * every.knowledge.omega[rows][~every.free[rows]].mean()
        assert torch.equal(spared[rows], ~every.free[rows] & (every.knowledge.omega[rows] < limit))
    assert bool((method.knowledge.omega[method.free] == 0).all())
    assert bool((model.heads["t0"].weight[:, method.free[32:]] == 0).all()), "what is free is not read"
    x = blobs(0)[0][0]
    before = model(x, "t0")
    learn(method, optimizer, 1)
    assert torch.equal(before, model(x, "t0"))


def test_importances_can_grow_from_task_to_task():
    def omegas(eta):
        method, _, optimizer = fresh(**SETTINGS, eta=eta)
        learn(method, optimizer, 0)
        first = method.knowledge.omega.clone()
        learn(method, optimizer, 1)
        return first, method.knowledge.omega

    first, second = omegas(1.5)
    assert bool((second >= 1.5 * first - 1e-6).all())
    first, second = omegas(0.5)
    assert not bool((second >= first).all())


def test_the_rate_in_force_is_that_of_the_last_step_not_of_a_scheduler_stepped_since():
    method, model, optimizer = fresh(mu=1.0, lam=1.0)
    model.add_head("t0", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method.begin_task("t0", optimizer)
    for x, y in blobs(0):
        F.cross_entropy(model(x, "t0"), y).backward()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    row = torch.cat([model.trunk[0].weight[0], model.trunk[0].bias[:1]]).norm()
    method.end_epoch()
    after = torch.cat([model.trunk[0].weight[0], model.trunk[0].bias[:1]]).norm()
    torch.testing.assert_close(row - after, torch.tensor(0.05), atol=1e-5, rtol=0)


def test_fresh_weights_can_be_those_the_model_started_with():
    method, model, optimizer = fresh(**SETTINGS, reinit_from="start")
    start = bits(model)["trunk.0.weight"]
    learn(method, optimizer, 0)
    now = model.trunk[0].weight.detach()
    same_rows = (now == start).all(1)
    free = method.free[:32]
    assert bool(same_rows.any())
    assert not bool((same_rows & ~free).any())


def test_momentum_of_fresh_rows_is_cleared():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    weight = model.trunk[0].weight
    moments = optimizer.state[weight]["exp_avg"]
    cleared = (moments == 0).all(1)
    important = ~method.free[:32]
    assert bool(cleared.any())
    assert not bool((cleared & important).any())


def test_two_seeds_draw_other_fresh_weights_and_one_seed_the_same():
    def weights(seed):
        torch.manual_seed(0)
        model = MultiHead(mlp())
        learn(PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS, seed=seed), adam(model), 0)
        return bits(model)

    assert same(weights(1), weights(1))
    assert not same(weights(1), weights(2))


def test_global_random_state_is_untouched_by_the_graph_and_by_fresh_weights():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    state = torch.get_rng_state()
    method.end_task(blobs(0))
    assert torch.equal(state, torch.get_rng_state())


def test_importance_is_the_mean_relu_activation_over_the_training_data():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    x = torch.cat([x for x, _ in blobs(0)])
    with torch.no_grad():
        model.eval()
        first = model.trunk[1](model.trunk[0](x))
        expected = torch.cat([first.mean(0), model.trunk[3](model.trunk[2](first)).mean(0)])
    method.end_task(blobs(0))
    torch.testing.assert_close(method.knowledge.omega, expected)


def test_diverged_activations_do_not_end_the_task():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    with torch.no_grad():
        model.trunk[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        method.end_task(blobs(0))
    assert method.task == "t0"


def test_a_task_without_data_cannot_be_ended():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    with pytest.raises(RuntimeError, match="batches"):
        method.end_task([])
    assert method.task == "t0"


# Self-check -----------------------------------------------------------------------------------------------------------


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if issubclass(w.category, SelfCheckWarning)]


def test_an_ordinary_run_warns_of_nothing():
    method, _, optimizer = fresh()
    assert warned(lambda: [learn(method, optimizer, n) for n in range(2)]) == []


def test_it_warns_once_when_the_optimizer_given_is_not_the_one_stepping():
    method, model, optimizer = fresh()
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer)
    other = adam(model)
    for x, y in blobs(0):
        F.cross_entropy(model(x, "t0"), y).backward()
        other.step()
    messages = warned(lambda: method.end_task(blobs(0)))
    assert any("never stepped" in m and "begin_task" in m for m in messages)


def test_a_warning_points_at_the_users_own_line():
    method, _, optimizer = fresh(mu=1e-9, lam=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(method, optimizer, 0, epochs=1)
    assert {Path(warning.filename).name for warning in caught} == {"loops.py"}


def test_it_warns_when_epochs_are_never_told():
    method, _, optimizer = fresh()
    messages = warned(lambda: learn(method, optimizer, 0, told=False))
    assert any("end_epoch" in m for m in messages)


def test_it_warns_when_mu_is_too_small_for_any_node_to_become_free():
    method, _, optimizer = fresh(mu=1e-4, lam=10)
    messages = warned(lambda: learn(method, optimizer, 0))
    assert len(messages) == 1
    assert "is too small to free a node" in messages[0]
    again = warned(lambda: learn(method, optimizer, 1))
    assert not any("too small to free a node" in m for m in again)


def test_it_warns_when_lam_is_zero_or_nothing_is_important():
    method, _, optimizer = fresh(mu=20, lam=0)
    assert any("lam is 0" in m for m in warned(lambda: [learn(method, optimizer, n) for n in range(2)]))
    method, _, optimizer = fresh(mu=1e4, lam=10)
    messages = warned(lambda: [learn(method, optimizer, n) for n in range(2)])
    assert any("nothing is held. Were all shrunk to zero? Use a smaller mu" in m for m in messages)


def test_it_warns_when_a_layer_has_no_free_node_left():
    method, _, optimizer = fresh(mu=2.5, lam=100, rho=1.0, width=6)
    messages = warned(lambda: [learn(method, optimizer, n) for n in range(4)])
    assert any("No free node is left in trunk" in m for m in messages)


def test_it_warns_when_the_optimizer_lacks_a_layer():
    torch.manual_seed(0)
    model = MultiHead(mlp())
    optimizer = torch.optim.Adam(model.trunk[0].parameters(), lr=1e-2)
    method = PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS)
    assert any("trunk.2" in m for m in warned(lambda: learn(method, optimizer, 0)))


# Models of other people -----------------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.outputs = nn.ModuleList(nn.Linear(32, 3) for _ in range(3))

    def forward(self, x, task):
        return self.outputs[int(task[1:])](self.body(x))


@pytest.mark.parametrize("heads", ["outputs", lambda model, task: model.outputs[int(task[1:])]])
def test_a_model_with_heads_of_its_own_forgets_nothing_either(heads):
    torch.manual_seed(0)
    model = Own()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    method = PaperAGSCL(model, torch.zeros(2, 16), mu=20, lam=math.inf, rho=0.3, heads=heads)
    learn(method, optimizer, 0)
    x = torch.randn(8, 16)
    model.eval()
    before = model(x, "t0").detach()
    learn(method, optimizer, 1)
    learn(method, optimizer, 2)
    model.eval()
    assert torch.equal(before, model(x, "t0"))
    method.close()
    assert all(p.requires_grad for p in model.parameters())


def test_a_shared_head_is_trained_by_every_task_and_the_certificate_says_so():
    torch.manual_seed(0)
    model = OneHead()
    optimizer = adam(model)
    method = PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS, heads="out")
    for number in range(2):
        method.begin_task(f"t{number}", optimizer)
        for x, y in blobs(number) * 4:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        method.end_epoch()
        method.end_task(blobs(number))
    assert "all tasks share one head" in str(method.certificate())


def test_sharded_models_get_a_clear_error():
    class FullyShardedDataParallel(nn.Module):
        pass

    model = MultiHead(nn.Sequential(mlp(), FullyShardedDataParallel()))
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        PaperAGSCL(model, torch.zeros(2, 16))


@pytest.mark.parametrize("kind", [PaperAGSCL, FineTune])
def test_a_model_sharded_by_fsdp2_is_refused_whenever_it_was_sharded(kind, tmp_path):
    from torch.distributed.fsdp import fully_shard

    def make_model():
        model = MultiHead(mlp())
        model.add_head("t0", 3)
        model(torch.zeros(2, 16), "t0")
        return model

    x = [torch.zeros(2, 16)] if kind is PaperAGSCL else []
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        before, after = make_model(), make_model()
        fully_shard(before.trunk, mesh=mesh)
        with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
            kind(before, *x)
        method = kind(after, *x)
        fully_shard(after.trunk, mesh=mesh)
        with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
            method.begin_task("t0", torch.optim.Adam(after.parameters()))
        assert method.task is None
    finally:
        torch.distributed.destroy_process_group()


def test_two_methods_on_one_optimizer_share_one_pair_of_hooks():
    method, _model, optimizer = fresh(FineTune)
    other = FineTune(method.model)
    method.model.add_head("t0", 3)
    method.begin_task("t0", optimizer)
    other.begin_task("t0", optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    method.close()
    assert len(optimizer._optimizer_step_post_hooks) == 1
    other.close()
    assert not optimizer._optimizer_step_post_hooks


def test_lbfgs_which_calls_its_closure_many_times_works():
    method, model, _ = fresh(mu=1, lam=10)
    model.add_head("t0", 3)
    x, y = blobs(0)[0]
    model(x, "t0")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    method.begin_task("t0", optimizer)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, "t0"), y)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    for _ in range(5):
        last = optimizer.step(closure).item()
    method.end_epoch()
    method.end_task(blobs(0))
    assert last < first


def test_a_network_the_graph_refuses_is_refused_when_the_method_is_made():
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.GELU()), features=32)
    with pytest.raises(ValueError, match="ReLU"):
        PaperAGSCL(model, torch.zeros(1, 16), **SETTINGS)


def test_a_task_that_cannot_begin_leaves_method_and_optimizer_as_they_were():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    held = [len(group["params"]) for group in optimizer.param_groups]
    model.add_head("t1", nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 3)))
    with pytest.raises((ValueError, RuntimeError), match="heads"):
        method.begin_task("t1", optimizer)
    assert method.task is None
    assert method.tasks == ["t0"]
    assert [len(group["params"]) for group in optimizer.param_groups] == held
    assert not optimizer._optimizer_step_post_hooks
    assert all(p.requires_grad for p in model.parameters())


def test_a_graph_that_was_built_before_gives_the_same_bits_as_an_example_input():
    results = []
    for ready in (False, True):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        optimizer = adam(model)
        method = PaperAGSCL(model, NodeGraph(model, torch.zeros(1, 16)) if ready else torch.zeros(1, 16), **SETTINGS)
        for number in range(2):
            learn(method, optimizer, number)
        results.append(bits(model))
    assert same(*results)


def test_a_state_loaded_and_saved_again_is_the_same_state():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(5), end=False)
    state = method.state_dict()
    other = PaperAGSCL(copy.deepcopy(model), torch.zeros(2, 16), **SETTINGS)
    other.load_state_dict(state, adam(other.model))
    assert hash_state(other.state_dict()) == hash_state(state)


def test_batchnorm_statistics_follow_the_weights_that_the_last_proximal_step_shrank():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
    model = MultiHead(trunk, features=48)
    optimizer = adam(model)
    method = PaperAGSCL(model, torch.zeros(2, 16), mu=10, lam=1000, rho=0.3)
    learn(method, optimizer, 0)
    norm = trunk[1]
    tracked = int(norm.num_batches_tracked)
    x = torch.cat([x for x, _ in blobs(0)])
    important = ~method.free[:48]
    with torch.no_grad():
        actual = trunk[0](x).var(0)[important]
    ratio = norm.running_var[important] / actual
    assert float((ratio - 1).abs().median()) < 0.2
    assert norm.momentum == 0.1
    assert tracked == 32
    assert norm.training


# Found by review ------------------------------------------------------------------------------------------------------


def test_importance_is_right_where_a_model_folds_time_into_the_batch():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 16)

        def forward(self, x):
            features = F.relu(self.conv(x.flatten(0, 1))).mean((2, 3)).unflatten(0, x.shape[:2]).mean(1)
            return F.relu(self.fc(features))

    torch.manual_seed(0)
    trunk = Folded()
    model = MultiHead(trunk, features=16)
    x, y = torch.randn(6, 4, 1, 8, 8), torch.randint(3, (6,))  # as many channels as rows of the image
    optimizer = adam(model)
    method = PaperAGSCL(model, x[:2], mu=1, lam=10)
    model.add_head("a", 3)
    method.begin_task("a", optimizer)
    optimizer.zero_grad()
    F.cross_entropy(model(x, "a"), y).backward()
    optimizer.step()
    method.end_epoch()
    with torch.no_grad():
        trunk.conv.weight[0] = 0
        trunk.conv.bias[0] = -1  # dead
        expected = F.relu(trunk.conv(x.flatten(0, 1))).mean((0, 2, 3))
    method.end_task([(x, y)])
    torch.testing.assert_close(method.knowledge.omega[:8], expected)
    assert method.free[0]


@pytest.mark.parametrize("every", ["epoch", "step"])
def test_with_infinite_lam_rows_in_a_second_optimizer_stay_put_too(every):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    one = torch.optim.Adam(model.trunk[0].parameters(), lr=1e-2)
    two = torch.optim.Adam(model.trunk[2].parameters(), lr=1e-2)
    method = PaperAGSCL(model, torch.zeros(2, 16), mu=8, lam=math.inf, prox_every=every)
    for number in range(2):
        torch.manual_seed(number)
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", one, two, steps_per_epoch=4)
        for _ in range(8):
            for x, y in blobs(number):
                one.zero_grad()
                two.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                one.step()
                two.step()
            method.end_epoch()
        method.end_task(blobs(number))
    assert method.statistics()["frozen"] == method.statistics()["important_before"] > 0


def test_an_optimizer_built_anew_within_a_task_is_noticed_and_guaranteed_rows_still_keep_their_bits():
    method, model, optimizer = fresh(mu=8, lam=math.inf)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(4), end=False)
    other = adam(model)

    def more():
        for x, y in blobs(1):
            other.zero_grad()
            F.cross_entropy(model(x, "t1"), y).backward()
            other.step()
        method.end_epoch()

    assert any("built anew" in message for message in warned(more))
    method.end_task(blobs(1))
    assert method.certificate().moved == []


def test_layers_unfrozen_after_the_graph_was_built_are_refused():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    model.trunk[0].requires_grad_(False)
    optimizer = adam(model)
    method = PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS)
    learn(method, optimizer, 0)
    model.trunk[0].requires_grad_(True)
    model.add_head("t1", 3)
    with pytest.raises(RuntimeError, match=r"trunk\.0"):
        method.begin_task("t1", optimizer)


@pytest.mark.parametrize(
    "layer",
    [
        type("Standardised", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight - s.weight.mean(), s.bias)})(
            16, 32
        ),
        nn.Sequential(nn.Unflatten(1, (16, 1)), nn.Conv1d(16, 32, 1), nn.InstanceNorm1d(32, track_running_stats=True)),
    ],
)
def test_layers_that_would_break_the_guarantee_are_refused(layer):
    model = MultiHead(nn.Sequential(layer, nn.ReLU(), nn.Flatten()))
    model.add_head("a", 3)
    with pytest.raises(ValueError, match="exclude"):
        PaperAGSCL(model, example_input=torch.randn(4, 16))


def test_heads_in_a_list_may_be_called_by_number():
    class Numbered(Own):
        def forward(self, x, task):
            return self.outputs[task](self.body(x))

    torch.manual_seed(0)
    model = Numbered()
    optimizer = adam(model)
    method = PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS, heads="outputs")
    for number in range(2):
        method.begin_task(f"t{number}", optimizer)
        for x, y in blobs(number) * 4:
            optimizer.zero_grad()
            F.cross_entropy(model(x, number), y).backward()
            optimizer.step()
        method.end_epoch()
        method.end_task(blobs(number))
    assert method.certificate().probe.outputs.keys() == {"t0", "t1"}


def with_norm(**settings):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()))
    return PaperAGSCL(model, torch.zeros(2, 16), **{**SETTINGS, **settings}), model, adam(model)


def test_a_batchnorm_that_the_loop_keeps_in_eval_mode_keeps_its_statistics():
    method, model, optimizer = with_norm()
    learn(method, optimizer, 0, end=False, steps=range(0))
    before = bits(model.trunk[1])
    for x, y in blobs(0) * 4:
        model.trunk[1].eval()
        optimizer.zero_grad()
        F.cross_entropy(model(x, "t0"), y).backward()
        optimizer.step()
    method.end_epoch()
    method.end_task(blobs(0))
    for key in ("running_mean", "running_var"):
        assert torch.equal(before[key], model.trunk[1].state_dict()[key]), key


@pytest.mark.parametrize("what", ["trunk.0.bias", "trunk.1.weight"])
def test_what_the_user_has_frozen_is_neither_shrunk_nor_made_fresh(what):
    method, model, optimizer = with_norm(rho=1.0)
    model.get_parameter(what).requires_grad_(False)
    before = model.get_parameter(what).detach().clone()
    learn(method, optimizer, 0)
    assert torch.equal(before, model.get_parameter(what))


def test_a_task_resumed_after_its_last_step_ends_as_if_it_had_not_stopped():
    method, model, optimizer = with_norm()
    learn(method, optimizer, 0, end=False)
    other, twin, steps = with_norm()
    twin.add_head("t0", 3)
    twin(blobs(0)[0][0], "t0")
    twin.load_state_dict(model.state_dict())
    steps.add_param_group({"params": twin.heads.parameters()})
    other.load_state_dict(method.state_dict(), steps)
    twin(blobs(0)[0][0], "t0")
    twin.load_state_dict(model.state_dict())
    method.end_task(blobs(0))
    other.end_task(blobs(0))
    assert same(bits(model.trunk[1]), bits(twin.trunk[1]))


def test_scoring_the_model_in_inference_mode_before_training_does_no_harm():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = PaperAGSCL(model, torch.zeros(2, 16), **SETTINGS), adam(model)
    learn(method, optimizer, 0, steps=range(0), end=False)
    with torch.inference_mode():
        model(blobs(0)[0][0], "t0")
    learn(method, optimizer, 0, begin=False)
    assert method.statistics()["nodes"] == 64


def test_with_infinite_lam_a_step_holds_also_while_the_length_of_an_epoch_is_not_known():
    method, _, optimizer = fresh(mu=12, lam=math.inf, rho=0.3, prox_every="step")
    learn(method, optimizer, 0)
    anchors = [part.clone() for part in method.knowledge.anchors]

    def held(step):
        assert all(torch.equal(a, b) for a, b in zip(method.plan.important_rows.gather(), anchors, strict=True)), step

    with pytest.warns(SelfCheckWarning, match="how many steps an epoch has was never told"):
        learn(method, optimizer, 1, after_step=held, told=False)


def test_with_infinite_lam_rows_return_after_every_step_however_rare_proximal_steps_are():
    method, _, optimizer = fresh(mu=12, lam=math.inf, rho=0.3, prox_every=3)
    learn(method, optimizer, 0)
    anchors = [part.clone() for part in method.knowledge.anchors]
    at_anchor = []

    def compare(step):
        pairs = zip(method.plan.important_rows.gather(), anchors, strict=True)
        at_anchor.append(all(torch.equal(row, anchor) for row, anchor in pairs))

    learn(method, optimizer, 1, epochs=3, after_step=compare)
    assert at_anchor == [True] * 12


def test_fresh_weights_leave_the_generators_of_gpus_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    method, _, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    seeded.clear()
    before = torch.get_rng_state()
    method.end_task(blobs(0))
    assert not seeded
    assert torch.equal(before, torch.get_rng_state())


def test_a_method_without_an_example_input_says_what_to_give():
    with pytest.raises(TypeError, match=r"PaperAGSCL\(model, example_input\)"):
        PaperAGSCL(MultiHead(mlp()))


def test_a_graph_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        PaperAGSCL(MultiHead(mlp()), NodeGraph(MultiHead(mlp()), torch.zeros(2, 16)))


def test_where_heads_are_a_function_of_the_task_the_graph_is_there_from_the_first_task_on():
    model = Own()
    method = PaperAGSCL(model, torch.zeros(2, 16), heads=lambda model, task: model.outputs[int(task[1:])])
    with pytest.raises(RuntimeError, match="no NodeGraph yet"):
        _ = method.graph
    method.begin_task("t0", adam(model))
    assert method.graph.size == 64


def test_labels_are_not_needed_to_end_a_task():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    method.end_task([(x, y + 100) for x, y in blobs(0)])


def test_an_input_that_is_added_to_a_layer_does_not_hide_it():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 32)

        def forward(self, x):
            return F.relu(self.b(F.relu(self.a(x) + x)))

    for seed in range(4):
        torch.manual_seed(seed)
        model = MultiHead(Added(), features=32)
        model.add_head("a", 3)
        graph = PaperAGSCL(model, example_input=torch.randn(2, 16)).graph
        assert graph.readers["trunk.b"].sources.tolist() == list(range(16))


def test_the_certificate_names_heads_that_moved():
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1)
    with torch.no_grad():
        model.heads["t0"].weight[0, 0] += 1
    assert "CHANGED: the heads of t0" in str(method.certificate())
