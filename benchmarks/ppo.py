"""Environment steps per second, training included: our PPO beside Stable-Baselines3's, on the same network and games.

    python benchmarks/ppo.py                                   # two cores, small iterations, both libraries
    python benchmarks/ppo.py --device cuda --paper --fast      # the paper's settings: captured beside eager

Stable-Baselines3 (pip install stable-baselines3) is left out where it is not installed. The contenders take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measured import record
from timing import summary

from agscl.heads import MultiHead
from agscl.methods.agscl import AGSCL
from agscl.methods.finetune import FineTune
from agscl.networks.atari import AtariTrunk
from agscl.reinforcement import EnvironmentTask, PPOConfig
from agscl.reinforcement.sequences import load_environments
from agscl.reinforcement.trainer import ReinforcementTrainer

SMALL = PPOConfig(steps=10**6, environments=16, rollout=32, epochs=2, minibatches=4, evaluations=1)
PAPER = PPOConfig(evaluations=1)
Iterate = Callable[[], object]


class Ours(NamedTuple):
    """One iteration of ours per call."""

    trainer: ReinforcementTrainer

    def __call__(self) -> object:
        return self.trainer.advance()


def make_ours(config: PPOConfig, task: EnvironmentTask, device: str, filters: int, method: str = "finetune") -> Ours:
    torch.manual_seed(0)
    trunk = AtariTrunk(filters)
    model = MultiHead(trunk, features=trunk.features).to(device)
    example = torch.zeros(2, *task.input_shape, device=device)
    chosen = AGSCL(model, example) if method == "agscl" else FineTune(model)
    trainer = ReinforcementTrainer(model, chosen, [task], config, seed=0, device=device)
    trainer.advance()  # begins the task
    return Ours(trainer)


def make_stable_baselines(config: PPOConfig, task: EnvironmentTask, device: str, filters: int) -> Iterate:
    """One iteration of Stable-Baselines3's PPO per call, with the same settings."""
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecEnv

    class Features(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 4 * filters)
            self.trunk = AtariTrunk(filters)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x)

    class Games(VecEnv):
        def __init__(self) -> None:
            self.games = task.make(config.environments, 0, training=True)
            space = spaces.Box(0, 255, task.input_shape, np.uint8)
            super().__init__(config.environments, space, spaces.Discrete(task.actions))

        def reset(self) -> np.ndarray:
            return self.games.reset()

        def step_async(self, actions: np.ndarray) -> None:
            self.games.send(actions)

        def step_wait(self) -> Any:
            done = self.games.receive()
            rewards = task.learned_rewards(done.rewards).astype(np.float32)
            return done.observations, rewards, done.ended | done.cut_off, [{} for _ in range(self.num_envs)]

        def close(self) -> None:
            self.games.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * self.num_envs

        def set_attr(self, *_: Any, **__: Any) -> None: ...
        def env_method(self, *_: Any, **__: Any) -> list[Any]:
            return [None] * self.num_envs

        def env_is_wrapped(self, *_: Any, **__: Any) -> list[bool]:
            return [False] * self.num_envs

    agent = PPO(
        "CnnPolicy",
        Games(),
        learning_rate=config.lr,
        n_steps=config.rollout,
        batch_size=config.samples // config.minibatches,
        n_epochs=config.epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip,
        clip_range_vf=config.clip,
        ent_coef=config.entropy,
        vf_coef=config.value_coefficient,
        max_grad_norm=config.max_grad_norm,
        policy_kwargs={"features_extractor_class": Features, "net_arch": [], "optimizer_kwargs": {"eps": 1e-5}},
        device=device,
    )
    return lambda: agent.learn(config.samples, reset_num_timesteps=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--game", default="demon_attack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--filters", type=int, default=128, help="128 is the paper's network")
    parser.add_argument("--paper", action="store_true", help="the paper's settings, for a GPU")
    parser.add_argument("--fast", action="store_true", help="bf16 and channels last")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/ppo.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = PAPER if arguments.paper else SMALL
    on_gpu = arguments.device.startswith("cuda")
    if arguments.fast:
        config = replace(config, precision="bf16", channels_last=True, compile=on_gpu)
    [task] = load_environments("atari", games=[arguments.game])
    common = (task, arguments.device, arguments.filters)
    makers: dict[str, Callable[[], Iterate]] = {
        "ours": lambda: make_ours(config, *common),
        "ours, AGS-CL": lambda: make_ours(config, *common, method="agscl"),
    }
    if arguments.device == "cpu" and not arguments.fast:
        makers["ours, channels last"] = lambda: make_ours(
            replace(config, channels_last=True), *common
        )  # as with --fast
    if on_gpu:
        if arguments.fast:
            makers["ours, not compiled"] = lambda: make_ours(replace(config, compile=False), *common)
        makers["ours, eager"] = lambda: make_ours(replace(config, engine="plain", compile=False), *common)
    if importlib.util.find_spec("stable_baselines3"):
        makers["Stable-Baselines3"] = lambda: make_stable_baselines(config, *common)
    contenders = {name: make() for name, make in makers.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    playing: dict[str, list[float]] = {name: [] for name, iterate in contenders.items() if isinstance(iterate, Ours)}

    def clock(work: Iterate) -> tuple[float, float]:
        synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        synchronize()
        wall, processor = time.perf_counter(), time.process_time()
        work()
        synchronize()
        return time.perf_counter() - wall, time.process_time() - processor

    for number in range(arguments.rounds + 2):
        for name, iterate in contenders.items():
            taken = clock(iterate)
            if number >= 2:  # the first warm up, and capture
                seconds[name].append(taken)
                if isinstance(iterate, Ours) and iterate.trainer.ppo is not None:
                    playing[name].append(clock(iterate.trainer.ppo.play)[0])
    figures = {
        name: {
            "steps_per_second": summary([config.samples / wall for wall, _ in taken]),
            "steps_per_processor_second": summary([config.samples / processor for _, processor in taken]),
            **({"seconds_of_play": summary(playing[name])} if playing.get(name) else {}),
        }
        for name, taken in seconds.items()
    }
    settings = {key: value for key, value in vars(config).items() if not key.startswith("evaluation")}
    record(
        arguments.out,
        {
            "game": arguments.game,
            "device": arguments.device,
            "filters": arguments.filters,
            "rounds": arguments.rounds,
            "settings": settings,
            "contenders": figures,
        },
    )
    for name, figure in figures.items():
        print(f"{name:20} {figure['steps_per_second']['median']:8.0f} steps/s", end="")
        print(f" {figure['steps_per_processor_second']['median']:8.0f} per second of processor time", end="")
        print(f", an iteration plays for {figure['seconds_of_play']['median']:.3f} s" if name in playing else "")


if __name__ == "__main__":
    main()
