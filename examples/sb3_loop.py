"""AGS-CL with PPO of Stable-Baselines3 on two environments in turn, fine-tuning beside it.

python examples/sb3_loop.py    # needs .[sb3]; takes a minute or two
"""

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from torch import nn

from agscl import AGSCL, FineTune, MultiHead
from agscl.integrations.sb3 import MultiHeadPolicy, StableBaselinesCallback

STEPS = 10_240


class Mirrored(gymnasium.ObservationWrapper):
    """CartPole as another task: positions and speeds are scaled and change their places."""

    def observation(self, observation):
        return np.float32([3, -1, 2, -1]) * observation[[2, 3, 0, 1]]


environments = {"cartpole": gymnasium.Wrapper, "mirrored": Mirrored}


def learn(make_method):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()))
    method = make_method(model)
    agents = {}
    for task, wrapper in environments.items():
        agents[task] = PPO(
            MultiHeadPolicy,
            Monitor(wrapper(gymnasium.make("CartPole-v1"))),
            policy_kwargs={"model": model, "task": task},  # the agents share the model; each has its head
            learning_rate=1e-3,
            n_steps=256,
            seed=0,
            device="cpu",
        )
        agents[task].learn(STEPS, callback=StableBaselinesCallback(method, task))  # all there is to add
        scores = {name: evaluate_policy(agent, agent.get_env(), 10)[0] for name, agent in agents.items()}
        print("   ".join(f"{name} {score:6.1f}" for name, score in scores.items()))
    return method


print("fine-tuning: mean score of 10 games, after each environment")
learn(FineTune)
print("AGS-CL")
print(learn(lambda model: AGSCL(model, torch.zeros(2, 4))).certificate())
