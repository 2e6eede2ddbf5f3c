"""TRGP: trust region gradient projection (Lin, Yang, Fan, Zhang; ICLR 2022).

As in GPM, weights change only orthogonally to the inputs of old tasks. What old tasks learned is used again: in the
subspaces of the old tasks that a new one is most related to, it sees the weights scaled by matrices of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from agscl.graph.probing import LAYERS
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.method_trained_parameters import compute_method_parameter_step
from agscl.methods._parts.optimizer_heads import remove_parameter
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.subspaces import (
    SubspaceConfig,
    SubspaceKnowledge,
    SubspaceMethod,
    SubspacePlan,
    count_inputs_drawn,
)
from agscl.system.distributed import is_distributed
from agscl.system.sums import to_sum_dtype

__all__ = ["TRGP", "TRGPConfig"]

Term = tuple[Tensor, Tensor]
"""The directions of an old task, (groups, columns, directions), and the scales on them, (groups, directions, …)."""

_pass_tasks: ContextVar[Mapping[int, str | None]] = ContextVar("trgp_pass_tasks", default=MappingProxyType({}))
"""By id of the method, the task of the forward pass under way in this thread."""


@dataclass(frozen=True, kw_only=True)
class TRGPConfig(SubspaceConfig):
    """Settings of TRGP; the defaults are those of its paper for CIFAR-100."""

    trust: float = 0.5
    """ε of the trust region: the share of the new task's gradient that must lie in an old task's subspace."""
    related: int = 2
    """Most old tasks in the trust region of a layer; those with the largest share are taken."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.trust <= 1, f"trust must be from 0 to 1, not {self.trust}")
        self.require(
            isinstance(self.related, int) and self.related >= 0, f"related is a number of tasks, not {self.related}"
        )

    def find_unused(self) -> dict[str, str]:
        unused = super().find_unused()
        return unused if self.related else {**unused, "trust": "related is 0"}


@dataclass
class TRGPKnowledge(SubspaceKnowledge):
    """What TRGP keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {**SubspaceKnowledge.purposes, "used": "masks", "scales": "scales"}
    used: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Per learned task and weight, (groups, directions so far): which directions of the basis are the task's own."""
    scales: dict[str, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    """Per learned task, weight and related task, (groups, directions, directions): Q of the paper."""


class TRGPPlan(SubspacePlan):
    """One task of TRGP: GPM's projections, and scales on subspaces of related tasks, which the plan moves itself."""

    method: TRGP
    saved: ClassVar[tuple[str, ...]] = ("scale_values", "moments", "moment_ages")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scales: dict[str, dict[str, nn.Parameter]] = {}  # by weight and related task; a weight is in it from its
        # first gradient on, by which the related tasks are chosen
        self.moments: dict[str, dict[str, list[Tensor]]] = {}  # of each scale: first and second
        self.moment_ages: dict[str, int] = {}  # per weight, steps since the moments were zero
        self.subspaces: dict[str, dict[str, Tensor]] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}  # of the scales, in the step under way

    # Scales ----------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        super().build()
        for name in self.scales:
            self._add_scales(name)

    def detach(self) -> None:
        super().detach()
        for scale in (scale for scales in self.scales.values() for scale in scales.values()):
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                remove_parameter(group, scale)

    def _add_scales(self, name: str) -> None:
        """Give the scales of a weight to the optimizer that trains it, and let its layers use them."""
        self.subspaces[name] = {task: self.method.find_subspace(name, task) for task in self.scales[name]}
        self.moments.setdefault(
            name, {task: [torch.zeros_like(scale) for _ in range(2)] for task, scale in self.scales[name].items()}
        )
        for task, scale in self.scales[name].items():
            self._add_to_group(self._find_group(name)[1], scale, f"agscl.scale.{name}.{task}")
            if is_distributed():  # no DistributedDataParallel knows them
                self._averaged.append(scale)
        self.method.hook_layers()

    def _find_group(self, name: str) -> tuple[Optimizer, dict[str, Any]]:
        weight = self.weights[name]
        groups = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        return next(pair for pair in groups if any(p is weight for p in pair[1]["params"]))

    @property
    def scale_values(self) -> dict[str, dict[str, Tensor]]:
        return {name: {task: q.detach() for task, q in scales.items()} for name, scales in self.scales.items()}

    @scale_values.setter
    def scale_values(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.scales = {
            name: {task: nn.Parameter(value.clone()) for task, value in scales.items()}
            for name, scales in values.items()
        }

    def terms(self, name: str) -> list[Term]:
        return [(self.subspaces[name][task], scale) for task, scale in self.scales.get(name, {}).items()]

    # A step ----------------------------------------------------------------------------------------------------------

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self._gradients = {}
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self.weights.items():
            if weight.grad is None or id(weight) not in trained:
                continue
            gradient = weight.grad if scale is None else weight.grad / scale
            if name not in self.scales:
                self._choose_related(name, gradient)
            elif self.scales[name]:
                gradients = {task: q.grad for task, q in self.scales[name].items() if q.grad is not None}
                self._gradients[name] = {task: g if scale is None else g / scale for task, g in gradients.items()}
                for parameter in self.scales[name].values():
                    parameter.grad = None  # the optimizer itself leaves the scales alone

    def _choose_related(self, name: str, gradient: Tensor) -> None:
        """Choose the trust region of a weight by its first gradient. Scales start as the identity."""
        shares = self.method.measure_shares(name, gradient)
        if shares is None:  # the gradient is 0 or not finite: wait for the next
            return
        config = self.method.config
        trusted = [task for task in shares if shares[task] >= config.trust] if self.method.can_scale(name) else []
        related = sorted(trusted, key=shares.__getitem__, reverse=True)[: config.related]
        subspaces = {task: self.method.find_subspace(name, task) for task in related}
        self.scales[name] = {
            task: nn.Parameter(torch.eye(basis.shape[2]).to(basis).repeat(len(basis), 1, 1))
            for task, basis in subspaces.items()
        }
        self._add_scales(name)
        weight = self.weights[name]
        self._gradients[name] = {  # what backward would have left, had the identity been there
            task: compute_scale_gradient(weight.detach(), gradient, basis) for task, basis in subspaces.items()
        }

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        super().restore(optimizer, skipped)
        for name, gradients in self._gradients.items():
            _, group = self._find_group(name)
            self.moment_ages[name] = self.moment_ages.get(name, 0) + 1
            for task, gradient in gradients.items():
                scale, moments = self.scales[name][task], self.moments[name][task]
                before = [] if skipped is None else [t.detach().clone() for t in (scale, *moments)]
                scale.sub_(compute_method_parameter_step(optimizer, group, gradient, moments, self.moment_ages[name]))
                for tensor, value in zip((scale, *moments), before, strict=False):  # a fused optimizer's skipped step
                    tensor.copy_(torch.where(skipped.reshape(()) > 0, value, tensor))  # type: ignore[union-attr]
        self._gradients = {}

    def clear_moments(self, when: Tensor | None) -> None:
        if when is None or bool(when):
            self.moment_ages = {}
            for moment in (m for moments in self.moments.values() for pair in moments.values() for m in pair):
                moment.zero_()

    def held_tensors(self) -> dict[str, list[Tensor]]:
        scales = [scale for scales in self.scale_values.values() for scale in scales.values()]
        moments = [m for moments in self.moments.values() for pair in moments.values() for m in pair]
        subspaces = [basis for bases in self.subspaces.values() for basis in bases.values()]
        return {**super().held_tensors(), "scales": [*scales, *moments], "bases": subspaces}


class TRGP(SubspaceMethod):
    """Learn as with GPM, and use what related old tasks learned through scale matrices of the new task's own.

    >>> method = TRGP(model, threshold=0.97, trust=0.5, related=2)

    **Trust region.** Each layer has a basis of the directions of all old inputs, and each old task j owns some of them,
    S_j. At a layer's first gradient in a task, the old tasks with ‖proj_{S_j}(g)‖ ≥ trust · ‖g‖ are related, at most
    `related` of them. The paper draws a batch for this; here it is the first that the loop steps on.

    **Scales.** The task runs with W + Σ_j W B_j (Q_j − I) B_jᵀ over the related tasks, where the columns of B_j are the
    directions in S_j. Q_j starts as the identity and is trained, W is changed orthogonally to all old directions. As
    W B_j never changes, what a task was scaled by stays right: old tasks lose what GPM loses, the part of their inputs
    that the threshold left out, and rounding. `model(x, task)` of a `MultiHead` scales as for that task; with other
    models use `viewing(task)`. No weight is written for it: a layer's output is computed again with the scaled weight,
    for the pass that asks for it alone.

    The scales in training join the group of the optimizer that holds the weight, so that `zero_grad` and a GradScaler
    look after their gradients; the method moves them itself at the rate in force, as HAT does its embeddings. When
    resuming within a task, load the method's state before the optimizer's. A loop that goes back to the weights of an
    earlier epoch must go back to these parameters too. A Linear or Conv with a `forward` of its own gets no scales.

    **Directions.** S_t are those with the most energy of the task's inputs, old and new in one order, until they hold
    the threshold. The new ones among them are added to the basis.
    """

    title = "TRGP"
    formula = (
        "a layer runs with W + Σ_j W B_j (Q_j − I) B_jᵀ over the related old tasks j; Q_j is trained from I",
        "ΔW ← ΔW − ΔW B Bᵀ, as in GPM",
    )
    search = (SearchAxis("threshold", values=(0.9, 0.95, 0.97, 0.99)),)
    Config = TRGPConfig
    config: TRGPConfig
    Knowledge = TRGPKnowledge
    knowledge: TRGPKnowledge
    Plan = TRGPPlan
    plan: TRGPPlan | None

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._layer_hooks: dict[str, list[RemovableHandle]] = {}  # by weight
        self._model_hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )

    @property
    def capturable(self) -> bool:
        return False  # the first step chooses the related tasks

    def clear_moments(self, when: Tensor | None = None) -> None:
        if self.plan is not None:
            self.plan.clear_moments(when)

    def find_subspace(self, name: str, task: str) -> Tensor:
        """The directions of a weight that a learned task owns in TRGP: (groups, columns, directions)."""
        return select_directions(self.knowledge.bases[name], self.knowledge.used[task][name])

    def measure_shares(self, name: str, gradient: Tensor) -> dict[str, float] | None:
        """How related TRGP finds each learned task: ‖proj(gradient)‖ / ‖gradient‖ for its subspace.

        None if the gradient is 0 or not finite.
        """
        basis = self.knowledge.bases[name]
        rows = to_sum_dtype(gradient.reshape(len(basis), -1, basis.shape[1]))
        total = float(rows.square().sum())
        if not 0 < total < float("inf"):
            return None
        energies = (rows @ to_sum_dtype(basis)).square().sum(1)  # (groups, directions)
        used = {task: masks[name] for task, masks in self.knowledge.used.items() if name in masks}
        if not used:
            return {}
        # all tasks side by side, (groups, directions of the first, of the second, …): there may be hundreds
        masks = torch.cat([*used.values()], 1)
        lengths = torch.tensor([mask.shape[1] for mask in used.values()], device=masks.device)
        directions = torch.arange(masks.shape[1], device=masks.device)
        directions -= (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        owned = torch.stack([(energies[:, directions] * masks).sum(0), masks.any(0)])
        owner = torch.arange(len(used), device=masks.device).repeat_interleave(lengths)
        energy, count = owned.new_zeros(2, len(used)).index_add_(1, owner, owned).tolist()
        return {task: (e / total) ** 0.5 for task, e, n in zip(used, energy, count, strict=True) if n}

    # Running the model for a task ------------------------------------------------------------------------------------

    def hook_layers(self) -> None:
        """Hook every layer whose weight TRGP scales for some task."""
        names = {name for scales in self.knowledge.scales.values() for name in scales}
        if self.plan is not None:
            names |= {name for name, scales in self.plan.scales.items() if scales}
        for name in sorted(names - self._layer_hooks.keys()):
            self._layer_hooks[name] = [
                module.register_forward_hook(partial(self._scale_output, name), with_kwargs=True, prepend=True)
                for module in self._find_layers(name)
            ]

    def can_scale(self, name: str) -> bool:
        """Whether TRGP can scale this weight: all its layers are a Linear or Conv without a forward pass of its own."""
        kinds = {
            type(module): next((k for k in LAYERS if isinstance(module, k)), None) for module in self._find_layers(name)
        }
        return all(kind is not None and own.forward is kind.forward for own, kind in kinds.items())

    def _find_layers(self, name: str) -> list[nn.Module]:
        weight = self.model.get_parameter(name)
        return [m for m in self.heads.list_trunk_modules(self.tasks).values() if m._parameters.get("weight") is weight]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _pass_tasks.set({**_pass_tasks.get(), id(self): self.task_of_call(args, kwargs)})

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        _pass_tasks.set({key: task for key, task in _pass_tasks.get().items() if key != id(self)})

    def _scale_output(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        passes = _pass_tasks.get()
        task = passes[id(self)] if id(self) in passes else self.task_of_call((), {})
        if not (terms := self._find_terms(name, task)):
            return output
        layer_input = args[0] if args else kwargs["input"]
        weight = module._parameters["weight"]
        assert weight is not None
        return run_layer(module, layer_input, scale_weight(weight, terms))

    def _find_terms(self, name: str, task: str | None) -> list[Term]:
        if self.plan is not None and task == self.plan.task:
            return self.plan.terms(name)
        scales = self.knowledge.scales.get(task or "", {}).get(name, {})
        return [(self.find_subspace(name, related), scale) for related, scale in scales.items()]

    # A task ends -----------------------------------------------------------------------------------------------------

    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan = self.plan
        assert plan is not None
        values = {name: dict(scales) for name, scales in plan.scale_values.items() if scales}
        for name, scales in values.items():
            if not all(bool(scale.isfinite().all()) for scale in scales.values()):
                raise FloatingPointError(
                    f"The scales of {name} are not finite: training diverged. The task was not ended; go back to the "
                    "last good weights, or lower the learning rate."
                )
        super()._finish_task(batches, forward)
        self.knowledge.scales[plan.task] = {
            name: {task: scale.clone() for task, scale in scales.items()} for name, scales in values.items()
        }
        self.knowledge.statistics["related"] = {name: list(scales) for name, scales in values.items()}

    def _extend_basis(self, name: str, inputs: Tensor, threshold: float) -> Tensor:
        basis, used = choose_trgp_directions(self.knowledge.bases.get(name), inputs, threshold)
        self.knowledge.used.setdefault(self.tasks[-1], {})[name] = used
        return basis

    # What it reports, saving -----------------------------------------------------------------------------------------

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of TRGP: GPM's directions; per task which are its own, and scales for the most related ones it can have."""
        bases = super().forecast_memory(outline, tasks, settings).counts
        samples, related = (settings.get(key, getattr(TRGPConfig, key)) for key in ("samples", "related"))
        masks = scales = size = 0
        for layer in outline.layers:
            drawn = count_inputs_drawn(layer.positions, samples)
            widths = [min(layer.columns, number * drawn) for number in range(1, tasks + 1)]
            masks += layer.groups * sum(widths)
            for number in range(1, tasks):
                count = layer.groups * sum(width**2 for width in widths[max(0, number - related) : number])
                scales, size = scales + count, size + count * layer.bytes_per_number
        return Memory.from_counts(
            ["bases", "masks", "scales", "bytes"],
            bases=bases["bases"],
            masks=masks,
            bytes=bases["bytes"] + masks + size,
            **({"scales": scales} if scales else {}),
        )

    def statistics(self) -> dict[str, Any]:
        """Of TRGP's last task: as GPM's, and `related`, per weight the old tasks whose subspaces this one scales."""
        return super().statistics()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        super()._load_knowledge(state, task)
        self.hook_layers()

    @property
    def tasks_need_method(self) -> bool:
        return len(self.tasks) > 1

    def close(self) -> None:
        super().close()
        for handle in (*self._model_hooks, *(handle for handles in self._layer_hooks.values() for handle in handles)):
            handle.remove()
        self._layer_hooks = {}


def scale_weight(weight: Tensor, terms: Iterable[Term]) -> Tensor:
    """TRGP's weight W + Σ W B (Q − I) Bᵀ: bit for bit W where every Q is the identity."""
    scaled = weight
    with torch.autocast(weight.device.type, enabled=False):
        for basis, scale in terms:
            rows = weight.reshape(len(basis), -1, basis.shape[1]).to(basis.dtype)
            identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
            change = (rows @ basis) @ (scale - identity) @ basis.mT
            scaled = scaled + change.view(weight.shape).to(weight.dtype)
    return scaled


def compute_scale_gradient(weight: Tensor, gradient: Tensor, basis: Tensor) -> Tensor:
    """The gradient by TRGP's scale matrix Q where all are the identity, given that by the weight: BᵀWᵀGB."""
    rows, row_gradients = (t.reshape(len(basis), -1, basis.shape[1]).to(basis.dtype) for t in (weight, gradient))
    return (rows @ basis).mT @ (row_gradients @ basis)


def run_layer(layer: nn.Module, layer_input: Tensor, weight: Tensor) -> Tensor:
    """The output of a Linear or Conv with the weight that TRGP scaled."""
    bias = layer._parameters["bias"]
    if isinstance(layer, nn.Linear):
        return F.linear(layer_input, weight, bias)
    output: Tensor = layer._conv_forward(layer_input, weight, bias)  # type: ignore[operator]
    return output


def select_directions(basis: Tensor, used: Tensor) -> Tensor:
    """The directions of a basis that TRGP uses: (groups, columns, most of any group), zero where a group has fewer."""
    width = int(used.sum(1).max())
    order = used.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]  # in their order
    chosen = basis.gather(2, order[:, None].expand(-1, basis.shape[1], -1))
    return chosen * used.gather(1, order)[:, None]


def choose_trgp_directions(old_basis: Tensor | None, inputs: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """TRGP's choice: the directions with the most energy of `inputs` (groups, columns, inputs), `threshold` of it.

    Old directions and those of what they leave compete. Returns the basis with the new ones appended, old ones with
    their bits, and (groups, directions) which were chosen.
    """
    bases, masks = [], []
    for number, group_inputs in enumerate(to_sum_dtype(inputs)):
        old = inputs.new_empty(len(group_inputs), 0) if old_basis is None else old_basis[number]
        old = old[:, (old != 0).any(0)]
        held_before = to_sum_dtype(old)
        along_old = held_before.T @ group_inputs
        left = group_inputs - held_before @ along_old
        directions, singular_values, _ = torch.linalg.svd(left, full_matrices=False)
        sizes = torch.cat([along_old.norm(dim=1), singular_values])
        order = sizes.argsort(descending=True, stable=True)
        held, total = sizes[order].square().cumsum(0), group_inputs.square().sum()
        chosen = order[: int((held < threshold * total).sum()) + 1]
        rounding = group_inputs.abs().max() * max(group_inputs.shape) * torch.finfo(inputs.dtype).eps
        chosen = chosen[sizes[chosen] > rounding]
        count = min(int((chosen >= old.shape[1]).sum()), len(group_inputs) - old.shape[1])
        new = directions[:, :count]
        new = torch.linalg.qr(new - held_before @ (held_before.T @ new))[0]
        bases.append(torch.cat([old, new.to(inputs.dtype)], 1))
        mask = torch.zeros(old.shape[1] + len(singular_values), dtype=torch.bool, device=inputs.device)
        mask[chosen] = True
        masks.append(mask[: bases[-1].shape[1]])
    widest = max(basis.shape[1] for basis in bases)
    return (
        torch.stack([F.pad(basis, (0, widest - basis.shape[1])) for basis in bases]),
        torch.stack([F.pad(mask, (0, widest - len(mask))) for mask in masks]),
    )
