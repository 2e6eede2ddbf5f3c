"""Continual reinforcement learning: PPO on one environment after the other, with any method of `agscl.methods`."""

from agscl.reinforcement.config import PPOConfig
from agscl.reinforcement.environments import EnvironmentTask
from agscl.reinforcement.sequences import load_environments
from agscl.reinforcement.trainer import ReinforcementTrainer

__all__ = ["EnvironmentTask", "PPOConfig", "ReinforcementTrainer", "load_environments"]
