"""Models behind `torch.compile`, DistributedDataParallel or FSDP: the model inside, and what the wrapper changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from agscl.heads import MultiHead


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model behind DistributedDataParallel or torch.compile; FSDP is refused."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap_model(model.module)
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        return unwrap_model(inner)
    refuse_sharded(model.modules())
    return model


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    kinds = {type(item).__name__ for module in modules for item in (module, *module._parameters.values())}
    if "DTensor" in kinds or any("FullyShardedDataParallel" in kind for kind in kinds):
        raise NotImplementedError(
            "The model is sharded (FSDP), which is not supported: the rows of a node would lie on several ranks. "
            "Use DistributedDataParallel."
        )


def find_ddp_parameters(model: nn.Module) -> set[int] | None:
    """Ids of the parameters whose gradients DistributedDataParallel averages; None where the model is not wrapped."""
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        return find_ddp_parameters(inner)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    return {id(p) for p in getattr(model, "_module_parameters", model.parameters())}


def contains_compiled(model: nn.Module) -> bool:
    """Whether a module was compiled, as `torch.compile(module)` or as `module.compile()`."""
    return any(
        isinstance(getattr(module, "_orig_mod", None), nn.Module)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in list_modules(model)
    )


@contextmanager
def recompile_if_hooks_change(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """What torch.compile compiled does not notice hooks that come or go: let it be compiled again."""
    before = _list_hooks(model)
    yield
    if (is_compiled or contains_compiled(model)) and _list_hooks(model) != before:
        torch.compiler.reset()


def _list_hooks(model: nn.Module) -> list[list[int]]:
    return [[*module._forward_pre_hooks, *module._forward_hooks] for module in list_modules(model)]


def list_modules(model: nn.Module) -> list[nn.Module]:
    """All modules that may be wrapped or compiled, but for the heads of a `MultiHead`: there may be hundreds."""
    return [model, *model.trunk.modules()] if type(model) is MultiHead else list(model.modules())
