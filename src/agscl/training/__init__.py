"""The paper's training loop over a task sequence, its settings, and the engine that runs its steps."""

from agscl.training.config import TrainingConfig
from agscl.training.engine import CompileFailed, Engine, PlainEngine
from agscl.training.seeds import derive_seed
from agscl.training.trainer import Trainer, TrainingFailed

__all__ = ["CompileFailed", "Engine", "PlainEngine", "Trainer", "TrainingConfig", "TrainingFailed", "derive_seed"]
