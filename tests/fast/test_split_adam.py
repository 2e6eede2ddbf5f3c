import copy

import pytest
import torch
from torch import nn

from agscl import FineTune, MultiHead
from agscl.fast import split_adam
from agscl.system import tensor_pieces
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig

TORCHS = {split_adam.SplitAdam: torch.optim.Adam, split_adam.SplitAdamW: torch.optim.AdamW}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_in_pieces_has_the_bits_of_torchs_own(monkeypatch, device, kind, layout, decay):
    monkeypatch.setattr(tensor_pieces, "MIN_PIECE", 64)
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Conv2d(4, 10, 3), nn.Conv2d(3, 10, 3), nn.Linear(90, 32), nn.Linear(33, 2)).to(device)
    mine.to(memory_format=layout)
    theirs = copy.deepcopy(mine)
    options = {"lr": 1e-2, "weight_decay": decay, "fused": True}
    optimizers = kind(mine.parameters(), **options), TORCHS[kind](theirs.parameters(), **options)
    kept = torch._fused_adam_ if kind is split_adam.SplitAdam else torch._fused_adamw_
    widest = []

    def watched(parameters, *rest, **more):
        widest[-1] = max(widest[-1], *map(torch.numel, parameters))
        kept(parameters, *rest, **more)

    for step in range(4):
        for name, parameter in mine.named_parameters():
            met = step or not name.startswith("2")  # at first one layer has no gradient
            parameter.grad = torch.randn_like(parameter) if met else None
            theirs.get_parameter(name).grad = parameter.grad
        for optimizer in optimizers:
            widest.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(torch, kept.__name__, watched)
                optimizer.step()
    assert widest == [270, 360] + 3 * [270, 90 * 32], "270 is no multiple of four"
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        states = optimizers[0].state[one], optimizers[1].state[other]
        assert states[0].keys() == states[1].keys()
        pairs = [(one, other), *((states[0][key], states[1][key]) for key in states[0])]
        assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("engine", ["plain", "captured"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_hooks_of_a_trainers_optimizer_are_called_once_a_step_whatever_was_made_before(device, engine, name):
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # torch puts its hooks around a class when it is first used,
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # and ours are derived from these
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), features=8).to(device)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    options = {"engine": engine, "optimizer": name, "patience": None, "restore_best": False}
    config = TrainingConfig(epochs=1, batch_size=3, **options)
    trainer = Trainer(model, FineTune(model), (Task("t", 2, x, y, None, None, x, y),), config, seed=0, device=device)
    trainer.advance()
    called = []
    trainer.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    trainer.optimizer.register_step_post_hook(lambda *_: called.append("after"))
    while trainer.epoch < 1:
        trainer.advance()
    assert called == ["before", "after"] * 2
    assert trainer.method.plan.steps == 2


@pytest.mark.parametrize("kind", TORCHS)
def test_a_closure_is_called_and_a_scalers_overflow_skips_the_step_as_torch_does(kind):
    mine, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = kind([mine], lr=0.1, fused=True), TORCHS[kind]([theirs], lr=0.1, fused=True)
    for optimizer, parameter in zip(optimizers, (mine, theirs), strict=True):

        def closure(optimizer=optimizer, parameter=parameter):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 3
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        optimizer.step()
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
    assert torch.equal(mine, theirs)
    states = [dict(optimizer.state[parameter]) for optimizer, parameter in zip(optimizers, (mine, theirs), strict=True)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert states[0]["step"].item() == 2


def test_a_gradient_laid_out_in_another_way_is_left_whole():
    parameter = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert [len(pieces) for pieces in tensor_pieces._split(4, parameter, parameter.contiguous())] == [1, 1]
    assert [len(pieces) for pieces in tensor_pieces._split(4, parameter, parameter.clone())] == [18, 18]
    assert [len(pieces) for pieces in tensor_pieces._split(4, parameter[:, ::2], parameter[:, ::2])] == [1, 1]


@pytest.mark.parametrize(("width", "pieces"), [(100, 3), (900, 100), (1102, 129), (2802, 129), (4000, 2), (1001, 2)])
def test_large_networks_are_cut_into_no_more_pieces_than_help(monkeypatch, width, pieces):
    layer = nn.Linear(width, width, bias=True)
    sizes = []
    monkeypatch.setattr(torch, "_fused_adam_", lambda parameters, *rest, **more: sizes.extend(map(len, parameters)))
    layer(torch.zeros(1, width)).sum().backward()
    split_adam.SplitAdam(layer.parameters(), fused=True).step()
    assert len(sizes) == pieces


def test_without_parameters_that_have_gradients_nothing_happens():
    layer = nn.Linear(2, 2)
    before = copy.deepcopy(layer.state_dict())
    split_adam.SplitAdam(layer.parameters(), fused=True).step()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
