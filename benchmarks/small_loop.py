"""A loop of one's own for small tasks: any method at its defaults, any optimizer, the length told or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl import MultiHead
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod

BATCH = 32


class SmallTask(NamedTuple):
    """Inputs and labels for training and for measuring accuracy, as tensors."""

    classes: int
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def learn_tasks(
    kind: type[Method],
    trunk: nn.Module,
    tasks: Sequence[SmallTask],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int,
    told: float | None = 1.0,
) -> list[float]:
    """Accuracy of each task in % after the last one. `told`: the length told, as a multiple of the true one."""
    model = MultiHead(trunk)
    method: Method = kind(model, tasks[0].x[:2]) if issubclass(kind, NodeMethod) else kind(model)
    optimizer = make_optimizer(model.parameters())
    for number, task in enumerate(tasks):
        name = str(number)
        model.add_head(name, task.classes)
        multiple = told or (1.0 if "epochs" in method.needs else None)
        steps = math.ceil(len(task.y) / BATCH)
        length = {"epochs": int(epochs * multiple), "steps_per_epoch": steps} if multiple else {}
        method.begin_task(name, optimizer, **length)
        model.train()
        for _ in range(epochs):
            for rows in torch.randperm(len(task.y)).split(BATCH):
                outputs = model(task.x[rows], name)
                loss = F.cross_entropy(outputs, task.y[rows]) + method.loss(task.x[rows], outputs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(list(zip(task.x.split(256), task.y.split(256), strict=True)))
    model.eval()
    accuracies = []
    for number, task in enumerate(tasks):
        with torch.no_grad(), method.viewing(str(number)):
            right = model(task.test_x, str(number)).argmax(1) == task.test_y
        accuracies.append(100 * right.float().mean().item())
    method.close()
    return accuracies
