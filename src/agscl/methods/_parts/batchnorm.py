"""Freezing, switching and recomputing the running statistics of BatchNorms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from agscl.graph.model_state import switch_mode
from agscl.graph.nodes import NodeGraph
from agscl.heads import Heads
from agscl.methods._parts.thread_local_tensors import View, make_replaceable, restore_plain_dicts
from agscl.system.distributed import average_over_ranks_

__all__ = [
    "ChannelFreezer",
    "NodeNormFreezer",
    "StatisticsFreezer",
    "TaskStatisticsSwitcher",
    "find_batchnorms",
    "find_trunk_batchnorms",
    "recompute_statistics",
]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorms of a model that have running statistics, by name."""
    return _select_batchnorms(dict(model.named_modules()))


def find_trunk_batchnorms(heads: Heads, tasks: Sequence[str]) -> dict[str, _BatchNorm]:
    """The BatchNorms outside the heads of `tasks`."""
    return _select_batchnorms(heads.list_trunk_modules(tasks))


def _select_batchnorms(modules: Mapping[str, nn.Module]) -> dict[str, _BatchNorm]:
    norms = {name: module for name, module in modules.items() if isinstance(module, _BatchNorm)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


class StatisticsFreezer:
    """Runs BatchNorms as in eval mode, in training too: by their running statistics, which they do not update."""

    def __init__(self, norms: Mapping[str, _BatchNorm]) -> None:
        self._training: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        for norm in norms.values():
            self._handles.append(norm.register_forward_pre_hook(self._before))
            self._handles.append(norm.register_forward_hook(self._after, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        while self._training:  # left by an interrupted pass (Ctrl-C), after which torch calls no hook
            self._training.pop().training = True
        if module.training:
            self._training.append(module)
            module.training = False

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._training and self._training[-1] is module:
            self._training.pop().training = True


class TaskStatisticsSwitcher:
    """Switches BatchNorms to a task's own running statistics while the model runs for that task.

    `task_of(args, kwargs)` returns the task that a call of the model is for; a task without stored statistics uses
    those in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: Mapping[str, _BatchNorm],
        task_of: Callable[[tuple[Any, ...], dict[str, Any]], str | None],
    ) -> None:
        self.norms = dict(norms)
        self.statistics: dict[str, dict[str, Tensor]] = {}
        self._task_of = task_of
        self._view = View()
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    def store(self, task: str) -> None:
        """Store a copy of the BatchNorm statistics in the model, averaged over ranks, as those of `task`."""
        average_statistics_over_ranks_(self.norms.values())  # every rank saw a part of the data
        self.statistics[task] = {
            f"{name}.{key}": norm._buffers[key].clone()  # type: ignore[union-attr]
            for name, norm in self.norms.items()
            for key in _STATISTICS
        }

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        restore_plain_dicts(self.norms.values())

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stored = self.statistics.get(self._task_of(args, kwargs) or "", {})
        places = ((name, norm, key) for name, norm in self.norms.items() if stored for key in _STATISTICS)
        self._view.show(
            {make_replaceable(norm, "_buffers", key): stored[f"{name}.{key}"] for name, norm, key in places}
        )

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._view.clear()


class ChannelFreezer:
    """Normalises the frozen channels of a BatchNorm by their frozen statistics, in training too.

    The other channels use and update batch statistics as usual. (Only restoring the statistics after each step would
    train on batch statistics and evaluate on frozen ones: the old task survives, the new one is ruined.)
    """

    def __init__(self, module: _BatchNorm, frozen_channels: Tensor) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self.module = module
        self.frozen_channels = frozen_channels.to(module.running_mean.device)
        self.frozen_mean, self.frozen_var = module.running_mean.clone(), module.running_var.clone()
        self._replaced: tuple[Tensor, Tensor] | None = None
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the forward pass update copies: autograd may have saved the buffers themselves."""
        if self._replaced is not None:  # left by an interrupted pass (Ctrl-C), after which torch calls no hook
            _set_statistics(module, *self._replaced)
            self._replaced = None
        if module.training:
            mean, var = self._replaced = _get_statistics(module)
            _set_statistics(module, mean.clone(), var.clone())

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None
    ) -> Tensor | None:
        if self._replaced is None:
            return None
        (mean, var), self._replaced = self._replaced, None
        new_mean, new_var = _get_statistics(module)
        with torch.no_grad():
            mean.copy_(torch.where(self.frozen_channels, self.frozen_mean, new_mean))
            var.copy_(torch.where(self.frozen_channels, self.frozen_var, new_var))
        _set_statistics(module, mean, var)
        if output is None:  # the forward pass failed
            return None
        channels = (1, -1, *[1] * (output.dim() - 2))
        if type(self.module).forward is not _BatchNorm.forward:
            frozen = self._run_frozen(args, kwargs)
        else:
            x = args[0] if args else kwargs["input"]
            scale = torch.rsqrt(self.frozen_var + self.module.eps)
            frozen = (x - self.frozen_mean.view(channels)) * scale.view(channels)
            if self.module.affine:
                frozen = frozen * self.module.weight.view(channels) + self.module.bias.view(channels)
        return torch.where(self.frozen_channels.view(channels), frozen.to(output.dtype), output)

    def _run_frozen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run a subclass that overrides forward (say, with an activation inside) with the frozen statistics."""
        module, before = self.module, _get_statistics(self.module)
        _set_statistics(module, self.frozen_mean, self.frozen_var)
        module.training = False
        try:
            output: Tensor = type(module).forward(module, *args, **kwargs)
            return output
        finally:
            module.training = True
            _set_statistics(module, *before)


def _get_statistics(module: nn.Module) -> tuple[Tensor, Tensor]:
    return module._buffers["running_mean"], module._buffers["running_var"]  # type: ignore[return-value]


def _set_statistics(module: nn.Module, mean: Tensor, var: Tensor) -> None:
    module._buffers["running_mean"], module._buffers["running_var"] = mean, var


class NodeNormFreezer:
    """Freezes the BatchNorm channels of the `important` (groups,) nodes during a task."""

    saved: ClassVar[tuple[str, ...]] = ("start_batches",)

    def __init__(self, graph: NodeGraph, important: Tensor) -> None:
        self._norms = list(graph.norms.values())
        self.start_batches = self._count_batches()
        masks = [important[norm.groups.to(important.device)] for norm in self._norms]
        pairs = zip(self._norms, masks, strict=True)
        self._freezers = [ChannelFreezer(norm.module, mask) for norm, mask in pairs if bool(mask.any())]

    def find_trained(self) -> list[_BatchNorm]:
        """The BatchNorms that saw a batch since the task began, so not those that the loop keeps in eval mode."""
        counts = zip(self._norms, self.start_batches, self._count_batches(), strict=True)
        return [norm.module for norm, before, after in counts if after > before]

    def _count_batches(self) -> list[int]:
        return [int(norm.module.num_batches_tracked) for norm in self._norms]  # type: ignore[arg-type]

    def close(self) -> None:
        for freezer in self._freezers:
            freezer.close()


@torch.no_grad()
def recompute_statistics(
    norms: Iterable[_BatchNorm], model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]
) -> None:
    """Recompute the BatchNorms' running statistics, as the mean over `batches`, for weights that have just changed.

    After a proximal step shrinks weights the running statistics lag behind, so that evaluation differs from training.
    Frozen channels stay as they are. Batches must be shuffled as in training.
    """
    norms = list(norms)
    saved = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        with switch_mode(model), torch.random.fork_rng(devices=[]):
            for norm in norms:
                norm.train()
                norm.momentum = None  # the plain mean over batches
                norm.num_batches_tracked = torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
            for batch in batches:
                try:
                    forward(batch)
                except ValueError as error:  # a last batch of one sample has no variance
                    if "more than 1 value per channel" not in str(error):
                        raise
        average_statistics_over_ranks_(norms)
    finally:
        for norm, (momentum, tracked) in zip(norms, saved, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


def average_statistics_over_ranks_(norms: Iterable[_BatchNorm]) -> None:
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        average_over_ranks_(norm.running_mean, norm.running_var)
