"""AGS-CL in the form of its paper, with the settings of its experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agscl.methods._agscl.proximal_schedule import Every
from agscl.methods._agscl.zero_init import ZeroRule
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.methods.agscl import AGSCL, AGSCLConfig

__all__ = ["PaperAGSCL", "PaperAGSCLConfig"]


@dataclass(frozen=True, kw_only=True)
class PaperAGSCLConfig(AGSCLConfig):
    """Settings of AGS-CL; the defaults are the paper's for CIFAR-100. μ and λ must be searched for other data."""

    budget: int | float | None = None
    """None: penalties alone decide how many nodes a task keeps."""
    mu: float = 10.0
    """μ: how strongly free nodes are shrunk; with the rate α, each epoch takes αμ off a node's norm."""
    lam: float = 400.0
    """λ: how strongly important nodes are pulled back, times their importance; inf freezes them for good."""
    rho: float = 0.3
    """ρ: share of each layer's free nodes that get fresh weights after a task."""
    prox_every: Every = "epoch"
    """When the proximal step runs: each epoch, each step or every so many; thresholds are scaled to match."""
    zero_init: ZeroRule | Literal["auto"] = "paper"
    """(I.1) Weights from a later node into an earlier one: 0 for good (paper) or while_free, hidden from earlier_tasks,
    or left (off)."""


class PaperAGSCL(AGSCL):
    """AGS-CL as in its paper: penalties μ and λ, which must be searched, in place of a budget.

    >>> method = PaperAGSCL(model, example_input, mu=10, lam=400, rho=0.3)
    """

    title = "AGS-CL paper"
    formula = (
        "loss + μ Σ_free ‖θ‖ + λ Σ_important Ω ‖θ − anchor‖, by a proximal step each epoch; α: learning rate",
        "free: θ ← (1 − αμ / ‖θ‖)₊ θ",
        "important: θ ← γθ + (1 − γ) anchor, γ = (1 − αλΩ / ‖θ − anchor‖)₊",
        "after a task: Ω ← ηΩ + mean ReLU activation; a node with Ω > 0 is important",
    )
    search = (
        SearchAxis("lam", FACTORS),
        SearchAxis("mu", (0.5, 0.75, 1.5, 2.0)),
        SearchAxis("rho", values=(0.1, 0.2, 0.3, 0.4, 0.5)),
    )
    Config = PaperAGSCLConfig
    min_captured_epochs = 1
    paper: ClassVar[Mapping[str, Any]] = {"zero_init": "while_free", "importance_mode": "train"}
