"""The experiments that have a name, and the configuration of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_type_hints

import torch

from agscl.experiments.methods import listed
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
    """The settings of each method; one that is not here keeps its own defaults."""
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
        methods={
            "agscl": {"mu": 10.0, "lam": 5000.0, "rho": 0.3},
            "ewc": {"lam": 10_000.0},
            "si": {"c": 1000.0},
            "rwalk": {"lam": 1.0},
            "mas": {"lam": 1.0},
            "hat": {"c": 0.75},
            "packnet": {"share": 0.9},
            "lwf": {"weight": 10.0},
            "l2": {"lam": 1.0},
            "gpm": {"threshold": 0.95},
        },
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
            "ewc": {
                "lam": 500_000.0,
                "fisher": "batched",
                "batch": 20,
                "mode": "train",
                "accumulation": "merged",
            },
            "si": {"c": 0.85, "gradient": "total", "clip": False, "xi": 0.01},
            "rwalk": {
                "lam": 70.0,
                "gradient": "total",
                "clip": False,
                "normalise": False,
                "halve_first": True,
                "eps": 0.01,
            },
            "mas": {"lam": 7.0, "norm": "plain", "batch": 20},
            "hat": {"c": 2.5, "mask": "gradient"},
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
    reference: bool = True
    """Whether fine-tuning is trained first, to measure plasticity against it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> RunConfig:
        settings = {name: float(value) if value == "inf" else value for name, value in stored["settings"].items()}
        return cls(**{**stored, "settings": settings, "training": TrainingConfig(**stored["training"])})


def configure(
    preset: str, *, method: str, seed: int = 0, device: str = "cpu", reference: bool = True, **changes: Any
) -> RunConfig:
    """The run of a preset with a method; `changes` are fields of `TrainingConfig` and settings of the method."""
    if preset not in PRESETS:
        known = "; ".join(f"{name} ({each.about})" for name, each in PRESETS.items())
        raise ValueError(f"no preset is called {preset!r}. There are: {known}")
    if seed < 0:
        raise ValueError(f"a seed is 0 or more, not {seed}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not to be had here: {str(error).splitlines()[0]}") from error
    chosen, kinds = PRESETS[preset], changeable(method)
    if unknown := [key for key in changes if key not in kinds]:
        raise ValueError(f"{method} has no setting {unknown[0]!r}. It has: {', '.join(kinds)}")
    own = listed(method).settings
    settings = {**chosen.methods.get(method, {}), **{key: value for key, value in changes.items() if key in own}}
    if "seed" in own:
        settings["seed"] = seed
    if own:
        listed(method).load().Config(**settings)  # raises where a value cannot be
    return RunConfig(
        preset=preset,
        method=method,
        seed=seed,
        device=device,
        tasks=chosen.tasks,
        task_options=chosen.task_options,
        network=chosen.network,
        network_options=chosen.network_options,
        training=replace(chosen.training, **{key: value for key, value in changes.items() if key not in own}),
        settings=settings,
        reference=reference,
    )


def changeable(method: str) -> dict[str, Any]:
    """What `configure` can change for a method, and the type of each: its own settings, then those of training."""
    own = {name: kind for name, kind in listed(method).settings.items() if name != "seed"}
    hints = get_type_hints(TrainingConfig)
    return {**own, **{field.name: hints[field.name] for field in fields(TrainingConfig)}}
