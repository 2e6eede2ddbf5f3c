"""The experiments that have a name, and the configuration of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agscl.supervised import TrainingConfig

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """One experiment: what is learned, by which network, and how."""

    about: str
    """One line for a person."""
    tasks: str
    """A task sequence of agscl.tasks."""
    network: str
    """A network of agscl.networks."""
    training: TrainingConfig
    """How each task is trained."""
    methods: Mapping[str, Options]
    """The settings of each method."""
    task_options: Options = field(default_factory=dict)
    network_options: Options = field(default_factory=dict)
    threads: int | None = None
    """CPU threads; none takes torch's own choice."""


PRESETS: dict[str, Preset] = {
    "digits": Preset(
        about="scikit-learn's digits as 5 tasks of 2 classes; no download, under a minute on a laptop",
        tasks="digits",
        network="mlp",
        network_options={"inputs": 64, "widths": [50, 50, 50]},
        training=TrainingConfig(epochs=30, batch_size=32, lr=1e-2, patience=None, restore_best=False),
        methods={"agscl": {"mu": 10.0, "lam": 2000.0, "rho": 0.3}, "finetune": {}},
        threads=1,  # so small a network is faster on one core
    ),
    "omniglot5": Preset(
        about="the first 5 alphabets of Omniglot with the paper's settings; needs AGSCL_DATA",
        tasks="omniglot",
        task_options={"alphabets": 5},
        network="omniglot",
        training=TrainingConfig(epochs=100, batch_size=256, lr=1e-3, patience=5, factor=3.0, restore_best=True),
        methods={
            "agscl": {"mu": 7.0, "lam": 1000.0, "rho": 0.5, "zero_init": "while_free", "importance_mode": "train"},
            "finetune": {},
        },
    ),
}


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines the result of one run."""

    preset: str
    method: str
    seed: int
    device: str
    tasks: str
    task_options: Options
    network: str
    network_options: Options
    training: TrainingConfig
    settings: Options
    """The method's own."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> RunConfig:
        settings = {name: float(value) if value == "inf" else value for name, value in stored["settings"].items()}
        return cls(**{**stored, "settings": settings, "training": TrainingConfig(**stored["training"])})
