"""Atari: the paper's games and preprocessing; no transition is learned that was not played."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("ale_py", reason="ale-py is not installed")

from agscl.heads import MultiHead
from agscl.methods.agscl import AGSCL
from agscl.methods.finetune import FineTune
from agscl.networks.atari import AtariTrunk
from agscl.reinforcement.sequences import ATARI_ACTIONS, load_environments
from agscl.reinforcement.trainer import ReinforcementTrainer
from small_agents import QUICK, learn_task


def make_games(game, count, seed, *, training, limit=None):
    [task] = load_environments("atari", games=game)
    return task.make(count, seed, training=training, limit=limit)


def play_randomly(environments, actions, steps, seed=0):
    """The transitions of random play."""
    draw = np.random.default_rng(seed)
    environments.reset()
    return [environments.step(draw.integers(0, actions, environments.count)) for _ in range(steps)]


def test_all_eight_games_have_the_papers_actions_and_inputs():
    tasks = load_environments("atari")
    assert [(task.name, task.actions) for task in tasks] == list(ATARI_ACTIONS.items())
    for task in tasks:
        environments = task.make(1, 0, training=True)
        assert environments._games.single_action_space.n == task.actions, task.name
        observations = environments.reset()
        assert observations.shape == (1, *task.input_shape)
        assert observations.dtype == np.uint8
        environments.close()


def test_the_emulator_is_set_as_the_paper_has_it(monkeypatch):
    import ale_py.vector_env

    given = {}
    made = ale_py.vector_env.ale_py.ALEVectorInterface
    monkeypatch.setattr(
        ale_py.vector_env.ale_py, "ALEVectorInterface", lambda **options: given.update(options) or made(**options)
    )
    make_games("boxing", 1, 0, training=True).close()
    expected = {
        "repeat_action_probability": 0.0,
        "noop_max": 30,
        "frame_skip": 4,
        "maxpool": True,
        "use_fire_reset": True,
        "img_height": 84,
        "img_width": 84,
        "grayscale": True,
        "stack_num": 4,
        "reward_clipping": False,  # signs are taken by the task; scores need the rewards themselves
        "episodic_life": False,  # a lost life ends an episode for the agent, not the game
        "life_loss_info": True,
        "full_action_space": False,
        "max_episode_steps": 108_000,
        "autoreset_mode": "SameStep",
    }
    assert {name: given[name] for name in expected} == expected


def test_observations_are_read_as_numbers_from_0_to_1_and_rewards_by_their_sign():
    [task] = load_environments("atari", games="boxing")
    assert task.prepare(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0.0, 1.0]
    assert task.learned_rewards(np.array([-200, 0, 7])).tolist() == [-1, 0, 1]


def test_a_lost_life_ends_an_episode_for_the_agent_and_the_score_is_of_the_whole_game():
    environments = make_games("demon_attack", 2, 3, training=True)
    total, ends, whole = np.zeros(2), np.zeros(2, int), []
    for transition in play_randomly(environments, 6, 900):
        total += transition.rewards
        ends += transition.ended
        for environment, score in transition.scores:
            assert transition.ended[environment]
            assert score == total[environment]
            whole.append(ends[environment])
            total[environment], ends[environment] = 0, 0
    environments.close()
    assert whole, "no game was completed"
    assert min(whole) >= 4  # lives


def test_in_an_evaluation_a_lost_life_ends_nothing():
    environments = make_games("demon_attack", 2, 3, training=False)
    transitions = play_randomly(environments, 6, 900)
    environments.close()
    assert sum(t.ended.sum() for t in transitions) == sum(len(t.scores) for t in transitions) > 0


def test_every_step_is_a_transition_of_a_game_none_is_made_by_a_reset():
    """Of a reset that took a step of its own, the frame counter would start at, not after, the first frames."""
    environments = make_games("demon_attack", 2, 3, training=True)
    environments.reset()
    draw, games = np.random.default_rng(0), 0
    frames, first = environments._frames.copy(), environments._frames.copy()
    played = np.zeros(2, int)
    for _ in range(900):
        transition = environments.step(draw.integers(0, 6, 2))
        played += 1
        for environment in range(2):
            if any(one == environment for one, _ in transition.scores):
                games += 1
                assert frames[environment] - first[environment] == 4 * (played[environment] - 1), "a step was no play"
                first[environment], played[environment] = environments._frames[environment], 0
        frames = environments._frames.copy()
    environments.close()
    assert games


def test_a_limit_cuts_games_off():
    environments = make_games("boxing", 2, 0, training=False, limit=20)
    transitions = play_randomly(environments, 18, 20)
    assert transitions[-1].cut_off.all()
    assert not transitions[-1].ended.any()
    assert len(transitions[-1].scores) == 2
    environments.close()


def test_the_same_seed_plays_the_same_games():
    def observe(seed):
        environments = make_games("boxing", 2, seed, training=True)
        last = play_randomly(environments, 18, 30)[-1].observations.copy()
        environments.close()
        return last

    assert np.array_equal(observe(1), observe(1))
    assert not np.array_equal(observe(1), observe(2))


def test_an_agent_plays_two_games_and_can_be_resumed():
    config = replace(QUICK, evaluation_limit=10)
    tasks = load_environments("atari", games=["boxing", "demon_attack"])

    def make():
        torch.manual_seed(0)
        model = MultiHead(AtariTrunk(filters=4), features=16)
        return ReinforcementTrainer(model, FineTune(model), tasks, config, seed=0)

    trainer = make()
    trainer.advance()
    trainer.advance()
    assert trainer.ppo.samples.observations.dtype == torch.uint8
    resumed, events = make(), []
    resumed.load_state_dict(trainer.state_dict())
    resumed.emit = events.append
    while resumed.advance():
        pass
    assert events[0]["event"] == "environments restarted"
    assert [len(row) for row in resumed.scores] == [1, 2]


def test_the_old_policy_keeps_its_bits_while_the_next_game_is_learned():
    tasks = load_environments("atari", games=["boxing", "demon_attack"])
    torch.manual_seed(0)
    model = MultiHead(AtariTrunk(filters=8), features=32)
    method = AGSCL(model, torch.zeros(2, 4, 84, 84))
    trainer = ReinforcementTrainer(model, method, tasks, replace(QUICK, evaluation_limit=20), seed=0)
    learn_task(trainer)
    environments = tasks[0].make(4, 5, training=False)
    frames = torch.cat([torch.from_numpy(step.observations) for step in play_randomly(environments, 18, 10)])
    environments.close()

    @torch.no_grad()
    def play_boxing():
        return {name: x.clone() for name, x in model(tasks[0].prepare(frames), "boxing").items()}

    before, weights = play_boxing(), {name: x.clone() for name, x in model.trunk.state_dict().items()}
    while trainer.advance():
        after = play_boxing()
        assert all(torch.equal(before[name], after[name]) for name in ("actor", "critic"))
    assert any(not torch.equal(weights[name], x) for name, x in model.trunk.state_dict().items()), (
        "something is learned"
    )
    assert {one["scores"][0] for one in trainer.evaluations[1:]} == {trainer.scores[0][0]}


def test_a_process_that_ends_in_the_middle_of_games_says_nothing_of_them():
    load = "from agscl.reinforcement.sequences import load_environments"
    make = f"{load}; a = load_environments('atari', games='pong')[0].make(2, 0, training=True)"
    keep = "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(a))"  # as a stopped trainer's frames do
    ended = subprocess.run([sys.executable, "-c", f"{make}; a.reset(); {keep}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "leaked" not in ended.stderr


def test_games_of_an_evaluation_are_the_same_whether_others_were_stopped_or_are_not_there():
    def play(count, stopped=()):
        games, draw = make_games("demon_attack", count, 3, training=False), np.random.default_rng(0)
        last = games.reset()
        for step in range(30):
            if step == 10:
                for index in stopped:
                    games.stop(index)
            last = games.step(draw.integers(0, 6, 4)[:count]).observations
        games.close()
        return last

    assert np.array_equal(play(4)[:1], play(1))
    assert np.array_equal(play(4)[[0, 2]], play(4, stopped=(3, 1))[[0, 2]])
    assert not np.array_equal(play(4)[3], play(4, stopped=(3, 1))[3])


def test_unknown_games_are_refused():
    with pytest.raises(ValueError, match="no game 'Boxing'"):
        load_environments("atari", games="Boxing")
