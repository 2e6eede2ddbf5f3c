"""What a run is built from: its tasks, its model and method, and its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from agscl import tasks
from agscl.experiments.bounds import Joint, Separate, all_heads
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run_config import RunConfig
from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.networks import NETWORKS
from agscl.reinforcement import EnvironmentTask, PPOConfig
from agscl.reinforcement.sequences import load_environments
from agscl.reinforcement.trainer import ReinforcementTrainer
from agscl.runs import WrongOptions
from agscl.tasks import TaskSequence
from agscl.training import Trainer, TrainingConfig
from agscl.training.ranks import Ranks
from agscl.training.seeds import derive_seed

AnySequence = TaskSequence | tuple[EnvironmentTask, ...]
AnyTrainer = Trainer | ReinforcementTrainer
HOLD_OUT = 0.1
"""Share of the training examples used for validation, where a run or a search needs some and the tasks have none."""


def load_tasks(config: RunConfig) -> AnySequence:
    """Build the task sequence of a run: of data, or of environments."""
    if not isinstance(config.training, PPOConfig):
        return load_supervised(config)
    try:
        return load_environments(config.tasks, **config.task_options)
    except (ValueError, TypeError) as error:  # an unknown option or an invalid value
        raise WrongOptions(f"{config.tasks}: {error}") from error


def load_supervised(config: RunConfig) -> TaskSequence:
    """Build a run's task sequence of data, with a validation split where training needs one."""
    assert isinstance(config.training, TrainingConfig)
    try:
        sequence = tasks.load(config.tasks, seed=config.seed, **config.task_options)
    except (ValueError, TypeError) as error:  # an unknown option or an invalid value
        raise WrongOptions(f"{config.tasks}: {error}") from error
    split_missing = config.training.validates and any(task.valid_x is None for task in sequence)
    if split_missing and not config.hold_out and ":" in config.tasks:
        raise WrongOptions(
            f"{config.tasks} has no validation split, but patience and restore_best need one: add one with "
            "--task-options validation=0.1, or train without: --set patience=none restore_best=false"
        )
    share = config.hold_out or (HOLD_OUT if split_missing else 0.0)
    return tuple(task.with_validation(share, config.seed) for task in sequence)


def build_trainer(config: RunConfig, method_name: str, sequence: AnySequence) -> AnyTrainer:
    """A trainer for the method (or bound) of this name, with a new model."""
    if Ranks.current().size > 1 and (method_name == "joint" or isinstance(config.training, PPOConfig)):
        what = "joint" if method_name == "joint" else "an agent"
        raise WrongOptions(f"{what} is trained by one process: start it without torchrun")
    if isinstance(config.training, PPOConfig):
        return _build_agent(config, method_name, cast(tuple[EnvironmentTask, ...], sequence))
    return build_supervised(config, method_name, cast(TaskSequence, sequence))


def _build_agent(
    config: RunConfig, method_name: str, environments: tuple[EnvironmentTask, ...]
) -> ReinforcementTrainer:
    assert isinstance(config.training, PPOConfig)
    if method_name == "joint":
        raise WrongOptions("joint needs the data of all tasks, which agents do not have: choose another method")
    example_input = torch.zeros(2, *environments[0].input_shape)
    model, method = build_model(config, method_name, example_input)
    try:
        return ReinforcementTrainer(
            model, method, environments, config.training, seed=config.seed, device=config.device
        )
    except ValueError as error:
        raise WrongOptions(str(error)) from error


def build_supervised(config: RunConfig, method_name: str, sequence: TaskSequence) -> Trainer:
    """As `build_trainer`, for tasks with data."""
    assert isinstance(config.training, TrainingConfig)
    first = sequence[0]
    example_input = first.prepare_inputs(first.train_x[:2])
    model, method = build_model(config, method_name, example_input, sequence=sequence)
    trainer_class = Joint if method_name == "joint" else Trainer
    try:
        return trainer_class(model, method, sequence, config.training, seed=config.seed, device=config.device)
    except ValueError as error:
        raise WrongOptions(str(error)) from error


def build_model(
    config: RunConfig,
    method_name: str,
    example_input: Tensor,
    device: str | None = None,
    sequence: TaskSequence = (),
) -> tuple[MultiHead, Method]:
    """A new model, which must be able to read the inputs of `sequence`, with the method of this name.

    A bound is fine-tuning with other data or another model.
    """
    torch.manual_seed(derive_seed(config.seed))
    device = device or config.device
    make_trunk = partial(NETWORKS[config.network], **config.network_options)
    trunk = make_trunk()
    _check_input_shapes(config, getattr(trunk, "input_shape", ()), sequence)
    if method_name == "separate":
        torch.manual_seed(derive_seed(config.seed))
        model: MultiHead = Separate(make_trunk)
        return model, FineTune(model)
    model = MultiHead(trunk, features=trunk.features).to(device)
    if method_name == "joint":
        return model, FineTune(model, heads=all_heads)
    settings = dict(config.settings) if method_name == config.method else {}
    method_class = METHODS[method_name].method_class
    if issubclass(method_class, NodeMethod):
        settings["example_input"] = example_input.to(device)
    return model, method_class(model, **settings)


def list_outputs(config: RunConfig, width: int) -> int | dict[str, int]:
    """What `add_head` makes a run's head of `width` outputs from: a number, or an agent's actor and critic."""
    return {"actor": width - 1, "critic": 1} if isinstance(config.training, PPOConfig) else width


def _check_input_shapes(config: RunConfig, expected: Sequence[int], sequence: TaskSequence) -> None:
    """Raise `WrongOptions` where a task's inputs do not have the shape the network expects, if it expects one."""
    for task in sequence if expected else ():
        shape = tuple(task.prepare_inputs(task.train_x[:1]).shape[1:])
        if shape != tuple(expected):
            can_resize = ":" in config.tasks and len(expected) == 3
            resize = f"Resize them: --task-options size={expected[-1]} channels={expected[0]}"
            raise WrongOptions(
                f"the network {config.network} expects inputs of {_format_shape(expected)}, but those of task "
                f"{task.name!r} of {config.tasks} are {_format_shape(shape)}. "
                f"{resize if can_resize else 'Use a preset with another network'}"
            )


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
