"""CPR's entropy term: in a loop of one's own, and with every method through the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from agscl import AGSCL, EWC, WSN, MultiHead, cpr_loss
from agscl.cli.main import main
from agscl.cli.options import parse_settings, parse_settings_of_methods
from agscl.experiments.compare import plan_comparison
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run_config import RunConfig, configure
from agscl.methods.finetune import FineTune
from agscl.runs.nested_state import flatten_state, unflatten_state
from loops import blobs, make, mlp
from trainers import QUICK, finish, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def test_the_term_is_beta_times_the_divergence_from_uniform_less_a_constant():
    output = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    p = torch.softmax(output, 1)
    divergence = (p * (p.log() - math.log(1 / 5))).sum(1).mean()
    term = cpr_loss(output, 0.4)
    torch.testing.assert_close(term, 0.4 * (divergence - math.log(5)))
    (by_term,), (by_divergence,) = torch.autograd.grad(term, output), torch.autograd.grad(0.4 * divergence, output)
    torch.testing.assert_close(by_term, by_divergence)
    assert float(cpr_loss(torch.zeros(3, 4), 1.0)) == pytest.approx(-math.log(4))
    assert cpr_loss(torch.zeros(2, 3, dtype=torch.bfloat16), 1.0).dtype == torch.float32


@pytest.mark.parametrize("cls", [EWC, AGSCL, WSN])
def test_in_a_loop_of_ones_own_it_makes_a_methods_outputs_less_sure(cls):
    entropies = []
    for beta in (0.0, 1.0):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        method, optimizer = make(cls, model), torch.optim.Adam(model.parameters(), lr=1e-2)
        model.add_head("t0", 3)
        method.begin_task("t0", optimizer)
        for x, y in blobs(0) * 10:
            output = model(x, "t0")
            optimizer.zero_grad()
            (F.cross_entropy(output, y) + method.loss(x, output) + cpr_loss(output, beta)).backward()
            optimizer.step()
        method.end_epoch()
        entropies.append(-cpr_loss(model(blobs(0)[0][0], "t0"), 1.0).item())
    assert entropies[1] > entropies[0] + 0.1


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_the_trainers_loss_has_the_term_in_training_and_in_validation(engine):
    with_term = make_trainer(FineTune, replace(QUICK, cpr=0.3, engine=engine))
    without = make_trainer(FineTune, replace(QUICK, engine=engine))
    for trainer in (with_term, without):
        trainer.advance()
        trainer.model.eval()  # no dropout
    rows = torch.arange(16)
    x, _ = without.task.make_batch(rows)
    term = cpr_loss(without.model(x, "first"), 0.3)
    torch.testing.assert_close(with_term.training_loss(rows), without.training_loss(rows) + term)
    validation_term = cpr_loss(without.model(without.task.valid_x, "first"), 0.3).double()
    torch.testing.assert_close(with_term.validation_loss(), without.validation_loss() + validation_term)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_configured_with_it_and_finds_it_again_in_its_stored_config(name):
    config = configure("digits", method=name, cpr=0.4)
    stored = json.loads(json.dumps(config.as_dict()))
    assert stored["training"]["cpr"] == 0.4
    assert RunConfig.from_dict(stored).training.cpr == 0.4
    del stored["training"]["cpr"]
    assert RunConfig.from_dict(stored).training.cpr == 0.0, "a run stored before there was CPR"


@pytest.mark.parametrize("wrong", [-0.1, math.inf, math.nan])
def test_a_beta_that_is_negative_or_not_finite_is_refused(wrong):
    with pytest.raises(ValueError, match="cpr must be at least 0 and finite"):
        configure("digits", method="ewc", cpr=wrong)


def test_a_run_with_it_stopped_and_continued_ends_with_the_same_bits():
    config = replace(QUICK, cpr=0.4)
    expected = finish(make_trainer(WSN, config))
    assert expected != finish(make_trainer(WSN, QUICK))
    stopped, continued = make_trainer(WSN, config), make_trainer(WSN, config)
    for _ in range(9):
        stopped.advance()
    continued.load_state_dict(unflatten_state(*flatten_state(stopped.state_dict())))
    assert finish(continued) == expected


def test_the_commands_take_it_for_all_methods_or_for_one(tmp_path, monkeypatch, capsys):
    for name in METHODS:
        assert parse_settings(name, ["cpr=0.4"], "digits") == {"cpr": 0.4}
    assert parse_settings_of_methods(["ewc", "finetune"], ["cpr=0.4"], "digits") == ({"cpr": 0.4}, {})
    training, methods = parse_settings_of_methods(["ewc", "finetune"], ["ewc.cpr=0.4", "patience=3"], "digits")
    plan = plan_comparison("digits", ["ewc"], 1, tmp_path, settings=methods, **training)
    assert {job.config.method: job.config.training.cpr for job in plan} == {"finetune": 0.0, "ewc": 0.4}
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--set", "cpr=-1"]) == 2
    assert "cpr must be at least 0" in capsys.readouterr().err
