"""The optimizer of a task, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.training.config import TrainingConfig

KINDS: dict[str, type[Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(
    config: TrainingConfig,
    parameters: Iterable[nn.Parameter],
    kinds: Mapping[str, type[Optimizer]] = KINDS,
    **options: Any,
) -> Optimizer:
    """A new optimizer as configured; `options` replace or add arguments of torch's optimizer."""
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **options}
    if config.optimizer == "sgd":
        settings["momentum"] = config.momentum
    kind: Any = kinds[config.optimizer]
    optimizer: Optimizer = kind(parameters, **settings)
    return optimizer


def list_named_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer trains, by name: the model's parameters, then those that the method added to the optimizer."""
    in_model = {id(parameter) for parameter in model.parameters()}
    added = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in in_model]
    return {**dict(model.named_parameters()), **{f"method/{index}": p for index, p in enumerate(added)}}


def optimizer_state_dict(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimizer's rates, and its moments by parameter name, every tensor in its own dtype and shape."""
    return {
        "lr": [float(group["lr"]) for group in optimizer.param_groups],
        "moments": {
            name: dict(optimizer.state[parameter])
            for name, parameter in list_named_parameters(optimizer, model).items()
            if parameter in optimizer.state
        },
    }


def load_optimizer_state_dict(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Restore what `optimizer_state_dict` returned.

    Not `optimizer.load_state_dict`: it casts moments to the parameter's dtype and goes by position, not by name.
    """
    for group, lr in zip(optimizer.param_groups, state["lr"], strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    parameters = list_named_parameters(optimizer, model)
    for name, moments in state["moments"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _restore_moment(key, value, parameter, optimizer) for key, value in moments.items()
        }


def _restore_moment(key: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """The moment on the parameter's device, with the parameter's strides."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and parameter.dim():
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    # Adam keeps its step counter on the host, unless its steps are captured.
    return value.to(parameter.device) if key != "step" or optimizer.defaults.get("capturable") else value
