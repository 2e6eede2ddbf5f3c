"""PPO of Stable-Baselines3: a policy with an actor and a critic per task, and a callback for a method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from agscl.heads import MultiHead
from agscl.integrations._attach import begin_or_continue, check_method, check_model, differentiates_logits
from agscl.methods._parts.lifecycle import Forward, Method
from agscl.methods.ewc import EWC
from agscl.system.describe import describe_value

__all__ = ["MultiHeadPolicy", "StableBaselinesCallback"]


class MultiHeadPolicy(ActorCriticPolicy):
    """An agent's policy for `task`: a `MultiHead` that all agents share, with an actor and a critic for each task.

    >>> agent = PPO(MultiHeadPolicy, environment, policy_kwargs={"model": model, "task": "cartpole"})

    The trunk gets observations as Stable-Baselines3 prepares them: floats, images divided by 255, one-hot states. The
    head is added here where the model has none for the task. Actions are discrete, as many as the environment has.
    """

    def __init__(self, *args: Any, model: MultiHead, task: str, **options: Any) -> None:
        if not isinstance(model, MultiHead):
            raise TypeError(f"MultiHeadPolicy needs model=MultiHead(trunk), got {describe_value(model)}.")
        self._given = model, task
        super().__init__(*args, **options)

    def _build(self, lr_schedule: Any) -> None:
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"MultiHeadPolicy needs discrete actions, not {self.action_space}.")
        self.model, self.task = self._given
        if self.task not in self.model.heads:
            self.model.add_head(self.task, {"actor": int(self.action_space.n), "critic": 1})
            with torch.no_grad():
                self.model(self.prepare(torch.as_tensor(self.observation_space.sample())[None]), self.task)
            gains = {"actor": 0.01, "critic": 1.0}
            for name, part in self.model.heads[self.task].named_children():
                part.apply(partial(self.init_weights, gain=gains[name]))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def prepare(self, observations: Any) -> Any:
        device = next(self.model.parameters()).device
        return preprocess_obs(observations.to(device), self.observation_space, normalize_images=self.normalize_images)

    def run_model(self, observations: Any) -> dict[str, Tensor]:
        """The policy's outputs: those of the task's actor (batch, actions) and critic (batch, 1)."""
        outputs: dict[str, Tensor] = self.model(self.prepare(observations), self.task)
        return outputs

    # What Stable-Baselines3 calls ------------------------------------------------------------------------------------

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.run_model(obs)
        distribution = self.action_dist.proba_distribution(action_logits=outputs["actor"])
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, outputs["critic"], distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        outputs = self.run_model(obs)
        distribution = self.action_dist.proba_distribution(action_logits=outputs["actor"])
        return outputs["critic"], distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: Any) -> Any:
        return self.action_dist.proba_distribution(action_logits=self.run_model(obs)["actor"])

    def predict_values(self, obs: Any) -> Tensor:
        return self.run_model(obs)["critic"]


class StableBaselinesCallback(BaseCallback):
    """Learns `task` with `method` during one `learn` of PPO or A2C; make an agent and a callback for each task.

    >>> agent.learn(100_000, callback=StableBaselinesCallback(method, "cartpole"))

    `method` was made of the model that the agents' `MultiHeadPolicy` shares. Importances are measured on the last
    rollout; `forward(batch)` replaces what is differentiated there, for batches (observations, actions).
    """

    def __init__(self, method: Method, task: str, *, forward: Forward | None = None) -> None:
        super().__init__()
        check_method(method, type(self).__name__)
        self.method, self.task, self.forward = method, task, forward
        self._steps = self._steps_per_epoch = 0
        self._handle: RemovableHandle | None = None
        self._loaded: dict[str, Any] | None = None  # a saved state, until there is an agent

    def state_dict(self) -> dict[str, Any]:
        """All that Stable-Baselines3's `learn` needs to continue within a task: weights, moments, timesteps, method."""
        if self.method.task != self.task:
            raise RuntimeError(f"Task {self.task!r} is not being learned now: save within `learn`, e.g. by a callback.")
        return {
            "task": self.task,
            "timesteps": self.model.num_timesteps,
            "steps": self._steps,
            "weights": self.method.model.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "method": self.method.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the agent's next `learn` continue with a saved state; the policy has the earlier tasks' heads by now."""
        if state_dict["task"] != self.task:
            raise ValueError(f"This is a state of task {state_dict['task']!r}, not of {self.task!r}.")
        self._loaded = state_dict

    def _init_callback(self) -> None:
        agent = self.model
        if not isinstance(agent, OnPolicyAlgorithm) or not isinstance(agent.policy, MultiHeadPolicy):
            raise ValueError(
                f"{type(self).__name__} needs PPO or A2C with a MultiHeadPolicy, which has a head for each task; got "
                f"{type(agent).__name__} with {type(agent.policy).__name__}. Make it with PPO(MultiHeadPolicy, …, "
                "policy_kwargs={'model': model, 'task': task})."
            )
        if agent.policy.task != self.task:
            raise ValueError(f"The agent's policy is for task {agent.policy.task!r}, the callback for {self.task!r}.")
        check_model(self.method, agent.policy)
        if self._loaded is not None:
            held = {name.split(".")[1] for name in self._loaded["weights"] if name.startswith("heads.")}
            if missing := sorted(held - set(agent.policy.model.heads)):
                raise ValueError(
                    f"The saved model has heads for {', '.join(missing)}: add them before the agent is made, e.g. "
                    f"model.add_head({missing[0]!r}, {{'actor': actions, 'critic': 1}})."
                )

    def _on_training_start(self) -> None:
        agent = self.model
        samples = agent.n_steps * agent.n_envs
        passes = getattr(agent, "n_epochs", 1)
        self._steps_per_epoch = math.ceil(samples / getattr(agent, "batch_size", samples))
        if self._loaded is not None:
            self._resume(agent, self._loaded)
            self._loaded = None
        iterations = max(1, math.ceil((agent._total_timesteps - agent.num_timesteps) / samples))
        begin_or_continue(
            self.method,
            self.task,
            [agent.policy.optimizer],
            epochs=iterations * passes,
            steps_per_epoch=self._steps_per_epoch,
        )
        self._handle = agent.policy.optimizer.register_step_post_hook(self._after_step)  # after the method's own

    def _resume(self, agent: OnPolicyAlgorithm, state: dict[str, Any]) -> None:
        self.method.model.load_state_dict(state["weights"])
        self.method.load_state_dict(state["method"], agent.policy.optimizer)
        agent.policy.optimizer.load_state_dict(state["optimizer"])
        agent.num_timesteps, self._steps = state["timesteps"], state["steps"]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps == self._steps_per_epoch:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._steps = 0
        self.method.end_epoch()

    def _on_rollout_end(self) -> None:
        if self._steps:  # PPO stopped a pass early (target_kl)
            self._end_epoch()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self._steps:
            self._end_epoch()
        if self._handle is not None:
            self._handle.remove()
        self.method.end_task(self._batches, self.forward or self._forward)

    def _batches(self) -> Iterator[tuple[Any, Tensor]]:
        """The last rollout: observations, and the actions taken there."""
        agent = self.model
        for samples in agent.rollout_buffer.get(getattr(agent, "batch_size", None)):
            yield samples.observations, samples.actions

    def _forward(self, batch: tuple[Any, Tensor]) -> Any:
        """For EWC the log-probability of the action taken, or the logits where it weighs all actions itself."""
        outputs = self.model.policy.run_model(batch[0])
        if not isinstance(self.method, EWC):
            return outputs
        if differentiates_logits(self.method):
            return outputs["actor"]
        actions = batch[1].long().flatten()
        return -nn.functional.cross_entropy(outputs["actor"], actions, reduction="none")
