"""The agent of a run, as its last checkpoint has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agscl.experiments.build import build_trainer, load_tasks
from agscl.experiments.run_config import RunConfig, check_device
from agscl.reinforcement import PPOConfig
from agscl.reinforcement.trainer import ReinforcementTrainer
from agscl.runs import Run, RunError, WrongOptions


def load_agent(folder: Path) -> ReinforcementTrainer:
    """A trainer with the agent stored in a run's last checkpoint; it is only meant to play."""
    run = Run(folder)
    config = RunConfig.from_dict(run.read_config() or {})
    try:
        check_device(config.device)
    except ValueError:  # it was trained on another machine
        config = replace(config, device="cpu")
    if not isinstance(config.training, PPOConfig):
        raise WrongOptions(f"{folder} is a run on data, so there is nothing to play: choose one of agents")
    state = run.load_checkpoint()
    if state is None or state["method"] is None:
        raise RunError(f"{folder} has no intact checkpoint yet, so there is no agent that could play")
    trainer = build_trainer(config, state["method"], load_tasks(config))
    assert isinstance(trainer, ReinforcementTrainer)
    trainer.load_state_dict(state["trainer"])
    return trainer
