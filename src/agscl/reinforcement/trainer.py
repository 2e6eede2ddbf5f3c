"""One agent on one environment after the other, as a state machine that can stop and resume between any two units:

for each task:                  a new head, a new Adam, new environments, method.begin_task
    for each iteration:         PPO.play, PPO.update (in it, method.end_epoch after each pass over the samples)
    after the last of them:     method.end_task on the last iteration's samples
    30 times, the last at the end:  an evaluation on all tasks learned so far, side by side
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam

from agscl.heads import MultiHead, check_task_name
from agscl.methods._parts.lifecycle import Method
from agscl.reinforcement.config import PPOConfig
from agscl.reinforcement.environments import Array, Environments, EnvironmentTask
from agscl.reinforcement.importance import make_importance_forward
from agscl.reinforcement.ppo import PPO, Lane, add_actor_critic
from agscl.reinforcement.recording import Recording, record_episode
from agscl.system.host_copies import HostCopy
from agscl.system.tf32 import tf32_for
from agscl.training import TrainingFailed
from agscl.training.engine import StepCompiler, WorkRunner, make_runner, make_step_compiler
from agscl.training.optimizers import load_optimizer_state_dict, optimizer_state_dict
from agscl.training.seeds import derive_seed
from agscl.training.trainer import place_model

Event = dict[str, Any]

LANES = 2
"""Into how many parts the environments are split, where there are enough: one is stepped while the network acts for
the other."""
RECENT = 100
"""Over how many of the last completed training episodes the mean score is reported."""
PLAY, EVALUATE = 1, 2
"""What a seed of environments is for."""


class ReinforcementTrainer:
    """Trains `model` with `method` and PPO on one environment after the other.

    `advance()` does one unit of work: it begins a task, does an iteration of PPO, or evaluates all tasks. Between two
    units `state_dict()` holds all that is needed to continue. On a CPU, with environments that can be restored, the
    result is then the same to the bit; those that cannot are started anew, which is reported.
    """

    def __init__(
        self,
        model: MultiHead,
        method: Method,
        tasks: Sequence[EnvironmentTask],
        config: PPOConfig,
        *,
        seed: int,
        device: torch.device | str | None = None,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        for task in tasks:
            check_task_name(task.name)
        if len({task.name for task in tasks}) < len(tasks):
            raise ValueError(f"two tasks have the same name: {', '.join(task.name for task in tasks)}")
        if config.engine == "captured" and not method.capturable:
            raise ValueError(f"steps of {method!r} cannot be captured as CUDA graphs: use engine='plain'")
        self.model, self.method, self.tasks, self.config = model, method, tuple(tasks), config
        self.seed, self.emit = seed, emit
        self.device = next(model.parameters()).device if device is None else torch.device(device)

        # The position, and what was measured so far.
        self.task_index = 0
        self.iteration = 0  # iterations of the task under way that are done
        self.evaluation_due = False
        self.layers: list[dict[str, Any]] = []  # what that evaluation is to report of the network's layers
        self.scores: list[list[float]] = []  # [i][j]: on task j after learning task i
        self.evaluations: list[dict[str, Any]] = []  # all of them: task, steps of it, scores, and relative ones
        self.losses: list[list[float]] = []
        self.statistics: list[dict[str, Any]] = []
        self.recent: deque[float] = deque(maxlen=RECENT)  # scores of the last training episodes
        self.steps_per_second = 0.0

        # The task under way.
        self.optimizer: Adam | None = None  # none between tasks
        self.ppo: PPO | None = None  # none when the task's last iteration is done, too
        self._restarted = False

    # The loop --------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do one unit of work; returns False if all tasks were done already."""
        if self.done:
            return False
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(tf32_for(self.config.precision))
            if self._restarted:
                self._restarted = False
                self.emit({"event": "environments restarted", "task": self.task_index, "iteration": self.iteration})
            if self.optimizer is None:
                self._begin_task()
            elif self.evaluation_due:
                self._evaluate_all()
            else:
                self._iterate()
        return True

    def _begin_task(self) -> None:
        task, config = self.task, self.config
        torch.manual_seed(derive_seed(self.seed, self.task_index))
        add_actor_critic(self.model, task)
        place_model(self.model, self.device, self.config)
        self.optimizer = self._make_optimizer()
        self.method.begin_task(
            task.name,
            self.optimizer,
            epochs=config.iterations * config.epochs,
            steps_per_epoch=config.minibatches,
        )
        self.model.train()
        self.losses.append([])
        self.recent.clear()
        self.ppo = self._start_ppo(None)
        self.emit({"event": "task started", "task": self.task_index, "name": task.name})

    def _iterate(self) -> None:
        assert self.ppo is not None
        start, config = time.perf_counter(), self.config
        rate = config.rate_at(self.iteration)
        self.recent.extend(self.ppo.play())
        self.ppo.update(rate, self.seed, self.task_index, self.iteration)
        figures = self.ppo.read_figures()
        self.check_finite(figures)
        self.iteration += 1
        self.losses[-1].append(figures["loss"])
        speed = config.samples / (time.perf_counter() - start)
        self.steps_per_second = 0.9 * self.steps_per_second + 0.1 * speed if self.steps_per_second else speed
        self.emit(
            {
                "event": "iteration",
                **self.describe_position(),
                "steps": self.iteration * config.samples,
                "lr": rate,
                "score": self.recent_score,
                "steps_per_second": speed,
                **figures,
            }
        )
        if config.is_evaluated(self.iteration):
            self.evaluation_due, self.layers = True, self.ppo.measure_layers()
        if self.iteration == config.iterations:
            self._end_learning()

    def _end_learning(self) -> None:
        """End the task for the method, on the samples of the last iteration."""
        assert self.ppo is not None
        self.ppo.release_graphs()
        forward = make_importance_forward(self.model, self.method, self.task)
        self.method.end_task(self.ppo.importance_batches(), forward)
        for lane in self.ppo.lanes:
            lane.environments.close()
        self.ppo = None

    def _evaluate_all(self) -> None:
        """Evaluate all tasks learned so far, and record it."""
        learned = range(self.task_index + 1)
        # The same episodes each time: a policy that is unchanged has the same score.
        scores = self.evaluate({index: derive_seed(self.seed, EVALUATE, index) for index in learned})
        self.evaluation_due = False
        steps = self.iteration * self.config.samples
        relative = [task.relative_score(score) for task, score in zip(self.tasks, scores, strict=False)]
        self.evaluations.append(
            {
                "task": self.task_index,
                "steps": steps,
                "scores": scores,
                "relative": relative,
                "layers": self.layers,
            }
        )
        self.emit({"event": "evaluation", "name": self.task.name, **self.describe_position(), **self.evaluations[-1]})
        if self.iteration == self.config.iterations:
            self._end_task(scores)

    def _end_task(self, scores: list[float]) -> None:
        self.optimizer = None
        self.scores.append(scores)
        self.statistics.append(self.method.statistics())
        self.emit(
            {
                "event": "task ended",
                "task": self.task_index,
                "name": self.task.name,
                "accuracies": self.accuracies[-1],
                "valid_accuracies": self.valid_accuracies[-1],
                "scores": scores,
                "statistics": self.statistics[-1],
            }
        )
        self.task_index += 1
        self.iteration = 0

    def evaluate(self, seeds: Mapping[int, int]) -> list[float]:
        """Of each of these tasks, the mean score of complete episodes, one in each environment, played greedily.

        The tasks are played side by side: the network acts for all of them, then the environments of all are stepped.
        """
        with ExitStack() as stack:
            stack.enter_context(self._evaluating())
            runner = make_runner(self.device, lambda: None, captured=self._captures)
            stack.callback(runner.release)
            games = []
            for index, seed in seeds.items():
                games.append(GreedyGame(self, self.tasks[index], seed, runner))
                stack.callback(games[-1].environments.close)
            for game in games:
                game.start_episodes()
            while playing := [game for game in games if not game.is_over]:
                for game, actions in [(game, game.act()) for game in playing]:
                    game.environments.send(actions.wait().numpy())
                for game in playing:
                    game.observe()
            return [game.score for game in games]

    @torch.no_grad()
    def choose_greedily(self, task: EnvironmentTask, observations: Array) -> Array:
        """The most probable action for each observation."""
        return self._most_probable(task, torch.from_numpy(observations).to(self.device)).cpu().numpy()

    def _most_probable(self, task: EnvironmentTask, observations: Tensor) -> Tensor:
        logits: Tensor = self.model(self._to_memory_format(task.prepare(observations)), task.name)["actor"]
        return logits.argmax(1)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def record_play(self, index: int, limit: int) -> Recording:
        """Pictures of greedy play, at most `limit`, of an episode that starts like the first of each evaluation."""
        task, seed = self.tasks[index], derive_seed(self.seed, EVALUATE, index)
        with closing(task.make(1, seed, training=False, render=True)) as one, self._evaluating():
            return record_episode(one, partial(self.choose_greedily, task), limit)

    # Position --------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.task_index == len(self.tasks)

    @property
    def task(self) -> EnvironmentTask:
        return self.tasks[self.task_index]

    @property
    def progress(self) -> float:
        """The share of all environment steps already taken."""
        return (self.task_index + self.iteration / self.config.iterations) / len(self.tasks)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.tasks[0].input_shape

    @property
    def recent_score(self) -> float | None:
        """The mean score of the last training episodes."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    @property
    def accuracies(self) -> list[list[float]]:
        """The scores, each relative to the task's own range: what metrics are computed from."""
        return [
            [task.relative_score(score) for task, score in zip(self.tasks, row, strict=False)] for row in self.scores
        ]

    @property
    def valid_accuracies(self) -> list[list[float]]:
        """What a search compares: the same, as episodes are no data that could be held out."""
        return self.accuracies

    def describe_position(self) -> dict[str, Any]:
        """The position, as events report it; `note` is for a person."""
        steps, score = self.iteration * self.config.samples, self.recent_score
        total, name = self.config.iterations * self.config.samples, "" if self.done else f" {self.task.name}"
        note = f"task {self.task_index + 1}{name}, {steps} of {total} steps"
        if self.steps_per_second:
            note += f", {self.steps_per_second:.0f} steps/s"
        if score is not None:
            note += f", score {score:.1f}"
        return {"task": self.task_index, "iteration": self.iteration, "note": note}

    def extra_results(self) -> dict[str, Any]:
        """What a result holds beside what every trainer has."""
        return {"scores": self.scores, "evaluations": self.evaluations}

    # What a task is made of ------------------------------------------------------------------------------------------

    def _to_memory_format(self, x: Tensor) -> Tensor:
        channels_last = self.config.channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    @property
    def _captures(self) -> bool:
        enough = self.config.iterations * self.config.epochs >= self.method.min_captured_epochs
        automatic = self.config.engine == "auto" and self.device.type == "cuda" and self.method.capturable and enough
        return automatic or self.config.engine == "captured"

    def _make_optimizer(self) -> Adam:
        """A new Adam for each task: moments of an earlier one would move weights that the new task does not train."""
        options: dict[str, Any] = {"fused": True, "capturable": self.device.type == "cuda"}
        rate = torch.tensor(self.config.lr, device=self.device) if self._captures else self.config.lr
        return Adam(self.model.parameters(), lr=rate, eps=self.config.adam_eps, **options)

    def _start_ppo(self, saved: list[dict[str, Any]] | None) -> PPO:
        """PPO on new environments, or on such as were saved."""
        assert self.optimizer is not None
        lanes, count = [], self.config.environments
        bounds = np.linspace(0, count, min(LANES, count) + 1).astype(int).tolist()
        for number, (start, stop) in enumerate(pairwise(bounds)):
            # Those that cannot be restored get other seeds in a resumed run: it must not play the same games again.
            parts = [number, 0 if saved is not None else self.iteration]
            seed = derive_seed(self.seed, PLAY, self.task_index, *parts)
            environments = self.task.make(stop - start, seed, training=True)
            observations = _restore(environments, None if saved is None else saved[number])
            lanes.append(Lane(environments, slice(start, stop), observations, self.device))
        optimizer = self.optimizer
        runner = make_runner(
            self.device,
            lambda: optimizer.zero_grad(set_to_none=True),  # so that a graph allocates gradients of its own
            captured=self._captures,
        )
        return PPO(self.model, self.method, self.task, self.optimizer, self.config, lanes, runner, self._compiler)

    @cached_property
    def _compiler(self) -> StepCompiler:
        config = self.config
        if not config.compile:
            return StepCompiler()
        fused = config.precision == "bf16" and config.channels_last
        return make_step_compiler(self.model.trunk, self.device, bf16_channels_last=fused)

    def check_finite(self, figures: dict[str, float]) -> None:
        """Raise if the loss or a weight is no longer finite."""
        norms = torch._foreach_norm(list(self.model.parameters()))
        if not (math.isfinite(figures["loss"]) and bool(torch.isfinite(torch.stack(norms)).all())):
            raise TrainingFailed(
                f"the loss or a weight became infinite or NaN in task {self.task_index + 1} ({self.task.name}), "
                f"iteration {self.iteration + 1}; a lower learning rate than {self.config.lr:g} may help"
            )

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a new trainer needs to continue, as nested dicts of tensors and plain values."""
        state = {
            "task": self.task_index,
            "iteration": self.iteration,
            "evaluation_due": self.evaluation_due,
            "layers": self.layers,
            "scores": self.scores,
            "accuracies": self.accuracies,
            "evaluations": self.evaluations,
            "losses": self.losses,
            "statistics": self.statistics,
            "recent": list(self.recent),
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": None if self.optimizer is None else optimizer_state_dict(self.optimizer, self.model),
            "environments": None if self.ppo is None else [lane.environments.state_dict() for lane in self.ppo.lanes],
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`; this trainer, its model and its method must be newly made."""
        for task in self.tasks[: state["task"] + (state["optimizer"] is not None)]:
            self.model.add_head(task.name, task.outputs)
        place_model(self.model, self.device, self.config)
        self.model.load_state_dict(state["model"])
        self.model.train()
        self.task_index, self.iteration = state["task"], state["iteration"]
        self.evaluation_due, self.layers = state["evaluation_due"], state["layers"]
        self.scores, self.evaluations, self.losses = state["scores"], state["evaluations"], state["losses"]
        self.statistics = state["statistics"]
        self.recent.extend(state["recent"])
        if state["optimizer"] is not None:
            self.optimizer = self._make_optimizer()
        if state["environments"] is None:  # the task has ended, or none has begun
            self.method.load_state_dict(state["method"])
        else:
            assert self.optimizer is not None
            self.method.load_state_dict(state["method"], self.optimizer)
            load_optimizer_state_dict(self.optimizer, self.model, state["optimizer"])
            self._restarted = None in state["environments"]
            self.ppo = self._start_ppo(None if self._restarted else state["environments"])
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


class GreedyGame:
    """An episode in each environment of a task, played greedily: `start_episodes`, then `act` and `observe` in turns.

    `act` launches the network and waits for nothing, so that games that are played side by side wait together.
    """

    def __init__(self, trainer: ReinforcementTrainer, task: EnvironmentTask, seed: int, runner: WorkRunner) -> None:
        config = trainer.config
        self.trainer, self.task, self.runner, self.count = trainer, task, runner, config.evaluation_episodes
        self.environments = task.make(self.count, seed, training=False, limit=config.evaluation_limit)
        self.scores: dict[int, float] = {}  # by environment

    def start_episodes(self) -> None:
        self.observations = self.environments.reset()
        shown, device = torch.from_numpy(self.observations), self.trainer.device
        # Only from pinned memory is a copy to the device left pending.
        self.staged = torch.empty(shown.shape, dtype=shown.dtype, pin_memory=device.type == "cuda")
        self.inputs = torch.empty_like(shown, device=device)
        self.actions = torch.zeros(self.count, dtype=torch.long, device=self.trainer.device)

    @property
    def is_over(self) -> bool:
        return len(self.scores) == self.count

    @property
    def score(self) -> float:
        return sum(self.scores.values()) / self.count

    @torch.no_grad()
    def act(self) -> HostCopy:
        """Launch the choice of the next actions; wait for them before the next call."""
        with self.runner.on_stream():
            self.staged.copy_(torch.from_numpy(self.observations))
            self.inputs.copy_(self.staged, non_blocking=True)
            self.runner.run(("act", self.task.name), self._choose_actions)
            return HostCopy(self.actions)

    def _choose_actions(self) -> None:
        self.actions.copy_(self.trainer._most_probable(self.task, self.inputs))

    def observe(self) -> None:
        """Wait for what the actions lead to."""
        transition = self.environments.receive()
        self.observations = transition.observations
        for environment, score in transition.scores:
            if environment not in self.scores:  # further episodes of the same environment do not count
                self.scores[environment] = score
                self.environments.stop(environment)


def _restore(environments: Environments, saved: dict[str, Any] | None) -> Array:
    return environments.reset() if saved is None else environments.load_state_dict(saved)
