"""Recordings show what the agent acted on, as small GIFs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed")

from PIL import Image

from agscl.methods.finetune import FineTune
from agscl.reinforcement.recording import Recording, record_episode
from agscl.reinforcement.sequences import load_environments
from agscl.reinforcement.trainer import EVALUATE
from agscl.training.seeds import derive_seed
from small_agents import CountingEnvironments, learn_task, make_agent, make_tasks


class DrawnEnvironments(CountingEnvironments):
    """Their picture is as bright as the count of steps."""

    def render(self):
        return np.full((20, 320, 3), 50 * self.position[0], np.uint8)


def make_noise(pictures, size=(40, 50)):
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)).quantize(32) for _ in range(pictures)]


def test_each_picture_is_of_what_the_agent_acted_on_and_the_score_is_of_these_steps():
    environments = DrawnEnvironments(make_tasks()[0], 1)
    recording = record_episode(environments, lambda observations: np.array([0]), limit=100)
    brightness = [picture.convert("L").getpixel((0, 0)) for picture in recording.pictures]
    assert brightness == [0, 50, 100, 150, 200], "none is of the next episode"
    assert recording.is_complete
    assert recording.score == 3, "the first action is right on even steps"
    assert recording.pictures[0].size == (160, 10)


def test_a_recording_stops_at_its_limit():
    environments = DrawnEnvironments(make_tasks()[0], 1)
    recording = record_episode(environments, lambda observations: np.array([0]), limit=3)
    assert len(recording.pictures) == 3
    assert not recording.is_complete


@pytest.mark.parametrize(
    ("max_bytes", "steps", "pictures", "every"), [(10**6, 40, 40, 1), (48_000, 40, 20, 2), (24_000, 20, 10, 2)]
)
def test_a_recording_that_is_too_large_leaves_out_every_second_picture_then_its_end(
    tmp_path, max_bytes, steps, pictures, every
):
    recording = Recording(make_noise(40), 15.0, 0.0, is_complete=True)
    assert recording.save_gif(tmp_path / "play" / "noise.gif", max_bytes) == steps
    with Image.open(tmp_path / "play" / "noise.gif") as stored:
        assert stored.n_frames == pictures
        assert stored.info["duration"] == pytest.approx(every * 1000 / 15, abs=10), "it is as fast"
    assert (tmp_path / "play" / "noise.gif").stat().st_size <= max_bytes


def test_greedy_play_of_gymnasium_is_the_first_episode_of_an_evaluation():
    pytest.importorskip("pygame", reason="pygame is not installed")
    trainer = make_agent(FineTune, load_environments("gym", environments="CartPole-v1"))
    learn_task(trainer)
    recording = trainer.record_play(0, limit=500)
    assert recording.is_complete
    assert recording.score == len(recording.pictures)
    assert recording.steps_per_second == 50
    assert len(set(recording.pictures[0].convert("L").tobytes())) > 1
    seen, choose = [], trainer._most_probable
    trainer._most_probable = lambda task, rows: seen.append(rows.clone()) or choose(task, rows)
    trainer.record_play(0, limit=1)
    trainer.evaluate({0: derive_seed(trainer.seed, EVALUATE, 0)})
    assert np.array_equal(seen[0][0], seen[1][0])


def test_an_environment_that_cannot_be_drawn_says_what_to_install():
    class DependencyNotInstalled(Exception):
        pass

    def fail():
        raise DependencyNotInstalled("pygame is not installed")

    [task] = load_environments("gym", environments="CartPole-v1")
    environments = task.make(1, 0, training=False)
    environments.environments[0].render = fail
    with pytest.raises(ValueError, match=r"CartPole-v1 cannot be drawn: .*agscl\[play\]"):
        environments.render()


def test_the_picture_of_an_atari_game_is_that_of_what_the_agent_sees():
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    [task] = load_environments("atari", games=["boxing"])
    environments = task.make(2, 3, training=False, render=True)
    environments.reset()
    for step in range(20):
        seen = environments.step(np.array([step % 18, 0])).observations[0, -1]
        picture = environments.render()
        assert picture.shape == (210, 160, 3)
        small = np.asarray(Image.fromarray(picture).convert("L").resize((84, 84)), float)
        assert np.abs(small - seen).mean() < 2
    environments.close()
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3, "in colour"
