"""WSN: winning subnetworks (Kang, Mina, Madjid, Yoon, Hasegawa-Johnson, Hwang, Yoo; ICML 2022).

Every weight has a score, trained along with it. A task runs on the share c of each layer's weights that has the largest
scores. Weights that earlier tasks use may be chosen again, but keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from agscl.methods._parts.frozen_parts import FixedWeightsPlan, FrozenPartsMethod
from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.memory_forecast import Memory, Outline
from agscl.methods._parts.optimizer_heads import remove_parameter
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.settings import Settings
from agscl.methods._parts.trunk_buffers import TrunkBufferKnowledge, TrunkBufferMethod
from agscl.system.distributed import copy_from_first_rank_, is_distributed

__all__ = ["WSN", "WSNConfig"]


@dataclass(frozen=True, kw_only=True)
class WSNConfig(Settings):
    """Settings of WSN."""

    c: float = 0.5
    """Share of each layer's weights that a task uses."""
    seed: int = 0
    """Seed of the scores' first values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.c < 1, f"c must be above 0 and below 1, not {self.c}")


@dataclass
class WSNKnowledge(TrunkBufferKnowledge):
    """What WSN keeps from task to task."""

    purposes: ClassVar[Mapping[str, str]] = {"masks": "masks", "scores": "scores"}
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Per learned task, which weights it uses: uint8, a bit per entry of the masked weights, in the model's order."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Per masked weight, of its shape; each task continues with those of the one before."""


class WSNPlan(FixedWeightsPlan):
    """One task of WSN: its scores, which the optimizer trains; the weights that earlier tasks use are fixed."""

    method: WSN
    saved: ClassVar[tuple[str, ...]] = ("scores_had_gradient",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scores: dict[str, nn.Parameter] = {}  # they share their memory with the knowledge's
        self.scores_had_gradient = False

    def attach(self) -> None:
        self.method.init_scores()
        super().attach()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        group_of = {id(p): group for group in groups for p in group["params"]}
        for name, weight in self.method.masked_parameters().items():
            scores = nn.Parameter(self.method.knowledge.scores[name])
            self.scores[name] = scores
            self._add_to_group(group_of.get(id(weight), groups[0]), scores, f"agscl.scores.{name}")
            if is_distributed():  # all ranks begin alike
                copy_from_first_rank_(scores.detach())
                self._averaged.append(scores)

    def build(self) -> None:
        """Copy the weights that earlier tasks use: no step of WSN may change them."""
        self._fixed = []
        if masks := list(self.method.knowledge.masks.values()):
            weights = self.method.masked_parameters()
            used_bits = masks[0].clone()
            for bits in masks[1:]:
                used_bits |= bits
            used = unpack_masks(used_bits, weights)
            self._fixed = [(p, used[name], p.detach().clone()) for name, p in weights.items()]

    def start(self) -> None:
        if self._fixed and all(bool(used.all()) for _, used, _ in self._fixed):
            self.method.warn_once(
                "full",
                "Earlier tasks use every weight: this one can only choose among them, and train its head. Use a "
                f"smaller c (it is {self.method.config.c:g}) or a wider network.",
            )

    def detach(self) -> None:
        super().detach()
        for optimizer in self.optimizers:
            for scores in self.scores.values():
                optimizer.state.pop(scores, None)
                for group in optimizer.param_groups:
                    remove_parameter(group, scores)
        self.scores = {}

    def reconnect_copy(self) -> None:
        super().reconnect_copy()
        for name, scores in self.scores.items():  # copied one by one, they no longer share memory
            self.method.knowledge.scores[name] = scores.detach()

    def observe_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        self.scores_had_gradient |= any(scores.grad is not None for scores in self.scores.values())

    def add_penalty(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for weight, used, _ in self._fixed:
            if weight.grad is not None and id(weight) in trained:
                weight.grad.masked_fill_(used, 0.0)

    def restore(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        self.restore_fixed()  # momentum and weight decay move weights without a gradient too
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for scores in self.scores.values():
            if id(scores) in trained:
                scores.grad = None  # the loop may clear the model's gradients, not the optimizer's

    def used_masks(self) -> dict[str, Tensor]:
        """Per weight that WSN masks, which of its entries earlier tasks use; nothing in the first task."""
        return dict(zip(self.scores, (used for _, used, _ in self._fixed), strict=False))


class WSN(TrunkBufferMethod, FrozenPartsMethod):
    """Every task uses the weights with the largest scores, and trains those of them that no earlier task uses.

    >>> method = WSN(model, c=0.5)

    **What is masked**: every weight of two or more dimensions outside the heads. All else (biases, BatchNorm) is
    trained by the first task and keeps its bits afterwards. Of a layer's n weights a task uses the round(c·n) whose
    scores are largest in magnitude, as in the authors' code.

    **Scores** are first drawn as torch draws a layer's weights, and go on from task to task. The gradient of a score's
    magnitude is that of the masked weight times the weight (straight-through). They join the group of the optimizer
    that holds their weight: the same optimizer trains them, at the same rate and with the same weight decay. They
    leave it when the task ends. When resuming within a task, load the method's state before the optimizer's. A loop
    that goes back to the weights of an earlier epoch must go back to `method.scores` of that epoch too.

    **Masks** are stored at one bit per weight and task; the paper's Huffman coding is left out.

    `model(x, task)` of a `MultiHead` runs an old task with its own weights; with other models use `viewing(task)`. A
    masked weight exists within a forward pass alone: parameters are never replaced, so several threads may run
    several tasks at once.
    """

    title = "WSN"
    formula = (
        "a task runs with W ⊙ m, where m is 1 for the round(c·n) weights of a layer with the largest |score|",
        "ΔW ← ΔW ⊙ (1 − M), M: the weights that earlier tasks use",
    )
    search = (SearchAxis("c", values=(0.03, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9)),)
    owns_weights = True
    Config = WSNConfig
    config: WSNConfig
    Knowledge = WSNKnowledge
    knowledge: WSNKnowledge
    Plan = WSNPlan
    plan: WSNPlan | None

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._masked_forwards: list[MaskedForward] = []

    @property
    def scores(self) -> dict[str, Tensor]:
        """Per weight that WSN masks, its scores; training changes them in place."""
        return self.knowledge.scores

    def is_frozen(self, name: str) -> bool:
        return name not in self.knowledge.scores

    def masked_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.heads.list_trunk_parameters().items() if name in self.knowledge.scores}

    def init_scores(self) -> None:
        """Draw WSN's first scores, if there are none yet, and let the masked weights' modules run masked."""
        trunk, knowledge = self.find_trunk_parameters(), self.knowledge
        if not knowledge.scores:
            generator = torch.Generator().manual_seed(self.config.seed)
            for name, p in trunk.items():
                if p.requires_grad and p.dim() > 1 and name.endswith("weight"):
                    bound = 1 / math.sqrt(p[0].numel())
                    values = torch.rand(p.shape, generator=generator) * (2 * bound) - bound
                    knowledge.scores[name] = values.to(torch.promote_types(p.dtype, torch.float32))
        masked = {name: trunk[name].device for name in knowledge.scores if name in trunk}
        knowledge.scores = {name: knowledge.scores[name].to(device) for name, device in masked.items()}
        self._replace_forwards()

    # The masks -------------------------------------------------------------------------------------------------------

    def mask(self, task: str) -> dict[str, Tensor]:
        """Per weight that WSN masks, which of its entries a learned task, or the one under way, uses."""
        weights = self.masked_parameters()
        if task in self.knowledge.masks:
            return unpack_masks(self.knowledge.masks[task], weights)
        return {name: choose_largest(self.knowledge.scores[name], self.config.c) for name in weights}

    def mask_by_scores(self, name: str, weight: Tensor) -> Tensor:
        """The weight as the task under way uses it in WSN, with a straight-through gradient for the scores."""
        assert self.plan is not None
        scores = self.plan.scores[name]
        mask = choose_largest(scores.detach(), self.config.c) + (scores.abs() - scores.detach().abs())
        return weight * mask.to(weight.dtype)

    @torch.no_grad()
    def _finish_task(self, batches: Iterable[Any], forward: Forward) -> None:
        plan, knowledge = self.plan, self.knowledge
        assert plan is not None
        if not all(bool(scores.isfinite().all()) for scores in plan.scores.values()):
            raise FloatingPointError(
                f"Scores of task {plan.task!r} are not finite: training diverged. The task was not ended; go back to "
                "the last good weights, or lower the learning rate."
            )
        if plan.steps and not plan.scores_had_gradient:
            self.warn_once(
                "scores", "No gradient reached the scores in this task. Is the loss computed from this model?"
            )
        plan.restore_fixed()  # the loop may have gone back to other weights
        masks = self.mask(plan.task)
        total, chosen = sum(mask.numel() for mask in masks.values()), sum(int(mask.sum()) for mask in masks.values())
        used_before = sum(int(used.sum()) for _, used, _ in plan._fixed)
        shared = sum(int((masks[name] & used).sum()) for name, used in plan.used_masks().items())
        free = total - used_before - chosen + shared
        knowledge.masks[plan.task] = pack_masks(masks.values())
        knowledge.statistics = {
            "weights": total,
            "chosen": chosen,
            "shared": shared,
            "free": free,
            "sparsity": free / total if total else 0.0,
        }

    # Running masked --------------------------------------------------------------------------------------------------

    def _replace_forwards(self) -> None:
        """Let the model, and every module that holds a masked weight, run with masked weights."""
        self._restore_forwards()
        masked = {id(p) for p in self.masked_parameters().values()}
        modules = self.heads.list_trunk_modules(self.tasks).values()
        holders = [m for m in modules if any(id(p) in masked for p in m._parameters.values())]
        self._masked_forwards = [MaskedForward(self, m) for m in dict.fromkeys([self.model, *holders])]

    def _restore_forwards(self) -> None:
        for replaced in self._masked_forwards:
            replaced.close()
        self._masked_forwards = []

    def run_masked(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass of the model, or of a part of it, with the weights that WSN masks for its task."""
        shown = _SHOWN.get().get(self)
        if shown is not None and shown.is_running and module is not self.model:
            return forward(*args, **kwargs)
        task = self.task or (self.tasks[-1] if self.tasks else None) if shown is None else shown.task
        if module is self.model:
            default = task
            task = self.heads.task_of_call(args, kwargs, self.tasks, lambda: default)
        with self._showing(Shown(task, is_running=True)):
            if task is None or (task not in self.knowledge.masks and self.plan is None):
                return forward(*args, **kwargs)
            with MaskedWeights(self, task):
                return forward(*args, **kwargs)

    @contextmanager
    def viewing(self, task: str) -> Iterator[None]:
        with super().viewing(task), self._showing(Shown(task, is_running=False)):
            yield

    @contextmanager
    def _showing(self, shown: Shown) -> Iterator[None]:
        token = _SHOWN.set({**_SHOWN.get(), self: shown})
        try:
            yield
        finally:
            _SHOWN.reset(token)

    @property
    def tasks_need_method(self) -> bool:
        return bool(self.tasks)

    def close(self) -> None:
        super().close()
        self._restore_forwards()

    # What it reports, saving -----------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """WSN's memory: an entry of a mask counts as one number, and takes a bit between tasks."""
        counts = super().memory()
        entries = sum(scores.numel() for scores in self.knowledge.scores.values())
        packed = sum(bits.numel() for bits in self.knowledge.masks.values())
        return {**counts, "masks": counts["masks"] - packed + entries * len(self.knowledge.masks)}

    @classmethod
    def forecast_memory(cls, outline: Outline, tasks: int, settings: Mapping[str, Any]) -> Memory:
        """Of WSN: a bit per weight and task, and a score per weight."""
        bytes_per_score = max(4, outline.weights.bytes // max(1, outline.weights.numbers))
        return Memory.from_counts(
            masks=tasks * outline.packed,
            scores=outline.packed,
            bytes=tasks * -(-outline.packed // 8) + outline.packed * bytes_per_score,
        )

    def statistics(self) -> dict[str, Any]:
        """Of WSN's last task: the weights `chosen`, and those of them `shared` with earlier tasks; the weights left
        `free` by all tasks, and their share."""
        return super().statistics()

    def _load_knowledge(self, state: Mapping[str, Any], task: str | None) -> None:
        super()._load_knowledge(state, task)
        if self.tasks:
            self.init_scores()


class Shown(NamedTuple):
    """The task whose masked weights WSN shows, and whether a forward pass runs on them already."""

    task: str | None
    is_running: bool


_SHOWN: ContextVar[Mapping[WSN, Shown]] = ContextVar("shown", default=MappingProxyType({}))


class MaskedForward:
    """Stands in for the forward pass of a module whose weights WSN masks."""

    def __init__(self, method: WSN, module: nn.Module) -> None:
        self.method, self.module = method, module
        self.__wrapped__: Callable[..., Any] = module.forward  # `inspect.signature` looks here
        self._was_replaced = "forward" in vars(module)
        module.forward = self
        # Where there is a hook, faster forward passes that read weights by themselves are not taken.
        self._handle: RemovableHandle = module.register_forward_pre_hook(_do_nothing)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method.run_masked(self.module, self.__wrapped__, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: not the module's own `forward`, which pickle would look up by name and find this stand-in."""
        return {name: value for name, value in vars(self).items() if self._was_replaced or name != "__wrapped__"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if not self._was_replaced:
            self.__wrapped__ = MethodType(type(self.module).forward, self.module)

    def close(self) -> None:
        self._handle.remove()
        if self._was_replaced:
            self.module.forward = self.__wrapped__
        else:
            del self.module.forward


def _do_nothing(module: nn.Module, args: Any) -> None: ...


class MaskedWeights(TorchFunctionMode):
    """Gives every torch function called within, in this thread, the masked weight for the parameter."""

    def __init__(self, method: WSN, task: str) -> None:
        super().__init__()
        self._method = method
        self._names = {id(p): name for name, p in method.masked_parameters().items()}
        self._masks = method.mask(task) if task in method.knowledge.masks else None  # None: by the scores
        self._masked: dict[str, Tensor] = {}  # computed when first needed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # of an attribute, e.g. its shape
            return func(*args, **(kwargs or {}))
        return func(*map(self._replace, args), **{key: self._replace(value) for key, value in (kwargs or {}).items()})

    def _replace(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._replace, value)) if type(value) in (list, tuple) else value
        if not isinstance(value, nn.Parameter) or (name := self._names.get(id(value))) is None:
            return value
        if name not in self._masked:
            if self._masks is None:
                self._masked[name] = self._method.mask_by_scores(name, value)
            else:
                self._masked[name] = value.masked_fill(~self._masks[name], 0.0)
        return self._masked[name]


def choose_largest(scores: Tensor, share: float) -> Tensor:
    """WSN's mask: true for the round(share · n) of n scores that are largest in magnitude, at least one."""
    count = max(1, round(share * scores.numel()))
    largest = scores.abs().flatten().topk(count, sorted=False).indices
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    return chosen.index_fill_(0, largest, True).view(scores.shape)


def pack_masks(masks: Iterable[Tensor]) -> Tensor:
    """(⌈n/8⌉,) uint8, the n entries of some of WSN's masks in their order, the first in the lowest bit."""
    entries = torch.cat([mask.flatten().byte() for mask in masks])
    padded = F.pad(entries, (0, -len(entries) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=padded.device)).sum(1, dtype=torch.uint8)


def unpack_masks(bits: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks that `pack_masks` packed, of these weights."""
    entries = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    sizes = [weight.numel() for weight in weights.values()]
    parts = entries.flatten()[: sum(sizes)].bool().split(sizes)
    pairs = zip(parts, weights.items(), strict=True)
    return {name: part.view(weight.shape).to(weight.device) for part, (name, weight) in pairs}
