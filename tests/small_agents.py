"""Small agents and environments that several tests use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agscl.heads import MultiHead
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.networks.mlp import MLP
from agscl.reinforcement import EnvironmentTask, PPOConfig
from agscl.reinforcement.environments import Array, Environments, Transition
from agscl.reinforcement.trainer import ReinforcementTrainer
from agscl.runs import hash_state

QUICK = PPOConfig(
    steps=128, environments=4, rollout=8, epochs=2, minibatches=4, lr=1e-2, evaluations=2, evaluation_episodes=2
)
FROZEN = {"lam": float("inf"), "mu": 12.0, "rho": 1.0}


@dataclass(frozen=True)
class CountingTask(EnvironmentTask):
    """An environment that counts its steps; the right action is the parity of the count. Episodes have 5 steps, or are
    cut off after `cut_after`. Observations: the count and its parity, in another order for each task."""

    cut_after: int | None = None
    swapped: bool = False

    def make(
        self, count: int, seed: int, *, training: bool, limit: int | None = None, render: bool = False
    ) -> Environments:
        return CountingEnvironments(self, count)

    def checksum(self) -> int:
        return 0


class CountingEnvironments(Environments):
    LENGTH = 5

    def __init__(self, task: CountingTask, count: int) -> None:
        self.task, self.count = task, count
        self.position = np.arange(count) % self.LENGTH
        self.returns = np.zeros(count)

    def observe(self, position: Array) -> Array:
        columns = [position / self.LENGTH, position % 2]
        rows = np.stack(columns[::-1] if self.task.swapped else columns, 1)
        return np.concatenate([rows, np.zeros((self.count, 2))], 1).astype(np.float32)

    def reset(self) -> Array:
        return self.observe(self.position)

    def send(self, actions: Array) -> None:
        self.actions = actions

    def receive(self) -> Transition:
        rewards = (self.actions == self.position % 2).astype(np.float32)
        self.returns += rewards
        after = self.position + 1
        ended = after >= self.LENGTH
        cut_off = ~ended & (after >= (self.task.cut_after or np.inf))
        final = self.observe(after)
        self.position = np.where(ended | cut_off, 0, after)
        scores = tuple((int(i), float(self.returns[i])) for i in np.flatnonzero(ended | cut_off))
        self.returns[ended | cut_off] = 0
        last = final if cut_off.any() else None
        return Transition(self.observe(self.position), rewards, ended, cut_off, last, scores)

    def close(self) -> None:
        pass


def make_tasks(count: int = 2, **options: Any) -> list[CountingTask]:
    return [CountingTask(f"count{i}", 2 + i, (4,), 0.0, 5.0, swapped=bool(i % 2), **options) for i in range(count)]


def make_agent(
    method: Any = FineTune,
    tasks: Any = None,
    config: PPOConfig = QUICK,
    width: int = 12,
    seed: int = 0,
    device: str = "cpu",
    **settings: Any,
) -> ReinforcementTrainer:
    tasks = make_tasks() if tasks is None else tasks
    torch.manual_seed(seed)
    model = MultiHead(MLP(tasks[0].input_shape[0], (width, width)), features=width).to(device)
    if issubclass(method, NodeMethod):
        settings = {**(FROZEN if method is PaperAGSCL else {}), **settings}
        settings["example_input"] = torch.randn(2, *tasks[0].input_shape).to(device)
    return ReinforcementTrainer(model, method(model, **settings), tasks, config, seed=seed)


def finish(trainer: ReinforcementTrainer) -> str:
    """Train to the end; returns a hash of all that came out."""
    while trainer.advance():
        pass
    results = [trainer.scores, trainer.evaluations, trainer.losses]
    return hash_state([trainer.model.state_dict(), trainer.method.state_dict(), results])


def learn_task(trainer: ReinforcementTrainer, tasks: int = 1) -> None:
    """Train until so many tasks are done."""
    while trainer.task_index < tasks:
        trainer.advance()
