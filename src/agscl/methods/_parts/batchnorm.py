"""BatchNorm while what it does for old tasks must stay as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from agscl.graph.nodes import NodeGraph

__all__ = [
    "FreezeChannels",
    "FreezeStatistics",
    "NodeNorms",
    "TaskStatistics",
    "find_batchnorms",
    "recompute_statistics",
]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorms of a model that keep running statistics, by name."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return {name: module for name, module in found if module.running_mean is not None}


class FreezeStatistics:
    """Lets BatchNorms normalise by their running statistics in training too, and leave these as they are."""

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
        while self._training:  # of a pass that was interrupted (Ctrl-C): torch calls no hook then
            self._training.pop().training = True
        if module.training:
            self._training.append(module)
            module.training = False

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._training and self._training[-1] is module:
            self._training.pop().training = True


class TaskStatistics:
    """Running statistics of BatchNorms for every task, put in place while the model runs for that task.

    `task_of(args, kwargs)` says which task a call of the model is for; a task without kept statistics uses those in
    the model. Buffers are exchanged, not written over: autograd holds on to the ones that it saw.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: Mapping[str, _BatchNorm],
        task_of: Callable[[tuple[Any, ...], dict[str, Any]], str | None],
    ) -> None:
        self.norms = dict(norms)
        self.kept: dict[str, dict[str, Tensor]] = {}
        self._task_of = task_of
        self._own: list[list[dict[str, Tensor | None]] | None] = []  # of the calls under way
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    def keep(self, task: str) -> None:
        """Remember the statistics in the model as those of `task`."""
        if dist.is_available() and dist.is_initialized():  # every rank saw a part of the data
            for norm in self.norms.values():
                for buffer in (norm.running_mean, norm.running_var):
                    assert buffer is not None
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()
        self.kept[task] = {
            f"{name}.{key}": norm._buffers[key].clone()  # type: ignore[union-attr]
            for name, norm in self.norms.items()
            for key in _STATISTICS
        }

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._own:  # of a pass that was interrupted (Ctrl-C): torch calls no hook then
            self._put_back()
        kept = self.kept.get(self._task_of(args, kwargs) or "")
        if kept is None:
            self._own.append(None)
            return
        self._own.append([{key: norm._buffers[key] for key in _STATISTICS} for norm in self.norms.values()])
        for name, norm in self.norms.items():
            norm._buffers.update({key: kept[f"{name}.{key}"] for key in _STATISTICS})

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._own:
            self._put_back()

    def _put_back(self) -> None:
        if (own := self._own.pop()) is not None:
            for norm, buffers in zip(self.norms.values(), own, strict=True):
                norm._buffers.update(buffers)


class FreezeChannels:
    """Normalises the kept channels of a BatchNorm by their kept statistics in training too.

    The other channels use and update batch statistics as ever. (Only putting statistics back after each step would
    train on batch statistics what is later evaluated on kept ones: the old task survives, the new one is ruined.)
    """

    def __init__(self, module: _BatchNorm, keep: Tensor) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self.module = module
        self.keep = keep.to(module.running_mean.device)
        self.mean, self.var = module.running_mean.clone(), module.running_var.clone()
        self._own: tuple[Tensor, Tensor] | None = None
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the forward pass update copies: autograd holds on to the statistics that it saw."""
        if self._own is not None:  # of a pass that was interrupted (Ctrl-C): torch calls no hook then
            module._buffers.update(running_mean=self._own[0], running_var=self._own[1])
            self._own = None
        if module.training:
            self._own = module._buffers["running_mean"], module._buffers["running_var"]  # type: ignore[assignment]
            module._buffers.update(running_mean=self._own[0].clone(), running_var=self._own[1].clone())  # type: ignore[index]

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None
    ) -> Tensor | None:
        if self._own is None:
            return None
        (mean, var), self._own = self._own, None
        with torch.no_grad():
            mean.copy_(torch.where(self.keep, self.mean, module._buffers["running_mean"]))  # type: ignore[arg-type]
            var.copy_(torch.where(self.keep, self.var, module._buffers["running_var"]))  # type: ignore[arg-type]
        module._buffers.update(running_mean=mean, running_var=var)
        if output is None:  # the forward pass failed
            return None
        channels = (1, -1, *[1] * (output.dim() - 2))
        if type(self.module).forward is not _BatchNorm.forward:
            frozen = self._run_frozen(args, kwargs)
        else:
            x = args[0] if args else kwargs["input"]
            scale = torch.rsqrt(self.var + self.module.eps)
            frozen = (x - self.mean.view(channels)) * scale.view(channels)
            if self.module.affine:
                frozen = frozen * self.module.weight.view(channels) + self.module.bias.view(channels)
        return torch.where(self.keep.view(channels), frozen.to(output.dtype), output)

    def _run_frozen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What a subclass with a forward of its own (an activation inside, say) gives with the kept statistics."""
        module, before = self.module, dict(self.module._buffers)
        module._buffers.update(running_mean=self.mean, running_var=self.var)
        module.training = False
        try:
            output: Tensor = type(module).forward(module, *args, **kwargs)
            return output
        finally:
            module.training = True
            module._buffers.update(before)


class NodeNorms:
    """The BatchNorms over nodes during a task: channels of important nodes are frozen, the others are followed."""

    saved: ClassVar[tuple[str, ...]] = ("start_batches",)

    def __init__(self, graph: NodeGraph, important: Tensor) -> None:
        self._norms = list(graph.norms.values())
        self.start_batches = self._count_batches()
        masks = [important[norm.groups.to(important.device)] for norm in self._norms]
        pairs = zip(self._norms, masks, strict=True)
        self._frozen = [FreezeChannels(norm.module, mask) for norm, mask in pairs if bool(mask.any())]

    def find_trained(self) -> list[_BatchNorm]:
        """Those that saw a batch since the task began: not the ones that the loop keeps in eval mode."""
        counts = zip(self._norms, self.start_batches, self._count_batches(), strict=True)
        return [norm.module for norm, before, now in counts if now > before]

    def _count_batches(self) -> list[int]:
        return [int(norm.module.num_batches_tracked) for norm in self._norms]  # type: ignore[arg-type]

    def close(self) -> None:
        for frozen in self._frozen:
            frozen.close()


@torch.no_grad()
def recompute_statistics(
    norms: Iterable[_BatchNorm], model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]
) -> None:
    """Take the running statistics anew, as the mean over `batches`, for weights that have just been changed.

    A proximal step shrinks weights under the statistics' feet: they lag behind, and a network that is right in
    training is wrong in evaluation. Kept channels stay as they are. Batches must be mixed as in training.
    """
    norms, modes = list(norms), [(module, module.training) for module in model.modules()]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = None  # the plain mean over batches
        norm.num_batches_tracked = torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            for batch in batches:
                try:
                    forward(batch)
                except ValueError as error:  # a last batch of one sample has no variance
                    if "more than 1 value per channel" not in str(error):
                        raise
        if dist.is_available() and dist.is_initialized():
            for norm in norms:
                for buffer in (norm.running_mean, norm.running_var):
                    assert buffer is not None
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
        for module, training in modes:
            module.training = training
