"""Small training loops that tests share."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from agscl import MultiHead
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod


def mlp(width: int = 32, inputs: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def blobs(number: int, classes: int = 3, inputs: int = 16, size: int = 48) -> list[tuple[Tensor, Tensor]]:
    """Four batches of a small task: noisy points around random centres."""
    draw = torch.Generator().manual_seed(number)
    centres = torch.randn(classes, inputs, generator=draw)
    y = torch.randint(classes, (size,), generator=draw)
    x = centres[y] + 0.5 * torch.randn(size, inputs, generator=draw)
    return list(zip(x.split(size // 4), y.split(size // 4), strict=True))


class OneHead(nn.Module):
    """A model whose tasks share one head, `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = mlp(), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def make(kind: type[Method], model: nn.Module, *, inputs: int = 16, **settings: Any) -> Method:
    """A method of any kind on a model that reads vectors."""
    if issubclass(kind, NodeMethod):
        settings = {"example_input": torch.zeros(2, inputs), **settings}
    return kind(model, **settings)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def learn(
    method: Method,
    optimizer: torch.optim.Optimizer,
    number: int,
    *,
    epochs: int = 8,
    after_step: Callable[[int], Any] | None = None,
    steps: range | None = None,
    begin: bool = True,
    end: bool = True,
    told: bool = True,
) -> None:
    """Train task `number`; `steps` picks a part of it, so that a loop can be left and taken up again."""
    model, task, data = method.model, f"t{number}", blobs(number)
    if begin:
        torch.manual_seed(number)  # the new head's weights
        if isinstance(model, MultiHead) and task not in model.heads:
            model.add_head(task, 3)
        method.begin_task(task, optimizer, epochs=epochs if "epochs" in method.needs else None)
    model.train()
    for step in range(epochs * len(data)) if steps is None else steps:
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        F.cross_entropy(model(x, task), y).backward()
        optimizer.step()
        if after_step:
            after_step(step)
        if told and step % len(data) == len(data) - 1:
            method.end_epoch()
    if end:
        method.end_task(data)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def leave_process_group() -> None:
    """End a rank of a test without Python's and torch's clean-up: gloo's threads sometimes abort the process there."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)
