"""Builds a public network's graph, trains two tiny tasks, and prints as JSON whether old logits kept their bits.

    python public_network.py SITE LIBRARY NAME      # SITE: a folder with pytorchcv and timm, e.g. pip install --target

A process of its own, since timm needs torchvision to be imported, and gets a stand-in for it here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import time
import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, MultiHead
from agscl.graph import NodeGraphError


class AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(types.ModuleType):
    """A module in which every name is an empty class; only networks are used, which need none of them."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyAttribute(name, (nn.Module,), {})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def make_trunk(library: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if library == "timm":
        return importlib.import_module("timm").create_model(name, num_classes=0)
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"pytorchcv.models.{module}"), function)().features


def learn_two_tasks(trunk: nn.Module, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
    model, x = MultiHead(trunk), torch.randn(8, 3, 32, 32)
    started = time.process_time()
    method = AGSCL(model, x[:2], exclude=exclude)
    seconds = time.process_time() - started
    optimizer, logits = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for number in range(2):
        task = f"t{number}"
        model.add_head(task, 2)
        method.begin_task(task, optimizer, epochs=1)
        batches = [(x + number, torch.arange(8) % 2), (x.flip(0) - number, torch.arange(8) % 2)]
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs, task), labels).backward()
            optimizer.step()
        method.end_epoch()
        method.end_task(batches)
        with torch.no_grad():
            logits.append(model.eval()(x, "t0"))
        model.train()
    return {
        "seconds": round(seconds, 1),
        "nodes": method.graph.node_count,
        "layers": len(method.graph.layers),
        "important": len(method.certificate().important),
        "finite": bool(logits[0].isfinite().all()),
        "kept": torch.equal(*logits),
    }


def main(site: str, library: str, name: str) -> None:
    sys.path.insert(0, site)
    sys.meta_path.insert(0, StandInFinder())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        print(json.dumps(learn_two_tasks(make_trunk(library, name))))
    except NodeGraphError as error:
        result = learn_two_tasks(make_trunk(library, name), tuple(error.exclude)) if error.exclude else {}
        print(json.dumps({**result, "refused": len(error.refusals), "first": str(error)[:300]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
