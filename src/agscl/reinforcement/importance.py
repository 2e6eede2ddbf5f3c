"""What methods differentiate to find the weights that matter to a policy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods.ewc import EWC
from agscl.reinforcement.environments import EnvironmentTask
from agscl.reinforcement.ppo import log_probabilities


def make_importance_forward(model: MultiHead, method: Method, task: EnvironmentTask) -> Forward:
    """`forward` for `method.end_task`, whose batches are (observations, actions taken there).

    EWC: the log-probability of the action taken, sample by sample (the actions were drawn from the policy), or with
    fisher="estimated" or "exact" the policy's logits, from which it takes the expectation over all actions itself.
    Others, MAS among them: the policy's logits and the value.
    """

    def run_model(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        output: dict[str, Tensor] = model(task.prepare(batch[0]), task.name)
        return output

    def run_actor(batch: tuple[Tensor, Tensor]) -> Tensor:
        return run_model(batch)["actor"]

    def score_actions(batch: tuple[Tensor, Tensor]) -> Any:
        return log_probabilities(run_actor(batch), batch[1])

    if isinstance(method, EWC):
        return run_actor if method.config.fisher in ("estimated", "exact") else score_actions
    return run_model
