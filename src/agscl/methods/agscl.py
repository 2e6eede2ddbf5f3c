"""AGS-CL: node-importance based adaptive group sparse regularisation (Jung, Ahn, Cha, Moon; NeurIPS 2020).

Nodes are free (never yet useful) or important. While a task is learned, a proximal step shrinks free nodes towards
zero and pulls important ones back to their anchors, both exactly; weights from a later node into an earlier one are
zero. When it ends, nodes that were active become important, and some of the free ones get fresh weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.certificate import NEVER
from agscl.graph.nodes import LaidRows, Rows
from agscl.graph.probing import undisturbed
from agscl.methods._parts.batchnorm import FrozenStatistics, KeptStatistics, settle_statistics
from agscl.methods._parts.importance import mean_activations
from agscl.methods._parts.ledger import Ledger
from agscl.methods._parts.lifecycle import Forward, NodeMethod
from agscl.methods._parts.proximal import gradients, group_norms, pull, shrink
from agscl.methods._parts.reinit import choose, refresh
from agscl.system.bitwise import as_bits, mask_bits_

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
    """η: what a node's importance is multiplied by from task to task; below 1 it fades, above 1 it grows."""
    prox_every: Literal["epoch", "step"] | int = "epoch"
    """When the proximal step runs: each epoch, each step or every so many; thresholds are scaled to match."""
    zero_init: Literal["paper", "while_free", "off"] = "paper"
    """(I.1) Weights from a free node into an important one: 0 for ever, 0 while the source is free, or left."""
    by_layer: Literal["none", "mu", "lam", "both"] = "none"
    """Whether each layer has its own μ (by the root of a node's number of weights), λ (importances of one mean)."""
    rand_init: bool | Literal["needed"] = True
    """(I.2) Whether free nodes get fresh weights after a task; needed: no more than became important in the layer."""
    spare: float = 0.0
    """Nodes less active in a task than this share of their layer's mean are not kept for it: they stay free."""
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
        check(self.eta > 0 and math.isfinite(self.eta), f"eta must be a finite number above 0, not {self.eta}")
        whole = isinstance(self.prox_every, int) and not isinstance(self.prox_every, bool) and self.prox_every >= 1
        check(whole or self.prox_every in ("epoch", "step"), "prox_every is 'epoch', 'step' or a number of steps")
        check(self.zero_init in ("paper", "while_free", "off"), "zero_init is 'paper', 'while_free' or 'off'")
        check(0 <= self.spare < 1, f"spare must be at least 0 and below 1, not {self.spare}")
        check(self.by_layer in ("none", "mu", "lam", "both"), "by_layer is 'none', 'mu', 'lam' or 'both'")
        check(self.rand_init in (True, False, "needed"), "rand_init is True, False or 'needed'")
        check(self.fresh in ("default", "start"), "fresh is 'default' or 'start'")
        check(self.importance_mode in ("eval", "train"), "importance_mode is 'eval' or 'train'")


def quick(tensor: Tensor) -> bool:
    """Whether fewer kernels are worth more memory."""
    return tensor.is_cuda


class AGSCL(NodeMethod):
    """Learn task after task without forgetting, in one network of ReLU nodes.

    >>> method = AGSCL(model, mu=10, lam=400, rho=0.3)

    Settings are the fields of `AGSCLConfig`; `example_input`, `heads`, `exclude` and `excluded` are those of every
    method that knows the nodes (`NodeGraph`). With `prox_every` other than "epoch", both thresholds are divided by
    the number of proximal steps in an epoch, so that μ and λ keep their meaning.
    """

    Config = AGSCLConfig
    config: AGSCLConfig
    paper: ClassVar[Mapping[str, Any]] = {"zero_init": "while_free", "importance_mode": "train"}
    """Settings that give the form behind the paper's table: `AGSCL(model, mu=…, lam=…, **AGSCL.paper)`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.omega = torch.empty(0)  # Ω (groups,)
        self.first = torch.empty(0, dtype=torch.int32)  # (groups,) first task a group was important in, or NEVER
        self.anchors: list[Tensor] = []  # rows of the important groups, as Rows(graph, important) orders them
        self._start: list[Tensor] = []  # with fresh="start", the weights to begin again from
        self._draws = torch.Generator()
        self._kept: list[KeptStatistics] = []  # of important channels, during a task
        self._fixed: list[FrozenStatistics] = []  # of frozen BatchNorms, always
        self._masks: list[tuple[nn.Parameter, Tensor]] = []  # during a task, where a layer's weight is 0
        self._kept_bits: list[Tensor] = []  # on a GPU, where it is not, as `mask_bits_` takes it
        self._tracked: list[Tensor] = []  # per BatchNorm, the batches seen in training when the task began
        self._laid_anchors: list[Tensor] = []  # during a task, the anchors as `_important` takes rows
        self._figures: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None  # loaded before there was a graph
        self._reset_counts()
        super().__init__(model, **options)

    @property
    def capturable(self) -> bool:
        return self.config.prox_every in ("epoch", "step", 1)

    @property
    def batch_size_matters(self) -> bool:
        """A mean does not depend on it; statistics of BatchNorm and what dropout draws do."""
        return self._graph is None or bool(self.graph.norms) or self.config.importance_mode == "train"

    @property
    def free(self) -> Tensor:
        """(groups,) nodes that were never important."""
        return self.first == NEVER

    # A task begins ---------------------------------------------------------------------------------------------------

    def _graph_built(self) -> None:
        device = next(parameter.device for _, parameter, _ in self.graph.parameters())
        self.omega = torch.zeros(self.graph.size, device=device)
        self.first = torch.full((self.graph.size,), NEVER, dtype=torch.int32, device=device)
        self._ledger = Ledger(self.graph)
        self._draws.manual_seed(self.config.seed)
        if self.graph.fixed_norms:
            self._fixed.append(FrozenStatistics(self.graph.fixed_norms))
        if self.config.fresh == "start":
            self._start = [parameter.detach().clone() for _, parameter, _ in self.graph.parameters()]
        if self._state is not None:
            self._take_up(self._state)
        elif self.task is not None:
            self._begin()

    def _begin(self) -> None:
        if self._graph is None:
            return  # at the first forward pass
        self._free, self._important = (self._rows(chosen) for chosen in (self.free, ~self.free))
        self._laid_anchors = self._important.laid(self.anchors)
        self._set_masks()
        for norm in self.graph.norms.values():
            important = (~self.free)[norm.groups.to(self.first.device)]
            if bool(important.any()):
                self._kept.append(KeptStatistics(norm.module, important))
        self._set_strengths()
        self._find_rates()
        self._reset_counts()
        self._tracked = self._batches_tracked()
        norms = group_norms(self._free.take(), self._free.members) / self._mu if len(self._free) else torch.zeros(1)
        self._norms = [float(norms.min()), float(norms.median())]
        self._before = [] if self.config.prox else Rows(self.graph, self.first >= 0).take()
        self._check_penalty()
        if loose := self.graph.unprotected():
            raise RuntimeError(
                f"{', '.join(loose[:3])}: frozen when the graph was built and trained now, so nothing protects it. "
                "Freeze it again, or build a new method on the model."
            )

    def _rows(self, chosen: Tensor) -> Rows:
        rows = Rows(self.graph, chosen)
        if self.config.prox and quick(self.omega) and LaidRows.fits(rows):
            return LaidRows(rows)
        return rows

    def _batches_tracked(self) -> list[Tensor]:
        """Of each BatchNorm, the batches it has seen in training."""
        return [norm.module.num_batches_tracked.clone() for norm in self.graph.norms.values()]  # type: ignore[union-attr]

    def _reset_counts(self) -> None:
        self._since = 0  # steps of the main optimizer since the last proximal one,
        self._pending: float | Tensor = 0.0  # and of these the ones not skipped on overflow
        self._others_since = False  # whether another optimizer has stepped since
        self._epoch_steps = 0
        self._captured = False
        self._proximal_steps = 0
        self._reach = torch.zeros((), dtype=torch.float64, device=self.omega.device)  # Σα over its proximal steps

    def _set_masks(self) -> None:
        """Per node layer, the weights whose source became important later than their row: these are 0."""
        self._masks, self._kept_bits = [], []
        if self.config.zero_init == "off":
            return
        first = torch.cat([self.first, self.first.new_tensor([-1])])  # -1: the column reads no node
        source = first if self.config.zero_init == "paper" else torch.where(first == NEVER, NEVER, -1)
        for name, layer in self.graph.layers.items():
            if reader := self.graph.readers.get(name):
                rows = first[layer.groups.to(first.device)].view(-1, *[1] * (layer.weight.dim() - 1))
                later = source[reader.columns().to(first.device)] > rows
                if bool(later.any()):
                    self._masks.append((layer.weight, torch.empty_like(layer.weight, dtype=torch.bool).copy_(later)))
        if quick(self.omega) and len({weight.dtype for weight, _ in self._masks}) == 1:
            self._kept_bits = [(~later).to(as_bits(weight).dtype) for weight, later in self._masks]

    def _set_strengths(self) -> None:
        """Of each free group, what multiplies μ; of each important one, Ω."""
        joined = torch.cat([layer.groups for layer in self.graph.layers.values()]).bincount(minlength=self.graph.size)
        mu, omega = joined.sqrt().to(self.omega), self.omega.clone()  # √ nodes that are one group; mostly 1
        if self.config.by_layer in ("mu", "both"):
            weights = torch.zeros_like(mu)
            for _, parameter, groups in self.graph.parameters():
                size = mu.new_full((len(groups),), parameter[0].numel())
                weights.index_add_(0, groups.to(mu.device), size)
            weights = (weights / joined.to(mu)).sqrt()  # of one of the nodes that are one group
            mu *= weights / weights.mean()
        if self.config.by_layer in ("lam", "both"):
            mean = omega[~self.free].mean()
            for here in self.graph.in_first_layer():
                mine = here.to(omega.device) & ~self.free
                omega[mine] *= mean / omega[mine].mean()
        self._mu, self._omega = mu[self._free.groups], omega[self._important.groups]

    def _find_rates(self) -> None:
        """Where the rate of each layer's weight stands: (optimizer, parameter group)."""
        place = {
            id(p): (optimizer, number)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._places = {name: place.get(id(layer.weight)) for name, layer in self.graph.layers.items()}
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
        self._zero()

    def _zero(self) -> None:
        """Set weights from a later node into an earlier one to zero."""
        if self._kept_bits:
            mask_bits_([weight for weight, _ in self._masks], self._kept_bits)
            return
        for weight, later in self._masks:
            weight.masked_fill_(later, 0.0)

    def _proximal(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if optimizer is not self._main:
            self._others_since = True
            if self.config.prox_every != "epoch":
                self._pull_for_good()
            return
        if self.omega.is_cuda and torch.cuda.is_current_stream_capturing():
            self._check_capture()
        self._since += 1
        self._epoch_steps += 1
        self._pending = self._pending + (1 if skipped is None else 1 - skipped.reshape(()).clamp(max=1))
        every = 1 if self.config.prox_every == "step" else self.config.prox_every
        if isinstance(every, int) and not self._steps_per_epoch:
            self._pull_for_good()  # how long an epoch is comes out at its end
        elif isinstance(every, int) and self._since >= every:
            assert self._steps_per_epoch
            self._run_proximal(self._pending / self._steps_per_epoch)

    def _check_capture(self) -> None:
        """A captured step runs this code once and its kernels many times: nothing may be counted here."""
        self._captured = True
        if self.config.prox_every not in ("epoch", "step", 1):
            raise RuntimeError(
                f"prox_every={self.config.prox_every} counts steps, which a captured CUDA graph cannot: use 'epoch', "
                "with end_epoch() outside the graph, or 'step'."
            )
        if self.config.prox_every != "epoch" and not self._steps_per_epoch:
            raise RuntimeError("A captured step cannot count an epoch's steps: give begin_task(…, steps_per_epoch=…).")

    def _end_epoch(self) -> None:
        if self._graph is None:
            raise RuntimeError(
                "end_epoch came before the model ran: call it after an epoch's steps, or give example_input=."
            )
        if not (self._epoch_steps or self._captured):
            self._warn(
                "epoch",
                "No step of the optimizer given to begin_task was seen in this epoch, so the method could not act. Was "
                "the optimizer built anew? Then end the task, or keep the optimizer and clear its state instead.",
            )
        if self.config.prox_every == "epoch" or not self._steps_per_epoch:  # the first epoch is counted
            if self._since or self._captured:
                self._run_proximal(1.0)
            self._steps_per_epoch = self._steps_per_epoch or self._epoch_steps or None
        self._epoch_steps = 0
        self._pull_for_good()

    @torch.no_grad()
    def _pull_for_good(self) -> None:
        """With λ = ∞ nothing may move important rows, whoever stepped: put them back, and the zeros."""
        if self.config.prox and math.isinf(self.config.lam) and len(self._important):
            self._important.put(self._laid_anchors)
            self._zero()
        self._others_since = False

    @torch.no_grad()
    def _run_proximal(self, share: float | Tensor) -> None:
        """One proximal step with `share` of an epoch's thresholds."""
        self._since, self._pending = 0, 0.0
        if not self.config.prox:
            return
        self._proximal_steps += 1
        alpha = self._alpha()
        self._reach += (alpha * share).mean() if isinstance(alpha, Tensor) else alpha * share
        if len(self._free) and self.config.mu:
            thresholds = self._per_group(alpha, self._free) * self._mu * (self.config.mu * share)
            self._free.put(shrink(self._free.take(), thresholds, self._free.members))
        if len(self._important) and self.config.lam:
            thresholds = self._omega
            if math.isinf(self.config.lam):
                thresholds = torch.full_like(thresholds, math.inf)  # also at rate 0
            else:
                thresholds = thresholds * self._per_group(alpha, self._important) * (self.config.lam * share)
            self._important.put(pull(self._important.take(), self._laid_anchors, thresholds, self._important.members))

    def _alpha(self) -> float | Tensor:
        """The rate of each layer's weight at the last step: one for all where they agree, else (groups,)."""
        rates: dict[str, float | Tensor] = {}
        for name, place in self._places.items():
            known = self._rates.get(id(place[0])) if place else None
            rates[name] = known[place[1]] if known and place else 0.0
        some, *rest = rates.values()
        if all(rate is some or (isinstance(rate, float) and rate == some) for rate in rest):
            return some
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
        """Without proximal steps: the gradient of μ‖θ‖ and λΩ‖θ − anchor‖ (eq. 2) as it stands."""
        if self.config.prox or optimizer is not self._main or self._graph is None:
            return
        for rows, anchors in ((self._free, None), (self._important, self.anchors)):
            if not len(rows):
                continue
            away = rows.take() if anchors is None else torch._foreach_sub(rows.take(), anchors)
            strengths = self.config.mu * self._mu if anchors is None else self.config.lam * self._omega
            strengths = strengths * (1.0 if scale is None else scale)
            pushes = gradients(away, strengths, rows.members)
            for parameter, index, push in zip(rows.parameters, rows.index, pushes, strict=True):
                if parameter.grad is not None:
                    parameter.grad.index_add_(0, index, push)

    # A task ends -----------------------------------------------------------------------------------------------------

    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        batches = self._meet_head(batches, forward)
        if self._since or self._others_since:
            whole = self.config.prox_every == "epoch" or not self._steps_per_epoch
            self._run_proximal(1.0 if whole else self._pending / (self._steps_per_epoch or 1))
        self._pull_for_good()
        norms = zip(self.graph.norms.values(), self._tracked, self._batches_tracked(), strict=True)
        trained = [norm.module for norm, before, now in norms if bool(now > before)]  # not those kept in eval mode
        if trained:
            batches = list(batches) if isinstance(batches, Iterator) else batches  # they are run through twice
            settle_statistics(trained, self.model, batches, forward)
        measured = mean_activations(self.graph, batches, forward, self.config.importance_mode)
        if not bool(measured.isfinite().all()):
            raise FloatingPointError(
                f"Activations of task {self.task!r} are not finite: training diverged. The task was not ended; "
                "go back to the last good weights, or lower the learning rate."
            )
        before = ~self.free
        changed = self._changed(before)
        omega = (self.config.eta * self.omega + measured).to(self.omega.dtype)
        self.omega = torch.where(before, omega.clamp(min=torch.finfo(omega.dtype).tiny), omega)  # never free again
        new = (self.omega > 0 if self.config.prox else self.omega >= self.config.tau) & ~before
        if self.config.spare:
            new &= ~self._spared(new, measured)
        self.first[new] = len(self.tasks) - 1
        self._self_check()
        self._reinitialise(new)
        self.anchors = Rows(self.graph, ~self.free).take()
        self._ledger.restart()
        self._figures = self._figures_of(before.cpu(), changed)
        self._let_go()

    def _spared(self, new: Tensor, measured: Tensor) -> Tensor:
        """(groups,) those of the `new` ones that matter too little to be kept; their importance is 0 again."""
        spared = torch.zeros_like(new)
        for here in self.graph.in_first_layer():
            mine = here.to(new.device) & (measured > 0)
            spared |= mine & new & (measured < self.config.spare * measured[mine].mean())
        self.omega[spared] = 0.0
        return spared

    def _meet_head(self, batches: Iterable[Any], forward: Forward) -> Iterable[Any]:
        """Run one batch if need be, so that the columns of this task's head are known."""
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
                f"end_task could not find the head of task {self.task!r}: `batches` was empty, or `forward` does not "
                "run the model on this task."
            )
        return itertools.chain(some, rest)

    def _changed(self, important: Tensor) -> Tensor:
        """(groups,) whether a group's incoming weights changed in this task; without proximal steps, by τ or more."""
        changed = self._ledger.compare(important)
        if self.config.prox:
            return changed
        rows = Rows(self.graph, self.first >= 0)
        away = torch._foreach_sub(rows.take(), self._before)
        return (group_norms(away, rows.members) >= self.config.tau).cpu()

    @torch.no_grad()
    def _reinitialise(self, new: Tensor) -> None:
        """(I.1) what free nodes feed is set to zero; (I.2) then some of them get fresh incoming weights.

        `new` are the groups that just became important.
        """
        assert self.task is not None
        free = torch.cat([self.free, torch.zeros_like(self.free[:1])])  # the last: columns that read no node
        mine = {id(module) for module in self.heads.of(self.task, self.tasks).modules()}
        for name, reader in self.graph.readers.items():
            trained = name in self.graph.layers or id(reader.module) in mine
            if self.config.zero_init != "off" and (trained or (not reader.head and self._excluded == "train")):
                reader.weight.masked_fill_(free[reader.columns().to(free.device)], 0.0)
        if not self.config.rand_init:
            return
        if dist.is_available() and dist.is_initialized():  # all ranks draw alike
            state = self._draws.get_state().to(self.omega.device)
            dist.broadcast(state, 0)
            self._draws.set_state(state.cpu())
        needed = new.cpu() if self.config.rand_init == "needed" else None
        chosen = choose(self.graph, self.free.cpu(), self.config.rho, self._draws, needed)
        refresh(self.graph, chosen, self._draws, self._optimizers, self._start)

    def _let_go(self) -> None:
        for kept in self._kept:
            kept.close()
        self._kept, self._masks, self._kept_bits = [], [], []
        self._mu = self._omega = torch.empty(0)

    # What it reports -------------------------------------------------------------------------------------------------

    def _figures_of(self, before: Tensor, changed: Tensor) -> dict[str, Any]:
        size, free = self.graph.size, int(self.free.sum())
        unchanged, frozen = int((~changed).sum()), int((~changed & before).sum())
        return {
            "nodes": size,
            "free": free,
            "sparsity": free / size,
            "unchanged": unchanged,
            "used_capacity": unchanged / size,
            "important_before": int(before.sum()),
            "frozen": frozen,
            "frozen_capacity": frozen / size,
        }

    def statistics(self) -> dict[str, Any]:
        """Of the last task: `sparsity` (share of free nodes), `used_capacity` (share whose weights did not change at
        all), `frozen` (important ones among these). Nodes that are one group count once."""
        return dict(self._figures)

    def memory(self) -> dict[str, int]:
        """Held between tasks: floats of importances, anchors and starting weights, an integer per node for the masks;
        the certificate's `digests` in bytes; and `bytes` in all."""
        if self._graph is None:
            return super().memory()
        tensors = [self.omega, self.first, *self.anchors, *self._start]
        return {
            **super().memory(),
            "importances": self.omega.numel(),
            "anchors": sum(part.numel() for part in self.anchors),
            "masks": self.first.numel(),
            "start": sum(part.numel() for part in self._start),
            "digests": self._ledger.bytes,
            "bytes": sum(t.numel() * t.element_size() for t in tensors) + self._ledger.bytes,
        }

    def _claims(self) -> dict[str, Any]:
        assert self.graph  # or it says that it is not known yet
        notes = [f"layer {name} is excluded: outputs that depend on it are not covered" for name in self._exclude]
        if frozen := [
            name for name, p in self.model.named_parameters() if not self._digested(name) and not p.requires_grad
        ]:
            notes.append(f"{len(frozen)} frozen tensors ({frozen[0]}, …) are outside the digests")
        if self.config.zero_init == "off":
            notes.append("zero_init is off: old outputs may change through free nodes")
        for_good = math.isinf(self.config.lam) and self.config.prox
        return {
            "kind": "guaranteed" if for_good else "held",
            "zero_rule": self.config.zero_init,
            "notes": notes,
            **self._ledger.claims(self.first),
        }

    def _digested(self, name: str) -> bool:
        return name in self._ledger.layout.parameters or name in self.heads.parameters(self.tasks)

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

    def _self_check(self) -> None:
        """Warn, once each, about what makes the method idle."""
        epochs_told = self.config.prox_every != "epoch" or not self._epoch_steps
        if self.config.prox and self._steps and not (self._proximal_steps and epochs_told):
            self._warn(
                "prox",
                "end_epoch() was not called after the last steps, or never: the proximal step ran "
                f"{self._proximal_steps} times in this task. Call method.end_epoch() after each epoch.",
            )
        if self.config.prox and self.config.prox_every != "epoch" and self._steps and not self._steps_per_epoch:
            self._warn(
                "length",
                f"prox_every={self.config.prox_every!r}, but how many steps an epoch has was never told: the proximal "
                "step ran once, at the end of the task. Give begin_task(…, steps_per_epoch=…), or call end_epoch().",
            )
        reach, (smallest, median) = float(self._reach), self._norms
        if reach and self.config.mu * reach < smallest:
            self._warn(
                "mu",
                "mu is too small to free a node, other than those that never fire: in this task it could take "
                f"{self.config.mu * reach:.3g} off a node's norm, and the smallest was {smallest:.3g}. Use mu of about "
                f"{median / reach:.3g} or more, or train for more epochs.",
            )
            return
        free = self.free.cpu()
        full = [name for name, layer in self.graph.layers.items() if not bool(free[layer.groups].any())]
        if full:
            self._warn(
                "full",
                f"No free node is left in {', '.join(full)}: what later tasks can learn there is limited. Use a larger "
                f"mu (it is {self.config.mu:g}), a smaller rho (it is {self.config.rho:g}) or wider layers.",
            )

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._graph is None:  # what was loaded, if anything, waits for the graph
            return {**(self._state or {"built": False}), **state}
        state |= {
            "built": True,
            "omega": self.omega.clone(),
            "first": self.first.clone(),
            "anchors": [part.clone() for part in self.anchors],
            "start": [part.clone() for part in self._start],
            "draws": self._draws.get_state(),
            "ledger": self._ledger.state_dict(),
            "figures": dict(self._figures),
            "input": None if self._input is None else [self._input[0], str(self._input[1]).removeprefix("torch.")],
        }
        if self.task is not None:
            state["counts"] = [self._since, float(self._pending), self._epoch_steps, self._proximal_steps]
            state["reach"], state["norms"] = float(self._reach), list(self._norms)
            state["before"] = [part.clone() for part in self._before]
            state["tracked"] = [int(count) for count in self._tracked]
        return state

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        super().load_state_dict(state, *optimizers)
        self._state = state if state["built"] else None
        if self._graph is not None and self._state is None:  # from before the first forward pass: begin as then
            self._let_go()
            self._graph_built()
        elif self._graph is not None:
            self._take_up(state)
        elif self._graph is None and self._example is not None and self.tasks:
            self._build(self._example)

    def _take_up(self, state: dict[str, Any]) -> None:
        self._state = None
        if len(state["omega"]) != self.graph.size:
            raise ValueError(
                f"The state is of a network with {len(state['omega'])} groups of nodes; this one has {self.graph.size}."
            )
        device = self.omega.device
        self.omega, self.first = state["omega"].to(device, copy=True), state["first"].to(device, copy=True)
        self.anchors = [part.to(device, copy=True) for part in state["anchors"]]
        self._start = [part.to(device, copy=True) for part in state["start"]]
        self._draws.set_state(state["draws"].cpu())
        self._ledger.load_state_dict(state["ledger"])
        self._figures = dict(state["figures"])
        if state["input"] is not None:
            self._input = (list(state["input"][0]), getattr(torch, state["input"][1]))
        self._let_go()
        if self.task is not None:
            self._begin()
            if "counts" in state:  # else it was saved before the task's first step
                self._since, self._pending, self._epoch_steps, self._proximal_steps = state["counts"]
                self._reach.fill_(state["reach"])
                self._norms = list(state["norms"])
                self._before = [part.to(device, copy=True) for part in state["before"]]
            for known, count in zip(self._tracked, state.get("tracked", []), strict=False):
                known.fill_(count)

    def close(self) -> None:
        super().close()
        self._let_go()
        for fixed in self._fixed:
            fixed.close()
        self._fixed = []
