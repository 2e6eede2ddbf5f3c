"""What Avalanche's EWC, SI and MAS add to its own plain training, in its own loop: `benchmarks/methods.py --avalanche`
runs this in an environment that has Avalanche, and says how to make one.

Each strategy is in its second experience and takes its turn, an iteration each, on a batch that is there already. The
time to measure importances is given in epochs of `Naive`, whose loader, as that of the plugins, is Avalanche's.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import clocked, compared, in_epochs, take_turns
from torch import Tensor, nn

from agscl.networks.cifar import CifarTrunk
from agscl.system.process import tune_malloc

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):  # torchvision asks for them at import, and its wheel for CUDA cannot bring them on a CPU
    if not hasattr(torch.ops.torchvision, _name):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
warnings.filterwarnings("ignore", "no QP solver found|No loggers specified")

import avalanche  # noqa: E402
import torchvision  # noqa: E402
from avalanche.benchmarks import benchmark_from_datasets  # noqa: E402
from avalanche.benchmarks.utils import as_classification_dataset  # noqa: E402
from avalanche.training.plugins import (  # noqa: E402
    EvaluationPlugin,
    EWCPlugin,
    MASPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.supervised import Naive  # noqa: E402

PLAIN = "plain"
RATE = 1e-6  # as in methods.py
PLUGINS: dict[str, Callable[[], Any]] = {
    "ewc": lambda: EWCPlugin(ewc_lambda=400.0),
    "si": lambda: SynapticIntelligencePlugin(si_lambda=1.0),
    "mas": lambda: MASPlugin(),
}


class Pictures(torch.utils.data.TensorDataset):
    """Random pictures, as Avalanche takes them: with `targets`."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.targets = torch.randint(10, (count,), generator=draw).tolist()
        super().__init__(torch.randn(count, 3, 32, 32, generator=draw), torch.tensor(self.targets))


def strategy(name: str, batch: int) -> tuple[Any, Any]:
    """A strategy and the plugin it has, if any."""
    torch.manual_seed(0)
    model = nn.Sequential(CifarTrunk(), nn.Linear(CifarTrunk.features, 10))
    plugin = None if name == PLAIN else PLUGINS[name]()
    made = Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=RATE),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=batch,
        plugins=[] if plugin is None else [plugin],
        evaluator=EvaluationPlugin(),
    )
    return made, plugin


def begin(one: Any, experience: Any) -> None:
    """What `train` does up to the first iteration of an experience."""
    one.is_training, one._stop_training, one._eval_streams = True, False, []
    one.model.train()
    one.experience = experience
    one._before_training()
    one._before_training_exp()
    one._before_training_epoch()


def iteration(one: Any, batch: list[Tensor]) -> None:
    one.dataloader = [batch]
    one.training_epoch()


def time_steps(experiences: Any, batch: int, rounds: int) -> dict[str, Any]:
    data = Pictures(batch)
    acts = {}
    for name in [PLAIN, *PLUGINS]:
        one, _ = strategy(name, batch)
        one.train(experiences[0])
        begin(one, experiences[1])
        assert one.clock.train_exp_counter == 1
        acts[name] = lambda one=one: iteration(one, list(data.tensors))
    taken = take_turns(acts.pop(PLAIN), acts, rounds, "cpu")
    return {name: compared(pairs) for name, pairs in taken.items()}


def time_importances(experience: Any, batch: int, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in PLUGINS}
    epochs = []
    for _ in range(rounds):
        naive, _ = strategy(PLAIN, batch)
        begin(naive, experience)
        epochs.append(clocked(naive.training_epoch, "cpu"))
        for name in PLUGINS:
            one, plugin = strategy(name, batch)
            begin(one, experience)
            iteration(one, next(iter(one.dataloader)))
            taken[name].append(clocked(lambda one=one, plugin=plugin: plugin.after_training_exp(one), "cpu"))
    return in_epochs(taken, epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--measurements", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--small-batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=4500)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    few, all_ = (as_classification_dataset(Pictures(count)) for count in (2 * arguments.batch, arguments.images))
    experiences = benchmark_from_datasets(train=[few, all_]).train_stream
    found = {
        "versions": {
            "avalanche": avalanche.__version__,
            "torchvision": torchvision.__version__,
            "torch": torch.__version__,
        },
        "small_step": time_steps(experiences, arguments.small_batch, 5 * arguments.rounds),
        "step": time_steps(experiences, arguments.batch, arguments.rounds),
    }
    for what in ("small_step", "step"):
        for name, one in found[what].items():
            print(f"avalanche {what} {name}: {one['ratio']['median']:.3f} of its plain training")
    if arguments.measurements:
        found["importance"] = time_importances(experiences[1], arguments.batch, arguments.measurements)
        for name, one in found["importance"]["methods"].items():
            print(f"avalanche importance {name}: {one['epochs']['median']:.2f} of its epochs")
    arguments.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
