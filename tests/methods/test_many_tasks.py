"""How much work a task takes when many have been learned before: counted in calls of functions, not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, EWC, GPM, HAT, L2, MAS, SI, TRGP, WSN, LwF, MultiHead, PackNet
from loops import make
from trainers import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

METHODS = [AGSCL, EWC, GPM, HAT, L2, MAS, SI, TRGP, WSN, LwF, PackNet]
FEW, MANY = 10, 50
X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2


def count_calls(act: Callable[[], object]) -> int:
    """How many Python functions `act` calls, generators that go on included."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def count_work(cls: type) -> dict[int, dict[str, int]]:
    """The calls in each part of a task's life, in the last of FEW tasks and in the last of MANY."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    model = MultiHead(trunk, features=16)
    method, optimizer = make(cls, model, inputs=8), torch.optim.SGD(model.parameters(), lr=1e-3)
    work: dict[int, dict[str, int]] = {}

    for number in range(MANY):
        task, calls = f"t{number}", {}
        model.add_head(task, 2)
        calls["begin_task"] = count_calls(lambda t=task: method.begin_task(t, optimizer, epochs=1, steps_per_epoch=1))
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X, task), Y)
        loss.backward()
        calls["step"] = count_calls(optimizer.step)
        method.end_epoch()
        calls["end_task"] = count_calls(lambda: method.end_task([(X, Y)]))
        if number + 1 in (FEW, MANY):
            calls["evaluation"] = count_calls(lambda: model(X, "t0"))
            calls["certificate"] = count_calls(lambda: method.certificate(X))
            calls["state_dict"] = count_calls(method.state_dict)
            work[number + 1] = calls
    return work


MAX_CALLS = {"begin_task": 0.5, "step": 0.5, "end_task": 1.5, "evaluation": 0.5, "certificate": 350, "state_dict": 8}
"""For each task learned before. A certificate runs its head, and digests its weights and its outputs."""
MORE_CALLS = {AGSCL: {"certificate": 400}, TRGP: {"state_dict": 25}}  # masks and scales of each task, by weight


@pytest.mark.parametrize("cls", METHODS)
def test_a_task_takes_hardly_more_work_for_every_task_learned_before(cls):
    work = count_work(cls)
    per_task = {name: (work[MANY][name] - work[FEW][name]) / (MANY - FEW) for name in work[FEW]}
    limits = {**MAX_CALLS, **MORE_CALLS.get(cls, {})}
    assert {name: calls for name, calls in per_task.items() if calls > limits[name]} == {}


@pytest.mark.parametrize("outputs", [2, {"actor": 3, "critic": 1}])
def test_a_certificate_runs_the_trunk_once_for_all_linear_heads_with_the_same_bits(outputs):
    model, method = learn_tasks(SI, lambda: outputs)
    model.eval()
    calls = []
    with model.trunk.register_forward_hook(lambda *_: calls.append(1)), torch.no_grad():
        found = method.head_outputs(X)
        assert len(calls) == 1
        for task, output in found.items():
            own = model(X, task)
            assert torch.equal(output, own if isinstance(own, torch.Tensor) else torch.cat([*own.values()], 1))


def test_a_head_that_overwrites_its_input_is_given_features_of_its_own():
    model, method = learn_tasks(EWC, lambda: nn.Sequential(nn.Hardtanh(-0.1, 0.1, inplace=True), nn.Linear(16, 2)))
    model.eval()
    with torch.no_grad():
        for task, output in method.head_outputs(X).items():
            assert torch.equal(output, model(X, task))


def learn_tasks(cls, make_outputs, count=3):
    torch.manual_seed(0)
    activation = nn.Softplus() if cls is EWC else nn.ReLU()
    model = MultiHead(nn.Sequential(nn.Linear(8, 16), activation, nn.Dropout(0.5)), features=16)
    method, optimizer = make(cls, model, inputs=8), torch.optim.SGD(model.parameters(), lr=1e-2)
    for number in range(count):
        task = f"t{number}"
        model.add_head(task, make_outputs())
        method.begin_task(task, optimizer)
        output = model(X, task)
        logits = output if isinstance(output, torch.Tensor) else output["actor"]
        optimizer.zero_grad()
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
        method.end_epoch()
        method.end_task([(X, Y)])
    return model, method


class Modal(nn.Module):
    """A head that computes something else in training, and notes in which mode it ran."""

    def __init__(self):
        super().__init__()
        self.linear, self.modes = nn.Linear(16, 2), []

    def forward(self, x):
        self.modes.append(self.training)
        return self.linear(x)


def test_heads_with_modes_are_evaluated_in_eval_mode_and_all_modes_are_as_before():
    model, method = learn_tasks(EWC, Modal)
    model.train()
    model.heads["t1"].eval()
    before = {name: module.training for name, module in model.named_modules()}
    for head in model.heads.values():
        head.modes.clear()
    method.head_outputs(X)
    assert [head.modes for head in model.heads.values()] == [[False]] * 3
    assert {name: module.training for name, module in model.named_modules()} == before


def test_the_trainer_goes_into_eval_mode_once_for_all_old_tasks(monkeypatch):
    trainer = make_trainer(EWC)
    model = trainer.model
    while trainer.advance():
        pass
    calls = []
    monkeypatch.setattr(model, "eval", lambda: calls.append(1) or nn.Module.eval(model))
    assert len(trainer.test_accuracies()) == 3
    assert len(calls) == 1
    assert model.training
