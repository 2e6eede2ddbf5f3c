"""Small trainers that several tests use."""

import torch
from torch import nn

from agscl.heads import MultiHead
from agscl.methods.finetune import FineTune
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.runs import hash_state
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig

QUICK = TrainingConfig(epochs=3, batch_size=16, lr=1e-2, patience=1, factor=3.0, restore_best=True)


def make_task(name: str, seed: int, valid: bool = True) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(72, 8, generator=generator)
    y = (x @ torch.randn(8, generator=generator) > 0).long()
    parts = (x[:40], y[:40], x[40:56], y[40:56], x[56:], y[56:])
    return Task(name, 2, *parts) if valid else Task(name, 2, parts[0], parts[1], None, None, parts[4], parts[5])


TASKS = tuple(make_task(name, seed) for seed, name in enumerate(("first", "second", "third")))


def make_trainer(method=PaperAGSCL, config=QUICK, tasks=TASKS, seed=0, **options) -> Trainer:
    torch.manual_seed(seed)
    trunk = nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()
    )
    model = MultiHead(trunk, features=12)
    example = tasks[0].train_x[:2]
    settings = {"mu": 52.0, "lam": 100.0, "rho": 0.5, "example_input": example} if method is PaperAGSCL else {}
    return Trainer(model, method(model, **settings), tasks, config, seed=seed, **options)


def finish(trainer: Trainer) -> str:
    """Train to the end; returns a hash of all that came out."""
    while trainer.advance():
        pass
    model, method = trainer.model.state_dict(), trainer.method.state_dict()
    return hash_state([model, method, trainer.accuracies, trainer.losses])


class ScriptedTrainer(Trainer):
    """Its validation losses are given, one per epoch."""

    def validation_loss(self) -> torch.Tensor:
        return torch.tensor(self.script[self.epoch], dtype=torch.float64)


def make_scripted_trainer(script, **changes) -> ScriptedTrainer:
    config = TrainingConfig(**{"epochs": len(script), "batch_size": 16, "lr": 0.09, "patience": 2, **changes})
    made = make_trainer(FineTune, config, tasks=TASKS[:1])
    trainer = ScriptedTrainer(made.model, made.method, made.tasks, config, seed=0)
    trainer.script = script
    return trainer
