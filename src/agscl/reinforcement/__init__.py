"""Continual reinforcement learning: PPO on one environment after the other, with any method of `agscl.methods`."""

from agscl.reinforcement.config import PPOConfig
from agscl.reinforcement.environments import EnvironmentTask

__all__ = ["EnvironmentTask", "PPOConfig"]
