"""GPM: gradient projection memory (Saha, Garg, Roy; ICLR 2021).

Each layer keeps a basis of the directions in which old tasks' inputs lie. A later task may change a layer's weights
only orthogonally to them, so the layer's outputs for old inputs stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.subspaces import SubspaceConfig, SubspaceMethod, extend_basis

__all__ = ["GPM", "GPMConfig"]


@dataclass(frozen=True, kw_only=True)
class GPMConfig(SubspaceConfig):
    """Settings of GPM; the defaults are those of its paper for CIFAR-100."""


class GPM(SubspaceMethod):
    """Learn new tasks with weight changes orthogonal to the inputs of the old ones.

    >>> method = GPM(model, threshold=0.97)

    Gradients are projected before each step. Adam, momentum and weight decay still leave the subspace, so after the
    step the total change since the task began is projected too. Biases, BatchNorm and whatever is
    no Linear or Conv weight are trained by the first task and keep their bits afterwards, and so does a layer that did
    not run while inputs were collected.
    """

    title = "GPM"
    formula = (
        "g ← g − g B Bᵀ for each layer, and so the total change of its weights since the task began",
        "B: the directions that hold the share ε of the energy of the old tasks' inputs to the layer",
    )
    search = (SearchAxis("threshold", values=(0.9, 0.95, 0.97, 0.99)),)
    Config = GPMConfig
    config: GPMConfig

    def _extend_basis(self, name: str, inputs: Tensor, threshold: float) -> Tensor:
        return extend_basis(self.knowledge.bases.get(name), inputs, threshold)
