"""WSN: its masks, its scores, and that old tasks keep their bits."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from agscl import WSN, MultiHead
from agscl.methods.wsn import choose_largest, pack_masks, unpack_masks
from agscl.runs.nested_state import flatten_state, unflatten_state
from loops import bits, blobs, learn, mlp
from trainers import QUICK, finish, make_trainer

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, weight_decay=1e-3),
}


def fresh(optimizer="adam", trunk=None, **settings):
    torch.manual_seed(0)
    model = MultiHead(mlp() if trunk is None else trunk, features=32)
    return WSN(model, **settings), model, OPTIMIZERS[optimizer](model.parameters())


def begin(method, optimizer, number):
    method.model.add_head(f"t{number}", 3)
    method.begin_task(f"t{number}", optimizer)


@torch.no_grad()
def logits(model, x, task):
    model.eval()
    return model(x, task)


# Old tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_old_logits_and_used_weights_keep_their_bits_while_later_tasks_train(optimizer):
    method, model, step = fresh(optimizer)
    x, kept = torch.randn(8, 16), []
    for number in range(4):
        used = {
            name: torch.stack([method.mask(f"t{old}")[name] for old in range(number)]).any(0)
            for name in (method.scores if number else ())
        }
        before = bits(model)
        learn(method, step, number, end=False)
        for old, was in enumerate(kept):
            assert torch.equal(was, logits(model, x, f"t{old}")), "in the middle of a task"
        method.end_task(blobs(number))
        after = bits(model)
        for name, fixed in used.items():
            assert torch.equal(after[name][fixed], before[name][fixed])
            assert not torch.equal(after[name][~fixed], before[name][~fixed])
        kept.append(logits(model, x, f"t{number}"))
        for old, was in enumerate(kept):
            assert torch.equal(was, logits(model, x, f"t{old}"))
            with method.viewing(f"t{old}"), torch.no_grad():
                assert torch.equal(was, model.heads[f"t{old}"](model.trunk(x)))


class Attention(nn.Module):
    """Weights that are read in other ways than by calling their layer: attention's, and one layer's by another."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1).expand(-1, 2, -1)
        x = self.layer(self.attention(x, x, x)[0])
        return F.relu(self.out(F.linear(x.mean(1), self.embed.weight.t())))


def test_old_logits_keep_their_bits_where_weights_are_read_without_calling_their_layer():
    method, model, optimizer = fresh(trunk=Attention())
    x, kept = torch.randn(8, 16), []
    for number in range(3):
        learn(method, optimizer, number, epochs=2)
        kept.append(logits(model, x, f"t{number}"))
        for old, was in enumerate(kept):
            assert torch.equal(was, logits(model, x, f"t{old}"))
    weights = [name for name, p in model.trunk.named_parameters() if p.dim() > 1]
    assert [name.removeprefix("trunk.") for name in method.scores] == weights


def test_threads_may_run_different_tasks_at_once_and_no_parameter_is_replaced():
    method, model, optimizer = fresh()
    x = torch.randn(8, 16)
    for number in range(3):
        learn(method, optimizer, number, epochs=2)
    expected = {task: logits(model, x, task) for task in method.tasks}
    meet, wrong, done = threading.Barrier(3, timeout=20), [], []

    def wait(module, args):  # until every thread is in the middle of its pass
        meet.wait()

    model.trunk[2].register_forward_pre_hook(wait)
    parameters = dict(model.named_parameters())

    def run(task):
        for repeat in range(20):
            with torch.no_grad():
                if repeat % 2:
                    output = model(x, task)
                else:
                    with method.viewing(task):
                        output = model.heads[task](model.trunk(x))
            if not torch.equal(output, expected[task]):
                wrong.append(task)
            if any(parameters[name] is not p for name, p in model.named_parameters()):
                wrong.append("a parameter")
        done.append(task)

    threads = [threading.Thread(target=run, args=(task,)) for task in method.tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(done) == 3


def test_a_copy_of_a_model_has_masks_of_its_own():
    method, model, optimizer = fresh()
    for number in range(2):
        learn(method, optimizer, number)
    x = torch.randn(8, 16)
    twin = copy.deepcopy(model)
    expected = [logits(model, x, task) for task in method.tasks]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(was, logits(twin, x, task)) for was, task in zip(expected, method.tasks, strict=True))


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("what", ["model", "model first", "method first"])
def test_a_pickled_model_runs_every_task_as_the_original(what, under_way):
    method, model, optimizer = fresh()
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=not under_way)
    objects = {"model": [model], "model first": [model, method], "method first": [method, model]}[what]
    twin = pickle.loads(pickle.dumps(objects))[objects.index(model)]
    x = torch.randn(8, 16)
    assert all(torch.equal(logits(model, x, task), logits(twin, x, task)) for task in method.tasks)


def test_a_pickled_method_can_be_closed():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0)
    other = pickle.loads(pickle.dumps(method))
    other.close()
    assert not any("forward" in vars(module) for module in other.model.modules())


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.03, 0.3, 0.5])
def test_each_task_uses_the_share_c_of_every_layer_those_with_the_largest_scores(c):
    method, _, optimizer = fresh(c=c)
    for number in range(2):
        learn(method, optimizer, number)
        for name, mask in method.mask(f"t{number}").items():
            assert int(mask.sum()) == round(c * mask.numel())
            size = method.scores[name].abs()
            assert size[mask].min() >= size[~mask].max()
    masks = [torch.cat([m.flatten() for m in method.mask(task).values()]) for task in method.tasks]
    found = method.statistics()
    assert found["weights"] == 16 * 32 + 32 * 32
    assert found["chosen"] == int(masks[1].sum())
    assert found["shared"] == int((masks[0] & masks[1]).sum()) > 0
    assert found["free"] == int((~masks[0] & ~masks[1]).sum())


def test_what_is_not_chosen_does_not_take_part_in_the_task():
    method, model, optimizer = fresh(c=0.2)
    learn(method, optimizer, 0)
    x = torch.randn(8, 16)
    before = logits(model, x, "t0")
    with torch.no_grad():
        for name, mask in method.mask("t0").items():
            model.get_parameter(name)[~mask] = math.nan
    assert torch.equal(before, logits(model, x, "t0"))


def test_equal_scores_and_tiny_layers_still_give_the_exact_count():
    assert int(choose_largest(torch.ones(7, 9), 0.3).sum()) == 19
    assert int(choose_largest(torch.randn(2, 2), 0.01).sum()) == 1
    assert choose_largest(torch.tensor([[-3.0, 1.0], [2.0, -0.5]]), 0.5).tolist() == [[True, False], [True, False]]


def test_masks_come_back_from_their_bits_and_take_an_eighth_of_a_byte_per_weight():
    weights = {"a": torch.zeros(3, 5), "b": torch.zeros(2, 2, 3)}
    masks = {name: torch.rand(weight.shape) < 0.5 for name, weight in weights.items()}
    packed = pack_masks(masks.values())
    assert packed.dtype == torch.uint8
    assert packed.shape == (4,)
    unpacked = unpack_masks(packed, weights)
    assert all(torch.equal(masks[name], unpacked[name]) for name in weights)

    method, _, optimizer = fresh()
    for number in range(3):
        learn(method, optimizer, number)
        count = 16 * 32 + 32 * 32
        expected = {"masks": (number + 1) * count, "scores": count, "bytes": (number + 1) * count // 8 + 4 * count}
        assert {key: method.memory()[key] for key in expected} == expected


def test_it_warns_where_every_weight_is_used():
    method, _, optimizer = fresh(c=0.999)
    for number in range(2):
        learn(method, optimizer, number, epochs=2)
    everything = {name: torch.ones_like(scores, dtype=torch.bool) for name, scores in method.scores.items()}
    method.knowledge.masks["t1"] = pack_masks(everything.values())
    with pytest.warns(UserWarning, match="smaller c"):
        begin(method, optimizer, 2)


# Scores ---------------------------------------------------------------------------------------------------------------


def test_the_gradients_of_weights_and_scores_are_the_closed_form_on_a_layer():
    torch.manual_seed(0)
    model = MultiHead(nn.Linear(6, 4), features=4)
    method = WSN(model, c=0.4)
    begin(method, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    layer, scores = model.trunk, method.plan.scores["trunk.weight"]
    x, outer = torch.randn(5, 6), torch.randn(5, 4)
    (model.trunk(x) * outer).sum().backward()
    by_masked_weight, mask = outer.t() @ x, choose_largest(scores.detach(), 0.4)
    assert int(mask.sum()) == 10
    assert torch.allclose(layer.weight.grad, by_masked_weight * mask, atol=1e-6)
    assert torch.allclose(scores.grad, by_masked_weight * layer.weight * scores.sign(), atol=1e-6)


def test_the_first_scores_are_uniform_within_one_over_the_root_of_the_fan_in():
    trunk = nn.Sequential(nn.Conv2d(3, 64, 5), nn.Flatten(), nn.Linear(64, 400))
    one, _, optimizer = fresh(trunk=trunk, seed=3)
    begin(one, optimizer, 0)
    for name, fan_in in (("trunk.0.weight", 75), ("trunk.2.weight", 64)):
        scores, bound = one.scores[name], 1 / math.sqrt(fan_in)
        assert 0.99 * bound < float(scores.max()) <= bound
        assert -bound <= float(scores.min()) < -0.99 * bound
        assert float(scores.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    other, _, optimizer = fresh(trunk=copy.deepcopy(trunk), seed=4)
    begin(other, optimizer, 0)
    assert not torch.equal(one.scores["trunk.0.weight"], other.scores["trunk.0.weight"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_tasks_train_as_the_algorithm_written_out_by_hand(optimizer):
    trunk = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.ReLU())
    method, model, step = fresh(optimizer, trunk=trunk, c=0.3)
    start = [layer.weight.detach().clone() for layer in (trunk[0], trunk[2])]
    for number in range(2):
        torch.manual_seed(number)
        begin(method, step, number)
        if number == 0:
            scores = [s.detach().clone().requires_grad_() for s in method.scores.values()]
            weights = [w.requires_grad_() for w in start]
            used = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
        head = copy.deepcopy(model.heads[f"t{number}"])
        fixed = [w.detach().clone() for w in weights]
        if number == 0:
            by_hand = OPTIMIZERS[optimizer]([*weights, *head.parameters(), *scores])
        else:  # the weights keep their moments in this loop, heads and scores have new ones
            for p in by_hand.param_groups[0]["params"][2:]:
                by_hand.state.pop(p, None)
            by_hand.param_groups[0]["params"][2:] = [*head.parameters(), *scores]
        for _ in range(3):
            for x, y in blobs(number):
                step.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                step.step()

                by_hand.zero_grad()
                masks = [choose_largest(s.detach(), 0.3) for s in scores]
                first, second = (
                    w * (m + (s.abs() - s.abs().detach())) for w, m, s in zip(weights, masks, scores, strict=True)
                )
                F.cross_entropy(head(F.relu(F.relu(x @ first.t()) @ second.t())), y).backward()
                for w, u in zip(weights, used, strict=True):
                    w.grad[u] = 0
                by_hand.step()
                with torch.no_grad():
                    for w, u, was in zip(weights, used, fixed, strict=True):
                        w[u] = was[u]
        method.end_task(blobs(number))
        used = [u | choose_largest(s.detach(), 0.3) for u, s in zip(used, scores, strict=True)]
        for layer, w in zip((trunk[0], trunk[2]), weights, strict=True):
            assert torch.allclose(layer.weight, w, atol=1e-5)
        for found, expected in zip(method.scores.values(), scores, strict=True):
            assert torch.allclose(found, expected, atol=1e-5)


def test_scores_are_in_the_optimizer_while_a_task_is_under_way_and_in_the_group_of_their_weight():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    groups = [{"params": model.trunk[0].parameters()}, {"params": model.trunk[2].parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    method = WSN(model)
    begin(method, optimizer, 0)
    before = {name: scores.clone() for name, scores in method.scores.items()}
    learn(method, optimizer, 0, begin=False, end=False)
    assert not torch.equal(before["trunk.0.weight"], method.scores["trunk.0.weight"])
    assert torch.equal(before["trunk.2.weight"], method.scores["trunk.2.weight"]), "at a rate of 0"
    method.end_task(blobs(0))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert set(optimizer.state) <= set(held)
    optimizer.state_dict()


def test_a_loop_that_clears_the_models_gradients_trains_as_one_that_clears_the_optimizers():
    results = []
    for clear_model in (False, True):
        method, model, optimizer = fresh()
        begin(method, optimizer, 0)
        for x, y in blobs(0) * 3:
            (model if clear_model else optimizer).zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            optimizer.step()
        results.append(torch.cat([s.flatten() for s in method.scores.values()]))
    assert torch.equal(*results)


def test_activation_checkpointing_changes_no_bit():
    class Recomputed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for kind in (nn.Sequential, Recomputed):
        torch.manual_seed(0)
        method, model, optimizer = fresh(trunk=kind(*mlp()))
        for number in range(2):
            learn(method, optimizer, number)
        results.append(model.trunk[2].weight)
    assert torch.equal(*results)


def test_a_step_without_any_gradient_for_the_scores_is_told():
    method, model, optimizer = fresh()
    begin(method, optimizer, 0)
    F.cross_entropy(model.heads["t0"](torch.randn(4, 32)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="No gradient reached the scores"):
        method.end_task(blobs(0))


def test_scores_that_are_not_finite_do_not_end_a_task():
    method, _, optimizer = fresh()
    learn(method, optimizer, 0, end=False)
    method.scores["trunk.0.weight"][0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="Scores of task 't0'"):
        method.end_task(blobs(0))
    assert method.task == "t0"


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "momentum": 0.9}, {"engine": "captured"}])
def test_a_checkpoint_within_a_task_holds_the_scores_and_their_moments(changes):
    config = replace(QUICK, epochs=4, **changes)
    expected = finish(make_trainer(WSN, config))
    for units in (3, 9, 24):
        stopped = make_trainer(WSN, config)
        for _ in range(units if stopped.config.engine != "captured" else units // 3):
            stopped.advance()
        stored = unflatten_state(*flatten_state(stopped.state_dict()))
        continued = make_trainer(WSN, config)
        continued.load_state_dict(stored)
        assert finish(continued) == expected
