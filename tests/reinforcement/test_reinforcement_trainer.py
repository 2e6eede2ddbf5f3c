"""The trainer resumes exactly, and evaluates complete episodes on all tasks learned so far."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium", reason="gymnasium is not installed")

from agscl.methods.agscl import AGSCL
from agscl.methods.ewc import EWC
from agscl.methods.finetune import FineTune
from agscl.methods.si import SI
from agscl.reinforcement.environments import GymEnvironments
from agscl.reinforcement.sequences import load_environments
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.training import TrainingFailed
from small_agents import QUICK, finish, learn_task, make_agent, make_tasks

CONTROL = load_environments("gym", environments="CartPole-v1,FrozenLake-v1:is_slippery=false")


def make_control(method=AGSCL, **options):
    return make_agent(method, CONTROL, replace(QUICK, evaluation_limit=30), **options)


@pytest.mark.parametrize("method", [AGSCL, EWC, SI])
def test_a_run_stopped_after_any_unit_ends_with_the_same_bits(method):
    whole = make_control(method)
    states = []
    while whole.advance():
        states.append(flatten_state(whole.state_dict()))
    expected = finish(whole)
    assert len(states) == 2 * (1 + 4 + 2)  # per task: its begin, four iterations, two evaluations
    for plain, tensors in states[:-1]:
        torch.manual_seed(123)  # whatever the global generator was
        resumed = make_control(method, seed=0)
        resumed.load_state_dict(unflatten_state(plain, dict(tensors)))
        assert finish(resumed) == expected


def test_other_seeds_give_other_results():
    assert finish(make_control()) != finish(make_control(seed=1))


def test_environments_that_cannot_be_restored_are_restarted_and_that_is_said():
    trainer = make_agent(FineTune)
    trainer.advance()
    trainer.advance()
    state, events = trainer.state_dict(), []
    assert state["environments"] == [None, None]
    resumed = make_agent(FineTune)
    resumed.load_state_dict(state)
    resumed.emit = events.append
    resumed.advance()
    assert events[0] == {"event": "environments restarted", "task": 0, "iteration": 1}
    assert events[1]["event"] == "iteration"
    finish(resumed)
    assert [event["event"] for event in events].count("environments restarted") == 1


def test_every_evaluation_covers_the_tasks_learned_so_far_and_the_last_follows_the_end_of_the_task():
    trainer = make_agent(AGSCL)
    finish(trainer)
    found = [(one["task"], one["steps"], len(one["scores"])) for one in trainer.evaluations]
    assert found == [(0, 64, 1), (0, 128, 1), (1, 64, 2), (1, 128, 2)]
    assert trainer.scores == [trainer.evaluations[1]["scores"], trainer.evaluations[3]["scores"]]
    assert trainer.accuracies[1][0] == trainer.scores[1][0] / 5


def test_an_evaluation_plays_one_complete_episode_in_each_environment():
    """The first episodes to end would be the short ones: here, those of the environment that starts last."""
    trainer = make_agent(tasks=make_tasks(1), config=replace(QUICK, evaluation_episodes=5))
    learn_task(trainer)
    with torch.no_grad():
        head = trainer.model.heads["count0"]["actor"]
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1.0, 0.0]))  # always the first action, which is right on even steps
    # Environment i starts with step i of 5: of its steps, 3, 2, 2, 1 and 1 are even.
    assert trainer.evaluate({0: 0}) == pytest.approx([(3 + 2 + 2 + 1 + 1) / 5])


def test_an_environment_whose_episode_is_over_is_not_stepped_any_more(monkeypatch):
    trainer = make_control(FineTune)
    learn_task(trainer)
    step, stepped = GymEnvironments._step_one, Counter()

    def count(self, index, action):
        outcome = step(self, index, action)
        stepped[index] += 1
        return outcome

    monkeypatch.setattr(GymEnvironments, "_step_one", count)
    score = trainer.evaluate({0: 5})[0]  # CartPole: a point for each step
    assert sum(stepped.values()) == score * trainer.config.evaluation_episodes
    assert len(set(stepped.values())) > 1


def test_tasks_evaluated_side_by_side_have_the_scores_they_have_alone():
    trainer = make_control(FineTune)
    learn_task(trainer, tasks=2)
    together = trainer.evaluate({0: 5, 1: 6})
    assert together == [*trainer.evaluate({0: 5}), *trainer.evaluate({1: 6})]
    assert len(set(together)) == 2


def test_an_evaluation_changes_nothing():
    trainer = make_control()
    for _ in range(3):
        trainer.advance()
    before, generator = trainer.state_dict(), torch.get_rng_state()
    trainer.evaluate({0: 1})
    after = trainer.state_dict()
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(before["environments"][0]["actions"], after["environments"][0]["actions"])
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert trainer.model.training


def test_the_learning_rate_falls_linearly_within_each_task():
    trainer, rates = make_agent(), []
    trainer.emit = lambda event: rates.append(event["lr"]) if event["event"] == "iteration" else None
    finish(trainer)
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2] * 2)


def test_divergence_is_an_error():
    trainer = make_agent(config=replace(QUICK, lr=1e30))
    with pytest.raises(TrainingFailed, match="iteration 1"):
        finish(trainer)


def test_progress_counts_steps_and_the_note_says_how_fast():
    trainer, events = make_agent(), []
    trainer.emit = events.append
    assert trainer.progress == 0
    learn_task(trainer)
    assert trainer.progress == 0.5
    iteration = next(event for event in events if event["event"] == "iteration")
    assert iteration["steps_per_second"] > 0
    assert math.isfinite(iteration["kl"])
    note = next(event for event in events if event["event"] == "evaluation")["note"]
    assert note.startswith("task 1 count0, 64 of 128 steps, ")
    assert "steps/s" in note


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        make_agent(tasks=[*make_tasks(1), *make_tasks(1)])


def test_an_unchanged_policy_has_the_same_score_in_every_evaluation():
    trainer = make_control(AGSCL)
    finish(trainer)
    assert trainer.scores[1][0] == trainer.scores[0][0]
    assert {one["scores"][0] for one in trainer.evaluations if one["task"] == 1} == {trainer.scores[0][0]}


def test_each_evaluation_says_which_nodes_are_dormant_and_which_have_no_weights():
    trainer = make_agent(tasks=make_tasks(1))
    trainer.advance()
    trainer.advance()
    first = trainer.model.trunk.layers[0]
    with torch.no_grad():
        first.weight[:3] = 0
        first.bias[:2] = 0
        first.bias[2] = -1  # never fires, with a weight left
        first.bias[3] = 50  # fires whatever it sees
    [layer, second] = trainer.ppo.measure_layers()
    assert layer == {"layer": "trunk.layers.0", "nodes": 12, "dormant": layer["dormant"], "zero": 2}
    assert 3 <= layer["dormant"] < 12
    assert second["zero"] == 0
    learn_task(trainer)
    assert [len(one["layers"]) for one in trainer.evaluations] == [2, 2]
