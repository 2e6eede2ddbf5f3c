"""CPR: classifier-projection regularization (Cha, Hsu, Hwang, Calmon, Moon; ICLR 2021), a term for any loss."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cpr_loss"]


def cpr_loss(output: Tensor, beta: float) -> Tensor:
    """−β times the entropy of softmax(output) (batch, classes), a mean over the batch.

    >>> output = model(x, task)
    >>> loss = F.cross_entropy(output, y) + cpr_loss(output, beta=0.4)

    Up to a constant it is β · KL(softmax(output) ‖ uniform): it keeps a classifier from becoming too sure, which leads
    to wider minima. It keeps no state and goes with every method. The authors use β from 0.1 to 1.
    """
    log_probabilities = torch.log_softmax(output.to(torch.promote_types(output.dtype, torch.float32)), -1)
    return beta * (log_probabilities.exp() * log_probabilities).sum(-1).mean()
