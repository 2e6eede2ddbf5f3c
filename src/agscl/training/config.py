"""The settings of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from agscl.methods._parts.settings import find_wrong_type


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of training: how each task is trained."""

    epochs: int = 100
    """Epochs per task; training never stops early."""
    batch_size: int = 256
    """Examples per optimizer step."""
    lr: float = 1e-3
    """Learning rate at the start of every task."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer, made anew for every task."""
    momentum: float = 0.0
    """Momentum, for sgd only."""
    weight_decay: float = 0.0
    """The optimizer's weight decay."""
    cpr: float = 0.0
    """CPR's β, for any method, fine-tuning too: the loss is lowered by β times the entropy of the outputs; 0: off."""
    patience: int | None = 5
    """Epochs without a better validation loss before the rate drops; none keeps the rate constant. When a method has
    pruned, the rate starts over, with a new state of the optimizer."""
    drop_at: int | None = None
    """Epoch after which the rate drops once, whatever the loss is; the optimizer keeps its state."""
    factor: float = 3.0
    """What the rate is divided by when it drops. A drop after `patience` epochs also clears the optimizer's state."""
    restore_best: bool = True
    """Whether a task ends with the weights of the epoch with the best validation loss, or with the last ones."""
    engine: Literal["auto", "plain", "captured"] = "auto"
    """How steps run: one by one, or captured as CUDA graphs; auto captures on a GPU."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Arithmetic of the network's forward and backward passes; weights are always kept in float32."""
    channels_last: bool = False
    """Whether images and convolutions are stored channels last, which is faster on most machines."""
    compile: bool = False
    """Whether the trunk is compiled for training, by torch or, where they support it, with Triton kernels of our own;
    compiling takes some seconds."""

    def __post_init__(self) -> None:
        if wrong := find_wrong_type(self):
            raise ValueError(wrong)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is for sgd alone, {self.optimizer} has its own: leave it out, or set it to 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, not {self.weight_decay}")
        if not 0 <= self.cpr < math.inf:
            raise ValueError(f"cpr must be at least 0 and finite, not {self.cpr}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, or none for a constant rate, not {self.patience}")
        if self.drop_at is not None and self.drop_at < 1:
            raise ValueError(f"drop_at is a number of epochs, at least 1, or none, not {self.drop_at}")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor must be above 1 and finite, not {self.factor}")

    def get_restart_rate(self, epochs: int) -> float:
        """The rate set for training to return to if it is pruned after so many epochs of a task."""
        return self.lr / self.factor if self.drop_at is not None and epochs > self.drop_at else self.lr

    @property
    def validates(self) -> bool:
        """Whether training with these settings needs a validation split."""
        return self.patience is not None or self.restore_best
