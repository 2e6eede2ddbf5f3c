"""On a GPU, captured steps learn what steps run one by one learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agscl.methods.agscl import AGSCL
from agscl.methods.ewc import EWC
from agscl.methods.finetune import FineTune
from agscl.methods.hat import HAT
from agscl.methods.packnet import PackNet
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.methods.wsn import WSN
from agscl.reinforcement.trainer import ReinforcementTrainer
from small_agents import QUICK, finish, learn_task, make_agent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_on_gpu(method, engine: str) -> ReinforcementTrainer:
    return make_agent(method, config=replace(QUICK, engine=engine, epochs=4), device="cuda")


@pytest.mark.parametrize("method", [FineTune, EWC, PaperAGSCL, AGSCL])
def test_captured_steps_learn_what_single_steps_learn(method):
    plain, captured = make_on_gpu(method, "plain"), make_on_gpu(method, "captured")
    learn_task(plain)
    captured.advance()
    captured.advance()
    assert {"step", "advantages"} & captured.ppo.runner.graphs.keys()
    learn_task(captured)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], value, rtol=1e-2, atol=1e-2, msg=name)
    finish(captured)
    assert len(captured.scores) == 2


@pytest.mark.parametrize("method", [FineTune, AGSCL, PackNet])
def test_compiled_steps_learn_what_single_steps_learn(method):
    plain = make_on_gpu(method, "plain")
    fast = make_agent(method, config=replace(QUICK, epochs=4, compile=True), device="cuda")
    finish(plain)
    finish(fast)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(fast.model.state_dict()[name], value, rtol=1e-2, atol=1e-2, msg=name)


@pytest.mark.parametrize("method", [FineTune, HAT, PackNet, WSN])
def test_an_evaluation_in_replayed_graphs_has_the_scores_of_single_steps(method):
    trainer = make_on_gpu(method, "captured")
    learn_task(trainer, tasks=2)
    captured = trainer.evaluate({0: 5, 1: 6})
    trainer.config = replace(trainer.config, engine="plain")
    assert trainer.evaluate({0: 5, 1: 6}) == captured


def test_frozen_policies_keep_their_bits_on_a_gpu():
    trainer = make_on_gpu(AGSCL, "captured")
    learn_task(trainer)
    x = torch.randn(16, 4, device="cuda")
    with torch.no_grad():
        before = trainer.model(x, "count0")
    finish(trainer)
    with torch.no_grad():
        after = trainer.model(x, "count0")
    assert all(torch.equal(before[part], after[part]) for part in before)
