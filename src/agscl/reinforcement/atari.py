"""Atari games through ALE's own vector environment (extra `atari`; ALE is licensed under GPL-2).

No sticky actions, at most 30 no-ops and FIRE when a game starts, 4 frames per action with the maximum of the last two,
84 × 84 grey, 4 frames stacked. While training, a lost life ends an episode but not the game, as nothing good follows it
in the agent's eyes; rewards are learned from by their sign. Scores are those of whole games.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from agscl.reinforcement.environments import Array, Environments, EnvironmentTask, SeparateEnvironments, Transition

FRAMES_PER_STEP = 4
SCREEN = (210, 160)
"""Height and width of a game's picture."""
MAX_FRAMES = 108_000
"""Half an hour of play, after which ALE cuts off a game."""


@dataclass(frozen=True)
class AtariTask(EnvironmentTask):
    """One game of ALE; `name` is that of its ROM, e.g. star_gunner."""

    def make(
        self, count: int, seed: int, *, training: bool, limit: int | None = None, render: bool = False
    ) -> Environments:
        seeds = np.random.SeedSequence(seed).generate_state(count).astype(np.int64) % 2**31
        make_games = partial(AtariEnvironments, self.name, training=training, limit=limit, render=render)
        return make_games(seeds) if training else SeparateEnvironments([make_games(own) for own in seeds[:, None]])

    def learned_rewards(self, rewards: Array) -> Array:
        return np.sign(rewards)

    def checksum(self) -> int:
        from ale_py import roms

        path = roms.get_rom_path(self.name)
        assert path is not None
        return zlib.crc32(path.read_bytes() + f"ale-py {version('ale-py')}".encode())


class AtariEnvironments(Environments):
    """Games of ALE, one for each seed, played by its own threads. They cannot be restored: a resumed run starts new
    ones."""

    def __init__(
        self, game: str, seeds: Array, *, training: bool, limit: int | None = None, render: bool = False
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.count, self.seeds = len(seeds), seeds
        options: dict[str, Any] = {
            "autoreset_mode": "SameStep",
            "life_loss_info": training,
            "reward_clipping": False,
            "max_num_frames_per_episode": MAX_FRAMES if limit is None else min(MAX_FRAMES, FRAMES_PER_STEP * limit),
        }
        self._games: Any = AtariVectorEnv(game, self.count, **options)
        # ALE shows either what the agent sees or a picture in colour: the same game is played once more for the latter.
        self._screen: Any = None
        if render:
            height, width = SCREEN
            self._screen = AtariVectorEnv(
                game, 1, grayscale=False, img_height=height, img_width=width, stack_num=1, **options
            )
        for games in (self._games, self._screen):
            if games is not None:  # at exit ALE complains of what was not freed, after Ctrl-C say
                weakref.finalize(self, vars(games).pop, "ale", None)
        self._picture = np.zeros((*SCREEN, 3), np.uint8)
        self.returns = np.zeros(self.count)
        self._frames = np.zeros(self.count, np.int64)  # of each game, at its last step

    def reset(self) -> Array:
        self.returns[:] = 0
        observations, info = self._games.reset(seed=self.seeds)
        self._frames = np.array(info["episode_frame_number"])
        if self._screen is not None:
            self._picture = self._screen.reset(seed=self.seeds[:1])[0].reshape(*SCREEN, 3).copy()
        return np.asarray(observations)

    def send(self, actions: Array) -> None:
        actions = np.ascontiguousarray(actions, np.int64)
        self._games.send(actions)
        if self._screen is not None:
            self._screen.send(actions[:1].copy())
            self._picture = self._screen.recv()[0].reshape(*SCREEN, 3).copy()

    def render(self) -> Array:
        assert self._screen is not None, "make the environments with render=True"
        return self._picture

    def receive(self) -> Transition:
        observations, rewards, ended, cut_off, info = self._games.recv()
        self.returns += rewards
        frames = np.array(info["episode_frame_number"])
        game_over = frames <= self._frames  # a new game has begun; a lost life alone lets the frames go on
        self._frames = frames
        scores = tuple((int(index), float(self.returns[index])) for index in np.flatnonzero(game_over))
        self.returns[game_over] = 0
        final = info["final_obs"] if cut_off.any() else None
        return Transition(observations, rewards, ended, cut_off, final, scores)

    def close(self) -> None:
        self._games.close()
        if self._screen is not None:
            self._screen.close()
