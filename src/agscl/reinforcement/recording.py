"""Greedy play as an animated picture (GIF), small enough to send around."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agscl.reinforcement.environments import Array, Environments
from agscl.system.files import write_atomically

WIDTH = 160
"""Of pictures; wider ones are made smaller."""
COLOURS = 32
MAX_BYTES = 10**6
"""The most that a run's recordings may have together: a page holds as much."""


@dataclass(frozen=True)
class Recording:
    """The pictures of one episode, or of its beginning."""

    pictures: Sequence[Any]
    """One of PIL for each step: what the agent acted on."""
    steps_per_second: float
    score: float
    """The sum of rewards up to the last picture."""
    is_complete: bool
    """Whether the episode ended."""

    def save_gif(self, path: Path, max_bytes: int = MAX_BYTES) -> int:
        """Write a file of at most `max_bytes`, or of one picture; returns how many steps it shows.

        Where it would be larger, every second picture is left out, then the later half of the steps, again and again.
        """
        steps, every = len(self.pictures), 1
        while len(data := self._encode(steps, every)) > max_bytes and steps > 1:
            steps, every = steps if every == 1 else math.ceil(steps / 2), 2
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        return steps

    def _encode(self, steps: int, every: int) -> bytes:
        chosen, file = self.pictures[:steps:every], io.BytesIO()
        duration = max(20, round(1000 * every / self.steps_per_second))  # viewers show shorter ones more slowly
        chosen[0].save(file, "GIF", save_all=True, append_images=chosen[1:], duration=duration, loop=0)
        return file.getvalue()


def record_episode(environments: Environments, choose_actions: Callable[[Array], Array], limit: int) -> Recording:
    """Play the first of `environments`, which have pictures, until its episode ends, for at most `limit` steps."""
    pictures, score = [], 0.0
    observations = environments.reset()
    for _ in range(limit):
        pictures.append(_shrink_picture(environments.render()))
        transition = environments.step(choose_actions(observations))
        observations, score = transition.observations, score + float(transition.rewards[0])
        if any(environment == 0 for environment, _ in transition.scores):
            return Recording(pictures, environments.steps_per_second, score, is_complete=True)
    return Recording(pictures, environments.steps_per_second, score, is_complete=False)


def _shrink_picture(pixels: Array) -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ValueError("recordings need Pillow: pip install 'agscl[play]'") from error
    picture = Image.fromarray(pixels)
    if picture.width > WIDTH:
        picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.BOX)
    return picture.quantize(COLOURS, dither=Image.Dither.NONE)
