"""PPO (Schulman et al., 2017) on one task, from top to bottom: play, advantages, loss, update.

An iteration plays `rollout` steps in every environment, then goes over these samples `epochs` times in mini-batches.
The continual-learning method acts in the optimizer's hooks, as in any other loop; one of its epochs is a pass over the
samples. All samples stay on the device, observations as they came (bytes, for images). An update launches the same work
with the same shapes again and again and reads nothing back, so on a GPU it is captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam

from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Method
from agscl.reinforcement.config import PPOConfig
from agscl.reinforcement.dormant_nodes import measure_layers
from agscl.reinforcement.environments import Array, Environments, EnvironmentTask, Transition
from agscl.system.host_copies import copy_to_host
from agscl.training.engine import StepCompiler, WorkRunner
from agscl.training.seeds import derive_seed

FIGURES = ("loss", "value_loss", "entropy", "clipped", "kl")
"""What an update reports, each as a mean over its mini-batches."""


# The agent -----------------------------------------------------------------------------------------------------------


def add_actor_critic(model: MultiHead, task: EnvironmentTask) -> None:
    """Add the head of a task: a policy that starts nearly uniform, and a value."""
    head = model.add_head(task.name, task.outputs)
    assert isinstance(head, nn.ModuleDict)
    for name, gain in (("actor", 0.01), ("critic", 1.0)):
        layer = head[name]
        assert isinstance(layer, nn.Linear)
        # Orthogonal on the CPU: the same weights on every device.
        weight = nn.init.orthogonal_(torch.empty(layer.weight.shape), gain)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.zero_()


def sample_actions(logits: Tensor) -> Tensor:
    """(samples,) actions drawn from the policy: with E ~ Exp(1), argmax(logit − log E) has its probabilities."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(1)


def log_probabilities(logits: Tensor, actions: Tensor) -> Tensor:
    """(samples,) log π(action | observation)."""
    return logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)


# What is learned from ------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """What was played in one iteration: (rollout, environments, …) on the device."""

    observations: Tensor
    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    rewards: Tensor
    ended: Tensor
    """1 where the step after this one belongs to another episode."""
    advantages: Tensor
    returns: Tensor

    @classmethod
    def allocate(cls, config: PPOConfig, task: EnvironmentTask, dtype: torch.dtype, device: torch.device) -> Samples:
        shape = (config.rollout, config.environments)
        floats = [torch.zeros(shape, device=device) for _ in range(6)]
        return cls(
            torch.zeros(*shape, *task.input_shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=torch.long, device=device),
            *floats,
        )

    def take(self, rows: Tensor) -> Batch:
        """These rows of all samples."""
        return Batch(*(getattr(self, name).flatten(0, 1)[rows] for name in Batch._fields))


class Batch(NamedTuple):
    """What the loss reads of some samples: (samples, …)."""

    observations: Tensor
    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def estimate_advantages(samples: Samples, last_values: Tensor, gamma: float, gae_lambda: float) -> None:
    """Fill in advantages (GAE) and returns; advantages are then normalised over the whole rollout."""
    advantage, next_values = torch.zeros_like(last_values), last_values
    for step in range(len(samples.rewards) - 1, -1, -1):
        goes_on = 1 - samples.ended[step]
        delta = samples.rewards[step] + gamma * goes_on * next_values - samples.values[step]
        advantage = delta + gamma * gae_lambda * goes_on * advantage
        samples.advantages[step] = advantage
        next_values = samples.values[step]
    torch.add(samples.advantages, samples.values, out=samples.returns)
    samples.advantages.sub_(samples.advantages.mean()).div_(samples.advantages.std() + 1e-5)


def ppo_loss(output: dict[str, Tensor], batch: Batch, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """The loss of a mini-batch, and its `FIGURES`."""
    log_policy, values = output["actor"].float().log_softmax(1), output["critic"].float().squeeze(1)
    log_ratio = log_policy.gather(1, batch.actions[:, None]).squeeze(1) - batch.log_probabilities
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped_ratio * batch.advantages).mean()

    clipped_values = batch.values + (values - batch.values).clamp(-config.clip, config.clip)
    errors = (values - batch.returns).square(), (clipped_values - batch.returns).square()
    value_loss = 0.5 * torch.maximum(*errors).mean()

    with torch.set_grad_enabled(config.entropy > 0 and torch.is_grad_enabled()):
        entropy = -(log_policy.exp() * log_policy).sum(1).mean()
    loss = policy_loss + config.value_coefficient * value_loss - config.entropy * entropy
    with torch.no_grad():
        clipped = ((ratio - 1).abs() > config.clip).float().mean()
        kl = (ratio - 1 - log_ratio).mean()
        return loss, torch.stack([loss, value_loss, entropy, clipped, kl])


# One task ------------------------------------------------------------------------------------------------------------


class Lane:
    """Some of the environments: while they are stepped, the network acts for the other lanes."""

    def __init__(self, environments: Environments, columns: slice, observations: Array, device: torch.device) -> None:
        self.environments, self.columns = environments, columns
        self.observations = observations  # on the host, to act on next
        first = torch.from_numpy(observations)
        self.inputs = torch.empty(first.shape, dtype=first.dtype, device=device)
        self.actions = torch.zeros(len(first), dtype=torch.long, device=device)
        self.log_probabilities, self.values = torch.zeros(2, len(first), device=device)
        self.is_sent = False


class PPO:
    """Learns one task: `play`, then `update`, once per iteration."""

    def __init__(
        self,
        model: MultiHead,
        method: Method,
        task: EnvironmentTask,
        optimizer: Adam,
        config: PPOConfig,
        lanes: Sequence[Lane],
        runner: WorkRunner,
        compiler: StepCompiler,
    ) -> None:
        self.model, self.method, self.task, self.optimizer = model, method, task, optimizer
        self.config, self.lanes, self.runner, self.compiler = config, lanes, runner, compiler
        self.compute_loss = compiler.compile_function(ppo_loss)
        self.device = lanes[0].inputs.device
        self.samples = Samples.allocate(config, task, lanes[0].inputs.dtype, self.device)
        self.rewards, self.ended = np.zeros((2, config.rollout, config.environments), np.float32)  # on the host
        size = config.samples // config.minibatches
        self.order = torch.zeros(config.samples, dtype=torch.long, device=self.device)  # of an epoch
        self.position = torch.zeros((), dtype=torch.long, device=self.device)  # of the next mini-batch in it
        self.offsets = torch.arange(size, device=self.device)
        self.last_values = torch.zeros(config.environments, device=self.device)
        self.figures = torch.zeros(len(FIGURES), device=self.device)
        self._plan_version = method.plan_version

    def forward(self, observations: Tensor) -> dict[str, Tensor]:
        """The policy's logits and the value of each observation."""
        if self.config.channels_last and observations.dim() == 4:  # while they are bytes, a quarter of the work
            observations = observations.contiguous(memory_format=torch.channels_last)
        with self._autocast():
            output: dict[str, Tensor] = self.model(self.task.prepare(observations), self.task.name)
        return output

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    # Playing

    @torch.no_grad()
    def play(self) -> list[float]:
        """Play `rollout` steps in all environments; returns the scores of the episodes that were completed."""
        scores: list[float] = []
        self.samples.rewards.zero_()
        with self.runner.on_stream():
            for step in range(self.config.rollout):
                for lane in self.lanes:
                    if lane.is_sent:
                        scores += self._receive(lane, step - 1)
                    self._act(lane, step)
            for lane in self.lanes:
                scores += self._receive(lane, self.config.rollout - 1)
                lane.inputs.copy_(torch.from_numpy(lane.observations))
                self.last_values[lane.columns] = self.forward(lane.inputs)["critic"].float().squeeze(1)
            self.samples.rewards += torch.from_numpy(self.rewards).to(self.device)
            self.samples.ended.copy_(torch.from_numpy(self.ended))
        return scores

    def _act(self, lane: Lane, step: int) -> None:
        """Draw the lane's next actions, send them to its environments, and record what they were drawn from."""
        lane.inputs.copy_(torch.from_numpy(lane.observations))
        self.runner.run(("act", lane.columns.start), lambda: self._choose(lane))
        lane.environments.send(copy_to_host(lane.actions).numpy())
        lane.is_sent = True
        samples = self.samples
        samples.observations[step, lane.columns] = lane.inputs
        samples.actions[step, lane.columns] = lane.actions
        samples.log_probabilities[step, lane.columns] = lane.log_probabilities
        samples.values[step, lane.columns] = lane.values

    def _choose(self, lane: Lane) -> None:
        output = self.forward(lane.inputs)
        logits = output["actor"].float()
        lane.actions.copy_(sample_actions(logits))
        lane.log_probabilities.copy_(log_probabilities(logits, lane.actions))
        lane.values.copy_(output["critic"].float().squeeze(1))

    def _receive(self, lane: Lane, step: int) -> list[float]:
        """Wait for the step that was sent; returns the scores of completed episodes."""
        transition: Transition = lane.environments.receive()
        lane.observations, lane.is_sent = transition.observations, False
        self.rewards[step, lane.columns] = self.task.learned_rewards(transition.rewards)
        self.ended[step, lane.columns] = transition.ended | transition.cut_off
        if transition.final_observations is not None:  # what a time limit cut off would have been worth
            final = torch.from_numpy(transition.final_observations).to(self.device)
            values = self.forward(final)["critic"].float().squeeze(1)
            cut_off = torch.from_numpy(transition.cut_off).to(self.device)
            self.samples.rewards[step, lane.columns] = torch.where(cut_off, self.config.gamma * values, 0.0)
        return [score for _, score in transition.scores]

    # Learning

    def update(self, rate: float, *seed: int) -> None:
        """Go over the samples `epochs` times; `seed` determines the order of each. Launches work, and waits for none.

        The method's epochs are these.
        """
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        with self.runner.on_stream():
            self.runner.run("advantages", self._estimate_advantages)
            for epoch in range(self.config.epochs):
                self._shuffle(derive_seed(*seed, epoch))
                for _ in range(self.config.minibatches):
                    self._run_step()
                self._end_epoch()

    def _shuffle(self, seed: int) -> None:
        pinned = self.device.type == "cuda"  # only from pinned memory may a copy be left pending
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.config.samples, generator=generator, pin_memory=pinned)
        self.order.copy_(order, non_blocking=pinned)
        self.position.zero_()

    @torch.no_grad()
    def _estimate_advantages(self) -> None:
        estimate_advantages(self.samples, self.last_values, self.config.gamma, self.config.gae_lambda)
        self.figures.zero_()

    def _run_step(self) -> None:
        version = self.compiler.version
        self.runner.run("step", self._step)
        if self.compiler.version != version:
            self.runner.forget_warm_ups()

    def _step(self) -> None:
        """One optimizer step on the next mini-batch; the method acts in the optimizer's hooks."""
        batch = self.samples.take(self.order[self.position + self.offsets])
        self.position += len(self.offsets)
        with self.compiler.trunk_context():
            output = self.forward(batch.observations)
        loss, figures = self.compute_loss(output, batch, self.config)
        if type(self.method).loss is not Method.loss:
            loss = loss + self.method.loss(self.task.prepare(batch.observations), output)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.method.add_penalty_gradients()  # before the clip, as in the paper's loop
        nn.utils.clip_grad_norm_(self._trained(), self.config.max_grad_norm)
        self.optimizer.step()
        self.figures += figures / (self.config.epochs * self.config.minibatches)

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _end_epoch(self) -> None:
        method = self.method
        if method.end_epoch_capturable and "end_epoch" in method.needs:  # of others nothing is launched there
            # Not before a step is captured: methods hand tensors of the last captured step to the end of the epoch.
            self.runner.run("end of epoch", method.end_epoch, may_capture="step" in self.runner.graphs)
            return
        method.end_epoch()
        if method.plan_version != self._plan_version:  # a step does something else from now on
            self._plan_version = method.plan_version
            if not method.prunes_in_place:
                self.release_graphs()
                self.runner.forget_warm_ups()  # what is compiled may have to be compiled anew: not within a capture

    def release_graphs(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # gradients lie in the memory of a graph
        self.runner.release()

    def read_figures(self) -> dict[str, float]:
        """The figures of the last update; waits for it."""
        return dict(zip(FIGURES, copy_to_host(self.figures).tolist(), strict=True))

    # What was learned

    def measure_layers(self, samples: int = 1024) -> list[dict[str, Any]]:
        """What some of the last iteration's observations show of the network's layers; waits for the device."""
        observations = self.samples.observations.flatten(0, 1)[:samples]
        return measure_layers(self.model, lambda: self.forward(observations))

    def importance_batches(self, size: int = 256) -> list[tuple[Tensor, Tensor]]:
        """The samples of the last iteration: observations, each with the action taken there."""
        samples = [x.flatten(0, 1).split(size) for x in (self.samples.observations, self.samples.actions)]
        return list(zip(*samples, strict=True))
