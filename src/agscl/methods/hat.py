"""HAT: hard attention to the task (Serrà, Surís, Miron, Karatzoglou; ICML 2018).

Every task learns which nodes it uses: a gate σ(s·e) on each, soft at first and hard in the end. Weights between nodes
that earlier tasks use are kept from changing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from agscl.methods._parts.batchnorm import NodeNormFreezer, StatisticsFreezer
from agscl.methods._parts.knowledge import Knowledge
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.method_trained_parameters import compute_method_parameter_step
from agscl.methods._parts.node_method import NodeMethod, NodePlan
from agscl.methods._parts.optimizer_heads import remove_parameter
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.soft_masks import SoftMask, mask_gradients_, mask_updates_
from agscl.methods._parts.thread_local_tensors import PerThread, View, make_replaceable, restore_plain_dicts
from agscl.system.distributed import average_over_ranks_, copy_from_first_rank_, is_distributed
from agscl.system.sums import to_sum_dtype

__all__ = ["HAT", "HATConfig"]

MAX_EMBEDDING = 6.0
"""Embeddings stay within ± this, where the compensated gradient is still alive."""
MAX_COSH = 50.0
"""cosh(s·e) is taken of at most this."""
MIN_GATE = 1e-12
"""A smaller gate counts as 0: in float32 it is lost beside an open one, and subnormal numbers are slow."""

Gates = tuple[Tensor, dict[str, Tensor]]
"""All gates, and those of the columns of each layer of the trunk."""


@dataclass(frozen=True, kw_only=True)
class HATConfig(Settings):
    """Settings of HAT; the defaults are those of its paper."""

    c: float = 0.75
    """How much using further nodes costs; more leaves more of them for later tasks."""
    s_max: float = 400.0
    """The steepest gate: within each epoch s rises from 1/s_max to s_max."""
    mask: Literal["update", "gradient"] = "update"
    """What is multiplied by 1 − min(mask_out, mask_in): the optimizer's change, which is right under Adam too, or the
    gradient. Where that factor is 0 the weight keeps its bits either way."""
    gate_gradient: Literal["exact", "authors"] = "exact"
    """The embedding's gradient: in closed form, or through the gate and compensated afterwards as the authors' code
    does, which in float32 is 0 for gates that are open or shut."""
    seed: int = 0
    """Seed of the embeddings' first values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("c", 0)
        self.require_at_least("s_max", 1, above=True)


@dataclass
class HATKnowledge(Knowledge):
    """What HAT keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {"embeddings": "embeddings", "used": "masks"}
    embeddings: dict[str, Tensor] = field(default_factory=dict)  # per learned task, (groups,)
    used: Tensor = field(default_factory=lambda: torch.empty(0))  # (groups,) the largest gate of all learned tasks


class HATPlan(NodePlan):
    """One task of HAT: its embedding, which the plan moves by itself, and the weights that earlier tasks use."""

    method: HAT
    saved: ClassVar[tuple[str, ...]] = ("embedding_values", "moments", "moves", "position", "moment_age")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.embedding: nn.Parameter | None = None
        self.moments: list[Tensor] = []  # of the embedding: first and second
        self.moves: int | Tensor = 0  # steps of the embedding in this task; on a GPU counted there
        self.position: int | Tensor = 0  # steps in this epoch, likewise
        self.moment_age: int | Tensor = 0  # steps since the moments were cleared, likewise
        self._gradient: Tensor | None = None
        self._masks: list[SoftMask] = []  # with the factor 1 − min(mask_out, mask_in)
        self._norms: NodeNormFreezer | None = None

    # Embedding and protected weights ---------------------------------------------------------------------------------

    def attach(self) -> None:
        super().attach()
        if self.embedding is None:
            generator = torch.Generator().manual_seed(self.method.config.seed * 1009 + len(self.method.tasks))
            values = torch.randn(self.graph.size, generator=generator).to(self.method.knowledge.used.device)
            copy_from_first_rank_(values)  # all ranks begin alike
            self.embedding_values = values
        assert self.embedding is not None
        group = self.optimizers[0].param_groups[0]  # zero_grad and a GradScaler look after its gradient
        self._add_to_group(group, self.embedding, "agscl.embedding")
        device = self.embedding.device
        if device.type != "cpu":  # a captured step counts on the device
            self.moves, self.position, self.moment_age = (
                torch.as_tensor(count, device=device) for count in (self.moves, self.position, self.moment_age)
            )

    @property
    def embedding_values(self) -> Tensor:
        return torch.empty(0) if self.embedding is None else self.embedding.detach()

    @embedding_values.setter
    def embedding_values(self, values: Tensor) -> None:
        device = next(self.method.model.parameters()).device
        self.embedding = nn.Parameter(values.to(device, copy=True))
        self.moments = self.moments or [torch.zeros_like(values, device=device) for _ in range(2)]

    def build(self) -> None:
        """HAT's factor 1 − min(mask_out, mask_in) of every weight that earlier tasks use; 1 − mask_out of the rest."""
        used_groups = self.method.knowledge.used
        used = torch.cat([used_groups, used_groups.new_ones(1)])  # the last: a column that reads no node is in use
        self._masks = []
        for name, parameter, groups in self.graph.incoming_parameters():
            factor = used[groups.to(used.device)].view(-1, *[1] * (parameter.dim() - 1))
            layer, _, key = name.rpartition(".")
            reader = self.graph.readers.get(layer)
            if key == "weight" and reader is not None and layer in self.graph.layers:
                factor = torch.minimum(factor, used[reader.source_groups().to(used.device)])
            if bool(factor.any()):
                self._masks.append(SoftMask(parameter, 1 - factor, parameter.detach().clone()))
        self._norms = NodeNormFreezer(self.graph, used_groups > 0)

    def start(self) -> None:
        self.refuse_unfrozen()
        free = self.method.knowledge.used < 0.5
        layers = self.graph.layers.items()
        if full := [name for name, layer in layers if not bool(free[layer.groups.to(free.device)].any())]:
            self.method.warn_once(
                "full",
                f"Earlier tasks use every node in {', '.join(full)}: what this one can learn there is limited. Use a "
                f"larger c (it is {self.method.config.c:g}) or wider layers.",
            )

    def detach(self) -> None:
        super().detach()
        if self.embedding is not None:
            for group in self.optimizers[0].param_groups:
                remove_parameter(group, self.embedding)
        if self._norms is not None:
            self._norms.close()

    @property
    def s(self) -> float | Tensor:
        """HAT's s at this point of the epoch."""
        if self.steps_per_epoch is None:
            return 1.0
        low, high, last = 1 / self.method.config.s_max, self.method.config.s_max, self.steps_per_epoch - 1
        position = to_sum_dtype(self.position) if isinstance(self.position, Tensor) else self.position
        return low + (high - low) * (position % self.steps_per_epoch / last if last else 1.0)

    # A step ----------------------------------------------------------------------------------------------------------

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        assert self.embedding is not None
        if optimizer is self.optimizers[0] and self.embedding.grad is not None:
            self._gradient = self.embedding.grad if scale is None else self.embedding.grad / scale
            self.embedding.grad = None  # the optimizer itself leaves the embedding alone

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        if self.method.config.mask == "gradient":
            mask_gradients_(self._masks, optimizer)

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        self.method.forget_last_pass()
        mask_updates_(self._masks, soft=self.method.config.mask == "update")
        if optimizer is self.optimizers[0]:
            if self._gradient is not None:
                self._move_embedding(optimizer, self._gradient, skipped)
            self._gradient = None
            self.position += 1

    def _move_embedding(self, optimizer: Optimizer, gradient: Tensor, skipped: Tensor | None) -> None:
        assert self.embedding is not None
        if is_distributed():
            gradient = gradient.clone()
            average_over_ranks_(gradient)
        e, (first, second), s, group = self.embedding, self.moments, self.s, optimizer.param_groups[0]
        before = [] if skipped is None else [t.detach().clone() for t in (e, first, second)]
        if self.method.config.gate_gradient == "exact":
            gradient = self.exact_gradient(gradient, e.detach())
        else:
            gradient = self.compensate(gradient + self.penalty_gradient(s, e.detach()), e.detach(), s)
        self.moves += 1
        self.moment_age += 1
        e.sub_(compute_method_parameter_step(optimizer, group, gradient, self.moments, self.moment_age)).clamp_(
            -MAX_EMBEDDING, MAX_EMBEDDING
        )
        if skipped is not None:  # a fused optimizer skipped the step on overflow
            for tensor, value_before in zip((e, first, second), before, strict=True):
                tensor.copy_(torch.where(skipped.reshape(()) > 0, value_before, tensor))

    def exact_gradient(self, gate_gradient: Tensor, embedding: Tensor) -> Tensor:
        """HAT's eq. 6 in closed form: s_max · σ(e) · σ(−e) times the gradient by the gate, penalty included."""
        free = 1 - self.method.knowledge.used
        total = gate_gradient + self.method.config.c * free / free.sum().clamp(min=1e-12)
        return self.method.config.s_max * torch.sigmoid(embedding) * torch.sigmoid(-embedding) * total

    def penalty_gradient(self, s: float | Tensor, embedding: Tensor) -> Tensor:
        """The gradient, by the embedding, of HAT's penalty c · Σ m(1 − m_prev) / Σ (1 − m_prev) with m = σ(s·e)."""
        free, m = 1 - self.method.knowledge.used, torch.sigmoid(s * embedding)
        return self.method.config.c * s * free * m * (1 - m) / free.sum().clamp(min=1e-12)

    def compensate(self, gradient: Tensor, embedding: Tensor, s: float | Tensor) -> Tensor:
        """The gradient times s_max/s · (cosh(s·e) + 1) / (cosh(e) + 1), so that HAT's steep gates learn too (eq. 6)."""
        steep = (s * embedding).clamp(-MAX_COSH, MAX_COSH)
        return gradient * (self.method.config.s_max / s) * (torch.cosh(steep) + 1) / (torch.cosh(embedding) + 1)

    def end_epoch(self) -> None:
        if self.steps_per_epoch is None:
            self.steps_per_epoch = int(self.position) or None
        self.position *= 0

    def clear_moments(self, when: Tensor | None) -> None:
        when = torch.ones((), dtype=torch.bool, device=self.embedding_values.device) if when is None else when
        for moment in self.moments:
            moment.masked_fill_(when, 0.0)
        if isinstance(self.moment_age, Tensor):  # in place: a captured step counts there
            self.moment_age.masked_fill_(when, 0)
        elif bool(when):
            self.moment_age = 0

    def held_tensors(self) -> dict[str, list[Tensor]]:
        embedding = [] if self.embedding is None else [self.embedding_values]
        return {
            "embeddings": [*embedding, *self.moments],
            "masks": [mask.factor for mask in self._masks],
            "anchors": [mask.before for mask in self._masks],
        }


class HAT(NodeMethod):
    """Learn task after task with gates that say which nodes each task uses.

    >>> method = HAT(model, example_input, c=0.75, s_max=400)
    >>> method = HAT(model, example_input, c=2.5, **HAT.paper)  # as in the AGS-CL paper's table
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

    title = "HAT"
    formula = (
        "loss + c Σ m (1 − m_prev) / Σ (1 − m_prev), with gates m = σ(s·e) on the nodes",
        "s rises from 1/s_max to s_max within each epoch",
        "a weight from node i into node j: Δθ ← (1 − min(m_prev,i, m_prev,j)) Δθ",
        "m_prev: the largest gate of all earlier tasks",
    )
    search = (SearchAxis("c", FACTORS),)
    Config = HATConfig
    config: HATConfig
    Knowledge = HATKnowledge
    knowledge: HATKnowledge
    Plan = HATPlan
    plan: HATPlan | None
    needs = frozenset({"end_epoch"})
    owns_weights = False
    paper: ClassVar[Mapping[str, Any]] = {"mask": "gradient", "gate_gradient": "authors"}
    """Settings that give the form behind the AGS-CL paper's table; its c is 2.5, or 0.1 for CIFAR-10/100."""

    def __init__(self, model: nn.Module, example_input: Any = None, **options: Any) -> None:
        self._gate_hooks: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}  # by the module of a reader
        self._gated = View()  # the weight of the layer that runs
        self._columns: dict[str, Tensor] = {}  # per reader, the group that each weight reads
        self._trunk_columns = torch.empty(0, dtype=torch.long)  # those of the trunk's layers, concatenated,
        self._trunk_shapes: dict[str, torch.Size] = {}  # and their shapes
        self._pass_gates = PerThread()  # those of the forward pass under way
        self._last_gates: Gates | None = None  # of the last pass that may go backward
        self._gates_off = False
        self._refuse_second_hat(model)
        super().__init__(model, example_input, **options)
        self._model_hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )

    def _refuse_second_hat(self, model: nn.Module) -> None:
        owners = (getattr(hook, "__self__", None) for hook in getattr(model, "_forward_pre_hooks", {}).values())
        if any(isinstance(owner, HAT) and owner is not self and owner.tasks for owner in owners):
            raise ValueError("Another HAT has gates on this model. Go on with that one, or call its close() first.")

    def _init_nodes(self) -> None:
        self.knowledge.used = torch.zeros(self.graph.size, device=self._node_device)
        self._frozen_norms = StatisticsFreezer(self.graph.frozen_norms)

    @property
    def embedding(self) -> nn.Parameter | None:
        """HAT's embedding of the task under way."""
        return None if self.plan is None else self.plan.embedding

    def mask(self, task: str) -> Tensor:
        """(groups,) HAT's gates for a learned task, or for the one under way, at s_max."""
        learning = task == self.task and self.embedding is not None
        embedding = self.embedding if learning else self.knowledge.embeddings[task]
        assert embedding is not None
        return _compute_gates(self.config.s_max, embedding.detach())

    def penalty(self) -> Tensor:
        """HAT's penalty c · Σ m(1 − m_prev) / Σ (1 − m_prev) at s_max."""
        if self.task is None or self.embedding is None:
            return super().penalty()
        free = 1 - self.knowledge.used
        return self.config.c * (self.mask(self.task) * free).sum() / free.sum().clamp(min=1e-12)

    def clear_moments(self, when: Tensor | None = None) -> None:
        if self.plan is not None:
            self.plan.clear_moments(when)

    # The gates -------------------------------------------------------------------------------------------------------

    def _prepare_task(self, task: str) -> None:
        self._refuse_second_hat(self.model)
        with self._without_gates():
            super()._prepare_task(task)
        self._register_gates()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        with self._without_gates():
            super()._load_knowledge(state, task)
        if self._graph is not None:
            self._register_gates()

    @contextmanager
    def _without_gates(self) -> Iterator[None]:
        """While the graph is probed, no gate changes what is read."""
        self._gated.clear()
        self._gates_off = True
        try:
            yield
        finally:
            self._gates_off = False

    def _register_gates(self) -> None:
        """Hook every layer that reads nodes, heads included, which has no hook yet."""
        readers, hooked, device = self.graph.readers, self._gate_hooks, self.knowledge.used.device
        known = self._columns if self._trunk_columns.device == device else {}
        self._columns = {
            name: known[name] if name in known and reader.module in hooked else reader.source_groups().to(device)
            for name, reader in readers.items()
        }
        trunk = {name: columns for name, columns in self._columns.items() if not readers[name].is_head}
        self._trunk_shapes = {name: columns.shape for name, columns in trunk.items()}
        self._trunk_columns = torch.cat(
            [self._trunk_columns.new_empty(0, device=device), *map(torch.flatten, trunk.values())]
        )
        for name, reader in readers.items():
            if reader.module not in hooked:
                hooked[reader.module] = (
                    reader.module.register_forward_pre_hook(partial(self._gate_weight, name)),
                    reader.module.register_forward_hook(self._ungate_weight, always_call=True),
                )

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute the gates of the task that a forward pass is for."""
        if self._gates_off:
            return
        gates = self._compute_pass_gates(self.task_of_call(args, kwargs))
        self._pass_gates.set(gates)
        if torch.is_grad_enabled():
            self._last_gates = gates

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._pass_gates.clear()

    def forget_last_pass(self) -> None:
        """Forget HAT's last forward pass, which will not go backward any more."""
        self._last_gates = None

    def _compute_pass_gates(self, task: str | None) -> Gates | None:
        """All gates at once, which takes a fraction of the kernels of layer by layer."""
        if self._graph is None or (gates := self._current_gates(task)) is None:
            return None
        shapes = self._trunk_shapes
        pieces = gates[self._trunk_columns].split([shape.numel() for shape in shapes.values()])
        return gates, {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}

    def _gates_of_layer(self, name: str) -> Tensor | None:
        """The gates of a layer's columns: those of the pass under way, or of one that is repeated to go backward."""
        backward = torch._C._current_graph_task_id() != -1
        pass_gates = self._pass_gates.get() or (self._last_gates if backward else None)
        if not self._gates_off and pass_gates is not None:
            gates, by_layer = pass_gates
            return by_layer[name] if name in by_layer else gates[self._columns[name]]
        return None if (current := self._current_gates()) is None else current[self._columns[name]]

    def _gate_weight(self, name: str, module: nn.Module, args: Any) -> None:
        """Let a layer run with each column of its weight times the gate of the node the column reads."""
        self._gated.clear()  # left by an interrupted pass (Ctrl-C), after which torch calls no hook
        if (gates := self._gates_of_layer(name)) is not None:
            key, weight = make_replaceable(module, "_parameters", "weight"), module._parameters["weight"]
            assert weight is not None
            self._gated.show({key: weight * gates.to(weight.dtype)})

    def _ungate_weight(self, *_: Any) -> None:
        self._gated.clear()

    def _current_gates(self, task: str | None = None) -> Tensor | None:
        """(groups + 1,) the gates in force, 1 at the end for columns that read no node; None where there are none."""
        task = task or self._default_task()
        if self._gates_off or task is None:
            return None
        if task == self.task and self.model.training:
            if self.plan is None or self.plan.embedding is None:
                return None
            gates = _compute_gates(self.plan.s, self.plan.embedding)
            if self.config.gate_gradient == "exact":  # let the embedding receive the gradient by the gate itself
                gates = gates.detach() + (self.plan.embedding - self.plan.embedding.detach())
        elif task in self.knowledge.embeddings or (task == self.task and self.embedding is not None):
            gates = self.mask(task)
        else:
            return None
        return torch.cat([gates, gates.new_ones(1)])

    # A task ends -----------------------------------------------------------------------------------------------------

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan, knowledge = self.plan, self.knowledge
        assert plan is not None
        embedding = plan.embedding_values
        if not bool(embedding.isfinite().all()):
            raise FloatingPointError(
                f"The embedding of task {plan.task!r} is not finite: training diverged. The task was not ended; go "
                "back to the last good weights, or lower the learning rate."
            )
        mask = self.mask(plan.task)
        self._check_gates(plan, mask)
        knowledge.embeddings[plan.task] = embedding.clone()
        used_before = knowledge.used
        knowledge.used = torch.maximum(used_before, mask)
        size, used = self.graph.size, int((knowledge.used >= 0.5).sum())
        knowledge.statistics = {
            "nodes": size,
            "open": int((mask >= 0.5).sum()),
            "used": used,
            "free": size - used,
            "sparsity": 1 - used / size,
            "shared": int(((mask >= 0.5) & (used_before >= 0.5)).sum()),
            "binary": float(to_sum_dtype((mask == 0) | (mask == 1)).mean()),
        }

    def _check_gates(self, plan: HATPlan, mask: Tensor) -> None:
        if plan.steps and not plan.moves:
            self.warn_once(
                "embedding",
                "No gradient reached the gates in this task. Is the loss computed from this model, in train mode?",
            )
        elif plan.steps and plan.steps_per_epoch is None:
            self.warn_once(
                "annealing",
                "The gates were never made steep: s stayed 1, because neither steps_per_epoch= was given to begin_task "
                "nor end_epoch() called.",
            )
        mask = mask.cpu()
        closed = [name for name, layer in self.graph.layers.items() if not bool((mask[layer.groups] >= 0.5).any())]
        if closed:
            self.warn_once(
                "shut",
                f"Task {plan.task!r} closed every gate in {', '.join(closed)}, so nothing passes there. Use a smaller "
                f"c (it is {self.config.c:g}).",
            )

    # What it reports, saving -----------------------------------------------------------------------------------------

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of HAT: an embedding of each group for each task, and the largest gate of all tasks."""
        numbers = (tasks + 1) * outline.groups
        return Memory.from_counts(
            masks=outline.groups, embeddings=tasks * outline.groups, bytes=numbers * outline.default_bytes
        )

    def statistics(self) -> dict[str, Any]:
        """Of HAT's last task: gates it holds `open`, `shared` with earlier tasks; nodes `used` by any task and `free`;
        `sparsity`, the share of free ones; `binary`, the share of its gates that are exactly 0 or 1."""
        return super().statistics()

    def __getstate__(self) -> dict[str, Any]:
        """What is copied with a model: not the gates of a pass that is still to go backward."""
        return {**vars(self), "_last_gates": None}

    def _check_group_count(self, state: Mapping[str, Any]) -> None:
        self._require_group_count(len(state["used"]))

    @property
    def tasks_need_method(self) -> bool:
        return bool(self.tasks)

    def close(self) -> None:
        super().close()
        for handle in itertools.chain(self._model_hooks, *self._gate_hooks.values()):
            handle.remove()
        self._gate_hooks = {}
        if self._graph is not None:
            self._frozen_norms.close()
            restore_plain_dicts(reader.module for reader in self.graph.readers.values())


def _compute_gates(s: float | Tensor, embedding: Tensor) -> Tensor:
    """σ(s·e), exactly 0 where it is next to 0; the gradient is that of σ(s·e) everywhere."""
    gates = torch.sigmoid(s * embedding)
    small = gates.detach()
    return gates - small.masked_fill(small >= MIN_GATE, 0.0)
