"""Supervised task sequences: the paper's training loop."""

from agscl.supervised.trainer import Trainer, TrainingConfig, TrainingFailed

__all__ = ["Trainer", "TrainingConfig", "TrainingFailed"]
