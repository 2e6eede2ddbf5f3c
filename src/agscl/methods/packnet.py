"""PackNet: one network for many tasks by pruning (Mallya, Lazebnik; CVPR 2018).

A task trains the weights that no earlier one owns. Part-way through, the smallest of them are set to zero and given
back; the task owns the rest, trains on with these, and from then on they keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.methods._parts.frozen_parts import StillMethod
from agscl.methods._parts.lifecycle import Forward

__all__ = ["PackNet", "PackNetConfig"]

FREE = 0  # the owner of a weight that no task owns; task number t owns those marked t + 1
Shown = list[tuple[nn.Module, str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class PackNetConfig:
    """Settings of PackNet; the defaults are those of its paper."""

    share: float = 0.5
    """Share of each layer's weights that a task trains and gives back for later tasks."""
    prune_at: float = 2 / 3
    """Share of the task's epochs after which the smallest weights are pruned; the rest is for training on."""

    def __post_init__(self) -> None:
        for name, value in (("share", self.share), ("prune_at", self.prune_at)):
            if not 0 < value < 1:
                raise ValueError(f"PackNet: {name} must be above 0 and below 1, not {value}.")


class PackNet(StillMethod):
    """Every weight belongs to one task, and a task is seen through its own weights and those of earlier tasks.

    >>> method = PackNet(model, share=0.5, prune_at=2 / 3)
    >>> method.begin_task("birds", optimizer, epochs=30)

    What is packed: every weight of two or more dimensions outside the heads. All else (biases, BatchNorm) is trained by
    the first task and keeps its bits afterwards. `model(x, task)` of a `MultiHead` shows an old task its own weights;
    with other models use `viewing(task)`. Weights of later tasks are left out of that forward pass, not overwritten.
    """

    Config = PackNetConfig
    config: PackNetConfig

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.owner: dict[str, Tensor] = {}  # per packed weight, uint8 of its shape: FREE, or the task's number + 1
        self._places: list[tuple[nn.Module, str, str, nn.Parameter]] = []  # module, key, name, the weight itself
        self._fixed: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # weight, where it is fixed, its values
        self._reached: list[str] = []  # packed weights that get a gradient in this task
        self._epoch = 0
        self._pruned = -1  # steps taken when the task was pruned
        self._stack: list[Shown] = []
        self._figures: dict[str, Any] = {}
        super().__init__(model, **options)
        self._handles = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )

    @property
    def same_every_epoch(self) -> bool:
        return False  # at one of them it prunes

    # A task ----------------------------------------------------------------------------------------------------------

    def _rests(self, name: str) -> bool:
        return name not in self.owner

    def _join(self, optimizers: tuple[Optimizer, ...]) -> None:
        trunk = self._trunk()
        if not self.owner:
            packed = {n: p for n, p in trunk.items() if p.requires_grad and p.dim() > 1 and n.endswith("weight")}
            self.owner = {n: torch.full_like(p, FREE, dtype=torch.uint8) for n, p in packed.items()}
        self.owner = {name: owner for name, owner in self.owner.items() if name in trunk}
        self._find()
        super()._join(optimizers)

    def _find(self) -> None:
        """Where the packed weights are; a tied one is in several places."""
        self._unwind()
        names = {id(p): name for name, p in self.model.named_parameters() if name in self.owner}
        self._places = [
            (module, key, names[id(p)], p)
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in names
        ]

    def _begin(self) -> None:
        if self._epochs is None:
            raise ValueError(
                "PackNet prunes after a share of the task's epochs, so it must know how many there are: "
                "begin_task(task, optimizer, epochs=…)."
            )
        if len(self.tasks) > 255:
            raise ValueError("PackNet marks each weight with its task's number in one byte: 255 tasks at the most.")
        self._epoch, self._pruned, self._reached = 0, -1, []
        self._fix()
        if not any(bool((owner == FREE).any()) for owner in self.owner.values()):
            self._warn(
                "full",
                "No weight is free any more: this task trains its head alone. Use a larger share (it is "
                f"{self.config.share:g}) or a wider network.",
            )

    def _fix(self) -> None:
        """Note what no step may change: weights of other tasks and, once pruned, those that were given back."""
        mine = FREE if self._pruned < 0 else len(self.tasks)
        weights = self._weights()
        self._fixed = []
        for name, owner in self.owner.items():
            fixed = owner != mine
            if bool(fixed.any()) and (self._pruned < 0 or name in self._reached):
                self._fixed.append((weights[name], fixed, weights[name].detach().clone()))

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: parameter for _, _, name, parameter in self._places}

    def _observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self._unwind()
        if self._pruned < 0:  # a layer may be left out of some steps
            known = set(self._reached)
            self._reached += [name for name, p in self._weights().items() if p.grad is not None and name not in known]

    def _restore(self, optimizer: Optimizer | None, skipped: Tensor | None) -> None:
        for weight, fixed, values in self._fixed:
            weight.copy_(torch.where(fixed, values, weight))

    def _end_epoch(self) -> None:
        self._epoch += 1
        assert self._epochs is not None
        if self._pruned < 0 and self._epoch >= min(max(1, round(self.config.prune_at * self._epochs)), self._epochs):
            self._prune()

    @torch.no_grad()
    def _prune(self) -> None:
        """Of each layer's weights that this task trained, the smallest share becomes zero and free again."""
        weights, number = self._weights(), len(self.tasks)
        for name in self._reached:
            weight, owner = weights[name], self.owner[name]
            trained = owner == FREE
            count = math.floor(int(trained.sum()) * self.config.share)
            smallest = weight.abs().masked_fill(~trained, math.inf).flatten().argsort(stable=True)[:count]
            kept = trained.flatten()  # a copy, in the order of the indices, however the weights lie in memory
            kept[smallest] = False
            owner[kept.view(trained.shape)] = number
            weight.masked_fill_(owner == FREE, 0.0)
        self._pruned = self._steps
        self._fix()
        self._version += 1

    @torch.no_grad()
    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        if self._pruned < 0:
            self._prune()
        if self._pruned == self._steps and self._steps:
            self._warn(
                "pruning",
                f"The task was pruned at its very end ({self._epoch} of {self._epochs} epochs were told by "
                "end_epoch()), so it could not train on with the weights it kept. Call method.end_epoch() after each "
                "epoch, and train for two epochs or more.",
            )
        self._restore(None, None)  # the loop may have gone back to weights from before the pruning
        total = sum(owner.numel() for owner in self.owner.values())
        free = sum(int((owner == FREE).sum()) for owner in self.owner.values())
        mine = sum(int((owner == len(self.tasks)).sum()) for owner in self.owner.values())
        self._figures = {"weights": total, "owned": mine, "free": free, "sparsity": free / total if total else 0.0}

    def _leave(self) -> None:
        super()._leave()
        self._fixed = []

    # Looking at a task -----------------------------------------------------------------------------------------------

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        with super().viewing(task):
            shown = self._show(task)
            try:
                yield
            finally:
                _put_back(shown)

    def _show(self, task: str | None) -> Shown:
        """Put weights in place of the model's: those of `task` and earlier ones, else zero. Returns what was there.

        The newest task needs none of this: what it does not use is zero already, or in training.
        """
        if task is None or task == self.tasks[-1]:
            shown = [(module, key, parameter) for module, key, _, parameter in self._places]
        else:
            number = self.tasks.index(task) + 1
            made: dict[str, nn.Parameter] = {}
            shown = []
            for module, key, name, parameter in self._places:
                if name not in made:
                    owner = self.owner[name]
                    seen = (owner != FREE) & (owner <= number)
                    made[name] = nn.Parameter(parameter.detach().masked_fill(~seen, 0.0), requires_grad=False)
                shown.append((module, key, made[name]))
        before: Shown = [(module, key, module._parameters[key]) for module, key, _ in shown]  # type: ignore[misc]
        _put_back(shown)
        return before

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unwind()
        self._stack.append(self._show(self._task_of(args, kwargs)))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._stack:
            _put_back(self._stack.pop())

    def _unwind(self) -> None:
        """Undo what a forward pass left that was interrupted (Ctrl-C): torch calls no hook then."""
        while self._stack:
            _put_back(self._stack.pop())

    def close(self) -> None:
        super().close()
        self._unwind()
        for handle in self._handles:
            handle.remove()

    # What it reports, saving -----------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Of the last task: `owned`, the weights it keeps; `free`, those left for later tasks, and their share."""
        return dict(self._figures)

    def memory(self) -> dict[str, int]:
        """One byte per packed weight; while a task is under way, also the values of what it must not change."""
        masks = sum(owner.numel() for owner in self.owner.values())
        size = sum(v.numel() * v.element_size() + fixed.numel() for _, fixed, v in self._fixed)
        anchors = sum(values.numel() for _, _, values in self._fixed)
        return {**super().memory(), "masks": masks, "anchors": anchors, "bytes": masks + size}

    def state_dict(self) -> dict[str, Any]:
        self._unwind()
        return {
            **super().state_dict(),
            "owner": {name: owner.clone() for name, owner in self.owner.items()},
            "reached": list(self._reached),
            "epoch": self._epoch,
            "pruned": self._pruned,
            "figures": dict(self._figures),
        }

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        if state["method"] == type(self).__name__:
            place = next(self.model.parameters()).device
            self.owner = {name: owner.to(place, copy=True) for name, owner in state["owner"].items()}
        super().load_state_dict(state, *optimizers)
        self._reached, self._epoch, self._pruned = list(state["reached"]), state["epoch"], state["pruned"]
        self._figures = dict(state["figures"])
        if self.task is not None:
            self._fix()
        elif self.tasks:
            self._find()


def _put_back(shown: Shown) -> None:
    for module, key, parameter in shown:
        module._parameters[key] = parameter
