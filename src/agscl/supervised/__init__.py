"""Supervised task sequences: the paper's training loop."""

from agscl.supervised.compiled import CompileFailed
from agscl.supervised.trainer import Trainer, TrainingConfig, TrainingFailed

__all__ = ["CompileFailed", "Trainer", "TrainingConfig", "TrainingFailed"]
