"""Heads in optimizers: a new task's head joins an optimizer, and ranks that train together average its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from agscl.system.distributed import average_over_ranks_, copy_from_first_rank_, is_distributed

if TYPE_CHECKING:
    from agscl.methods._parts.lifecycle import Method

__all__ = ["OptimizerHeads", "remove_parameter"]

Order = list[list[list[str]]]
"""Per optimizer and group, the names of the parameters in their order, by which torch saves their moments."""


class OptimizerHeads:
    """The part of a plan that adds parameters to its optimizers."""

    method: Method
    optimizers: tuple[Optimizer, ...]
    task: str
    head_parameters: Mapping[str, nn.Parameter]

    def __init__(self) -> None:
        self._names: Mapping[int, str] = {}  # of the model's parameters, by id
        self._added_parameters: list[tuple[dict[str, Any], nn.Parameter]] = []  # with the param group of each
        self._averaged: list[nn.Parameter] = []  # gradients that no DistributedDataParallel averages over ranks
        self._unshared: list[nn.Parameter] = []  # those of them that are lazy: each rank will draw its own

    def _name_parameters(self) -> Order:
        """The names of the optimizers' parameters; lists the heads again where one is unknown.

        A loop may have replaced some, e.g. by `load_state_dict(…, assign=True)`.
        """
        heads, tasks = self.method.heads, self.method.tasks
        self.head_parameters, self._names = heads.recall_parameters(tasks)
        order = self._list_parameter_order()
        head = heads.get_head(self.task, tasks)
        unknown = any(id(p) not in self._names for p in head.parameters())
        if unknown or any("" in group for groups in order for group in groups):
            self.head_parameters, self._names = heads.recall_parameters(tasks, again=True)
            order = self._list_parameter_order()
        return order

    def _add_head_to_optimizer(self, order: Order) -> None:
        """Give the head to the group that holds heads already, else to the first group of the first optimizer.

        `order` grows with what is added.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        group_names = [names for each in order for names in each]
        head = self.method.heads.get_head(self.task, self.method.tasks)
        added = [p for p in head.parameters() if not any(self._names[id(p)] in names for names in group_names)]
        target = 0
        if len(groups) > 1:
            holders = [not self.head_parameters.keys().isdisjoint(names) for names in group_names]
            target = holders.index(True) if any(holders) else 0
            self._warn_of_rate(added, groups[target], groups)
        others = [number for number, takes_all in enumerate(self._list_general_groups()) if takes_all]
        for parameter in added:
            name, chosen = self._names[id(parameter)], target
            if target not in others and (is_lazy(parameter) or parameter.dim() != 2):
                if not others:
                    raise ValueError(
                        f"Muon trains matrices alone, and the new head has {name}: give begin_task the optimizer that "
                        "trains what has other dimensions, too: begin_task(task, muon, adamw)."
                    )
                chosen = others[0]
            self._add_to_group(groups[chosen], parameter, name)
            group_names[chosen].append(name)

    def _list_general_groups(self) -> list[bool]:
        """For each parameter group of the optimizers, whether it takes tensors of any number of dimensions."""
        muon = getattr(torch.optim, "Muon", ())
        return [not isinstance(optimizer, muon) for optimizer in self.optimizers for _ in optimizer.param_groups]

    def _warn_of_rate(
        self, added: Sequence[nn.Parameter], target: dict[str, Any], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Warn where the group that a first head joins has a lower rate than another group."""
        if any(group.get("lr") is None for group in groups):  # the optimizer finds its own
            return
        rate, highest = float(target["lr"]), max(float(group["lr"]) for group in groups)
        is_first = len(self.method.tasks) == 1 and bool(added)
        if is_first and rate < highest:
            self.method.warn_once(
                "head rate",
                f"The heads join the optimizer's first parameter group, whose rate is {rate:g}; another group has "
                f"{highest:g}. If they are to learn faster, add the head to the optimizer yourself before begin_task, "
                "with optimizer.add_param_group; later heads follow it.",
            )

    def _add_to_group(self, group: dict[str, Any], parameter: nn.Parameter, name: str) -> None:
        group["params"].append(parameter)
        if "param_names" in group:  # of an optimizer made of named_parameters()
            group["param_names"].append(name)
        self._added_parameters.append((group, parameter))
        self.restart_lbfgs()

    def restart_lbfgs(self) -> None:
        """Let LBFGS, which keeps vectors as long as all its parameters, start anew: some came, went or were pruned."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.state.clear()
                optimizer._numel_cache = None

    def _average_head(self) -> None:
        """Where ranks train together, let them start with one head, and average its gradients if DDP will not."""
        method = self.method
        if not is_distributed() or method.averaged_by_ddp is None:
            return
        for parameter in method.heads.get_head(self.task, method.tasks).parameters():
            if id(parameter) not in method.averaged_by_ddp:
                self._averaged.append(parameter)
                self._unshared.append(parameter)
        self._share_drawn()

    def _share_drawn(self) -> None:
        """Let all ranks have the first one's values of what is no longer lazy."""
        for parameter in [p for p in self._unshared if not is_lazy(p)]:
            copy_from_first_rank_(parameter.detach())
        self._unshared = [p for p in self._unshared if is_lazy(p)]

    def _list_parameter_order(self) -> Order:
        names = self._names
        groups = [optimizer.param_groups for optimizer in self.optimizers]
        return [[[names.get(id(p), "") for p in group["params"]] for group in each] for each in groups]

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average over ranks what DistributedDataParallel does not know: a head added after it was wrapped."""
        self._share_drawn()
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]} if self._averaged else set()
        for parameter in self._averaged:
            if id(parameter) in trained and parameter.grad is not None:
                average_over_ranks_(parameter.grad)


def remove_parameter(group: dict[str, Any], parameter: nn.Parameter) -> None:
    """Take a parameter, and its name where there are names, out of a group of an optimizer."""
    for position in reversed([position for position, p in enumerate(group["params"]) if p is parameter]):
        del group["params"][position]
        if "param_names" in group:
            del group["param_names"][position]
