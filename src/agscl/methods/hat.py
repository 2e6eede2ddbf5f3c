"""HAT: hard attention to the task (Serrà, Surís, Miron, Karatzoglou; ICML 2018).

Every task learns which nodes it uses: a gate σ(s·e) on each, soft at first and hard in the end. Weights between nodes
that earlier tasks use are kept from changing.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from agscl.methods._parts.batchnorm import KeptStatistics
from agscl.methods._parts.lifecycle import Forward, NodeMethod

__all__ = ["HAT", "HATConfig"]

BOUND = 6.0  # embeddings stay within ±6, where the compensated gradient is still alive
CLIP = 50.0  # cosh(s·e) is taken of at most this
SHUT = 1e-12  # a gate below counts as 0: float32 cannot see it beside an open one, and subnormal numbers are slow

Gates = tuple[Tensor, dict[str, Tensor]]
"""All gates, and those of the columns of each layer of the trunk."""


@dataclass(frozen=True, kw_only=True)
class HATConfig:
    """Settings of HAT; the defaults are those of its paper."""

    c: float = 0.75
    """How much using further nodes costs; more leaves more of them for later tasks."""
    s_max: float = 400.0
    """The steepest gate: within each epoch s rises from 1/s_max to s_max."""
    mask: Literal["update", "gradient"] = "update"
    """What is multiplied by 1 − min(mask_out, mask_in): the optimizer's change, which is right under Adam too, or the
    gradient. Where that factor is 0 the weight keeps its bits either way."""
    seed: int = 0
    """Seed of the embeddings' first values."""

    def __post_init__(self) -> None:
        if not (self.c >= 0 and math.isfinite(self.c)):
            raise ValueError(f"HAT: c must be a finite number of at least 0, not {self.c}.")
        if not (self.s_max > 1 and math.isfinite(self.s_max)):
            raise ValueError(f"HAT: s_max must be a finite number above 1, not {self.s_max}.")
        if self.mask not in ("update", "gradient"):
            raise ValueError(f"HAT: mask is 'update' or 'gradient', not {self.mask!r}.")


class HAT(NodeMethod):
    """Learn task after task with a gate on every node (group of nodes) of the `NodeGraph`.

    >>> method = HAT(model, c=0.75, s_max=400)
    >>> method = HAT(model, c=2.5, **HAT.paper)  # as in the AGS-CL paper's table
    >>> method.begin_task("birds", optimizer, steps_per_epoch=len(loader))

    **Where a gate is.** A group's gate multiplies what every layer and head reads of it: the columns of their weights,
    which is the same as the activation and far cheaper. Nodes that are added together have one gate, and BatchNorm
    never sees it. What stands behind a gate of exactly 0 is read with exact zeros.

    **Embeddings** e, one float per group and task, belong to the method. The one in training joins the first group of
    the optimizer, so that `zero_grad` and a GradScaler look after its gradient; the method takes that gradient away
    before the step and moves e itself at the rate in force, by SGD with the optimizer's momentum if it is SGD and else
    by Adam, without weight decay. When resuming within a task, load the method's state before the optimizer's. A loop
    that goes back to the weights of an earlier epoch must go back to `method.embedding` of that epoch too.

    **s** rises within each epoch; this needs `steps_per_epoch`. Without it the first epoch is counted, with s = 1. In
    eval mode, and for every other task, s is s_max.
    """

    Config = HATConfig
    config: HATConfig
    paper: ClassVar[Mapping[str, Any]] = {"mask": "gradient"}
    """Settings that give the form behind the AGS-CL paper's table; its c is 2.5, or 0.1 for CIFAR-10/100."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.embeddings: dict[str, Tensor] = {}  # per learned task, (groups,)
        self.used = torch.empty(0)  # (groups,) the largest mask of all learned tasks
        self.embedding: nn.Parameter | None = None  # of the task under way
        self._moments: list[Tensor] = []  # of the embedding: first and second
        self._moves: int | Tensor = 0  # steps of the embedding in this task; on a GPU counted there
        self._age: int | Tensor = 0  # of its moments, in steps, likewise
        self._position: int | Tensor = 0  # steps in this epoch, likewise
        self._gradient: Tensor | None = None
        self._factors: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # weight, 1 − min(…), its value at the last step
        self._kept: list[KeptStatistics] = []
        self._fixed: list[KeptStatistics] = []
        self._gates: dict[str, tuple[RemovableHandle, RemovableHandle]] = {}
        self._open: dict[str, tuple[nn.Module, nn.Parameter]] = {}  # layers that run with a gated weight, and their own
        self._columns: dict[str, Tensor] = {}
        self._all_columns = torch.empty(0, dtype=torch.long)  # those of the trunk's layers, one after the other
        self._passing: Gates | None = None  # of the forward pass under way
        self._passed: Gates | None = None  # of the last one that may go backward
        self._met: set[str] = set()  # tasks whose heads have a gate
        self._shown: str | None = None  # the task of the forward pass under way
        self._figures: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        super().__init__(model, **options)
        self._after = self.model.register_forward_hook(self._forget_call, always_call=True)

    def mask(self, task: str) -> Tensor:
        """(groups,) the gates of a learned task, or of the one under way, at s_max."""
        learning = task == self.task and self.embedding is not None
        embedding = self.embedding if learning else self.embeddings[task]
        assert embedding is not None
        return _gates(self.config.s_max, embedding.detach())

    @property
    def s(self) -> float | Tensor:
        """s at this point of the epoch."""
        if self._steps_per_epoch is None:
            return 1.0
        low, high, last = 1 / self.config.s_max, self.config.s_max, self._steps_per_epoch - 1
        place = self._position.double() if isinstance(self._position, Tensor) else self._position
        return low + (high - low) * (place % self._steps_per_epoch / last if last else 1.0)

    def penalty(self) -> Tensor:
        """c · Σ m(1 − m_prev) / Σ (1 − m_prev) at s_max."""
        if self.task is None or self.embedding is None:
            return super().penalty()
        free = 1 - self.used
        return self.config.c * (self.mask(self.task) * free).sum() / free.sum().clamp(min=1e-12)

    # The gates -------------------------------------------------------------------------------------------------------

    def _join(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._close_gates()
        super()._join(optimizers)

    def _first_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before every forward pass: note its task, and see that the head of that task has its gate."""
        if not self._watching:
            return
        self._close_gates()
        task = self._task_of(args, kwargs)
        if task is not None and task not in self._met and not torch.is_inference_mode_enabled():
            arguments = inspect.signature(self.model.forward).bind(*args, **kwargs).args
            if self._graph is None:
                self._build(arguments)
            head = self.heads.of(task, self.tasks)
            if not self.graph.knows(head):
                with self._looking_away():
                    self.graph.read_head(arguments, self.tasks)
            self._set_gates()
            if self.graph.knows(head):
                self._met.add(task)
        self._shown = task
        self._passing = self._gates_by_layer()
        if torch.is_grad_enabled():
            self._passed = self._passing

    def _forget_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._watching:
            self._shown = self._passing = None

    def _gates_by_layer(self) -> Gates | None:
        """All gates at once, which takes a fraction of the kernels of layer by layer."""
        if self._graph is None or (gates := self._gates_now()) is None:
            return None
        parts = {name: columns for name, columns in self._columns.items() if not self.graph.readers[name].head}
        pieces = gates[self._all_columns].split([columns.numel() for columns in parts.values()])
        return gates, {name: piece.view(parts[name].shape) for name, piece in zip(parts, pieces, strict=True)}

    def _gates_of(self, name: str) -> Tensor | None:
        """The gates of a layer's columns: those of the pass under way, or of one that is repeated to go backward."""
        backward = torch._C._current_graph_task_id() != -1
        known = self._passed if backward and self._passing is None else self._passing
        if self._watching and known is not None:
            gates, by_layer = known
            return by_layer[name] if name in by_layer else gates[self._columns[name]]
        return None if (now := self._gates_now()) is None else now[self._columns[name]]

    def _set_gates(self) -> None:
        readers = self.graph.readers.items()
        self._columns = {name: reader.columns().to(self.used.device) for name, reader in readers}
        trunk = [self._columns[name].flatten() for name, reader in readers if not reader.head]
        self._all_columns = torch.cat(trunk) if trunk else self._all_columns
        for name, reader in readers:
            if name not in self._gates:
                self._gates[name] = (
                    reader.module.register_forward_pre_hook(partial(self._open_gate, name)),
                    reader.module.register_forward_hook(partial(self._close_gate, name), always_call=True),
                )

    def _open_gate(self, name: str, module: nn.Module, args: Any) -> None:
        """Let a layer run with each column of its weight times the gate of the node the column reads."""
        self._close_gate(name)
        if (gates := self._gates_of(name)) is not None:
            weight = module._parameters["weight"]
            assert weight is not None
            self._open[name] = module, weight
            gated = weight * gates.to(weight.dtype)
            module._parameters["weight"] = gated  # type: ignore[assignment]

    def _close_gate(self, name: str, *_: Any) -> None:
        if name in self._open:
            layer, weight = self._open.pop(name)
            layer._parameters["weight"] = weight

    def _close_gates(self) -> None:
        """A forward pass that was interrupted (Ctrl-C) closes none: torch calls no hook then."""
        for name in list(self._open):
            self._close_gate(name)

    def _gates_now(self) -> Tensor | None:
        """(groups + 1,) the gates in force, 1 at the end for columns that read no node; None while probed."""
        task = self._shown or self._viewed or self.task or (self.tasks[-1] if self.tasks else None)
        if not self._watching or task is None:
            return None
        if task == self.task and self.model.training:
            if self.embedding is None:
                return None
            gates = _gates(self.s, self.embedding)
        elif task in self.embeddings or (task == self.task and self.embedding is not None):
            gates = self.mask(task)
        else:
            return None
        return torch.cat([gates, gates.new_ones(1)])

    # A task begins ---------------------------------------------------------------------------------------------------

    def _graph_built(self) -> None:
        device = next(parameter.device for _, parameter, _ in self.graph.parameters())
        for norm in [] if self._fixed else self.graph.fixed_norms.values():
            self._fixed.append(KeptStatistics(norm, torch.ones(norm.num_features, dtype=torch.bool)))
        if self._state is not None:
            self._take_up(self._state)
            return
        self.used = torch.zeros(self.graph.size, device=device)
        if self.task is not None:
            self._begin()

    def _begin(self) -> None:
        if self._graph is None:
            return  # at the first forward pass
        draw = torch.Generator().manual_seed(self.config.seed * 1009 + len(self.tasks))
        values = torch.randn(self.graph.size, generator=draw).to(self.used.device)
        if dist.is_available() and dist.is_initialized():  # all ranks begin alike
            dist.broadcast(values, 0)
        self._take_embedding(values)
        self._count_from(0, 0, 0)
        self._protect()
        free = self.used < 0.5
        full = [name for name, layer in self.graph.layers.items() if not bool(free[layer.groups.to(free.device)].any())]
        if full:
            self._warn(
                "full",
                f"Earlier tasks use every node in {', '.join(full)}: what this one can learn there is limited. Use a "
                f"larger c (it is {self.config.c:g}) or wider layers.",
            )

    def _count_from(self, *counts: int) -> None:
        """Take up moves, position and age; a captured step counts on the device."""
        place = self.used.device
        self._moves, self._position, self._age = (
            counts if place.type == "cpu" else torch.tensor(counts, device=place).unbind()
        )

    def _take_embedding(self, values: Tensor) -> None:
        """Let the optimizer look after the gradient of a new embedding."""
        device = next(self.model.parameters()).device
        self.embedding = nn.Parameter(values.to(device, copy=True))
        self._moments = [torch.zeros_like(self.embedding, requires_grad=False) for _ in range(2)]
        self._optimizers[0].param_groups[0]["params"].append(self.embedding)

    def _protect(self) -> None:
        """The factor 1 − min(mask_out, mask_in) of every weight that an earlier task uses; 1 − mask_out of the rest."""
        for kept in self._kept:
            kept.close()
        self._factors, self._kept = [], []
        used = torch.cat([self.used, self.used.new_ones(1)])  # the last: a column that reads no node is always in use
        for name, parameter, groups in self.graph.parameters():
            out = used[groups.to(used.device)].view(-1, *[1] * (parameter.dim() - 1))
            layer, _, key = name.rpartition(".")
            reader = self.graph.readers.get(layer)
            if key == "weight" and reader is not None and layer in self.graph.layers:
                out = torch.minimum(out, used[reader.columns().to(used.device)])
            if bool(out.any()):
                self._factors.append((parameter, 1 - out, parameter.detach().clone()))
        for norm in self.graph.norms.values():
            mine = self.used[norm.groups.to(self.used.device)] > 0
            if bool(mine.any()):
                self._kept.append(KeptStatistics(norm.module, mine))

    # A step ----------------------------------------------------------------------------------------------------------

    def _observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.embedding is None:
            raise RuntimeError("The optimizer stepped, but the model's forward pass never ran: give example_input=.")
        if optimizer is self._optimizers[0] and self.embedding.grad is not None:
            self._gradient = self.embedding.grad if scale is None else self.embedding.grad / scale
            self.embedding.grad = None  # the optimizer itself leaves the embedding alone

    def _add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.config.mask == "gradient":
            for parameter, factor, _ in self._factors:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        self._passed = None
        for parameter, factor, before in self._factors:
            part = _between(before, parameter, factor) if self.config.mask == "update" else parameter
            before.copy_(torch.where(factor == 0, before, part))  # in between alone a NaN would get through
            parameter.copy_(before)
        if optimizer is self._optimizers[0]:
            if self._gradient is not None:
                self._move_embedding(optimizer, self._gradient, skipped)
            self._gradient = None
            self._position += 1

    def _move_embedding(self, optimizer: Optimizer, gradient: Tensor, skipped: Tensor | None) -> None:
        assert self.embedding is not None
        if dist.is_available() and dist.is_initialized():
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        e, (first, second), s, group = self.embedding, self._moments, self.s, optimizer.param_groups[0]
        old = [] if skipped is None else [t.detach().clone() for t in (e, first, second)]
        gradient = self.compensated(gradient + self.penalty_gradient(s, e.detach()), e.detach(), s)
        self._moves += 1
        self._age += 1
        if isinstance(optimizer, SGD):
            first.mul_(group["momentum"]).add_(gradient)
            move = first
        else:
            b1, b2 = group.get("betas", (0.9, 0.999))
            first.lerp_(gradient, 1 - b1)
            second.lerp_(gradient.square(), 1 - b2)
            move = first / (1 - b1**self._age) / ((second / (1 - b2**self._age)).sqrt() + 1e-8)
        e.sub_(move * group["lr"]).clamp_(-BOUND, BOUND)
        if skipped is not None:  # a fused optimizer's overflow: nothing was to happen
            for now, then in zip((e, first, second), old, strict=True):
                now.copy_(torch.where(skipped.reshape(()) > 0, then, now))

    def penalty_gradient(self, s: float | Tensor, embedding: Tensor) -> Tensor:
        """The gradient, by the embedding, of c · Σ m(1 − m_prev) / Σ (1 − m_prev) with m = σ(s·e)."""
        free, m = 1 - self.used, torch.sigmoid(s * embedding)
        return self.config.c * s * free * m * (1 - m) / free.sum().clamp(min=1e-12)

    def compensated(self, gradient: Tensor, embedding: Tensor, s: float | Tensor) -> Tensor:
        """The gradient times s_max/s · (cosh(s·e) + 1) / (cosh(e) + 1), so that a steep gate learns too (eq. 6)."""
        steep = (s * embedding).clamp(-CLIP, CLIP)
        return gradient * (self.config.s_max / s) * (torch.cosh(steep) + 1) / (torch.cosh(embedding) + 1)

    def _end_epoch(self) -> None:
        if self._steps_per_epoch is None:
            self._steps_per_epoch = int(self._position) or None
        self._position *= 0

    def clear_moments(self, when: Tensor | None = None) -> None:
        when = torch.ones((), dtype=torch.bool, device=self.used.device) if when is None else when
        for moment in self._moments:
            moment.masked_fill_(when, 0.0)
        if isinstance(self._age, Tensor):  # in place: a captured step counts there
            self._age.masked_fill_(when, 0)
        elif bool(when):
            self._age = 0

    # A task ends -----------------------------------------------------------------------------------------------------

    def _end(self, batches: Iterable[Any], forward: Forward) -> None:
        if self.embedding is None or self.task is None:
            raise RuntimeError("The model's forward pass never ran in this task, so there are no gates to keep.")
        if not bool(self.embedding.isfinite().all()):
            raise FloatingPointError(
                f"The embedding of task {self.task!r} is not finite: training diverged. The task was not ended; go "
                "back to the last good weights, or lower the learning rate."
            )
        mask = self.mask(self.task)
        self._self_check(mask)
        self.embeddings[self.task] = self.embedding.detach().clone()
        before = self.used
        self.used = torch.maximum(before, mask)
        size, used = self.graph.size, int((self.used >= 0.5).sum())
        self._figures = {
            "nodes": size,
            "open": int((mask >= 0.5).sum()),
            "used": used,
            "free": size - used,
            "sparsity": 1 - used / size,
            "shared": int(((mask >= 0.5) & (before >= 0.5)).sum()),
            "binary": float(((mask == 0) | (mask == 1)).double().mean()),
        }

    def _self_check(self, mask: Tensor) -> None:
        if self._steps and not self._moves:
            self._warn(
                "embedding",
                "No gradient ever reached the gates in this task. Does the loss come from this very model, in train "
                "mode?",
            )
        elif self._steps and self._steps_per_epoch is None:
            self._warn(
                "annealing",
                "The gates were never made steep: s stayed 1, because neither steps_per_epoch= was given to begin_task "
                "nor end_epoch() called.",
            )
        mask = mask.cpu()
        shut = [name for name, layer in self.graph.layers.items() if not bool((mask[layer.groups] >= 0.5).any())]
        if shut:
            self._warn(
                "shut",
                f"Task {self.task!r} closed every gate in {', '.join(shut)}, so nothing passes there. Use a smaller c "
                f"(it is {self.config.c:g}).",
            )

    def _leave(self) -> None:
        if self.embedding is not None and self._optimizers:
            for group in self._optimizers[0].param_groups:
                group["params"][:] = [p for p in group["params"] if p is not self.embedding]
        super()._leave()
        for kept in self._kept:
            kept.close()
        self.embedding, self._gradient, self._passed, self._moments = None, None, None, []
        self._factors, self._kept = [], []

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        shown = self._shown
        with super()._looking_away():
            yield
        self._shown = shown

    def close(self) -> None:
        super().close()
        self._close_gates()
        self._after.remove()
        for handle in itertools.chain(*self._gates.values()):
            handle.remove()
        for fixed in self._fixed:
            fixed.close()
        self._gates, self._fixed = {}, []

    # What it reports, saving -----------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Of the last task: gates it holds `open`, `shared` with earlier tasks; nodes `used` by any task and `free`;
        `sparsity`, the share of free ones; `binary`, the share of its gates that are exactly 0 or 1."""
        return dict(self._figures)

    def memory(self) -> dict[str, int]:
        """A float per group and task (embeddings), one per group (masks), statistics of used BatchNorm channels while
        a task is under way; then also its embedding's moments and the weights at the last step, as anchors."""
        kept = [t for keeper in self._kept for t in (keeper.mean, keeper.var)]
        own = [] if self.embedding is None else [self.embedding.detach()]
        embeddings = [*self.embeddings.values(), *own, *self._moments]
        anchors = [before for *_, before in self._factors]
        everything = [self.used, *embeddings, *anchors, *(f for _, f, _ in self._factors), *kept]
        return {
            **super().memory(),
            "embeddings": sum(t.numel() for t in embeddings),
            "masks": self.used.numel() + sum(f.numel() for _, f, _ in self._factors),
            "anchors": sum(t.numel() for t in anchors),
            "statistics": sum(t.numel() for t in kept),
            "bytes": sum(t.numel() * t.element_size() for t in everything),
        }

    def __getstate__(self) -> dict[str, Any]:
        """What is copied with a model: not the gates of a pass that is still to go backward."""
        return {**vars(self), "_passing": None, "_passed": None}

    def state_dict(self) -> dict[str, Any]:
        self._close_gates()
        state = {
            **super().state_dict(),
            "built": self._graph is not None,
            "embeddings": {task: e.clone() for task, e in self.embeddings.items()},
            "used": self.used.clone(),
            "figures": dict(self._figures),
            "input": None if self._input is None else [self._input[0], str(self._input[1]).removeprefix("torch.")],
        }
        if self.embedding is not None:
            state |= {
                "embedding": self.embedding.detach().clone(),
                "moments": [moment.clone() for moment in self._moments],
                "counts": [int(self._moves), int(self._position), int(self._age)],
            }
        return state

    def load_state_dict(self, state: dict[str, Any], *optimizers: Optimizer) -> None:
        super().load_state_dict(state, *optimizers)
        device = next(self.model.parameters()).device
        self.embeddings = {task: e.to(device, copy=True) for task, e in state["embeddings"].items()}
        self.used = state["used"].to(device, copy=True)
        self._figures = dict(state["figures"])
        self._met.clear()
        if "embedding" in state:  # into the optimizer at once: its own state may be loaded next
            self._take_embedding(state["embedding"])
            self._moments = [moment.to(device, copy=True) for moment in state["moments"]]
            moves, position, *age = state["counts"]  # older states know no age
            self._count_from(moves, position, *(age or [moves]))
        self._state = state if state["built"] else None
        if self._graph is not None and self._state is not None:
            self._take_up(state)
        elif self._graph is not None:
            self._graph_built()
        elif self._example is not None and self.tasks:
            self._build(self._example)

    def _take_up(self, state: dict[str, Any]) -> None:
        self._state = None
        if len(state["used"]) != self.graph.size:
            raise ValueError(
                f"The state is of a network with {len(state['used'])} groups of nodes; this one has {self.graph.size}."
            )
        if state["input"] is not None:
            self._input = (list(state["input"][0]), getattr(torch, state["input"][1]))
        if self.embedding is not None:
            self._protect()


def _between(before: Tensor, after: Tensor, factor: Tensor) -> Tensor:
    """This part of the way from `before` to `after`: exactly `after` for 1."""
    kind = torch.promote_types(after.dtype, factor.dtype)
    return torch.lerp(before.to(kind), after.to(kind), factor.to(kind))


def _gates(s: float | Tensor, embedding: Tensor) -> Tensor:
    """σ(s·e), exactly 0 where it is next to 0; the gradient is that of σ(s·e) everywhere."""
    gates = torch.sigmoid(s * embedding)
    small = gates.detach()
    return gates - small.masked_fill(small >= SHUT, 0.0)
