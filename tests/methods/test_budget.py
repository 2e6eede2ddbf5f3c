"""AGS-CL without settings: a budget of nodes per task, pruned while the task is learned."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo
from agscl import AGSCL, EWC, MultiHead, NodeGraph, PaperAGSCL, Together
from agscl.certificate import NEVER
from agscl.graph.rows import FlatRows, Rows
from agscl.methods._agscl import budget as budgets
from agscl.methods._agscl import node_pruner
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.testing import NETWORKS, OPTIMIZERS
from loops import adam, bits, blobs, learn, mlp, same
from replayed_graphs import use_forms_for_a_gpu

quiet = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
EXAMPLE = torch.zeros(2, 16)


def build(**settings):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    return AGSCL(model, EXAMPLE, **settings), adam(model)


@pytest.fixture(params=["usual", "for a GPU"])
def form(request, monkeypatch):
    """Both forms in which pruned nodes are held at 0 and saliencies are summed."""
    if request.param == "for a GPU":
        use_forms_for_a_gpu(monkeypatch)


def train(method, optimizer, number, steps, *, end=True, told=None, epoch=None, begin=True, after_step=None):
    """Train a task for so many steps; `told` is given to begin_task, `end_epoch` is called every `epoch` steps."""
    model, task, data = method.model, f"t{number}", blobs(number)
    if begin:
        torch.manual_seed(number)
        model.add_head(task, 3)
        method.begin_task(task, optimizer, **(told or {}))
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        F.cross_entropy(model(x, task), y).backward()
        optimizer.step()
        if after_step:
            after_step(step + 1)
        if epoch and (step + 1) % epoch == 0:
            method.end_epoch()
    if end:
        method.end_task(data)


def pruned_at(method, optimizer, number, steps, **options):
    """After which steps a task was pruned, and how many nodes were then gone."""
    counts = {}

    def note(step):
        count = int(method.plan.pruner.pruned.sum())
        if count > max(counts.values(), default=0):
            counts[step] = count

    train(method, optimizer, number, steps, after_step=note, **options)
    return counts


# What a task keeps ----------------------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("network", ["mlp", "cnn", "residual"])
@pytest.mark.parametrize("budget", [0.25, 0.5, 4])
def test_a_task_keeps_at_most_its_budget_of_each_layers_free_nodes(network, budget):
    torch.manual_seed(0)
    model = MultiHead(NETWORKS[network].make())
    method = AGSCL(model, torch.zeros(2, 1, 8, 8), budget=budget)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for number in range(3):
        allowed = [
            (in_layer, budgets.count_kept(int((in_layer & method.free).sum()), budget, number))
            for in_layer in method.graph.groups_by_layer()
        ]
        model.add_head(f"t{number}", 2)
        method.begin_task(f"t{number}", optimizer, epochs=5, steps_per_epoch=4)
        draw = torch.Generator().manual_seed(number)
        data = [(torch.randn(8, 1, 8, 8, generator=draw), torch.arange(8) % 2) for _ in range(4)]
        for _ in range(5):
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
        new = method.knowledge.first_task == number
        assert all(int((in_layer & new).sum()) <= kept for in_layer, kept in allowed)
        assert int(new.sum()) > 0


@given(free=st.integers(0, 500), share=st.floats(0.001, 1), learned=st.integers(0, 20))
def test_a_share_gives_every_task_a_node_while_one_is_free(free, share, learned):
    kept = budgets.count_kept(free, share, learned)
    assert (1 if free else 0) <= kept <= free
    assert kept - 1 < free * share + 1e-6


@given(nodes=st.integers(1, 500), tasks=st.integers(1, 60))
def test_a_number_of_tasks_shares_the_nodes_evenly_among_them(nodes, tasks):
    free, kept = nodes, []
    for learned in range(tasks):
        kept.append(budgets.count_kept(free, tasks, learned))
        free -= kept[-1]
    assert free == 0
    assert max(kept) - min(kept) <= 1
    assert budgets.count_tasks_left(nodes, tasks, 0) == min(nodes, tasks)


@quiet
def test_a_score_of_ones_own_may_be_anything_below_zero_too(monkeypatch):
    method, optimizer = build()
    monkeypatch.setattr(node_pruner.NodePruner, "_score_groups", lambda pruner, sizes: sizes - 100.0)
    train(method, optimizer, 0, 200, end=False, told={"epochs": 5, "steps_per_epoch": 40}, epoch=40)
    assert int(method.plan.pruner.pruned.sum()) == 48  # of 64: each layer of 32 keeps 8


def test_one_epoch_of_captured_steps_prunes_at_its_end_no_more_than_a_task_that_ends_early_and_says_so():
    method, optimizer = build()

    def capture(step):
        method.plan.schedule.captured = True  # from now on steps count nothing

    told = {"epochs": 1, "steps_per_epoch": 100}
    with pytest.warns(SelfCheckWarning, match="at the very end"):
        train(method, optimizer, 0, 100, told=told, epoch=100, after_step=capture)
    assert int((method.knowledge.first_task == 0).sum()) > 16


@quiet
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adamw"])
def test_pruned_nodes_are_exactly_zero_after_every_step_until_the_task_ends(optimizer, form):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = AGSCL(model, EXAMPLE), OPTIMIZERS[optimizer](model.parameters())
    seen = []

    def check(step):
        pruned = method.plan.pruner.pruned
        for layer in method.graph.layers.values():
            gone = pruned[layer.groups]
            assert not layer.module.weight[gone].any()
            assert not layer.module.bias[gone].any()
        seen.append(int(pruned.sum()))

    for number in range(2):
        train(method, optimizer, number, 32, told={"epochs": 8, "steps_per_epoch": 4}, epoch=4, after_step=check)
    assert len(set(seen)) > 4
    assert not any((p == 0).all(1).any() for name, p in model.trunk.named_parameters() if p.dim() > 1)  # fresh again


@quiet
def test_a_layer_that_is_unfrozen_after_a_pruning_is_held_at_zero_too(form):
    method, optimizer = build()
    layer = method.model.trunk[0]
    layer.requires_grad_(False)
    kept = bits(layer)
    told = {"told": {"epochs": 10, "steps_per_epoch": 2}, "epoch": 2, "end": False}
    train(method, optimizer, 0, 16, **told)
    assert method.plan.pruner.pruned_share == 1
    assert same(bits(layer), kept), "the user has frozen it"
    layer.requires_grad_(True)
    train(method, optimizer, 0, 2, begin=False, **told)
    gone = method.plan.pruner.pruned[method.graph.layers["trunk.0"].groups]
    assert gone.any()
    assert not layer.weight[gone].any()


@quiet
def test_a_loop_that_replaces_parameters_within_a_task_is_pruned_as_one_that_does_not(form):
    def learn(replace):
        method, optimizer = build()
        model, told = method.model, {"told": {"epochs": 10, "steps_per_epoch": 2}, "epoch": 2, "end": False}
        train(method, optimizer, 0, 4, **told)
        if replace:
            old = dict(model.named_parameters())
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            new = {id(old[name]): p for name, p in model.named_parameters()}
            group = optimizer.param_groups[0]
            group["params"] = [new[id(p)] for p in group["params"]]
            for parameter in old.values():
                optimizer.state[new[id(parameter)]] = optimizer.state.pop(parameter)
        train(method, optimizer, 0, 16, begin=False, **told)
        return method.plan.pruner.pruned

    # at the first pruning the saliencies of the last epoch alone are missing
    assert (learn(replace=True) == learn(replace=False)).float().mean() > 0.9


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("network", zoo.SUPPORTED)
def test_in_both_forms_a_group_has_the_sum_over_all_its_rows(network, layout):
    entry = zoo.SUPPORTED[network]
    graph = NodeGraph(MultiHead(entry.trunk()), entry.example())
    for layer in graph.layers.values():
        if layer.weight.dim() == 4:
            layer.weight.data = layer.weight.data.to(memory_format=layout)
    chosen = torch.rand(graph.size, generator=torch.Generator().manual_seed(0)) < 0.6
    rows = Rows(graph, chosen)
    values = [torch.randn_like(parameter) for parameter in rows.parameters]
    expected = torch.zeros(graph.size)
    for parameter, value in zip(rows.parameters, values, strict=True):
        groups = next(groups for _, p, groups in graph.incoming_parameters() if p is parameter)
        expected.index_add_(0, groups, value.flatten(1).sum(1) if value.dim() > 1 else value)
    for each in (rows, FlatRows(rows)):
        torch.testing.assert_close(each.sum_by_group(values), expected[chosen], rtol=1e-4, atol=1e-4)


@quiet
def test_the_nodes_with_the_lowest_scores_go_first(form):
    method, optimizer = build()
    train(method, optimizer, 0, 4, told={"epochs": 20, "steps_per_epoch": 4}, epoch=4, end=False)
    scores = node_pruner.measure_sizes(method.graph, method.model.heads["t0"])
    before = scores * method.plan.pruner.saliency
    method.plan.pruner.prune_(0.5)
    pruned = method.plan.pruner.pruned
    for layer in method.graph.layers.values():
        own = pruned[layer.groups]
        assert own.sum() == 12  # half of the 24 that must go
        assert before[layer.groups][own].max() <= before[layer.groups][~own].min()


@quiet
def test_the_saliency_of_a_node_is_what_the_loss_changes_by_without_it_to_first_order(form):
    method, optimizer = build()
    train(method, optimizer, 0, 3, end=False)
    model, (x, y) = method.model, blobs(0)[0]
    method.plan.pruner.saliency.zero_()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, "t0"), y)
    loss.backward()
    method.plan.pruner.observe_gradients(optimizer, None)
    saliency, layer = method.plan.pruner.saliency[method.graph.layers["trunk.2"].groups], model.trunk[2]
    for node in range(5):
        kept = bits(model)
        with torch.no_grad():
            layer.weight[node] *= 1 - 1e-3
            layer.bias[node] *= 1 - 1e-3
            change = abs(F.cross_entropy(model(x, "t0").double(), y) - loss.double()) / 1e-3
        model.load_state_dict(kept)
        assert abs(change - saliency[node]) < 2e-3


@quiet
def test_a_gradient_that_overflowed_leaves_the_saliencies_finite(form):
    method, optimizer = build()
    train(method, optimizer, 0, 3, end=False)
    before = method.plan.pruner.saliency.clone()
    for parameter in method.model.trunk.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    method.plan.pruner.observe_gradients(optimizer, None)
    assert torch.equal(method.plan.pruner.saliency, before)


@quiet
def test_nodes_that_never_fire_go_first_however_large_their_weights_are(form):
    method, optimizer = build()
    layer = method.model.trunk[2]
    with torch.no_grad():
        layer.weight[:10] *= 3  # the highest scores of the layer,
        layer.bias[:10] = -1e3  # and never a positive output
    train(method, optimizer, 0, 20, told={"epochs": 10, "steps_per_epoch": 2}, epoch=2, end=False)
    pruned = method.plan.pruner.pruned[method.graph.layers["trunk.2"].groups]
    assert pruned[:10].all()
    method.end_task(blobs(0))
    assert int((method.knowledge.first_task[method.graph.layers["trunk.2"].groups] == 0).sum()) == 8


def test_a_score_is_the_norm_of_incoming_times_outgoing_weights_and_leaves_old_heads_out():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), features=4)
    old, head = model.add_head("old", 2), model.add_head("new", 5)
    method = AGSCL(model, torch.zeros(1, 3))
    method.graph.trace_head("old", ["old", "new"])
    method.graph.trace_head("new", ["old", "new"])
    layer = model.trunk[0]
    expected = torch.cat([layer.weight, layer.bias[:, None]], 1).norm(dim=1) * head.weight.norm(dim=0)
    assert torch.allclose(node_pruner.measure_sizes(method.graph, head).float(), expected, rtol=1e-5)
    assert old is not head


def test_behind_batchnorm_its_scale_and_shift_count_and_the_scale_of_weights_does_not():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    model = MultiHead(trunk, features=4)
    head = model.add_head("t", 2)
    nn.init.normal_(trunk[1].weight)
    method = AGSCL(model, torch.zeros(2, 3))
    scores = node_pruner.measure_sizes(method.graph, head)
    with torch.no_grad():
        trunk[0].weight[1] *= 100
    assert torch.equal(node_pruner.measure_sizes(method.graph, head), scores)
    assert torch.allclose(scores.float(), trunk[1].weight.abs() * head.weight.norm(dim=0), rtol=1e-5)


# Old tasks ------------------------------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("told", [{}, {"epochs": 6}, {"epochs": 6, "steps_per_epoch": 4}], ids=str)
def test_without_any_setting_old_outputs_keep_their_bits_after_every_step(told):
    method, optimizer = build()
    probe, kept = torch.randn(8, 16), {}

    def check(step):
        for task, output in kept.items():
            assert torch.equal(method.model(probe, task), output)

    for number in range(3):
        train(method, optimizer, number, 24, told=told, epoch=4, after_step=check)
        with torch.no_grad():
            kept[f"t{number}"] = method.model(probe, f"t{number}")
    assert "guaranteed for good" in str(method.certificate())


@quiet
@pytest.mark.parametrize("name", [name for name in zoo.SUPPORTED if name != "alexnet"])
def test_two_tasks_without_settings_keep_old_bits_on_every_network(name):
    torch.manual_seed(0)
    entry = zoo.SUPPORTED[name]
    model = MultiHead(entry.trunk())
    method = AGSCL(model, entry.example())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    probe, outputs = entry.example(seed=1), []
    for number in range(2):
        task, data = f"t{number}", [(entry.example(seed=10 + step), torch.arange(4) % 2) for step in range(3)]
        model.add_head(task, 2)
        method.begin_task(task, optimizer, epochs=2, steps_per_epoch=3)
        model.train()
        for _ in range(2):
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x, task), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
        model.eval()
        with torch.no_grad():
            outputs.append(model(probe, "t0"))
    assert torch.equal(*outputs)


# When a task is pruned ------------------------------------------------------------------------------------------------


@quiet
def test_a_long_task_is_pruned_at_the_ends_of_a_few_epochs():
    method, optimizer = build()
    counts = pruned_at(method, optimizer, 0, 60, told={"epochs": 15, "steps_per_epoch": 4}, epoch=4)
    assert list(counts) == [21, 29, 37]  # seen after the first step of the next epoch: epochs 5, 7 and 9
    assert list(counts.values()) == [2 * round(24 * share) for share in (1 - 27 / 64, 7 / 8, 63 / 64)]


@quiet
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_a_short_task_is_pruned_between_steps(epochs):
    method, optimizer = build()
    told = {"epochs": epochs, "steps_per_epoch": 60 // epochs}
    counts = pruned_at(method, optimizer, 0, 60, told=told, epoch=60 // epochs)
    assert counts == {18: 28, 26: 42, 34: 48}  # at a fourth point nothing is left to prune in layers this narrow


@quiet
def test_steps_of_an_epoch_that_were_not_told_are_counted_in_the_first_one():
    method, optimizer = build()
    counts = pruned_at(method, optimizer, 0, 60, told={"epochs": 3}, epoch=20)
    assert list(counts) == [21, 26, 34]  # at the end of the first epoch, then between steps


@quiet
def test_a_task_of_unknown_length_is_pruned_whenever_it_has_become_twice_as_long():
    method, optimizer = build()
    counts = pruned_at(method, optimizer, 0, 300)
    assert counts == {64: 24, 128: 36, 256: 42}
    assert int(method.free.sum()) >= 44


@quiet
def test_a_later_task_of_unknown_length_is_taken_to_be_as_long_as_the_last_one():
    method, optimizer = build()
    train(method, optimizer, 0, 100)
    assert list(pruned_at(method, optimizer, 1, 100)) == [30, 44, 57]


def test_nodes_pruned_at_the_very_end_are_warned_about_with_what_to_tell():
    method, optimizer = build()
    with pytest.warns(SelfCheckWarning, match=r"16 nodes were pruned at the very end .* Give begin_task\(…, epochs="):
        train(method, optimizer, 0, 8)
    method, optimizer = build()
    with pytest.warns(SelfCheckWarning, match=r"end_epoch\(\) was never called"):
        train(method, optimizer, 0, 40, told={"epochs": 30})


def test_a_task_that_stops_early_is_warned_about_with_the_length_that_was_told():
    method, optimizer = build()
    with pytest.warns(SelfCheckWarning, match=r"ended after 10 of the 30 epochs .* may be longer than told"):
        train(method, optimizer, 0, 40, told={"epochs": 30}, epoch=4)


@quiet
def test_a_task_that_stops_early_keeps_three_quarters_of_the_nodes_it_has():
    method, optimizer = build()
    train(method, optimizer, 0, 20, told={"epochs": 100}, epoch=4)
    assert 16 <= int(method.free.sum()) <= 24  # with those that never fire


@quiet
def test_after_a_task_that_stopped_early_the_next_one_is_pruned_as_if_it_stopped_at_the_same_point():
    method, optimizer = build()
    train(method, optimizer, 0, 40, told={"epochs": 30}, epoch=4)
    counts = pruned_at(method, optimizer, 1, 120, told={"epochs": 30}, epoch=4)
    assert min(counts) == 13  # after epoch 3, not 9,
    assert max(counts) <= 29  # to epoch 7, not 21
    assert method.knowledge.last_task_share == 1.0


@quiet
def test_ending_a_task_again_after_an_error_prunes_no_more():
    method, optimizer = build()
    train(method, optimizer, 0, 8, end=False)
    good = bits(method.model)
    for parameter in method.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        method.end_task(blobs(0))
    method.model.load_state_dict(good)
    method.end_task(blobs(0))
    assert 16 <= int(method.free.sum()) <= 24


def test_what_is_read_of_nodes_that_stay_is_scaled_up_so_that_sums_stay_nearly_of_the_same_size():
    method, optimizer = build()
    train(method, optimizer, 0, 8, end=False)
    method.model.add_head("t1", 3)  # not of this task
    before = bits(method.model)
    sizes = node_pruner.measure_sizes(method.graph, method.model.heads["t0"])
    sizes[method.plan.pruner.saliency == 0] = 0  # they never fire
    method.plan.pruner.prune_(0.5)
    after = bits(method.model)
    for layer, reader in (("trunk.0", "trunk.2.weight"), ("trunk.2", "heads.t0.weight")):
        groups = method.graph.layers[layer].groups
        stay = ~method.plan.pruner.pruned[groups]
        factor = (sizes[groups].sum() / sizes[groups][stay].sum()).sqrt().float()
        assert 1.05 < factor < 2
        rows = slice(None) if "heads" in reader else ~method.plan.pruner.pruned[method.graph.layers["trunk.2"].groups]
        torch.testing.assert_close(after[reader][rows][:, stay], before[reader][rows][:, stay] * factor)
        assert torch.equal(after[f"{layer}.bias"][stay], before[f"{layer}.bias"][stay])
        assert not after[f"{layer}.weight"][~stay].any()
    assert torch.equal(after["heads.t1.weight"], before["heads.t1.weight"])


def test_nodes_that_stay_keep_their_weights_where_many_steps_are_left():
    method, optimizer = build()
    train(method, optimizer, 0, 8, end=False)
    before = bits(method.model)
    method.plan.pruner.prune_(0.5, steps_left=node_pruner.RECOVERY_STEPS)
    stay = ~method.plan.pruner.pruned[method.graph.layers["trunk.2"].groups]
    assert 0 < stay.sum() < len(stay)
    assert torch.equal(method.model.trunk[2].weight[stay], before["trunk.2.weight"][stay])
    assert torch.equal(method.model.heads["t0"].weight, before["heads.t0.weight"])


@pytest.mark.parametrize(("examples", "scaled"), [(16, True), (400, False)])
def test_how_much_of_a_task_is_left_is_told_in_steps_however_many_epochs_that_is(monkeypatch, examples, scaled):
    calls = []
    monkeypatch.setattr(node_pruner, "_scale_outgoing_", lambda graph, head, factors: calls.append(True))
    method, optimizer = build()
    method.model.add_head("t0", 3)
    method.begin_task("t0", optimizer, epochs=20)
    for _ in range(20):
        for _ in range(examples // 4):
            optimizer.zero_grad()
            F.cross_entropy(method.model(torch.randn(4, 16), "t0"), torch.randint(3, (4,))).backward()
            optimizer.step()
        method.end_epoch()
    assert bool(calls) == scaled


@pytest.mark.parametrize("norm", [True, False], ids=["with BatchNorm", "without"])
def test_groups_behind_a_batchnorm_and_depthwise_filters_are_not_scaled(norm):
    torch.manual_seed(0)

    def block(*layers):
        return [*layers[:1], *([nn.BatchNorm2d(8)] if norm else []), *layers[1:]]

    trunk = nn.Sequential(
        *block(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
        *block(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = MultiHead(trunk)
    model.add_head("t0", 2)
    method = AGSCL(model, torch.zeros(2, 1, 8, 8))
    method.begin_task("t0", adam(model))
    before = bits(model)
    method.plan.pruner.prune_(0.5)
    stay = ~method.plan.pruner.pruned
    for name, value in trunk.named_parameters():
        assert torch.equal(value[stay], before[f"trunk.{name}"][stay]), name
    assert torch.equal(model.heads["t0"].weight[:, stay], before["heads.t0.weight"][:, stay]) == norm


def test_going_back_to_weights_from_before_a_pruning_is_warned_about():
    method, optimizer = build()
    train(method, optimizer, 0, 4, told={"epochs": 20}, epoch=4, end=False)
    best = bits(method.model)
    train(method, optimizer, 0, 76, epoch=4, begin=False, end=False)
    method.model.load_state_dict(best)
    with pytest.warns(SelfCheckWarning, match=r"48 nodes that were pruned in task 't0' had weights again"):
        method.end_task(blobs(0))


@pytest.mark.parametrize("rate", [0.3, 0.08])
def test_averaged_weights_in_which_pruned_nodes_have_faded_give_no_warning(rate):
    method, optimizer = build()
    averages = {}

    def average(step):
        for name, value in method.model.state_dict().items():
            averages[name] = averages.get(name, value).lerp(value, rate)

    train(method, optimizer, 0, 80, told={"epochs": 20}, epoch=4, after_step=average, end=False)
    method.model.load_state_dict(averages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.end_task(blobs(0))


@pytest.mark.parametrize("told", [{"epochs": 20, "steps_per_epoch": 4}, {"epochs": 2, "steps_per_epoch": 40}], ids=str)
def test_a_task_whose_length_was_told_gives_no_warning(told):
    method, optimizer = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            train(method, optimizer, number, 80, told=told, epoch=told["steps_per_epoch"])


@quiet
@pytest.mark.parametrize("told", [{}, {"epochs": 4}, {"epochs": 4, "steps_per_epoch": 10}], ids=str)
@pytest.mark.parametrize("stop", [7, 11, 33])
def test_a_task_resumed_between_prunings_ends_with_the_same_bits(told, stop):
    def run(stop):
        method, optimizer = build()
        train(method, optimizer, 0, 40, told=told, epoch=10)
        train(method, optimizer, 1, stop or 40, told=told, epoch=10, end=False)
        if stop:
            saved = copy.deepcopy((method.model.state_dict(), optimizer.state_dict(), method.state_dict()))
            method.close()
            method, _ = build()
            for number in range(2):
                method.model.add_head(f"t{number}", 3)
            method.model.load_state_dict(saved[0])
            optimizer = adam(method.model)
            method.load_state_dict(saved[2], optimizer)
            optimizer.load_state_dict(saved[1])
            data, step = blobs(1), stop
            for step in range(stop, 40):
                x, y = data[step % len(data)]
                optimizer.zero_grad()
                F.cross_entropy(method.model(x, "t1"), y).backward()
                optimizer.step()
                if (step + 1) % 10 == 0:
                    method.end_epoch()
        method.end_task(blobs(1))
        return bits(method.model)

    assert same(run(None), run(stop))


@quiet
def test_weights_from_before_a_pruning_that_a_loop_restores_are_pruned_again_when_the_task_ends():
    method, optimizer = build()
    kept = {}

    def keep(step):
        if step == 4:
            kept.update(bits(method.model))

    train(method, optimizer, 0, 40, told={"epochs": 10, "steps_per_epoch": 4}, epoch=4, after_step=keep, end=False)
    method.model.load_state_dict(kept)
    method.end_task(blobs(0))
    assert int((~method.free).sum()) <= 16


@quiet
def test_a_budget_works_beside_another_method():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = Together(AGSCL(model, EXAMPLE), EWC(model, lam=1.0)), adam(model)
    versions = []
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer, epochs=10, steps_per_epoch=4)
    for _ in range(10):
        for x, y in blobs(0):
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            optimizer.step()
        method.end_epoch()
        versions.append(method.plan_version)
    method.end_task(blobs(0))
    assert versions == [0, 0, 1, 1, 2, 3, 4, 4, 4, 4]


# Forms and settings ---------------------------------------------------------------------------------------------------


@quiet
def test_the_papers_form_of_agscl_has_the_bits_of_paper_agscl():
    def run(kind, **settings):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        method, optimizer = kind(model, EXAMPLE, mu=20, lam=1000, rho=0.3, **settings), adam(model)
        for number in range(3):
            learn(method, optimizer, number)
        return bits(model)

    assert same(run(AGSCL, **AGSCL.paper), run(PaperAGSCL, **PaperAGSCL.paper))


@quiet
def test_in_the_papers_form_old_outputs_drift_within_an_epoch_and_come_back_when_it_ends():
    torch.manual_seed(0)
    model, x, kept = MultiHead(mlp(), features=32), blobs(0)[0][0], []
    method, optimizer = PaperAGSCL(model, EXAMPLE, lam=math.inf), adam(model)
    train(method, optimizer, 0, 8, epoch=4)
    outputs = model(x, "t0")

    def compare(step=None):
        kept.append(torch.equal(model(x, "t0"), outputs))

    train(method, optimizer, 1, 4, after_step=compare, end=False)
    method.end_epoch()
    compare()
    assert kept == [False, False, False, False, True]


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, 1.5, -3, True, math.nan, math.inf, "half"])
def test_a_budget_that_is_no_share_and_no_number_of_tasks_is_refused(budget):
    with pytest.raises(ValueError, match=r"a share of each layer's free nodes|a whole number, a number"):
        AGSCL(MultiHead(mlp()), EXAMPLE, budget=budget)


@pytest.mark.parametrize(("budget", "least"), [(0.001, "at least 0.0313"), (100, "at most 32")])
def test_a_budget_too_small_for_a_node_is_refused_with_one_that_works(budget, least):
    with pytest.raises(ValueError, match=f"leaves a task less than one node.*{least}"):
        AGSCL(MultiHead(mlp()), EXAMPLE, budget=budget)
    AGSCL(MultiHead(mlp()), EXAMPLE, budget=type(budget)(least.split()[-1]))


def test_without_proximal_steps_a_finite_lam_and_no_budget_are_needed():
    with pytest.raises(ValueError, match="budget=None and a finite lam"):
        AGSCL(MultiHead(mlp()), EXAMPLE, prox=False)
    AGSCL(MultiHead(mlp()), EXAMPLE, prox=False, budget=None, lam=400.0)


# Capacity -------------------------------------------------------------------------------------------------------------


@quiet
def test_capacity_says_per_layer_what_each_task_has_taken_and_how_many_more_fit():
    method, optimizer = build()
    assert method.capacity().tasks_left == budgets.count_tasks_left(32, 0.25, 0)
    for number in range(2):
        train(method, optimizer, number, 40, told={"epochs": 10, "steps_per_epoch": 4}, epoch=4)
    capacity = method.capacity()
    assert [layer.layer for layer in capacity.layers] == ["trunk.0", "trunk.2"]
    for layer, in_layer in zip(capacity.layers, method.graph.groups_by_layer(), strict=True):
        own = method.knowledge.first_task[in_layer]
        assert layer.taken == {"t0": int((own == 0).sum()), "t1": int((own == 1).sum())}
        assert layer.free == int((own == NEVER).sum()) == layer.nodes - sum(layer.taken.values())
        assert layer.tasks_left == budgets.count_tasks_left(layer.free, 0.25, 2)
    assert f"{capacity.tasks_left} more tasks will find free nodes in every layer (budget 0.25)" in str(capacity)
    assert str(capacity).endswith("the next may keep 5 of the 18 free nodes of trunk.0")
    assert max(map(len, str(capacity).splitlines())) <= 80
    summary = method.statistics()["capacity"]
    assert summary["tasks_left"] == capacity.tasks_left
    for layer, summarised in zip(capacity.layers, summary["layers"], strict=True):
        assert summarised["taken"] == layer.nodes - layer.free
        assert summarised["taken_by_last"] == layer.taken["t1"]


def test_a_network_that_is_nearly_full_is_warned_about_before_it_is():
    method, optimizer = build(budget=2)
    with pytest.warns(SelfCheckWarning, match="One more task will find a free node in trunk.0.*after task 't0'"):
        train(method, optimizer, 0, 40, told={"epochs": 10, "steps_per_epoch": 4}, epoch=4)


def test_a_network_that_fills_up_because_epochs_never_ended_is_not_called_too_narrow():
    method, optimizer = build()

    def learn_tasks():
        for number in range(12):
            train(method, optimizer, number, 8, told={"epochs": 10})

    with pytest.warns(SelfCheckWarning) as warned:
        learn_tasks()
    (late,) = [str(each.message) for each in warned if "end_epoch() was never called" in str(each.message)]
    (full,) = [str(each.message) for each in warned if "will find a free node" in str(each.message)]
    assert "more than its budget were kept" in late
    assert "Tasks kept more than their budget" in full
    assert "wider" not in full


def test_a_network_that_is_pruned_late_but_to_its_budget_is_not_said_to_be_above_it():
    method, optimizer = build(budget=0.8)

    def learn_tasks():
        for number in range(4):
            train(method, optimizer, number, 8, told={"epochs": 10})

    with pytest.warns(SelfCheckWarning) as warned:
        learn_tasks()
    messages = [str(each.message) for each in warned]
    assert any("and 0 more than its budget were kept" in message for message in messages)
    (full,) = [message for message in messages if "will find a free node" in message]
    assert "or a smaller share as budget (it is 0.8)" in full


@quiet
def test_a_network_without_free_nodes_learns_further_tasks_with_its_frozen_ones():
    method, optimizer = build(budget=1)
    outputs = {}
    for number in range(3):
        train(method, optimizer, number, 40, told={"epochs": 10, "steps_per_epoch": 4}, epoch=4)
        outputs[number] = method.model(EXAMPLE, "t0")
    assert torch.equal(outputs[0], outputs[2])


# What the paper's form warns about ------------------------------------------------------------------------------------


def test_a_mu_that_shrinks_nearly_all_nodes_to_zero_is_warned_about():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method = PaperAGSCL(model, EXAMPLE, mu=60, lam=math.inf)
    with pytest.warns(SelfCheckWarning, match="Fewer than one node in ten fires in .* Use a smaller mu"):
        learn(method, adam(model), 0)


def test_important_nodes_of_which_none_is_held_are_warned_about():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = PaperAGSCL(model, EXAMPLE, mu=8, lam=1e-6), adam(model)
    learn(method, optimizer, 0)
    with pytest.warns(SelfCheckWarning, match=r"None of the \d+ important nodes kept its weights in task 't1'"):
        learn(method, optimizer, 1)


def test_a_mu_too_small_to_free_a_node_is_answered_with_the_form_that_needs_none():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method = PaperAGSCL(model, EXAMPLE, mu=0.01)
    with pytest.warns(SelfCheckWarning, match=r"too small to free a node.*A budget needs no tuning"):
        learn(method, adam(model), 0)


def test_a_layer_in_which_no_node_fires_is_warned_about_when_the_task_ends_although_there_is_no_mu():
    method, optimizer = build()
    train(method, optimizer, 0, 40, told={"epochs": 10, "steps_per_epoch": 4}, epoch=4, end=False)
    with torch.no_grad():
        method.model.trunk[2].bias.fill_(-100)  # as after a step that was far too large
    with pytest.warns(SelfCheckWarning, match=r"No node fires in trunk\.2 after task 't0'.*did training collapse"):
        method.end_task(blobs(0))


# What the loop may do between tasks ----------------------------------------------------------------------------------


def with_batchnorm():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
    model = MultiHead(trunk, features=32)
    return AGSCL(model, EXAMPLE), adam(model)


TOLD = {"told": {"epochs": 10, "steps_per_epoch": 4}, "epoch": 4}


def test_batchnorm_statistics_that_changed_between_tasks_are_warned_about_when_the_next_one_begins():
    method, optimizer = with_batchnorm()
    train(method, optimizer, 0, 40, **TOLD)
    method.model.train()
    method.model(blobs(1)[0][0], "t0")
    with pytest.warns(SelfCheckWarning, match=r"8 frozen nodes changed after task 't0' ended .* eval mode") as caught:
        train(method, optimizer, 1, 40, **TOLD)
    assert not any("Use lam" in str(warning.message) for warning in caught)


def test_a_step_between_tasks_is_warned_about_when_the_next_one_begins():
    method, optimizer = build()
    train(method, optimizer, 0, 40, **TOLD)
    x, y = blobs(0)[0]
    F.cross_entropy(method.model(x, "t0"), y).backward()
    optimizer.step()
    with pytest.warns(SelfCheckWarning, match=r"frozen nodes changed after task 't0' .* no optimizer step"):
        train(method, optimizer, 1, 40, **TOLD)


def test_evaluation_between_tasks_gives_no_warning():
    method, optimizer = with_batchnorm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            train(method, optimizer, number, 40, **TOLD)
            method.model.eval()
            method.model(blobs(number)[0][0], "t0")
            method.model.train()


@quiet
def test_frozen_nodes_keep_their_bits_when_a_loop_replaces_parameters_and_optimizer_within_a_task():
    method, optimizer = build()
    train(method, optimizer, 0, 40, **TOLD)
    x = blobs(0)[0][0]
    before = method.model(x, "t0").detach()
    train(method, optimizer, 1, 20, **TOLD, end=False)
    method.model.load_state_dict(bits(method.model), assign=True)
    train(method, adam(method.model), 1, 20, epoch=4, begin=False)
    assert torch.equal(method.model(x, "t0"), before)


def test_a_model_converted_between_tasks_is_warned_about_as_such_alone():
    method, optimizer = build()
    train(method, optimizer, 0, 40, **TOLD)
    method.model.double()
    method.model.add_head("t1", 3)
    with pytest.warns(SelfCheckWarning, match="weights are float64") as caught:
        method.begin_task("t1", optimizer)
    assert len(caught) == 1


def test_a_task_has_ended_although_its_warning_is_an_error():
    method, optimizer = build()
    train(method, optimizer, 0, 8, told={"epochs": 20}, epoch=4, end=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SelfCheckWarning, match="at the very end of task"):
            method.end_task(blobs(0))
    assert method.task is None
    assert method.tasks == ["t0"]


def test_prunings_follow_the_steps_of_the_optimizer_that_trains_the_nodes():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    model.add_head("t0", 3)
    method = AGSCL(model, torch.zeros(2, 16))
    nodes, head = torch.optim.Adam(model.trunk.parameters(), lr=1e-2), torch.optim.SGD(model.heads.parameters(), lr=0.1)
    method.begin_task("t0", head, nodes, epochs=2, steps_per_epoch=20)
    for step in range(28):
        for x, y in blobs(0)[:1]:
            model.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            nodes.step()
            if step % 4 == 0:
                head.step()
    assert method.plan.steps == 28
    assert method.plan.pruner.pruned_share == 1.0  # by 70 % of 40 steps
