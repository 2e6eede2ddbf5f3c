"""Sequences of environments: those of gymnasium, and the paper's Atari games."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from agscl.heads import make_task_names
from agscl.reinforcement.atari import AtariTask
from agscl.reinforcement.environments import EnvironmentTask, GymTask, make_gym

ATARI_ACTIONS = {
    "star_gunner": 18,
    "boxing": 18,
    "video_pinball": 9,
    "crazy_climber": 9,
    "gopher": 8,
    "robotank": 18,
    "demon_attack": 6,
    "name_this_game": 6,
}
"""The paper's eight games in its order, and how many actions each has."""
HUMAN_SCORES = {
    "star_gunner": 10250.0,
    "boxing": 12.1,
    "video_pinball": 17667.9,
    "crazy_climber": 35829.4,
    "gopher": 2412.5,
    "robotank": 11.9,
    "demon_attack": 1971.0,
    "name_this_game": 8049.0,
}
"""A person's scores, as papers on Atari agents quote them. Here they are units, which cancel in the paper's ratios."""
CONTROL = ("Acrobot-v1", "CartPole-v1", "FrozenLake-v1:is_slippery=false")
"""Environments that PPO learns in seconds."""
GYM_SCORES = {
    "CartPole": (0.0, 500.0),
    "Acrobot": (-500.0, -80.0),
    "FrozenLake": (0.0, 1.0),
    "MountainCar": (-200.0, -110.0),
}
"""By the name of an environment: the worst score, and a good one. For others: 0, and what gymnasium calls solved."""
REWARD_RANGE = 10.0
"""Rewards of environments in gymnasium are scaled such that a good score and the worst are so far apart."""


def load_environments(name: str, **options: Any) -> tuple[EnvironmentTask, ...]:
    """The tasks of a sequence: "gym" with `environments`, or "atari" with `games` (a list, or text with commas)."""
    loaders = {"gym": load_gym, "atari": load_atari}
    if name not in loaders:
        raise ValueError(f"no sequence of environments is called {name!r}. There are: {', '.join(loaders)}")
    return loaders[name](**options)


def load_gym(environments: str | Sequence[str] = CONTROL) -> tuple[EnvironmentTask, ...]:
    """Environments of gymnasium, by id, with options after a colon, e.g. "FrozenLake-v1:is_slippery=false"."""
    described = [_describe_gym(text) for text in _split_names(environments)]
    names = make_task_names(one["id"] for one in described)
    width = max(one.pop("width") for one in described)
    return tuple(GymTask(name=name, input_shape=(width,), **one) for name, one in zip(names, described, strict=True))


def load_atari(games: str | Sequence[str] = tuple(ATARI_ACTIONS)) -> tuple[EnvironmentTask, ...]:
    """Games of ALE, by the names of their ROMs: by default the paper's eight."""
    if importlib.util.find_spec("ale_py") is None:
        raise ValueError("ale-py is not installed: pip install 'agscl[atari]'")
    return tuple(_describe_game(game) for game in _split_names(games))


def _describe_gym(text: str) -> dict[str, Any]:
    id, _, pairs = text.partition(":")
    options = dict(_read_option(pair) for pair in pairs.split("&") if pair)
    environment = make_gym(id, options)
    try:
        solved = environment.spec.reward_threshold
        low, high = GYM_SCORES.get(id.partition("-")[0], (0.0, solved if solved and solved > 0 else 1.0))
        return {
            "id": id,
            "options": options,
            "actions": _count_actions(id, environment.action_space),
            "width": _measure_width(id, environment.observation_space),
            "low": low,
            "high": high,
            "reward_scale": REWARD_RANGE / (high - low),
        }
    finally:
        environment.close()


def _count_actions(id: str, space: Any) -> int:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete) and space.start == 0:
        return int(space.n)
    raise ValueError(f"{id} has the actions {space}: only discrete ones, counted from 0, can be learned")


def _measure_width(id: str, space: Any) -> int:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete) and space.start == 0:
        return int(space.n)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return int(np.prod(space.shape))
    raise ValueError(f"{id} has the observations {space}: only real numbers, or discrete ones from 0, can be read")


def _describe_game(game: str) -> AtariTask:
    from ale_py import ALEInterface, LoggerMode, roms

    path = roms.get_rom_path(game)
    if path is None:
        raise ValueError(
            f"ALE has no game {game!r}. Names look like star_gunner; the paper's: {', '.join(HUMAN_SCORES)}"
        )
    if (actions := ATARI_ACTIONS.get(game)) is None:
        ALEInterface.setLoggerMode(LoggerMode.Error)
        emulator = ALEInterface()
        emulator.loadROM(path)
        actions = len(emulator.getMinimalActionSet())
    return AtariTask(game, actions, (4, 84, 84), high=HUMAN_SCORES.get(game, 1.0))


def _split_names(names: str | Sequence[str]) -> list[str]:
    found = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if not found or not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"expected the names of environments, not {names!r}")
    return found


def _read_option(pair: str) -> tuple[str, Any]:
    key, equals, text = pair.partition("=")
    if not equals:
        raise ValueError(f"an option of an environment is KEY=VALUE, not {pair!r}")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
