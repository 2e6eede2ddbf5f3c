"""MAS: memory aware synapses (Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars; ECCV 2018).

The importance of a weight is how fast the size of the output changes with it; no labels are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from agscl.methods._parts.lifecycle import Forward
from agscl.methods._parts.sample_gradients import measure_gradients
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods._parts.weight_method import Tensors, WeightConfig, WeightMethod

__all__ = ["MAS", "MASConfig"]


@dataclass(frozen=True, kw_only=True)
class MASConfig(WeightConfig):
    """Settings of MAS. The defaults are the definitions of its own paper; λ must be searched for other data."""

    lam: float = 2.0
    """λ: the penalty is λ/2 Σ Ω (θ − θ*)². The method's own paper writes it without the half: its λ = 1 is 2 here."""
    norm: Literal["squared", "plain"] = "squared"
    """What is differentiated: the squared L2 norm of a sample's output, or the norm itself."""
    batch: int = 1
    """Absolute values are taken of each sample's gradient (1), or of the sum over mini-batches of this size."""
    mode: Literal["eval", "train"] = "eval"
    """Mode in which Ω is measured; train (dropout on) needs mini-batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least("lam", 0)
        self.require(isinstance(self.batch, int) and self.batch >= 1, f"batch is a number of samples, not {self.batch}")
        self.require(
            self.mode == "eval" or self.batch > 1,
            "mode='train' needs mini-batches (batch=20); gradients per sample are taken in eval mode",
        )


class MAS(WeightMethod):
    """Hold every weight by how much the outputs for earlier tasks depend on it.

    >>> method = MAS(model, lam=2.0)
    >>> method = MAS(model, lam=4.0, **MAS.paper)  # as in the AGS-CL paper's table

    `end_task` takes `(x, y)` or `x`; its `forward(batch)`, if given, returns the output (samples, …).
    """

    title = "MAS"
    formula = (
        "loss + λ/2 Σ Ω (θ − θ*)²",
        "Ω = E[|∂‖f(x)‖² / ∂θ|] over a task's inputs, added up over tasks",
    )
    search = (SearchAxis("lam", FACTORS),)
    Config = MASConfig
    config: MASConfig
    paper: ClassVar[Mapping[str, Any]] = {"norm": "plain", "batch": 20}

    no_importance_advice = "The output for every sample of the earlier tasks was 0, or does not depend on the weights."

    @property
    def strength(self) -> float:
        return self.config.lam / 2

    def _measure_importances(
        self, protected: dict[str, nn.Parameter], batches: Iterable[Any], forward: Forward
    ) -> Tensors:
        default = forward == self._default_forward

        def score(batch: Any) -> tuple[Tensor, Tensor]:
            assert self.task is not None
            x = batch[0] if isinstance(batch, tuple | list) else batch
            output = self.call_model(x, self.task) if default else forward(batch)
            parts = list(output.values()) if isinstance(output, dict) else [output]
            if not all(isinstance(part, Tensor) and part.dim() > 1 for part in parts):
                raise ValueError("MAS needs outputs of (samples, …): let `forward` return them, not a loss.")
            flat = torch.cat([part.flatten(1) for part in parts], 1)
            sizes = flat.square().sum(1) if self.config.norm == "squared" else torch.linalg.vector_norm(flat, dim=1)
            return sizes.mean().reshape(1), torch.ones(1, dtype=sizes.dtype, device=sizes.device)

        return measure_gradients(
            self.model,
            protected,
            batches,
            score,
            power=1,
            batch_size=self.config.batch if self.config.batch > 1 else None,
            train=self.config.mode == "train",
        )
