"""Supervised task sequences: the paper's training loop."""

from agscl.fast.compiled import CompileFailed
from agscl.training.trainer import Trainer, TrainingConfig, TrainingFailed

__all__ = ["CompileFailed", "Trainer", "TrainingConfig", "TrainingFailed"]
