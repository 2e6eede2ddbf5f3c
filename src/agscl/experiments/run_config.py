"""The configuration of one run, and how a preset, a method and changed settings become one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from agscl.experiments.method_entries import get_entry
from agscl.experiments.presets import PRESETS, Options, get_preset
from agscl.reinforcement import PPOConfig
from agscl.reinforcement.sequences import load_environments
from agscl.runs import RunError
from agscl.training import TrainingConfig


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
    training: TrainingConfig | PPOConfig
    settings: Options
    """The settings of the method."""
    reference: bool = True
    """Whether fine-tuning is trained first, to measure plasticity against it."""
    hold_out: float = 0.0
    """Share of the training examples split off for validation, for tasks without a validation split."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> RunConfig:
        try:
            settings = {name: float(value) if value == "inf" else value for name, value in stored["settings"].items()}
            if stored["preset"] not in PRESETS:
                raise ValueError(f"unknown preset {stored['preset']!r}")
            training = type(PRESETS[stored["preset"]].training)(**stored["training"])
            return cls(**{**stored, "settings": settings, "training": training})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"the run's config.json is damaged, or was written by another version of agscl: {error!r}"
            ) from error


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
    """The run of a preset with a method; `changes` are settings of training and of the method.

    `tasks` replaces the preset's task sequence, e.g. by "folder:PATH"; `task_options` are added to its options.
    """
    chosen, types = get_preset(preset), list_settings(method, preset)
    if tasks is not None and tasks.startswith("folder:"):  # the same path from any working directory
        tasks = f"folder:{Path(tasks.removeprefix('folder:')).expanduser().resolve()}"
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2^63, not {seed}")
    check_device(device)
    if unknown := [key for key in changes if key not in types]:
        raise ValueError(f"{method} has no setting {unknown[0]!r}. Its settings: {', '.join(types)}")
    method_types = get_entry(method).settings
    settings = {**chosen.methods.get(method, {}), **{key: changes[key] for key in changes if key in method_types}}
    if "seed" in method_types:
        settings["seed"] = seed
    if method_types:
        get_entry(method).method_class.Config(**settings)  # raises ValueError for an invalid value
    task_name, all_options = tasks or chosen.tasks, {**({} if tasks else chosen.task_options), **(task_options or {})}
    network_options = chosen.network_options
    if task_name == "gym":  # the network reads as many numbers as the widest observation has
        try:
            network_options = {**network_options, "inputs": load_environments("gym", **all_options)[0].input_shape[0]}
        except TypeError as error:  # an unknown option
            raise ValueError(f"gym: {error}") from error
    return RunConfig(
        preset=preset,
        method=method,
        seed=seed,
        device=device,
        tasks=task_name,
        task_options=all_options,
        network=chosen.network,
        network_options=network_options,
        training=replace(chosen.training, **{key: changes[key] for key in changes if key not in method_types}),
        settings=settings,
        reference=reference,
        hold_out=hold_out,
    )


def check_device(device: str) -> None:
    """Raise ValueError for a run's device that this machine does not have, or that cannot compute."""
    if device.partition(":")[0] == "meta":
        raise ValueError("device 'meta' stores no data, so nothing can be trained on it: use cpu or cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} is not available on this machine: {reason}") from error


def list_settings(method: str, preset: str) -> dict[str, Any]:
    """What `configure` can change for a method, and the type of each: the method's settings, then those of training."""
    method_types = {name: kind for name, kind in get_entry(method).settings.items() if name != "seed"}
    training = type(get_preset(preset).training)
    hints = get_type_hints(training)
    return {**method_types, **{field.name: hints[field.name] for field in fields(training)}}
