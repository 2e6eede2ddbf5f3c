"""The experiments that have a name, and the configuration of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from agscl.experiments.methods import METHODS, listed
from agscl.methods.agscl import AGSCL
from agscl.runs import RunError
from agscl.training import TrainingConfig

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
    compared: tuple[str, ...] = ()
    """The methods of its table: what a comparison takes unless told. Empty: those with settings here."""
    seeds: int = 5
    """The seeds of its table."""


LOOP = TrainingConfig(epochs=100, batch_size=256, lr=1e-3, patience=5, factor=3.0, restore_best=True)
"""The paper's loop for every set but CUB-200."""


def _paper(agscl: tuple[float, float, float], *, ewc: float, mas: float, **others: float) -> dict[str, Options]:
    """The paper's values, for the forms behind its table. AGS-CL's are λ, μ and ρ; others are si, rwalk and hat."""
    lam, mu, rho = agscl
    strength = {"ewc": {"lam": ewc}, "mas": {"lam": mas}}
    strength |= {name: {"lam" if name == "rwalk" else "c": value} for name, value in others.items()}
    return {
        "agscl": {"lam": lam, "mu": mu, "rho": rho, **AGSCL.paper},
        **{name: {**strength[name], **listed(name).load().paper} for name in strength},
    }


CIFAR100 = _paper((400.0, 10.0, 0.3), ewc=10_000.0, si=1.0, rwalk=8.0, mas=4.0, hat=2.5)
TINY = _paper((3330.0, 10.0, 0.3), ewc=30_000.0, si=10.0, rwalk=24.0, mas=4.0, hat=278.0)
"""Not the paper's: found by a search on tinyimagenet32, on three seeds that no comparison uses."""
OMNIGLOT = _paper((1000.0, 7.0, 0.5), ewc=500_000.0, si=0.85, rwalk=70.0, mas=7.0, hat=2.5)
CIFAR10_100 = _paper((7000.0, 20.0, 0.2), ewc=25_000.0, si=0.7, rwalk=6.0, mas=1.0, hat=0.1)
EIGHT = _paper((400_000.0, 40.0, 0.4), ewc=1000.0, mas=0.1)
FIVE = _paper((133_000.0, 40.0, 0.4), ewc=3000.0, mas=0.1)
"""Not the paper's: found by a search on five."""
CUB200 = _paper((1.5, 0.5, 0.1), ewc=8192.0, si=0.75, rwalk=50.0, mas=38.4)  # its EWC 40 and MAS 0.6, in these units

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
            "mas": {"lam": 0.1},
            "hat": {"c": 0.75},
            "packnet": {"share": 0.9},
            "lwf": {"weight": 10.0},
            "l2": {"lam": 1.0},
            "gpm": {"threshold": 0.95},
        },
        threads=1,  # so small a network is faster on one core
        compared=tuple(METHODS),
        seeds=3,
    ),
    "cifar100": Preset("the paper's: CIFAR-100 as 10 tasks of 10 classes", "cifar100", "cifar", LOOP, CIFAR100),
    "cifar10-100": Preset(
        "the paper's: CIFAR-10, then CIFAR-100's 10 tasks", "cifar10-100", "cifar", LOOP, CIFAR10_100
    ),
    "omniglot": Preset(
        about="the paper's: 50 alphabets, every drawing in 20 rotations and shifts",
        tasks="omniglot",
        task_options={"copies": 20},
        network="omniglot",
        training=LOOP,
        methods=OMNIGLOT,
    ),
    "cub200": Preset(
        about="the paper's: 200 birds as 10 tasks of 20, AlexNet with ImageNet weights",
        tasks="cub200",
        network="alexnet",
        network_options={"weights": "imagenet"},
        training=TrainingConfig(
            epochs=40,
            batch_size=64,
            lr=0.005,
            optimizer="sgd",
            momentum=0.9,
            patience=None,
            drop_at=30,
            factor=10.0,
            restore_best=False,
        ),
        methods={**CUB200, "agscl": {**CUB200["agscl"], "fresh": "start"}},
    ),
    "eight": Preset("the paper's: eight datasets, one task each", "eight", "eight", LOOP, EIGHT),
    "tinyimagenet32": Preset("100 Tiny ImageNet classes at 32×32, as cifar100", "tinyimagenet32", "cifar", LOOP, TINY),
    "cifar10-tiny": Preset("CIFAR-10, then tinyimagenet32's 10 tasks", "cifar10-tiny", "cifar", LOOP, TINY),
    "five": Preset("as eight, with five datasets that are easy to get", "five", "eight", LOOP, FIVE),
    "omniglot-plain": Preset("50 alphabets, every drawing once", "omniglot", "omniglot", LOOP, OMNIGLOT),
    "omniglot5": Preset(
        about="the first 5 alphabets of Omniglot, every drawing once",
        tasks="omniglot",
        task_options={"alphabets": 5},
        network="omniglot",
        training=LOOP,
        methods=OMNIGLOT,
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
    hold_out: float = 0.0
    """Share of the training examples set apart for validation, where the sequence has none of its own for that."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> RunConfig:
        try:
            settings = {name: float(value) if value == "inf" else value for name, value in stored["settings"].items()}
            if stored["preset"] not in PRESETS:
                raise ValueError(f"there is no preset {stored['preset']!r}")
            return cls(**{**stored, "settings": settings, "training": TrainingConfig(**stored["training"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"the config.json of the run is damaged, or of another version: {error!r}") from error


def preset_called(name: str) -> Preset:
    if name not in PRESETS:
        known = "\n".join(f"  {name:15} {each.about}" for name, each in PRESETS.items())
        raise ValueError(f"no preset is called {name!r}. There are:\n{known}")
    return PRESETS[name]


def configure(
    preset: str,
    *,
    method: str,
    seed: int = 0,
    device: str = "cpu",
    reference: bool = True,
    hold_out: float = 0.0,
    tasks: str | None = None,
    task_options: Options | None = None,
    **changes: Any,
) -> RunConfig:
    """The run of a preset with a method; `changes` are fields of `TrainingConfig` and settings of the method.

    `tasks` names another task sequence than the preset's, e.g. "folder:PATH"; `task_options` are added to its options.
    """
    chosen, kinds = preset_called(preset), changeable(method)
    if tasks is not None and tasks.startswith("folder:"):  # the same from wherever it is asked for
        tasks = f"folder:{Path(tasks.removeprefix('folder:')).expanduser().resolve()}"
    if not 0 <= seed < 2**63:
        raise ValueError(f"a seed is 0 or more and below 2^63, not {seed}")
    check_device(device)
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
        tasks=tasks or chosen.tasks,
        task_options={**({} if tasks else chosen.task_options), **(task_options or {})},
        network=chosen.network,
        network_options=chosen.network_options,
        training=replace(chosen.training, **{key: value for key, value in changes.items() if key not in own}),
        settings=settings,
        reference=reference,
        hold_out=hold_out,
    )


def check_device(device: str) -> None:
    """Raise where this machine has no such device, or where it computes nothing."""
    if device.partition(":")[0] == "meta":
        raise ValueError("device 'meta' holds no numbers, so nothing can be trained there: use cpu or cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not to be had here: {str(error).splitlines()[0]}") from error


def changeable(method: str) -> dict[str, Any]:
    """What `configure` can change for a method, and the type of each: its own settings, then those of training."""
    own = {name: kind for name, kind in listed(method).settings.items() if name != "seed"}
    hints = get_type_hints(TrainingConfig)
    return {**own, **{field.name: hints[field.name] for field in fields(TrainingConfig)}}


def fastest(device: str) -> dict[str, Any]:
    """Settings of training that are fast on a device, in other arithmetic than the plain ones."""
    if device.startswith("cuda"):
        return {"precision": "bf16", "channels_last": True, "compile": True}
    return {"channels_last": True}


def threads_of(config: RunConfig) -> int | None:
    """As many CPU threads as suit a run; none: torch's own choice."""
    return PRESETS[config.preset].threads or (1 if config.device.startswith("cuda") else None)
