"""Environments of gymnasium: what is played, and that it can be restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="gymnasium is not installed")

from agscl.reinforcement.environments import GymTask
from agscl.reinforcement.sequences import load_environments


def load(*names: str) -> tuple[GymTask, ...]:
    return load_environments("gym", environments=list(names))


def test_inputs_are_padded_to_a_common_width_and_discrete_observations_are_one_hot():
    cart, lake = load("CartPole-v1", "FrozenLake-v1:is_slippery=false")
    assert cart.input_shape == lake.input_shape == (16,)
    assert (cart.actions, lake.actions) == (2, 4)
    rows = cart.make(3, 0, training=True).reset()
    assert rows[:, :4].all()
    assert not rows[:, 4:].any()
    assert lake.make(2, 0, training=True).reset().tolist() == [[1.0] + [0.0] * 15] * 2


def test_the_same_environment_may_be_two_tasks():
    assert [task.name for task in load("CartPole-v1", "CartPole-v1")] == ["CartPole-v1", "CartPole-v1-2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendulum-v1", "only discrete ones"),
        ("Blackjack-v1", "only real numbers"),
        ("NoSuch-v0", "cannot make"),
        ("CartPole-v1:unknown=1", "cannot make"),
        ("CartPole-v1:unknown", "KEY=VALUE"),
        ("", "names of environments"),
    ],
)
def test_what_cannot_be_learned_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


def test_an_episode_ends_and_the_next_begins_within_one_step():
    [task] = load("CartPole-v1")
    environments = task.make(2, 0, training=True)
    environments.reset()
    rewards, scores, steps = 0.0, [], 0
    while not scores:
        transition = environments.step(np.array([1, 0]))
        rewards, steps = rewards + transition.rewards, steps + 1
        scores = list(transition.scores)
    environment, score = scores[0]
    assert transition.ended[environment]
    assert not transition.cut_off.any()
    assert transition.final_observations is None
    assert score == rewards[environment] == steps
    assert np.abs(transition.observations[environment]).max() <= 0.05  # where episodes of CartPole begin


def test_a_time_limit_cuts_an_episode_off_and_keeps_its_last_observation():
    [task] = load("Acrobot-v1")
    environments = task.make(2, 0, training=False, limit=7)
    environments.reset()
    for _ in range(7):
        transition = environments.step(np.array([0, 2]))
    assert transition.cut_off.all()
    assert not transition.ended.any()
    assert transition.scores == ((0, -7.0), (1, -7.0))
    assert not np.array_equal(transition.final_observations, transition.observations)


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "FrozenLake-v1:is_slippery=true"])
def test_restored_environments_go_on_exactly(name):
    [task] = load(name)
    draw = np.random.default_rng(0)
    environments = task.make(3, 5, training=True)
    environments.reset()
    for _ in range(60):
        before = environments.step(draw.integers(0, task.actions, 3))
    restored = task.make(3, 5, training=True)
    assert np.array_equal(restored.load_state_dict(environments.state_dict()), before.observations)
    assert restored.returns == environments.returns
    for _ in range(60):
        actions = draw.integers(0, task.actions, 3)
        first, second = environments.step(actions), restored.step(actions)
        for name in vars(first):
            assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_the_state_of_environments_is_small_and_holds_no_objects():
    [task] = load("CartPole-v1")
    environments = task.make(2, 0, training=True)
    environments.reset()
    environments.step(np.array([0, 1]))
    state = environments.state_dict()
    assert state["episodes"] == [0, 0]
    assert state["lengths"] == [1, 1]
    assert torch.equal(state["actions"], torch.tensor([0, 1], dtype=torch.int32))


def test_other_seeds_give_other_episodes():
    [task] = load("CartPole-v1")
    first, second = (task.make(2, seed, training=True).reset() for seed in (0, 1))
    assert len({tuple(row) for row in [*first, *second]}) == 4


def test_rewards_are_scaled_to_the_range_of_scores_and_scores_are_not():
    cart, acrobot = load("CartPole-v1", "Acrobot-v1")
    assert cart.learned_rewards(np.ones(1, np.float32)) == pytest.approx(10 / 500)
    assert cart.relative_score(250.0) == 0.5
    assert acrobot.relative_score(-500.0) == 0.0
