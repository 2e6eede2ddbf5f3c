"""Environments played side by side, and what a task of reinforcement learning is.

An environment whose episode ends starts the next one within the same step. So every step is a transition that was
played, and what it leads to is never the first observation of another episode: that is known to be an end, or the last
observation of an episode that a time limit cut off comes beside it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agscl.training.seeds import derive_seed

Array = NDArray[Any]


@dataclass(frozen=True)
class Transition:
    """What one step of all environments led to."""

    observations: Array
    """(environments, …) what to act on next."""
    rewards: Array
    """(environments,) as the environment gives them, unclipped."""
    ended: Array
    """(environments,) bool: nothing follows, so the value of what follows is 0 (a lost life counts where it should)."""
    cut_off: Array
    """(environments,) bool: a time limit ended the episode, which has a value beyond it."""
    final_observations: Array | None
    """(environments, …) the last observations of the episodes that were cut off; other rows mean nothing."""
    scores: tuple[tuple[int, float], ...]
    """Of each complete episode that ended (a whole game, whatever its lives): its environment and sum of rewards."""


class Environments(ABC):
    """Several environments of a task, stepped together. `send` may return before the step is done."""

    count: int
    stopped: frozenset[int] = frozenset()
    """Those that need not be stepped."""
    steps_per_second: float = 15.0
    """How fast a person would watch it."""

    @abstractmethod
    def reset(self) -> Array:
        """Start all environments; returns their first observations."""

    @abstractmethod
    def send(self, actions: Array) -> None:
        """Begin a step."""

    @abstractmethod
    def receive(self) -> Transition:
        """Wait for the step that was sent."""

    def step(self, actions: Array) -> Transition:
        self.send(actions)
        return self.receive()

    def stop(self, index: int) -> None:
        """Say that nobody looks at this environment any more, so that it need not be stepped."""
        self.stopped |= {index}

    def render(self) -> Array:
        """(height, width, 3) bytes: the picture of the first environment, if these were made with `render`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """What `load_state_dict` needs, or None where environments cannot be restored."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Bring new environments to where others were; returns their observations."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free what the environments hold."""


class SeparateEnvironments(Environments):
    """Environments of which each is stepped by itself, so that any can be stopped; each of `parts` has one.

    For evaluations: what was last seen of an episode that was cut off is not passed on.
    """

    def __init__(self, parts: Sequence[Environments]) -> None:
        self.parts, self.count, self.steps_per_second = parts, len(parts), parts[0].steps_per_second

    def reset(self) -> Array:
        self._observations = np.concatenate([part.reset() for part in self.parts])
        return self._observations

    def send(self, actions: Array) -> None:
        for index in self._playing:
            self.parts[index].send(actions[index : index + 1])

    @property
    def _playing(self) -> list[int]:
        return [index for index in range(self.count) if index not in self.stopped]

    def receive(self) -> Transition:
        observations = self._observations.copy()
        rewards, ended, cut_off = np.zeros(self.count, np.float32), *np.zeros((2, self.count), bool)
        scores: list[tuple[int, float]] = []
        for index in self._playing:
            one = self.parts[index].receive()
            observations[index], rewards[index] = one.observations[0], one.rewards[0]
            ended[index], cut_off[index] = one.ended[0], one.cut_off[0]
            scores += [(index, score) for _, score in one.scores]
        self._observations = observations
        return Transition(observations, rewards, ended, cut_off, None, tuple(scores))

    def render(self) -> Array:
        return self.parts[0].render()

    def close(self) -> None:
        for part in self.parts:
            part.close()


@dataclass(frozen=True)
class EnvironmentTask(ABC):
    """One task of reinforcement learning."""

    name: str
    actions: int
    input_shape: tuple[int, ...]
    """Of one observation, as the network reads it."""
    low: float = 0.0
    """The score that counts as 0."""
    high: float = 1.0
    """The score that counts as 1; results are shown relative to these two."""

    @abstractmethod
    def make(
        self, count: int, seed: int, *, training: bool, limit: int | None = None, render: bool = False
    ) -> Environments:
        """New environments; `limit` cuts off episodes after so many steps, with `render` they have pictures."""

    @abstractmethod
    def checksum(self) -> int:
        """Identifies the task, with the version of what implements it."""

    def learned_rewards(self, rewards: Array) -> Array:
        """The rewards that the agent learns from; scores are sums of the others."""
        return rewards

    @property
    def outputs(self) -> dict[str, int]:
        """What a head of the task has."""
        return {"actor": self.actions, "critic": 1}

    def prepare(self, observations: Tensor) -> Tensor:
        """Observations as the network reads them: bytes as numbers from 0 to 1."""
        return observations.float() / 255 if observations.dtype == torch.uint8 else observations

    def relative_score(self, score: float) -> float:
        """A score relative to `low` and `high`."""
        return (score - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class GymTask(EnvironmentTask):
    """An environment of gymnasium with discrete actions, and flat or discrete observations, padded with zeros."""

    id: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    """What rewards are multiplied by: value losses of very different tasks then have the same size."""

    def make(
        self, count: int, seed: int, *, training: bool, limit: int | None = None, render: bool = False
    ) -> Environments:
        return GymEnvironments(self, count, seed, limit, render=render)

    def make_one(self, render: bool = False) -> Any:
        return make_gym(self.id, {**self.options, "render_mode": "rgb_array"} if render else self.options)

    def checksum(self) -> int:
        return zlib.crc32(f"{self.id} {sorted(self.options.items())} gymnasium {version('gymnasium')}".encode())

    def learned_rewards(self, rewards: Array) -> Array:
        return rewards * np.float32(self.reward_scale)

    def encode(self, observation: Any) -> Array:
        """An observation as a row of numbers: a discrete one as one-hot, and zeros up to the width of the input."""
        row = np.zeros(self.input_shape, np.float32)
        if np.ndim(observation):
            flat = np.asarray(observation, np.float32).ravel()
            row[: flat.size] = flat
        else:
            row[int(observation)] = 1.0
        return row


class GymEnvironments(Environments):
    """Environments of gymnasium, stepped one after the other.

    The seed of every episode follows from the seed, the environment and the number of the episode. So the state of an
    environment is the number of its episode and the actions taken in it: to restore it, they are taken again. That
    holds for every environment that is deterministic once it is seeded.
    """

    def __init__(self, task: GymTask, count: int, seed: int, limit: int | None = None, *, render: bool = False) -> None:
        self.task, self.count, self.seed, self.limit = task, count, seed, limit
        self.environments = [task.make_one(render) for _ in range(count)]
        self.steps_per_second = float(self.environments[0].metadata.get("render_fps", self.steps_per_second))
        self.episodes = [0] * count  # the number of the episode under way, by environment
        self.taken: list[list[int]] = [[] for _ in range(count)]  # its actions
        self.returns = [0.0] * count  # its sum of rewards
        self._sent: Array | None = None

    def reset(self) -> Array:
        return np.stack([self._start_episode(index) for index in range(self.count)])

    def send(self, actions: Array) -> None:
        self._sent = actions

    def receive(self) -> Transition:
        assert self._sent is not None, "send actions first"
        actions, self._sent = self._sent.tolist(), None
        observations = np.zeros((self.count, *self.task.input_shape), np.float32)
        rewards = np.zeros(self.count, np.float32)
        ended, cut_off = np.zeros((2, self.count), bool)
        final, scores = None, []
        for index, action in enumerate(actions):
            if index in self.stopped:
                continue
            observations[index], rewards[index], ended[index], cut_off[index] = self._step_one(index, action)
            if ended[index] or cut_off[index]:
                scores.append((index, self.returns[index]))
                if cut_off[index]:
                    final = np.zeros_like(observations) if final is None else final
                    final[index] = observations[index]
                self.episodes[index] += 1
                observations[index] = self._start_episode(index)
        return Transition(observations, rewards, ended, cut_off, final, tuple(scores))

    def _step_one(self, index: int, action: int) -> tuple[Array, float, bool, bool]:
        observation, reward, ended, cut_off, _ = self.environments[index].step(action)
        self.taken[index].append(action)
        self.returns[index] += float(reward)
        cut_off = cut_off or (self.limit is not None and len(self.taken[index]) >= self.limit)
        return self.task.encode(observation), float(reward), bool(ended), bool(cut_off and not ended)

    def _start_episode(self, index: int) -> Array:
        self.taken[index], self.returns[index] = [], 0.0
        seed = derive_seed(self.seed, index, self.episodes[index]) % 2**31
        return self.task.encode(self.environments[index].reset(seed=seed)[0])

    def render(self) -> Array:
        try:
            return np.asarray(self.environments[0].render(), np.uint8)
        except Exception as error:
            if type(error).__name__ != "DependencyNotInstalled":
                raise
            raise ValueError(f"{self.task.id} cannot be drawn: {error}. Try: pip install 'agscl[play]'") from error

    def state_dict(self) -> dict[str, Any]:
        actions = [action for taken in self.taken for action in taken]
        return {
            "episodes": list(self.episodes),
            "lengths": [len(taken) for taken in self.taken],
            "actions": torch.tensor(actions, dtype=torch.int32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        self.episodes = list(state["episodes"])
        rows = self.reset()
        for index, taken in enumerate(state["actions"].split(state["lengths"])):
            for action in taken.tolist():
                rows[index] = self._step_one(index, action)[0]
        return rows

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


def make_gym(id: str, options: Mapping[str, Any]) -> Any:
    """One environment of gymnasium."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ValueError("gymnasium is not installed: pip install 'agscl[control]'") from error
    try:
        return gymnasium.make(id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"gymnasium cannot make {id!r}: {error}") from error
