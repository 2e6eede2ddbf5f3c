"""MultiHead, and heads that must not move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, EWC, HAT, MAS, FineTune, LwF, MultiHead, PaperAGSCL
from agscl.methods._parts.node_method import NodeMethod
from loops import bits, blobs, learn, mlp, same

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2


def test_features_are_found_from_the_trunk_also_through_convolutions():
    model = MultiHead(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    model.add_head("a", 5)
    assert model(torch.randn(2, 3, 8, 8), "a").shape == (2, 5)
    model.add_head("b", 7)
    assert isinstance(model.heads["b"], nn.Linear)
    assert model.heads["b"].in_features == 4 * 6 * 6


def test_a_head_may_be_a_module_or_a_dict_of_heads():
    model = MultiHead(mlp())
    model.add_head("pong", {"actor": 6, "critic": 1})
    out = model(torch.randn(2, 16), "pong")
    assert {k: v.shape[1] for k, v in out.items()} == {"actor": 6, "critic": 1}
    model.add_head("own", nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2)))
    assert model(torch.randn(2, 16), "own").shape == (2, 2)


@pytest.mark.parametrize("outputs", [0, -1, 2.5, True, {}, "ten"])
def test_a_head_without_outputs_is_refused(outputs):
    with pytest.raises((ValueError, TypeError), match=r"head|outputs"):
        MultiHead(mlp()).add_head("a", outputs)


def test_names_are_checked():
    model = MultiHead(mlp())
    model.add_head("a", 2)
    for name in ("a", "", "a.b", "keys"):
        with pytest.raises(ValueError, match=r"task|Task"):
            model.add_head(name, 2)
    with pytest.raises(KeyError, match="add_head"):
        model(torch.randn(2, 16), "b")


def test_heads_take_the_trunks_type():
    model = MultiHead(mlp().double(), features=32)
    model.add_head("a", 2)
    assert model.heads["a"].weight.dtype == torch.float64


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("cls", [PaperAGSCL, FineTune])
def test_other_heads_stay_put_with_zero_and_with_static_gradients_after_momentum_has_built_up(cls, make):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    model.add_head("t0", 3)
    model.add_head("t1", 3)
    later = model.heads["t1"].weight.clone()
    optimizer = make(model.parameters())
    method = cls(model, torch.zeros(2, 16)) if cls is PaperAGSCL else cls(model)
    learn(method, optimizer, 0)
    assert torch.equal(later, model.heads["t1"].weight), "a head moved before its task began"
    old = [p.clone() for p in model.heads["t0"].parameters()]

    method.begin_task("t1", optimizer)
    still = list(model.heads["t0"].parameters())
    for x, y in blobs(1) * 3:
        optimizer.zero_grad(set_to_none=False)
        for p in still:
            p.grad = torch.zeros_like(p)  # as a captured step would hold it
        F.cross_entropy(model(x, "t1"), y).backward()
        optimizer.step()
        assert all(p.grad is not None for p in still), "the loop's own gradients come back after the step"
    assert all(torch.equal(a, b) for a, b in zip(old, still, strict=True))
    assert not torch.equal(later, model.heads["t1"].weight)
    method.end_task(blobs(1))
    method.close()
    assert all(p.requires_grad for p in model.parameters())


def test_an_old_head_in_the_new_tasks_loss_still_does_not_move():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = FineTune(model)
    learn(method, optimizer, 0)
    old = model.heads["t0"].weight.clone()
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    x, y = blobs(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, "t1"), y) + model(x, "t0").square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert torch.equal(old, model.heads["t0"].weight)


def test_a_layer_that_two_heads_share_is_trained_and_an_old_head_is_given_back_as_it_was():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), features=8)
    shared = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FineTune(model) as method:
        for task in ("a", "b"):
            model.add_head(task, nn.Sequential(shared, nn.Linear(4, 2)))
            method.begin_task(task, optimizer)
            trained = {name for name, p in model.heads.named_parameters() if p.requires_grad}
            own = {f"{task}.1.weight", f"{task}.1.bias"}
            assert trained == {"a.0.weight", "a.0.bias", *own}  # a shared layer is named after the first head
            F.cross_entropy(model(X, task), Y).backward()
            optimizer.step()
            method.end_task([(X, Y)])
            assert all(p.requires_grad for p in model.parameters())
        model.heads["a"].requires_grad_(False)
        model.add_head("c", 2)
        method.begin_task("c", optimizer)
        assert not any(p.requires_grad for p in model.heads["b"].parameters())
    assert not any(p.requires_grad for p in model.heads["a"].parameters())
    assert all(p.requires_grad for p in [*model.heads["b"][1].parameters(), *model.heads["c"].parameters()])


def test_a_head_that_was_replaced_between_tasks_is_the_one_that_is_frozen():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), features=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = FineTune(model)
    for task in ("a", "b", "c"):
        model.add_head(task, 2)
        method.begin_task(task, optimizer)
        assert {name for name, head in model.heads.items() if head.weight.requires_grad} == {task}
        F.cross_entropy(model(X, task), Y).backward()
        optimizer.step()
        method.end_task([(X, Y)])
        model.heads["a"] = nn.Linear(8, 2)


def test_weights_of_a_head_that_was_not_added_say_to_add_it_before_they_are_loaded():
    def make_model():
        return MultiHead(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), features=3)

    learned, fresh = make_model(), make_model()
    for task in ("cats", "dogs"):
        learned.add_head(task, 2)
    fresh.add_head("cats", 2)
    with pytest.raises(RuntimeError, match=r"no head for dogs: call model\.add_head.* before"):
        fresh.load_state_dict(learned.state_dict())
    fresh.load_state_dict(learned.state_dict(), strict=False)
    fresh.add_head("dogs", 2)
    fresh.load_state_dict(learned.state_dict())
    assert torch.equal(fresh.heads["dogs"].weight, learned.heads["dogs"].weight)


def test_parameters_that_were_replaced_between_tasks_are_found_whatever_the_optimizer_holds():
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), features=8)
    for task in ("a", "b"):
        model.add_head(task, 2)
    method = FineTune(model)
    method.begin_task("a", torch.optim.SGD(model.trunk.parameters(), lr=0.1))
    method.end_task([(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))])
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.trunk.parameters(), lr=0.1)
    method.begin_task("b", optimizer)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in [*model.trunk.parameters(), *model.heads["b"].parameters()]}


def test_numbers_of_outputs_may_be_those_of_numpy():
    model = MultiHead(nn.Linear(4, 8), features=8)
    assert model.add_head("a", np.int64(3)).out_features == 3


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, inputs):
        left, right = inputs.values() if isinstance(inputs, dict) else inputs
        return torch.relu(self.left(left) + self.right(right))


def test_several_inputs_go_to_the_trunk_in_a_list_or_dict_and_a_call_with_two_says_so():
    model, x = MultiHead(TwoInputs()), torch.randn(5, 4)
    model.add_head("a", 3)
    with pytest.raises(TypeError, match=r"one input and the task.*got 3 arguments.*model\(\[x1, x2\], task\)"):
        model(x, x, "a")
    expected = model([x, x], "a")
    assert torch.equal(model({"left": x, "right": x}, task="a"), expected)
    method = AGSCL(model, [x, x])
    optimizer = torch.optim.Adam(model.parameters())
    method.begin_task("a", optimizer, epochs=1)
    model([x, x], "a").sum().backward()
    optimizer.step()
    method.end_epoch()
    method.end_task([([x, x], torch.zeros(5, dtype=torch.long))])
    assert method.certificate().important


@pytest.mark.parametrize("cls", [AGSCL, HAT, EWC, MAS, LwF])
def test_several_inputs_in_a_tuple_are_learned_to_the_bit_as_those_in_a_list_are(cls):
    def train(kind):
        torch.manual_seed(0)
        model, inputs = MultiHead(TwoInputs(), features=8), kind(X.split(4, 1))
        method = cls(model, inputs) if issubclass(cls, NodeMethod) else cls(model)
        optimizer = torch.optim.Adam(model.parameters())
        for task in ("a", "b"):
            model.add_head(task, 2)
            method.begin_task(task, optimizer, epochs=1, steps_per_epoch=2)
            for _ in range(2):
                output = model(inputs, task)
                optimizer.zero_grad()
                (F.cross_entropy(output, Y) + method.loss(inputs, output)).backward()
                optimizer.step()
            method.end_epoch()
            method.end_task([(inputs, Y)])
        return bits(model)

    assert same(train(tuple), train(list))


class TwoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.heads = TwoInputs(), nn.ModuleDict({"a": nn.Linear(8, 2)})

    def forward(self, left, right, task):
        return self.heads[task](self.trunk([left, right]))


@pytest.mark.parametrize("named", [(), ("a",)], ids=["inputs", "inputs and task"])
def test_a_tuple_stands_for_several_arguments_where_the_forward_pass_has_them_before_its_task(named):
    model, inputs = TwoArguments(), X.split(4, 1)
    method, optimizer = AGSCL(model, (*inputs, *named), heads="heads"), torch.optim.Adam(model.parameters())
    method.begin_task("a", optimizer, epochs=1)
    F.cross_entropy(model(*inputs, "a"), Y).backward()
    optimizer.step()
    method.end_epoch()
    method.end_task([(inputs, Y)])
    assert method.certificate().important
