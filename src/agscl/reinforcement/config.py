"""The settings of PPO and of evaluation. The defaults are the paper's for Atari."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PPOConfig:
    """How each task is learned, and how often the agent is evaluated."""

    steps: int = 10_000_000
    """Environment steps per task, rounded down to whole iterations."""
    environments: int = 128
    """Environments that are played side by side."""
    rollout: int = 64
    """Steps of each environment per iteration."""
    epochs: int = 10
    """Passes over the data of an iteration."""
    minibatches: int = 64
    """Optimizer steps per epoch: the data of an iteration is split into so many mini-batches."""
    lr: float = 3e-4
    """Adam's learning rate at the start of every task; it falls linearly to 0 within the task."""
    adam_eps: float = 1e-5
    """Adam's ε."""
    gamma: float = 0.99
    """γ: how much a reward one step later counts."""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimate."""
    clip: float = 0.2
    """How far the probability ratio, and the value, may move before their gradient is cut."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this norm over all parameters, penalties of methods included."""
    evaluations: int = 30
    """Evaluations per task, evenly spaced, the last at its end; each on all tasks learned so far."""
    evaluation_episodes: int = 10
    """Complete episodes per evaluation of a task, each in an environment of its own, played greedily."""
    evaluation_limit: int | None = None
    """Steps after which an episode of an evaluation is cut off; none: the environment's own limit."""
    engine: Literal["auto", "plain", "captured"] = "auto"
    """How steps run: one by one, or captured as CUDA graphs; auto captures on a GPU."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Arithmetic of the network's forward and backward passes; weights are always kept in float32."""
    channels_last: bool = False
    """Whether images and convolutions are stored channels last, which is faster on most machines."""
    compile: bool = False
    """Whether the network and the loss of an update are compiled; compiling takes some seconds."""

    def __post_init__(self) -> None:
        for name in ("environments", "rollout", "epochs", "minibatches", "evaluations", "evaluation_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.samples % self.minibatches:
            raise ValueError(
                f"minibatches must divide the {self.samples} samples of an iteration (environments × rollout), "
                f"but {self.minibatches} does not"
            )
        if self.iterations < 1:
            raise ValueError(f"steps must be at least one iteration of {self.samples} steps, not {self.steps}")
        if self.evaluations > self.iterations:
            raise ValueError(
                f"{self.evaluations} evaluations need as many iterations, but a task of {self.steps} steps has "
                f"{self.iterations}: set fewer evaluations, or more steps"
            )
        if self.evaluation_limit is not None and self.evaluation_limit < 1:
            raise ValueError(f"evaluation_limit must be at least 1 step, or none, not {self.evaluation_limit}")
        for name in ("lr", "adam_eps", "clip", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        for name in ("value_coefficient", "entropy"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")
        for name, choices in (
            ("engine", ("auto", "plain", "captured")),
            ("precision", ("float32", "tf32", "bf16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")

    @property
    def samples(self) -> int:
        """Environment steps per iteration."""
        return self.environments * self.rollout

    @property
    def iterations(self) -> int:
        """Iterations per task."""
        return self.steps // self.samples

    def rate_at(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        return self.lr * (1 - iteration / self.iterations)

    def is_evaluated(self, iterations: int) -> bool:
        """Whether an evaluation follows once so many iterations of a task are done."""
        due = iterations * self.evaluations // self.iterations
        return due > (iterations - 1) * self.evaluations // self.iterations
