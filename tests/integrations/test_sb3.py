"""PPO of Stable-Baselines3 on one environment after the other: old policies keep their bits."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from agscl import AGSCL, EWC, MAS, FineTune, MultiHead

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed: pip install -e '.[sb3]'")

import gymnasium
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback

from agscl.integrations.sb3 import MultiHeadPolicy, StableBaselinesCallback

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Padded(gymnasium.ObservationWrapper):
    """FrozenLake with as many inputs as CartPole, and more actions than it."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False))
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,))

    def observation(self, state):
        return [(state >> bit) % 2 for bit in range(4)]


def make_model(inputs: int = 4) -> MultiHead:
    torch.manual_seed(0)
    return MultiHead(nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()))


def make_method(kind: type, model: MultiHead):
    settings = {AGSCL: {"example_input": torch.zeros(2, 4)}, EWC: {"lam": 10.0}, MAS: {"lam": 1.0}}
    return kind(model, **settings.get(kind, {}))


def make_agent(model: MultiHead, task: str, environment="CartPole-v1", kind=PPO, **options):
    defaults = {"n_steps": 64, "batch_size": 32, "n_epochs": 2} if kind is PPO else {"n_steps": 64}
    policy = {"model": model, "task": task}
    return kind(MultiHeadPolicy, environment, policy_kwargs=policy, seed=0, device="cpu", **{**defaults, **options})


def logits(agent) -> torch.Tensor:
    agent.policy.set_training_mode(False)
    with torch.no_grad():
        return agent.policy.run_model(X)["actor"]


@pytest.mark.parametrize(
    ("agent", "options"),
    [(PPO, {}), (PPO, {"target_kl": 1e-6, "n_epochs": 4}), (PPO, {"batch_size": 48}), (A2C, {})],
    ids=["ppo", "ppo that stops early", "ppo with a smaller last batch", "a2c"],
)
def test_the_policy_of_an_old_environment_keeps_its_bits(agent, options):
    model = make_model()
    method = make_method(AGSCL, model)
    first = make_agent(model, "cartpole", kind=agent, **options)
    first.learn(256, callback=StableBaselinesCallback(method, "cartpole"))
    before = logits(first), first.policy.predict_values(X)
    second = make_agent(model, "lake", Padded(), kind=agent, **options)
    trunk = model.trunk[0].weight.detach().clone()
    second.learn(256, callback=StableBaselinesCallback(method, "lake"))
    assert torch.equal(logits(first), before[0])
    assert torch.equal(first.policy.predict_values(X), before[1])
    assert not torch.equal(trunk, model.trunk[0].weight), "the second one was learned"
    assert method.certificate().kind == "guaranteed"
    assert [model.heads[task]["actor"].out_features for task in method.tasks] == [2, 4]
    action, _ = first.predict(X[0].numpy())
    assert action in (0, 1)


@pytest.mark.parametrize("kind", [EWC, MAS, FineTune])
def test_other_methods_learn_two_environments_too(kind):
    model = make_model()
    method = make_method(kind, model)
    for task in ("one", "two"):
        make_agent(model, task).learn(128, callback=StableBaselinesCallback(method, task))
    assert method.tasks == ["one", "two"]
    assert method.task is None


def test_an_epoch_is_a_pass_over_the_samples():
    model = make_model()
    method = make_method(FineTune, model)
    ended = []
    method.end_epoch = lambda: ended.append(method.plan.steps)
    make_agent(model, "one", batch_size=32, n_epochs=3).learn(128, callback=StableBaselinesCallback(method, "one"))
    assert ended == [2, 4, 6, 8, 10, 12], "two iterations of three passes, two steps each"


def test_a_plain_callback_of_ones_own_goes_beside_it():
    model = make_model()
    method = make_method(AGSCL, model)
    calls = []
    own = ConvertCallback(lambda local, all_: calls.append(1) or True)
    make_agent(model, "one").learn(64, callback=CallbackList([StableBaselinesCallback(method, "one"), own]))
    assert len(calls) == 64
    assert method.tasks == ["one"]


class Saving(BaseCallback):
    """Saves before each rollout, and ends as a crash does."""

    def __init__(self, callback: StableBaselinesCallback) -> None:
        super().__init__()
        self.callback, self.saved = callback, []

    def _on_rollout_start(self) -> None:
        file = io.BytesIO()
        torch.save(self.callback.state_dict(), file)
        self.saved.append(file.getvalue())
        if len(self.saved) == 4:
            raise ConnectionError("the machine is gone")

    def _on_step(self) -> bool:
        return True


def test_learning_resumed_within_a_task_goes_on_where_it_was_and_keeps_the_old_policy():
    model = make_model()
    method = make_method(AGSCL, model)
    first = make_agent(model, "cartpole")
    first.learn(256, callback=StableBaselinesCallback(method, "cartpole"))
    before = logits(first)
    callback = StableBaselinesCallback(method, "lake")
    saving = Saving(callback)
    with pytest.raises(ConnectionError):
        make_agent(model, "lake", Padded()).learn(512, callback=CallbackList([callback, saving]))
    saved = torch.load(io.BytesIO(saving.saved[-1]), weights_only=True)
    assert saved["timesteps"] == 3 * 64

    model = make_model()  # as in a new process
    method = make_method(AGSCL, model)
    callback, agent = StableBaselinesCallback(method, "lake"), make_agent(model, "lake", Padded())
    callback.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"heads for cartpole: add them before the agent is made"):
        agent.learn(512, callback=callback)
    model = make_model()
    method = make_method(AGSCL, model)
    first = make_agent(model, "cartpole")  # adds its head
    agent = make_agent(model, "lake", Padded())
    callback = StableBaselinesCallback(method, "lake")
    callback.load_state_dict(saved)
    rollouts = Counting()
    agent.learn(512, callback=CallbackList([callback, rollouts]))
    assert rollouts.number == 5, "of eight"
    assert method.tasks == ["cartpole", "lake"]
    assert torch.equal(logits(first), before)
    assert method.certificate().kind == "guaranteed"
    with pytest.raises(RuntimeError, match="'lake' is not being learned now"):
        callback.state_dict()
    with pytest.raises(ValueError, match="a state of task 'lake', not of 'cartpole'"):
        StableBaselinesCallback(method, "cartpole").load_state_dict(saved)


class Counting(BaseCallback):
    number = 0

    def _on_rollout_start(self) -> None:
        self.number += 1

    def _on_step(self) -> bool:
        return True


def test_what_cannot_work_is_refused_with_the_reason():
    model = make_model()
    method = make_method(AGSCL, model)
    plain = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, device="cpu")
    with pytest.raises(ValueError, match=r"needs PPO or A2C with a MultiHeadPolicy.* got PPO with ActorCriticPolicy"):
        plain.learn(64, callback=StableBaselinesCallback(method, "one"))
    agent = make_agent(model, "one")
    with pytest.raises(ValueError, match="policy is for task 'one', the callback for 'two'"):
        agent.learn(64, callback=StableBaselinesCallback(method, "two"))
    with pytest.raises(ValueError, match="that is no part of this MultiHeadPolicy"):
        agent.learn(64, callback=StableBaselinesCallback(make_method(AGSCL, make_model()), "one"))
    with pytest.raises(TypeError, match="needs model=MultiHead"):
        make_agent(nn.Linear(4, 2), "one")
    with pytest.raises(ValueError, match="needs discrete actions, not Box"):
        make_agent(make_model(3), "one", "Pendulum-v1")
    with pytest.raises(TypeError, match="needs a method"):
        StableBaselinesCallback(model, "one")
    assert method.tasks == []
