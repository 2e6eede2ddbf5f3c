"""The seam between a trainer and the engine that runs its steps."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import agscl
from agscl import FineTune
from agscl.training import Engine, PlainEngine
from agscl.training.plateau_schedule import PlateauSchedule
from trainers import QUICK, TASKS, finish, make_trainer

SOURCE = Path(agscl.__file__).parent


class WholeEpochs(PlainEngine):
    """Runs an epoch at a time, and records what it was asked for."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.calls = []

    def start_task(self):
        super().start_task()
        self.calls.append("start_task")

    def advance(self):
        epoch = self.trainer.epoch
        while self.trainer.epoch == epoch:
            super().advance()
        self.calls.append("advance")

    def sync(self):
        self.calls.append("sync")

    def end_task(self):
        self.calls.append("end_task")

    def trunk_context(self, *, full_batch):
        self.calls.append(full_batch)
        return super().trunk_context(full_batch=full_batch)


def test_a_trainer_runs_on_any_engine_and_comes_to_the_same_bits():
    config = replace(QUICK, epochs=2)
    trainer = make_trainer(FineTune, config, tasks=TASKS[:1], engine=WholeEpochs)
    expected = finish(make_trainer(FineTune, config, tasks=TASKS[:1]))
    assert finish(trainer) == expected
    epoch = [True, True, False, False, "advance"]  # two full batches, the last one, validation
    assert trainer.engine.calls == ["start_task", *epoch, *epoch, "end_task"]
    trainer.state_dict()
    assert trainer.engine.calls[-1] == "sync"


def test_a_resumed_task_is_started_on_the_engine_too():
    stopped = make_trainer(FineTune)
    for _ in range(2):
        stopped.advance()
    continued = make_trainer(FineTune, engine=WholeEpochs)
    continued.load_state_dict(stopped.state_dict())
    assert continued.engine.calls == ["start_task"]
    between = make_trainer(FineTune, engine=WholeEpochs)
    between.load_state_dict(make_trainer(FineTune).state_dict())
    assert between.engine.calls == []


def test_an_engine_must_say_how_it_runs():
    with pytest.raises(TypeError, match="abstract"):
        Engine(make_trainer(FineTune))


PLAIN_RUN = """
import sys
import torch
from torch import nn
from agscl import PaperAGSCL, MultiHead
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig

model = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), features=8)
x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
method = PaperAGSCL(model, example_input=x[:2])
trainer = Trainer(model, method, (Task("t", 2, x, y, x, y, x, y),), TrainingConfig(epochs=1), seed=0)
while trainer.advance():
    pass
trainer.state_dict()
print([name for name in sys.modules if name.startswith("agscl.fast")])
"""


def test_a_plain_run_does_not_import_the_fast_engines():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PLAIN_RUN], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_but_the_engine_knows_the_fast_engines():
    """They are imported by name in `training.engine` alone."""
    naming = set()
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "fast"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            if any(module.startswith("agscl.fast") for module in modules):
                naming.add(str(path.relative_to(SOURCE)))
    assert naming == {"training/engine.py"}


def test_the_best_weights_and_the_rate_are_the_schedules_to_choose():
    class NeverBetter(PlateauSchedule):
        def select_best(self, valid_loss):
            self.drop_rate()

    trainer = make_trainer(FineTune, replace(QUICK, epochs=2), tasks=TASKS[:1], engine=PlainEngine)
    trainer.engine.schedule = NeverBetter(trainer)
    while trainer.epoch < 2:
        trainer.advance()
    assert trainer.best_weights is None
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(QUICK.lr / 9)
    assert not trainer.optimizer.state
    assert torch.isfinite(trainer.loss_sum)
