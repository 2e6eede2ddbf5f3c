"""AGS-CL: node-importance based adaptive group sparse regularisation (Jung, Ahn, Cha, Moon; NeurIPS 2020).

Nodes are free (never yet useful) or important. While a task is learned, a proximal step shrinks free nodes towards
zero and pulls important ones back to their anchors, both exactly; weights from a later node into an earlier one are
zero. When it ends, nodes that were active become important, and some of the free ones get fresh weights.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from agscl.certificate import NEVER, Layout, group_digests
from agscl.heads import HeadPlace
from agscl.importance import mean_activations
from agscl.methods.base import Forward, NodeMethod
from agscl.methods.batchnorm import KeptStatistics
from agscl.nodes import Rows
from agscl.probing import undisturbed
from agscl.proximal import group_norms, pull, shrink

__all__ = ["AGSCL", "AGSCLConfig"]


@dataclass(frozen=True, kw_only=True)
class AGSCLConfig:
    """Settings of AGS-CL. The defaults are the paper's for CIFAR-100; μ and λ must be searched for other data."""

    mu: float = 10.0
    """μ: how strongly free nodes are shrunk; with the rate α, each epoch takes αμ off a node's norm."""
    lam: float = 400.0
    """λ: how strongly important nodes are held, times their importance; inf freezes them for good."""
    rho: float = 0.3
    """ρ: share of each layer's free nodes that get fresh weights after a task."""
    eta: float = 0.9
    """η: how much of a node's importance lasts from task to task."""
    prox_every: Literal["epoch", "step"] | int = "epoch"
    """When the proximal step runs: each epoch, each step or every so many; thresholds are scaled to match."""
    zero_init: Literal["paper", "while_free", "off"] = "paper"
    """(I.1) Weights from a free node into an important one: 0 for ever, 0 while the source is free, or left."""
    rand_init: bool = True
    """(I.2) Whether free nodes get fresh weights after a task."""
    fresh: Literal["default", "start"] = "default"
    """Fresh weights: the layer's own initialiser, or those the model started with (a pre-trained network)."""
    prox: bool = True
    """False: no proximal steps, the penalty's gradient is added instead (the paper's ablation)."""
    tau: float = 1e-4
    """τ: without proximal steps, below this an importance counts as 0 and a change as none."""
    importance_mode: Literal["eval", "train"] = "eval"
    """Mode in which activations are measured; train keeps dropout on, as the authors' code did."""
    seed: int = 0
    """Seed of the random choices."""

    def __post_init__(self) -> None:
        def check(good: bool, rule: str) -> None:
            if not good:
                raise ValueError(f"AGSCL: {rule}.")

        check(self.mu >= 0 and math.isfinite(self.mu), f"mu must be a finite number of at least 0, not {self.mu}")
        check(self.lam >= 0, f"lam must be at least 0 (math.inf freezes for good), not {self.lam}")
        check(0 < self.rho <= 1, f"rho must be above 0 and at most 1, not {self.rho}; rand_init=False turns it off")
        check(0 < self.eta <= 1, f"eta must be above 0 and at most 1, not {self.eta}")
        whole = isinstance(self.prox_every, int) and not isinstance(self.prox_every, bool) and self.prox_every >= 1
        check(whole or self.prox_every in ("epoch", "step"), "prox_every is 'epoch', 'step' or a number of steps")
        check(self.zero_init in ("paper", "while_free", "off"), "zero_init is 'paper', 'while_free' or 'off'")
        check(self.fresh in ("default", "start"), "fresh is 'default' or 'start'")
        check(self.importance_mode in ("eval", "train"), "importance_mode is 'eval' or 'train'")


class AGSCL(NodeMethod):
    """Learn task after task without forgetting, in one network of ReLU nodes.

    >>> method = AGSCL(model, mu=10, lam=400, rho=0.3)

    Settings are the fields of `AGSCLConfig`. With `prox_every` other than "epoch", both thresholds are divided by
    the number of proximal steps in an epoch, so that μ and λ keep their meaning.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        example_input: Any = None,
        heads: HeadPlace | None = None,
        exclude: Sequence[str] = (),
        excluded: Literal["freeze", "train"] = "freeze",
        **settings: Any,
    ) -> None:
        self.config = AGSCLConfig(**settings)
        self.omega = torch.empty(0)  # Ω (groups,)
        self.first = torch.empty(0, dtype=torch.int32)  # (groups,) first task a group was important in, or NEVER
        self.anchors: list[Tensor] = []  # rows of the important groups, as Rows(graph, important) orders them
        self._start: list[Tensor] = []
        self._draws = torch.Generator().manual_seed(self.config.seed)
        self._keepers: list[KeptStatistics] = []
        self._fixed: list[KeptStatistics] = []
        self._masks: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._figures: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        super().__init__(model, example_input=example_input, heads=heads, exclude=exclude, excluded=excluded)

    # A task begins -------------------------------------------------------------------------------------------------

    def _graph_built(self) -> None:
        graph = self.graph
        device = next(parameter.device for _, parameter, _ in graph.parameters())
        self.omega = torch.zeros(graph.size, device=device)
        self.first = torch.full((graph.size,), NEVER, dtype=torch.int32, device=device)
        self._fixed = [KeptStatistics(m, torch.ones(m.num_features, dtype=torch.bool)) for m in graph.fixed_norms.values()]
        if self.config.fresh == "start":
            self._start = [parameter.detach().clone() for _, parameter, _ in graph.parameters()]
        self._layout = _layout(graph)
        self._digests = self._digest()
        self._claimed: tuple[list[int], list[int]] = ([], [])  # important groups that held, that moved
        if self._state is not None:
            self._take_up(self._state)
        elif self.task is not None:
            self._begin()

    def _begin(self) -> None:
        if self._graph is None:
            return  # at the first forward pass
        free = self.first == NEVER
        self._free, self._important = Rows(self.graph, free), Rows(self.graph, ~free)
        self._set_masks()
        self._keepers = [
            KeptStatistics(norm.module, (~free)[norm.groups.to(free.device)])
            for norm in self.graph.norms.values()
            if bool((~free)[norm.groups.to(free.device)].any())
        ]
        self._find_rates()
        self._before = Rows(self.graph, torch.ones_like(free)).take() if not self.config.prox else []
        self._since = 0  # optimizer steps since the last proximal one
        self._pending: float | Tensor = 0.0  # of these, the ones that moved weights (not skipped on overflow)
        self._epoch_steps = 0
        self._proximal_steps = 0
        self._reach: float | Tensor = 0.0  # Σα over proximal steps
        norms = group_norms(self._free.take(), self._free.members) if len(self._free) else torch.zeros(1)
        self._norms = (float(norms.min()), float(norms.median()))
        self._check_penalty()

    def _set_masks(self) -> None:
        """Per node layer: the first task of each row and of what each column reads; where source > row, weight = 0."""
        self._masks = []
        if self.config.zero_init == "off":
            return
        first = torch.cat([self.first, self.first.new_tensor([-1])])  # -1: the column reads no node
        source = first if self.config.zero_init == "paper" else torch.where(first == NEVER, NEVER, -1)
        for name, layer in self.graph.layers.items():
            if name not in self.graph.readers:
                continue
            weight = layer.module.weight
            rows = first[layer.groups.to(first.device)].view(-1, *[1] * (weight.dim() - 1))
            columns = source[self.graph.readers[name].columns().to(first.device)]
            columns = columns.view(*columns.shape, *[1] * (weight.dim() - 2))
            if bool((columns > rows).any()):
                self._masks.append((weight, rows, columns))

    def _find_rates(self) -> None:
        """Where the rate of each layer's weight stands: (optimizer, parameter group)."""
        place = {
            id(p): (optimizer, number)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._places = {name: place.get(id(layer.module.weight)) for name, layer in self.graph.layers.items()}
        self._main = next((found[0] for found in self._places.values() if found), self._optimizers[0])
        if missing := [name for name, found in self._places.items() if found is None]:
            self._warn(
                "missing",
                f"No optimizer given to begin_task holds the weights of {', '.join(missing)}: they are never trained. "
                "Freeze them (requires_grad_(False)) or add them to the optimizer.",
            )

    # A step, an epoch ------------------------------------------------------------------------------------------------

    def _restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if self._graph is None:
            raise RuntimeError("The optimizer stepped, but the model's forward pass never ran: give example_input=.")
        for weight, rows, columns in self._masks:
            weight.masked_fill_(columns > rows, 0.0)

    def _proximal(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if optimizer is not self._main:
            return
        self._since += 1
        self._epoch_steps += 1
        self._pending = self._pending + (1 if skipped is None else 1 - skipped.reshape(()).clamp(max=1))
        every = {"step": 1, "epoch": 0}.get(self.config.prox_every, self.config.prox_every)  # type: ignore[call-overload]
        if every and self._steps_per_epoch and self._since >= every:
            self._run_proximal(self._pending / self._steps_per_epoch)

    def _end_epoch(self) -> None:
        if self._steps_per_epoch is None or self.config.prox_every == "epoch":
            if self._since:
                self._run_proximal(1.0)
            self._steps_per_epoch = self._steps_per_epoch or self._epoch_steps or None
        self._epoch_steps = 0

    @torch.no_grad()
    def _run_proximal(self, share: float | Tensor) -> None:
        """One proximal step with `share` of an epoch's thresholds."""
        self._since, self._pending = 0, 0.0
        if not self.config.prox:
            return
        self._proximal_steps += 1
        alpha = self._alpha()
        self._reach = self._reach + (alpha * share if not isinstance(alpha, Tensor) else (alpha * share).mean())
        if len(self._free) and self.config.mu:
            threshold = self._per_group(alpha, self._free) * (self.config.mu * share)
            self._free.put(shrink(self._free.take(), threshold, self._free.members))
        if len(self._important) and self.config.lam:
            omega = self.omega[self._important.groups]
            if math.isinf(self.config.lam):
                threshold = torch.full_like(omega, math.inf)
            else:
                threshold = omega * self._per_group(alpha, self._important) * (self.config.lam * share)
            self._important.put(pull(self._important.take(), self.anchors, threshold, self._important.members))

    def _alpha(self) -> float | Tensor:
        """The rate of each layer's weight at the last step: one for all where they agree, else (groups,)."""
        rates: dict[str, float | Tensor] = {}
        for name, place in self._places.items():
            known = self._rates.get(id(place[0])) if place else None
            rates[name] = known[place[1]] if known and place else 0.0
        values = list(rates.values())
        if all(value is values[0] or (isinstance(value, float) and value == values[0]) for value in values):
            return values[0]
        alpha = torch.zeros_like(self.omega)
        for name, rate in rates.items():  # coupled layers with different rates: the largest
            groups = self.graph.layers[name].groups.to(alpha.device)
            alpha[groups] = torch.maximum(alpha[groups], torch.ones_like(alpha[groups]) * rate)
        return alpha

    def _per_group(self, alpha: float | Tensor, rows: Rows) -> Tensor:
        if isinstance(alpha, Tensor) and alpha.dim():
            return alpha[rows.groups]
        return torch.ones(len(rows), device=self.omega.device, dtype=torch.float64) * alpha

    def _add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Without proximal steps: the gradient of μ‖θ‖ and λΩ‖θ − anchor‖ (eq. 2), added as it stands."""
        if self.config.prox or optimizer is not self._main or self._graph is None:
            return
        weights = torch.full_like(self.omega, self.config.mu)
        for rows, target in ((self._free, None), (self._important, self.anchors)):
            if not len(rows):
                continue
            away = rows.take() if target is None else torch._foreach_sub(rows.take(), target)
            strength = weights[rows.groups] if target is None else self.config.lam * self.omega[rows.groups]
            norms = group_norms(away, rows.members)
            factor = torch.where(norms > 0, strength / norms, 0.0) * (1.0 if scale is None else scale)
            every = factor.new_zeros(sum(len(part) for part in away) + 1)
            every[rows.members] = factor[:, None].expand_as(rows.members)
            parts = every[:-1].split([len(part) for part in away])
            for parameter, index, part, by in zip(rows.parameters, rows.index, away, parts, strict=True):
                if parameter.grad is not None:
                    push = part * by.to(part.dtype).view(-1, *[1] * (part.dim() - 1))
                    parameter.grad.index_add_(0, index, push)

    # A task ends -----------------------------------------------------------------------------------------------------

    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        batches = self._meet_head(batches, forward)
        if self._since:
            per_step = self.config.prox_every != "epoch" and self._steps_per_epoch
            self._run_proximal(self._pending / self._steps_per_epoch if per_step and self._steps_per_epoch else 1.0)
        measured = mean_activations(self.graph, batches, forward, self.config.importance_mode)
        if not bool(measured.isfinite().all()):
            raise FloatingPointError(
                f"Activations of task {self.task!r} are not finite: training diverged. The task was not ended; "
                "go back to the last good weights, or lower the learning rate."
            )
        moved = self._moved()
        before = self.first != NEVER
        self.omega = (self.config.eta * self.omega + measured).to(self.omega.dtype)
        active = self.omega > 0 if self.config.prox else self.omega >= self.config.tau
        assert not bool((before & (self.omega <= 0)).any()), "an important node became free"
        self.first[active & ~before] = len(self.tasks) - 1
        self._self_check(before)
        self._reinitialise()
        important = Rows(self.graph, self.first != NEVER)
        self.anchors = important.take()
        self._digests = self._digest()
        self._figures = self._figures_of(before, moved)
        for keeper in self._keepers:
            keeper.close()
        self._keepers, self._masks = [], []

    def _meet_head(self, batches: Iterable[Any], forward: Forward) -> Iterable[Any]:
        """Run one batch, so that the graph and the columns of this task's head are known."""
        if self._graph is not None and self._head_known():
            return batches
        rest = iter(batches)
        some = list(itertools.islice(rest, 1))
        self._watching = True
        with undisturbed(self.model):
            for batch in some:
                forward(batch)
        if self._graph is None or not self._head_known():
            raise RuntimeError(
                f"end_task could not find the head of task {self.task!r}: `batches` was empty, or `forward` does not run "
                "the model on this task."
            )
        return itertools.chain(some, rest)

    def _moved(self) -> Tensor:
        """(groups,) whether a group's incoming weights changed during the task, and note it for the certificate."""
        now = self._digest()
        pairs = list(zip(self._digests[0], now[0], strict=True))
        whole = [old == new for old, new in zip(self._digests[1], now[1], strict=True)]
        important = (self.first != NEVER).tolist()
        self._claimed = (
            [g for g, mine in enumerate(important) if mine and whole[g]],
            [g for g, mine in enumerate(important) if mine and not whole[g]],
        )
        if self.config.prox:
            return torch.tensor([old != new for old, new in pairs])
        rows = Rows(self.graph, torch.ones_like(self.first, dtype=torch.bool))
        away = torch._foreach_sub(rows.take(), self._before)
        return (group_norms(away, rows.members) >= self.config.tau).cpu()

    @torch.no_grad()
    def _reinitialise(self) -> None:
        """(I.1) what free nodes feed is set to zero; (I.2) then some of them get fresh incoming weights."""
        assert self.task is not None
        free = torch.cat([self.first == NEVER, torch.zeros_like(self.first[:1], dtype=torch.bool)])
        mine = {id(module) for module in self.heads.of(self.task, self.tasks).modules()}
        for name, reader in self.graph.readers.items():
            trained = name in self.graph.layers or id(reader.module) in mine
            if self.config.zero_init != "off" and (trained or (not reader.head and self._excluded == "train")):
                weight = reader.module.weight
                columns = free[reader.columns().to(free.device)]
                weight.masked_fill_(columns.view(*columns.shape, *[1] * (weight.dim() - 2)), 0.0)
        if self.config.rand_init:
            self._refresh(self._choose(free[:-1].cpu()))

    def _choose(self, free: Tensor) -> Tensor:
        """A random ρ-share of each layer's free groups: n − ⌊n(1−ρ)⌋ of n; a group counts in its first layer."""
        if dist.is_available() and dist.is_initialized():
            state = self._draws.get_state().to(self.omega.device)
            dist.broadcast(state, 0)
            self._draws.set_state(state.cpu())
        chosen, seen = torch.zeros_like(free), torch.zeros_like(free)
        for layer in self.graph.layers.values():
            here = torch.zeros_like(free)
            here[layer.groups] = True
            candidates = (here & free & ~seen).nonzero().flatten()
            seen |= here
            count = len(candidates) - math.floor(len(candidates) * (1 - self.config.rho))
            chosen[candidates[torch.randperm(len(candidates), generator=self._draws)[:count]]] = True
        return chosen

    def _refresh(self, chosen: Tensor) -> None:
        """Give the chosen groups fresh weights, statistics and optimizer moments."""
        position = 0
        for owner in (*self.graph.layers.values(), *self.graph.norms.values()):
            rows = chosen[owner.groups].nonzero().flatten()
            twin = _twin(owner.module, int(torch.randint(2**62, (1,), generator=self._draws)))
            for key, parameter in owner.module.named_parameters(recurse=False):
                fresh = self._start[position] if self._start else twin.get_parameter(key).to(parameter.device)
                position += 1
                where = rows.to(parameter.device)
                parameter.index_copy_(0, where, fresh.detach().index_select(0, where))
                for optimizer in self._optimizers:
                    for moment in optimizer.state.get(parameter, {}).values():
                        if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                            moment.index_fill_(0, where, 0.0)
            if isinstance(owner.module, _BatchNorm):
                for key in ("running_mean", "running_var"):
                    buffer, fresh = owner.module.get_buffer(key), twin.get_buffer(key)
                    buffer.index_copy_(0, rows.to(buffer.device), fresh[rows].to(buffer.device))

    # What it reports -------------------------------------------------------------------------------------------------

    def _digest(self) -> tuple[list[str], list[str]]:
        """Digests per group: of its weights, and of these with its BatchNorm statistics."""
        tensors, layout = self.model.state_dict(), self._layout
        weights = group_digests(tensors, layout.parameters, layout.size)
        return weights, group_digests(tensors, layout.rows, layout.size) if layout.statistics else weights

    def _figures_of(self, before: Tensor, moved: Tensor) -> dict[str, Any]:
        size, was = self.graph.size, int(before.sum())
        free = int((self.first == NEVER).sum())
        still = int((~moved).sum())
        frozen = int((~moved & before.cpu()).sum())
        return {
            "nodes": size,
            "free": free,
            "sparsity": free / size,
            "unchanged": still,
            "used_capacity": still / size,
            "important_before": was,
            "frozen": frozen,
            "frozen_capacity": frozen / size,
        }

    def statistics(self) -> dict[str, Any]:
        """Of the last task: `sparsity` (share of free nodes), `used_capacity` (share whose weights did not change at
        all), `frozen` (important ones among these); nodes that are one group count once."""
        return dict(self._figures)

    def memory(self) -> dict[str, int]:
        """Held between tasks: floats of importances, anchors, BatchNorm statistics and starting weights; one integer per
        node for the masks; the certificate's digests in bytes; and `bytes` in all."""
        if self._graph is None:
            return super().memory()
        anchors = sum(part.numel() for part in self.anchors)
        kept = sum(2 * int((self.first[n.groups.to(self.first.device)] != NEVER).sum()) for n in self.graph.norms.values())
        digests = 16 * self.graph.size
        tensors = [self.omega, self.first, *self.anchors, *self._start]
        total = sum(t.numel() * t.element_size() for t in tensors) + 4 * kept + digests
        return {
            "importances": self.omega.numel(),
            "anchors": anchors,
            "masks": self.first.numel(),
            "statistics": kept,
            "start": sum(part.numel() for part in self._start),
            "digest_bytes": digests,
            "bytes": total,
        }

    def _claims(self) -> dict[str, Any]:
        first = self.first.tolist()
        notes = [f"layer {name} is excluded: outputs that depend on it are not covered" for name in self._exclude]
        if self.config.zero_init == "off":
            notes.append("zero_init is off: old outputs may change through free nodes")
        return {
            "kind": "guaranteed" if math.isinf(self.config.lam) and self.config.prox else "held",
            "zero_rule": self.config.zero_init,
            "layout": self._layout,
            "first": first,
            "digests": [d if f != NEVER else None for d, f in zip(self._digests[1], first, strict=True)],
            "held": self._claimed[0],
            "moved": self._claimed[1],
            "notes": notes,
        }

    # Self-check ------------------------------------------------------------------------------------------------------

    def _check_penalty(self) -> None:
        if len(self.tasks) < 2:
            return
        if not len(self._important):
            self._warn(
                "penalty",
                "No node is important after the first task, so nothing is held: the penalty is 0. Every node was "
                f"shrunk to zero; use a smaller mu (it is {self.config.mu:g}) or fewer epochs.",
            )
        elif self.config.lam == 0:
            self._warn("penalty", "lam is 0, so important nodes are not held and old tasks are forgotten. Use lam > 0.")

    def _self_check(self, before: Tensor) -> None:
        """Warn, once each, about what makes the method idle."""
        if self.config.prox and self._steps and not self._proximal_steps:
            self._warn("prox", "The proximal step never ran in this task: call method.end_epoch() after each epoch.")
        elif self.config.prox and self.config.prox_every == "epoch" and self._proximal_steps == 1 and self._epoch_steps:
            self._warn(
                "prox",
                "end_epoch() was never called in this task, so the proximal step ran only once, at its end. "
                "Call method.end_epoch() after each epoch.",
            )
        reach, (smallest, median) = float(self._reach), self._norms
        free = self.first == NEVER
        if self.config.prox and reach and self.config.mu * reach < smallest and not bool(free.any()):
            self._warn(
                "mu",
                f"mu is too small for any node to become free: in this task it could take {self.config.mu * reach:.3g} "
                f"off a node's norm, and the smallest was {smallest:.3g}. Use mu of about {median / reach:.3g} or more, "
                "or train for more epochs.",
            )
        full = [name for name, layer in self.graph.layers.items() if not bool(free[layer.groups.to(free.device)].any())]
        if full and "mu" not in self._warned:
            self._warn(
                "full",
                f"No free node is left in {', '.join(full)}: what later tasks can learn there is limited. "
                f"Use a larger mu (it is {self.config.mu:g}), a smaller rho (it is {self.config.rho:g}) or wider layers.",
            )

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._graph is None:
            return {**state, "built": False}
        state |= {
            "built": True,
            "omega": self.omega.clone(),
            "first": self.first.clone(),
            "anchors": [part.clone() for part in self.anchors],
            "start": [part.clone() for part in self._start],
            "draws": self._draws.get_state(),
            "digests": list(self._digests[0]),
            "digests_with_statistics": list(self._digests[1]),
            "held": list(self._claimed[0]),
            "moved": list(self._claimed[1]),
            "figures": dict(self._figures),
            "input": None if self._input is None else [self._input[0], str(self._input[1]).removeprefix("torch.")],
        }
        if self.task is not None:
            state["under_way"] = {
                "since": self._since,
                "pending": float(self._pending),
                "epoch_steps": self._epoch_steps,
                "proximal_steps": self._proximal_steps,
                "reach": float(self._reach),
                "norms": list(self._norms),
                "before": [part.clone() for part in self._before],
            }
        return state

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        super().load_state_dict(state, *optimizers)
        if not state["built"]:
            return
        self._state = state
        if self._graph is not None:
            self._take_up(state)
        elif self._example is not None:
            self._build(self._example)

    def _take_up(self, state: dict[str, Any]) -> None:
        self._state = None
        if len(state["omega"]) != self.graph.size:
            raise ValueError(
                f"The state is of a network with {len(state['omega'])} groups of nodes; this one has {self.graph.size}."
            )
        device = self.omega.device
        self.omega, self.first = state["omega"].to(device), state["first"].to(device)
        self.anchors = [part.to(device) for part in state["anchors"]]
        self._start = [part.to(device) for part in state["start"]]
        self._draws.set_state(state["draws"])
        self._digests = (list(state["digests"]), list(state["digests_with_statistics"]))
        self._claimed = (list(state["held"]), list(state["moved"]))
        self._figures = dict(state["figures"])
        if state["input"] is not None:
            self._input = (list(state["input"][0]), getattr(torch, state["input"][1]))
        if self.task is not None:
            self._begin()
            if now := state.get("under_way"):
                self._since, self._pending, self._epoch_steps = now["since"], now["pending"], now["epoch_steps"]
                self._proximal_steps, self._reach = now["proximal_steps"], now["reach"]
                self._norms = (now["norms"][0], now["norms"][1])
                self._before = [part.to(device) for part in now["before"]]

    def close(self) -> None:
        super().close()
        for keeper in (*self._keepers, *self._fixed):
            keeper.close()
        self._keepers, self._fixed, self._masks = [], [], []

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in asdict(self.config).items())
        return f"AGSCL({settings})"


def _layout(graph: Any) -> Layout:
    return Layout(
        size=graph.size,
        parameters={name: groups.tolist() for name, _, groups in graph.parameters()},
        statistics={
            f"{norm.name}.{key}": norm.groups.tolist()
            for norm in graph.norms.values()
            for key in ("running_mean", "running_var")
        },
        readers={
            f"{name}.weight": graph.readers[name].columns().tolist() for name in graph.layers if name in graph.readers
        },
    )


def _twin(module: nn.Module, seed: int) -> nn.Module:
    """A copy of one layer with freshly initialised weights, made on the CPU without touching global random state."""
    twin = copy.copy(module)
    twin._parameters = {
        key: None if p is None else nn.Parameter(torch.empty_like(p, device="cpu")) for key, p in module._parameters.items()
    }
    twin._buffers = {key: None if b is None else b.detach().cpu().clone() for key, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin.reset_parameters()  # type: ignore[operator]
    return twin

