"""PPO computes what its paper and the AGS-CL paper's settings say, and none of the authors' code's defects."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from agscl.certificate import NEVER
from agscl.methods.agscl import AGSCL
from agscl.methods.ewc import EWC
from agscl.methods.finetune import FineTune
from agscl.methods.hat import HAT
from agscl.methods.mas import MAS
from agscl.methods.packnet import PackNet
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.methods.si import SI
from agscl.reinforcement import PPOConfig
from agscl.reinforcement.importance import make_importance_forward
from agscl.reinforcement.ppo import Samples, estimate_advantages, log_probabilities, ppo_loss, sample_actions
from agscl.training.engine import WorkRunner
from small_agents import QUICK, finish, learn_task, make_agent, make_tasks


def make_samples(steps: int, environments: int, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(steps, environments, generator=generator)  # noqa: E731
    actions = torch.randint(3, (steps, environments), generator=generator)
    ended = (torch.rand(steps, environments, generator=generator) < 0.3).float()
    return Samples(draw(), actions, draw() - 2, draw(), draw(), ended, draw(), draw())


def test_the_defaults_are_the_papers():
    config = PPOConfig()
    assert config.samples == 8192
    assert config.samples // config.minibatches == 128
    assert config.iterations == 1220
    assert sum(config.is_evaluated(done + 1) for done in range(config.iterations)) == 30
    assert config.is_evaluated(config.iterations)
    assert config.rate_at(0) == 3e-4
    assert 0 < config.rate_at(config.iterations - 1) < 3e-4 / 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatches": 3}, "must divide the 32 samples"),
        ({"steps": 31}, "at least one iteration"),
        ({"evaluations": 5}, "fewer evaluations"),
        ({"gamma": 1.1}, "from 0 to 1"),
        ({"engine": "fast"}, "one of auto"),
        ({"evaluation_limit": 0}, "at least 1 step"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **changes)


def test_advantages_are_the_discounted_sum_of_temporal_differences_up_to_the_end_of_an_episode():
    steps, gamma, gae_lambda = 6, 0.9, 0.8
    samples, last = make_samples(steps, 2), torch.tensor([0.5, -1.0])
    values = torch.cat([samples.values, last[None]])
    expected = torch.zeros(steps, 2)
    for column in range(2):
        for step in range(steps):
            factor = 1.0
            for later in range(step, steps):
                goes_on = 1 - samples.ended[later, column]
                delta = samples.rewards[later, column] + gamma * goes_on * values[later + 1, column]
                expected[step, column] += factor * (delta - values[later, column])
                factor *= gamma * gae_lambda * float(goes_on)
    estimate_advantages(samples, last, gamma, gae_lambda)
    torch.testing.assert_close(samples.returns, expected + samples.values)
    normalised = (expected - expected.mean()) / (expected.std() + 1e-5)  # over the whole rollout
    torch.testing.assert_close(samples.advantages, normalised)


def test_the_loss_is_ppos_with_a_clipped_value():
    samples = make_samples(5, 4)
    batch = samples.take(torch.arange(20))
    logits, values = torch.randn(20, 3), torch.randn(20, 1)
    config = PPOConfig(entropy=0.01)
    loss, figures = ppo_loss({"actor": logits, "critic": values}, batch, config)
    policy, value = 0.0, 0.0
    for i in range(20):
        ratio = math.exp(logits[i].log_softmax(0)[batch.actions[i]] - batch.log_probabilities[i])
        advantage, old, target = (float(x[i]) for x in (batch.advantages, batch.values, batch.returns))
        policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) / 20
        clipped = old + min(max(float(values[i]) - old, -0.2), 0.2)
        value += 0.5 * max((float(values[i]) - target) ** 2, (clipped - target) ** 2) / 20
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert loss.item() == pytest.approx(policy + 0.5 * value - 0.01 * entropy, rel=1e-5)
    assert figures[:3].tolist() == pytest.approx([loss.item(), value, entropy], rel=1e-5)


def test_actions_are_drawn_with_the_policys_probabilities():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -2.0])
    drawn = sample_actions(logits.expand(20_000, 3))
    shares = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.01, rtol=0)
    torch.testing.assert_close(log_probabilities(logits[None], torch.tensor([1])), logits.log_softmax(0)[1:2])


def test_an_agent_learns_a_task_and_a_second_one():
    config = PPOConfig(
        steps=2048, environments=8, rollout=16, epochs=4, minibatches=4, lr=1e-2, evaluations=1, evaluation_episodes=2
    )
    trainer = make_agent(FineTune, config=config, width=32)
    finish(trainer)
    assert trainer.scores[0][0] == 4.5  # one of the two environments starts a step later
    assert trainer.scores[1][1] == 4.5  # one of the two environments starts a step later


def test_a_time_limit_is_no_end_what_it_cut_off_keeps_its_value():
    trainer = make_agent(tasks=make_tasks(1, cut_after=3))
    trainer.advance()
    ppo = trainer.ppo
    ppo.play()
    samples = ppo.samples
    cut = samples.ended.bool()
    assert cut.any()
    with torch.no_grad():
        final = torch.zeros(4, 4)
        final[:, 0], final[:, 1] = 3 / 5, 1.0  # the observation after the third step
        bonus = 0.99 * trainer.model(final, "count0")["critic"][0, 0]
    played = torch.from_numpy(ppo.rewards)
    at_limit = torch.isclose(samples.observations[..., 0], torch.tensor(2 / 5)) & cut
    assert at_limit.any()
    torch.testing.assert_close(samples.rewards[at_limit], played[at_limit] + bonus)
    assert torch.equal(samples.rewards[~cut], played[~cut])


def test_every_sample_is_a_transition_that_was_played():
    trainer = make_agent(tasks=make_tasks(1))
    trainer.advance()
    trainer.ppo.play()
    samples = trainer.ppo.samples
    counts = (samples.observations[..., 0] * 5).round().long()
    following = torch.where(samples.ended.bool(), 0, counts + 1)
    assert torch.equal(counts[1:], following[:-1])
    rewards = (samples.actions == counts % 2).float()
    assert torch.equal(samples.rewards, rewards)


def test_the_method_is_told_how_many_epochs_and_steps_a_task_has():
    trainer = make_agent(FineTune)
    trainer.advance()
    plan = trainer.method.plan
    assert (plan.epochs, plan.steps_per_epoch) == (8, 4)  # 4 iterations of 2 epochs
    ended = []
    plan.end_epoch = lambda: ended.append(plan.steps)
    learn_task(trainer)
    assert ended == [4 * (epoch + 1) for epoch in range(8)]


def test_gradients_are_clipped_over_all_parameters_with_penalties_inside():
    trainer = make_agent(EWC, config=replace(QUICK, max_grad_norm=0.01), lam=1e6, fisher="empirical")
    learn_task(trainer)
    trainer.advance()
    norms = []

    def record_norm(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm())

    trainer.optimizer.register_step_pre_hook(record_norm)
    trainer.advance()
    assert max(norms) <= 0.01 + 1e-6


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (EWC, {"fisher": "empirical"}),
        (EWC, {}),
        (MAS, {}),
        (SI, {}),
        (PaperAGSCL, {}),
        (AGSCL, {}),
        (HAT, {}),
        (PackNet, {}),
    ],
)
def test_methods_run_unchanged(method, settings):
    trainer = make_agent(method, **settings)
    finish(trainer)
    assert len(trainer.scores) == 2
    assert trainer.method.tasks == ["count0", "count1"]


# What the authors' code does otherwise -------------------------------------------------------------------------------


def after_first_task(method=PaperAGSCL, **settings):
    """An agent that has just begun its second task."""
    trainer = make_agent(method, **settings)
    learn_task(trainer)
    trainer.advance()
    return trainer


def test_the_live_policy_is_masked_after_every_step():
    trainer = after_first_task()
    first_task = trainer.method.knowledge.first_task.clone()
    free = [first_task[layer.groups] == NEVER for layer in trainer.method.graph.layers.values()]
    assert all(0 < mask.sum() < len(mask) for mask in free)
    second = list(trainer.model.trunk.layers)[2].weight
    live = []
    trainer.optimizer.register_step_post_hook(lambda *_: live.append(second[~free[1]][:, free[0]].abs().max().item()))
    trainer.advance()
    assert len(live) == 8
    assert max(live) == 0.0


def test_actor_and_critic_read_nothing_from_free_nodes_after_a_task():
    trainer = after_first_task()
    layer = list(trainer.method.graph.layers.values())[-1]
    free = trainer.method.knowledge.first_task[layer.groups] == NEVER
    assert 0 < free.sum() < len(free)
    for part in trainer.model.heads["count0"].values():
        assert torch.equal(part.weight[:, free], torch.zeros_like(part.weight[:, free]))


def test_the_fisher_is_the_mean_square_of_each_samples_own_gradient():
    trainer = make_agent(EWC, fisher="empirical")
    while trainer.iteration < 3:
        trainer.advance()
    kept = {}
    end_task = trainer.method.end_task
    trainer.method.end_task = lambda batches, forward: (kept.update(batches=batches), end_task(batches, forward))
    trainer.advance()  # the last iteration, which ends the task
    model, weight = trainer.model, trainer.model.trunk.layers[0].weight
    expected, count = torch.zeros_like(weight), 0
    for observations, actions in kept["batches"]:
        for observation, action in zip(observations, actions, strict=True):
            log_probability = model(observation[None], "count0")["actor"].log_softmax(1)[0, action]
            expected += torch.autograd.grad(log_probability, weight)[0].square()
            count += 1
    assert count == QUICK.samples
    fisher = trainer.method.knowledge.importances["trunk.layers.0.weight"]
    torch.testing.assert_close(fisher, expected / count)
    assert fisher.any()


def test_importances_are_measured_on_observations_with_the_actions_taken_there():
    trainer = make_agent(MAS, tasks=make_tasks(1))
    while trainer.iteration < 3:
        trainer.advance()
    kept = {}
    end_task = trainer.method.end_task
    trainer.method.end_task = lambda batches, forward: (kept.update(batches=batches), end_task(batches, forward))
    samples, rewards = trainer.ppo.samples, trainer.ppo.rewards
    trainer.advance()
    observations, actions = (torch.cat(parts) for parts in zip(*kept["batches"], strict=True))
    counts = (observations[:, 0] * 5).round().long()
    assert torch.equal((actions == counts % 2).float(), torch.from_numpy(rewards).flatten())
    assert torch.equal(observations, samples.observations.flatten(0, 1))


def test_mas_measures_the_norm_of_the_policys_logits_and_the_value():
    trainer = make_agent(MAS, tasks=make_tasks(1))
    trainer.advance()
    forward = make_importance_forward(trainer.model, trainer.method, trainer.task)
    batch = trainer.ppo.importance_batches()[0]
    output = forward(batch)
    assert set(output) == {"actor", "critic"}
    learn_task(trainer)
    assert trainer.method.knowledge.importances["trunk.layers.0.weight"].any()


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL, AGSCL])
def test_heads_of_earlier_tasks_keep_their_bits(method):
    trainer = after_first_task(method)
    before = {name: value.clone() for name, value in trainer.model.heads["count0"].state_dict().items()}
    first_optimizer = trainer.optimizer
    finish(trainer)
    for name, value in trainer.model.heads["count0"].state_dict().items():
        assert torch.equal(value, before[name]), name
    assert first_optimizer is not trainer.optimizer


def test_each_task_starts_with_an_adam_without_moments_at_the_full_rate():
    trainer = make_agent(FineTune)
    learn_task(trainer)
    trainer.advance()
    assert not trainer.optimizer.state
    assert trainer.optimizer.param_groups[0]["lr"] == QUICK.lr


@pytest.mark.parametrize("method", [PaperAGSCL, AGSCL])
def test_with_frozen_nodes_the_policy_of_an_old_task_keeps_its_bits(method):
    trainer = after_first_task(method)
    x = torch.randn(16, 4)
    trainer.model.eval()
    with torch.no_grad():
        before = trainer.model(x, "count0")
    finish(trainer)
    trainer.model.eval()
    with torch.no_grad():
        after = trainer.model(x, "count0")
    assert trainer.evaluations[-1]["scores"][0] == trainer.scores[0][0]
    for part in before:
        assert torch.equal(before[part], after[part])
    assert trainer.method.certificate().kind == "guaranteed"


def test_the_heads_start_orthogonal_the_actors_nearly_uniform():
    trainer = make_agent()
    trainer.advance()
    head = trainer.model.heads["count0"]
    actor, critic = head["actor"].weight, head["critic"].weight
    torch.testing.assert_close(actor @ actor.T, 1e-4 * torch.eye(2))
    torch.testing.assert_close(critic @ critic.T, torch.ones(1, 1))
    assert not any(part.bias.any() for part in head.values())
    default = nn.Linear(4, 12).weight.abs().max()
    assert trainer.model.trunk.layers[0].weight.abs().max() < 1.1 * default


# Capturing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL, AGSCL])
def test_the_twin_of_captured_steps_learns_the_same(method):
    plain, twin = make_agent(method), make_agent(method, config=replace(QUICK, engine="captured"))
    finish(plain)
    finish(twin)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(twin.model.state_dict()[name], value, msg=name)
    assert plain.scores == twin.scores


@pytest.mark.parametrize("method", [FineTune, AGSCL])
def test_compiled_steps_learn_what_others_learn_and_both_trunk_and_loss_are_compiled(monkeypatch, method):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # needs no compiler of the machine's
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = make_agent(method), make_agent(method, config=replace(QUICK, compile=True))
    finish(plain)
    finish(compiled)
    assert counters["stats"]["unique_graphs"] in (2, 3)  # the trunk, and the loss for each number of actions
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, msg=name)
    assert plain.scores == compiled.scores


class RunnerTwin(WorkRunner):
    """Follows the rule of the runner that captures graphs, run once, then capture, then replay, and notes the steps."""

    def __init__(self):
        super().__init__()
        self.warmed_up, self.steps = set(), []

    def run(self, key, work, may_capture=True):
        if key not in self.graphs:
            captures = key in self.warmed_up and may_capture
            if captures:
                self.graphs[key] = True
            if key == "step":
                self.steps.append("captured" if captures else "run")
        self.warmed_up.add(key)
        work()

    def forget_warm_ups(self):
        self.warmed_up.clear()

    def release(self):
        self.graphs.clear()


@pytest.mark.parametrize(("method", "captures"), [(AGSCL, 1), (PackNet, 2)])
def test_after_a_pruning_that_is_not_in_place_a_step_runs_once_as_it_may_be_compiled_anew(method, captures):
    trainer = make_agent(method)
    trainer.advance()
    runner = trainer.ppo.runner = RunnerTwin()
    versions = set()
    while trainer.task_index < 1:
        trainer.advance()
        versions.add(trainer.method.plan_version)
    assert max(versions) > 0, "it pruned"
    assert runner.steps == ["run", "captured"] * captures


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL, EWC])
def test_an_update_reads_nothing_back_from_the_device(monkeypatch, method):
    trainer = make_agent(method)
    learn_task(trainer)
    trainer.advance()
    trainer.ppo.play()

    def refuse(*_: object) -> None:
        raise AssertionError("an update waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    trainer.ppo.update(1e-3, 0)


def test_methods_that_count_in_python_are_not_captured():
    with pytest.raises(ValueError, match="use engine='plain'"):
        make_agent(AGSCL, prox_every=3, config=replace(QUICK, engine="captured"))


def test_minibatches_cover_the_rollout_once_per_epoch(monkeypatch):
    trainer = make_agent()
    trainer.advance()
    ppo, seen, take = trainer.ppo, [], Samples.take
    ppo.play()
    monkeypatch.setattr(Samples, "take", lambda samples, rows: (seen.append(rows.clone()), take(samples, rows))[1])
    ppo.update(1e-3, 0)
    orders = torch.stack(seen).view(QUICK.epochs, -1)
    assert not torch.equal(orders[0], orders[1])
    assert all(np.array_equal(np.sort(order), np.arange(QUICK.samples)) for order in orders.numpy())
