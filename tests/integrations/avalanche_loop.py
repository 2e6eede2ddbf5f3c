"""Avalanche's strategies with methods, for `test_avalanche.py`, in a process that finds Avalanche: prints JSON.

python tests/integrations/avalanche_loop.py
"""

# ruff: noqa: E402
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
import torch.nn.functional as F
from torchvision_ops import import_torchvision

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
import_torchvision()

from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark, with_classes_timeline
from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import MultiHeadClassifier, MultiTaskModule
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive, Replay
from torch import nn
from torch.utils.data import TensorDataset

from agscl import AGSCL, EWC, MultiHead
from agscl.integrations.avalanche import AvalancheModel, AvalanchePlugin
from loops import bits, blobs, mlp, same

EPOCHS = 6


def make_benchmark(*, labels: bool = True):
    datasets = []
    for number in range(2):
        x, y = (torch.cat(part) for part in zip(*blobs(number), strict=True))
        targets = DataAttribute(y.tolist(), "targets")
        datasets.append(make_avalanche_dataset(TensorDataset(x, y), data_attributes=[targets]))
    benchmark = task_incremental_benchmark(benchmark_from_datasets(train=datasets, test=datasets))
    if not labels:
        for experience in benchmark.train_stream:
            experience.task_labels = [0]
    return with_classes_timeline(benchmark)


def make_strategy(kind, model, method, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    metrics = EvaluationPlugin(accuracy_metrics(stream=True, experience=True), loggers=[])
    defaults = {"train_mb_size": 12, "train_epochs": EPOCHS, "eval_mb_size": 12, "evaluator": metrics}
    return kind(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        **{"plugins": [AvalanchePlugin(method)], **defaults, **options},
    )


def make_model():
    torch.manual_seed(0)
    return MultiHead(mlp(), features=32)


def make_method(kind, model):
    return AGSCL(model, torch.zeros(2, 16)) if kind is AGSCL else EWC(model, lam=100.0)


def own_loop(kind):
    model = make_model()
    method = make_method(kind, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)  # Avalanche keeps its moments
    for number in range(2):
        task = str(number)
        torch.manual_seed(number)
        model.add_head(task, 3)
        data = blobs(number)
        method.begin_task(task, optimizer, epochs=EPOCHS, steps_per_epoch=4)
        model.train()
        for _ in range(EPOCHS):
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x, task), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
    return model


class SeededModel(AvalancheModel):
    """New heads get the weights that they get in the loop of one's own."""

    def adaptation(self, experience):
        torch.manual_seed(experience.current_experience)
        super().adaptation(experience)


def same_bits(kind):
    model = make_model()
    method = make_method(kind, model)
    strategy = make_strategy(Naive, SeededModel(model), method)
    for experience in make_benchmark().train_stream:
        strategy.train(experience, shuffle=False)
    return same(bits(model), bits(own_loop(kind)))


def protect(kind):
    """Two experiences with a strategy: whether old outputs keep their bits, and Avalanche's own accuracy."""
    model = make_model()
    method = make_method(AGSCL, model)
    options = {"mem_size": 10} if kind is Replay else {}
    strategy = make_strategy(kind, AvalancheModel(model), method, **options)
    benchmark, x = make_benchmark(), torch.randn(8, 16)
    first, second = benchmark.train_stream
    strategy.train(first)
    before = model.eval()(x, "0")
    strategy.train(second)
    metrics = strategy.eval(benchmark.test_stream)
    [accuracy] = [value for name, value in metrics.items() if name.startswith("Top1_Acc_Stream")]
    return {
        "kept": torch.equal(model.eval()(x, "0"), before),
        "kind": method.certificate().kind,
        "accuracy": accuracy,
        "tasks": method.tasks,
    }


def resumed(kind):
    """Two experiences, and the second again in new objects, from what was saved between them: the same bits?"""
    benchmark, results = make_benchmark(), []
    file = io.BytesIO()
    for number in (0, 1):
        model = make_model()
        method = make_method(kind, model)
        plugin = AvalanchePlugin(method)
        if number:
            plugin.load_state_dict(torch.load(file, weights_only=True))
        strategy = make_strategy(Naive, SeededModel(model), method, plugins=[plugin])
        for experience in benchmark.train_stream[number:]:
            strategy.train(experience, shuffle=False)
            if not file.tell():
                torch.save(plugin.state_dict(), file)
        file.seek(0)
        results.append(bits(model))
    return same(*results)


class OwnHeads(MultiTaskModule):
    """Heads as Avalanche makes them."""

    def __init__(self):
        super().__init__()
        self.trunk = mlp()
        self.classifier = MultiHeadClassifier(32, initial_out_features=3, masking=False)

    def forward(self, x, task_labels):
        return self.classifier(self.trunk(x), task_labels)


def own_heads():
    """A method finds the heads of Avalanche's own multi-head classifier by label."""
    torch.manual_seed(0)
    model = OwnHeads()
    method = EWC(model, lam=100.0, heads="classifier.classifiers")
    strategy = make_strategy(Naive, model, method)
    [plugin] = [one for one in strategy.plugins if isinstance(one, AvalanchePlugin)]
    plugin.forward = lambda batch: model(batch[0], int(method.task))
    for experience in make_benchmark().train_stream:
        strategy.train(experience)
    return method.tasks


class TwoOptimizers(Naive):
    """Steps a second optimizer, which holds the first layer, after the main one."""

    def make_optimizer(self, **kwargs):
        super().make_optimizer(**kwargs)
        first = self.model.model.trunk[0]
        self.second = torch.optim.SGD(first.parameters(), lr=1e-2, weight_decay=0.1)

    def optimizer_step(self):
        super().optimizer_step()
        self.second.step()


def refusals():
    errors = []

    def attempt(function):
        try:
            function()
        except (TypeError, ValueError) as error:
            errors.append(str(error))

    model = make_model()
    method = make_method(AGSCL, model)
    strategy = make_strategy(Naive, AvalancheModel(model), method)
    stream = make_benchmark(labels=False).train_stream
    strategy.train(stream[0])
    attempt(lambda: strategy.train(stream[1]))
    other = make_strategy(Naive, AvalancheModel(make_model()), method)
    attempt(lambda: other.train(stream[0]))
    attempt(lambda: AvalancheModel(nn.Linear(2, 2)))
    attempt(lambda: AvalanchePlugin(model))
    return errors


with contextlib.redirect_stdout(io.StringIO()):
    found = {
        "same_bits": {kind.__name__: same_bits(kind) for kind in (AGSCL, EWC)},
        "protect": {kind.__name__: protect(kind) for kind in (Naive, Replay, TwoOptimizers)},
        "resumed": {kind.__name__: resumed(kind) for kind in (AGSCL, EWC)},
        "own_heads": own_heads(),
        "refusals": refusals(),
    }
print(json.dumps(found))
