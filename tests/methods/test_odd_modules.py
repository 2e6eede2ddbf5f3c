"""Modules that are called in unusual ways, other precisions, and training that diverged."""

from __future__ import annotations

import copy
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agscl import AGSCL, EWC, HAT, LwF, MultiHead, PaperAGSCL
from agscl.graph import NodeGraphError
from agscl.methods import find_methods
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.system import sums
from loops import adam, blobs, learn, make, mlp

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


class CalledByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)

    def forward(self, x):
        return F.relu(self.norm(input=self.fc(x)))


@pytest.mark.parametrize("cls", [PaperAGSCL, HAT, EWC])
def test_a_batchnorm_called_with_a_keyword_is_held_like_any_other(cls):
    def outputs(trunk):
        torch.manual_seed(0)
        model = MultiHead(trunk(), features=32)
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        method, optimizer = make(cls, model), adam(model)
        for number in range(3):
            learn(method, optimizer, number)
        return model(blobs(0)[0][0], "t0").detach()

    class Plain(CalledByKeyword):
        def forward(self, x):
            return F.relu(self.norm(self.fc(x)))

    assert torch.equal(outputs(CalledByKeyword), outputs(Plain))


class NormWithActivation(nn.BatchNorm1d):
    """As timm's BatchNormAct2d: the activation is inside."""

    def forward(self, x):
        return F.relu(super().forward(x))


def test_a_batchnorm_with_an_activation_inside_keeps_it_where_its_channels_are_frozen():
    def train(*norm):
        torch.manual_seed(0)
        model = MultiHead(nn.Sequential(nn.Linear(16, 32), *norm), features=32)
        method, optimizer = PaperAGSCL(model, torch.zeros(2, 16), mu=8, lam=math.inf, rho=0.3), adam(model)
        for number in range(2):
            learn(method, optimizer, number)
        model.train()
        method.begin_task("t2", optimizer) if model.add_head("t2", 3) else None
        return model.trunk(blobs(0)[0][0])

    inside, outside = train(NormWithActivation(32)), train(nn.BatchNorm1d(32), nn.ReLU())
    assert bool((inside >= 0).all())
    torch.testing.assert_close(inside, outside)


def test_an_error_of_the_users_own_forward_is_not_swallowed_while_statistics_are_taken_anew():
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()), features=32)
    method, optimizer = PaperAGSCL(model, torch.zeros(2, 16)), adam(model)
    learn(method, optimizer, 0, epochs=1, end=False)

    def forward(batch):
        if model.trunk[1].training:
            raise ValueError("my own mistake")
        return model(batch[0], "t0")

    with pytest.raises(ValueError, match="my own mistake"):
        method.end_task(blobs(0), forward)


def test_a_last_batch_of_one_example_does_no_harm_to_batchnorm():
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()), features=32)
    method, optimizer = PaperAGSCL(model, torch.zeros(2, 16)), adam(model)
    learn(method, optimizer, 0, epochs=1, end=False)
    x, y = blobs(0)[0]
    method.end_task([(x, y), (x[:1], y[:1])])


def test_a_float64_model_has_importances_and_targets_in_float64():
    torch.manual_seed(0)
    model = MultiHead(mlp().double(), features=32)
    assert PaperAGSCL(model, torch.zeros(2, 16, dtype=torch.float64)).knowledge.omega.dtype == torch.float64
    one, other = torch.randn(2, 4, 3, dtype=torch.float64)
    term = LwF(model)._cross_entropy(one, other)
    expected = -(torch.softmax(one / 2, -1) * torch.log_softmax(other / 2, -1)).sum(-1).mean()
    assert term.dtype == torch.float64
    assert torch.equal(term, expected)


class RefuseFloat64(TorchDispatchMode):
    """As a device that has no float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result))
        return result


@pytest.mark.parametrize("cls", find_methods().values())
def test_no_method_needs_float64_on_a_device_that_has_none(cls, monkeypatch):
    monkeypatch.setattr(sums, "WITHOUT_FLOAT64", {"cpu"})
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()), features=32)
    method, optimizer = make(cls, model), adam(model)
    with RefuseFloat64():
        for number in range(2):
            learn(method, optimizer, number, epochs=1)
            method.penalty()
            method.statistics()


@pytest.mark.parametrize("where", ["trunk.0.weight", "heads.t0.bias"])
@pytest.mark.parametrize("cls", find_methods().values())
def test_a_task_whose_weights_are_not_finite_is_not_ended(cls, where):
    model = MultiHead(mlp(), features=32)
    method, optimizer = make(cls, model), adam(model)
    model.add_head("t0", 3)
    model.add_head("later", nn.LazyLinear(3))  # has no weights yet
    method.begin_task("t0", optimizer, epochs=2, steps_per_epoch=4)
    with torch.no_grad():
        model.get_parameter(where)[0] = math.nan
    with pytest.raises(FloatingPointError, match=rf"{re.escape(where)}.*not ended.*lower the learning rate"):
        method.end_task(blobs(0))
    assert method.task == "t0"


def test_lwf_may_be_copied_between_forward_and_backward():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = LwF(model), adam(model)
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    x, y = blobs(1)[0]
    loss = F.cross_entropy(model(x, "t1"), y)
    copied = copy.deepcopy(method)
    loss.backward()
    assert copied.task == "t1"
    assert float(copied.loss(x, copied.model(x, "t1"))) == float(method.loss(x, model(x, "t1")))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_tau_must_be_a_finite_number(wrong):
    with pytest.raises(ValueError, match="tau"):
        PaperAGSCL(MultiHead(mlp()), torch.zeros(2, 16), tau=wrong)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


class OwnConv(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight.abs(), bias)


@pytest.mark.parametrize("odd", [OwnLinear(16, 16), nn.Sequential(nn.Unflatten(1, (1, 16)), OwnConv(1, 4, 16))])
def test_a_layer_with_a_forward_of_its_own_is_refused_by_name_with_advice_that_works(odd):
    trunk = nn.Sequential(odd, nn.Flatten(), nn.ReLU(), nn.LazyLinear(8), nn.ReLU())
    trunk(torch.zeros(2, 16))
    with pytest.raises(NodeGraphError, match=r"trunk\.0.*Own\w+ overrides") as caught:
        AGSCL(MultiHead(trunk), torch.zeros(2, 16))
    AGSCL(MultiHead(trunk), torch.zeros(2, 16), exclude=caught.value.exclude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_old_logits_to_the_bit(dtype):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32).to(dtype)
    example = torch.zeros(2, 16, dtype=dtype)
    method, optimizer, logits = AGSCL(model, example), torch.optim.SGD(model.parameters(), lr=1e-2), []
    for number in range(2):
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer, epochs=2)
        batches = [(x.to(dtype), y) for x, y in blobs(number)]
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x, f"t{number}").float(), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(batches)
        logits.append(model(blobs(0)[0][0].to(dtype), "t0").detach())
    assert torch.equal(*logits)


def test_an_excluded_layer_that_reads_nodes_is_warned_of_when_the_next_task_trains_them():
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()), features=32)
    method, optimizer = AGSCL(model, torch.zeros(2, 16), exclude="trunk.2"), adam(model)
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    with pytest.warns(SelfCheckWarning, match=r"trunk\.2 is left out .* may be forgotten\. PackNet and WSN"):
        method.begin_task("t1", optimizer, epochs=1)


HEADS = {
    "plain": lambda: 3,
    "relu first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(32, 3)),
    "hidden layer": lambda: nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dict": lambda: {"a": 2, "b": nn.Sequential(nn.ReLU(), nn.Linear(32, 1))},
}


def call(model, x, task):
    output = model(x, task)
    return torch.cat(list(output.values()), 1) if isinstance(output, dict) else output


@pytest.mark.parametrize("head_first", [True, False], ids=["head, method", "method, head"])
@pytest.mark.parametrize("order", list(itertools.permutations(HEADS, 2)), ids=", ".join)
@pytest.mark.parametrize("cls", [AGSCL, PaperAGSCL, HAT])
def test_heads_with_and_without_relus_follow_each_other_and_old_outputs_keep_their_bits(cls, order, head_first):
    torch.manual_seed(0)
    model, x, recorded = MultiHead(mlp()), torch.cat([x for x, _ in blobs(0)]), {}
    if head_first:
        model.add_head("t0", HEADS[order[0]]())
    method, optimizer = make(cls, model, **({"lam": math.inf} if cls is PaperAGSCL else {})), adam(model)
    for number, kind in enumerate([*order, order[0]]):
        task, data = f"t{number}", blobs(number)
        if task not in model.heads:
            model.add_head(task, HEADS[kind]())
        method.begin_task(task, optimizer, epochs=3, steps_per_epoch=len(data))
        if cls is HAT:
            method.embedding.data.sign_().mul_(3)  # gates that are 0 or 1, as after a long training
        for _ in range(3):
            for inputs, labels in data:
                optimizer.zero_grad()
                F.cross_entropy(call(model, inputs, task), labels).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
        model.eval()
        recorded[task] = call(model, x, task).detach()
        assert all(torch.equal(call(model, x, task), output) for task, output in recorded.items())
        model.train()


@pytest.mark.parametrize("head_first", [True, False], ids=["head, method", "method, head"])
def test_a_relu_in_a_head_adds_nothing_to_the_importance_of_the_nodes_it_reads(head_first):
    def importance(*before):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        head = nn.Linear(32, 3)
        model.add_head("t0", nn.Sequential(*before, head)) if head_first else None
        method, optimizer = AGSCL(model, torch.zeros(2, 16)), adam(model)
        model.add_head("t0", nn.Sequential(*before, head)) if not head_first else None
        learn(method, optimizer, 0, epochs=2)
        return method.knowledge.omega

    assert torch.equal(importance(nn.ReLU()), importance())


@pytest.mark.parametrize("make_head", [lambda: 3, lambda: nn.Sequential(nn.Dropout(), nn.Linear(32, 3))])
@pytest.mark.parametrize("cls", [AGSCL, HAT])
def test_a_head_that_replaced_another_before_its_task_was_learned_keeps_its_outputs_to_the_bit(cls, make_head):
    torch.manual_seed(0)
    model, x = MultiHead(mlp()), blobs(0)[0][0]
    method, optimizer, outputs = make(cls, model), adam(model), []
    for _ in range(2):
        model.add_head("t0", make_head())
        method.begin_task("t0", optimizer)
        method.cancel_task()
        del model.heads["t0"]
    for number in range(2):
        task = f"t{number}"
        model.add_head(task, make_head())
        method.begin_task(task, optimizer)
        if cls is HAT:
            method.embedding.data.sign_().mul_(3)  # gates that are 0 or 1, as after a long training
        learn(method, optimizer, number, epochs=3, begin=False)
        outputs.append(model.eval()(x, "t0"))
    assert torch.equal(*outputs)


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return x * self.weight


class ScaledBlock(nn.Module):
    """A residual block with a scale of its own, as LayerScale."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.rand(16))

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return F.relu(x + self.scale * self.fc2(x))


SCALED = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), Scale(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), Scale(8, 1, 1), nn.ReLU()),
    "residual": ScaledBlock,
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("cls", [AGSCL, PaperAGSCL])
def test_a_learned_scale_is_refused_and_once_frozen_as_the_message_says_old_outputs_keep_their_bits(cls, name):
    torch.manual_seed(0)
    model, settings = MultiHead(SCALED[name]()), {"lam": math.inf} if cls is PaperAGSCL else {}
    with pytest.raises(NodeGraphError, match="scales or shifts each node by itself, freeze it") as caught:
        make(cls, model, **settings)
    frozen = re.search(r"model\.get_parameter\('(.*)'\)\.requires_grad_\(False\)", str(caught.value))[1]
    model.get_parameter(frozen).requires_grad_(False)
    method, optimizer, recorded, x = make(cls, model, **settings), adam(model), [], blobs(0)[0][0]
    for number in range(3):
        learn(method, optimizer, number, epochs=3)
        model.eval()
        recorded.append(model(x, f"t{number}"))
        assert all(torch.equal(model(x, f"t{task}"), output) for task, output in enumerate(recorded))
    assert method.certificate().kind == "guaranteed"
