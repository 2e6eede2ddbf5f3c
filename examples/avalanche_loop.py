"""AGS-CL in Avalanche: one plugin. Fine-tuning beside it, on five tasks of digits.

python examples/avalanche_loop.py    # needs .[cli,avalanche]
"""

from agscl.integrations.avalanche import AvalancheModel, AvalanchePlugin  # first: it says what is missing

# isort: split
import torch
from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark, with_classes_timeline
from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.utils.data import TensorDataset

from agscl import AGSCL, FineTune, MultiHead
from agscl.tasks import load

tasks = load("digits", seed=0)


def make_dataset(x, y):
    return make_avalanche_dataset(TensorDataset(x, y), data_attributes=[DataAttribute(y.tolist(), "targets")])


benchmark = benchmark_from_datasets(
    train=[make_dataset(task.train_x, task.train_y) for task in tasks],
    test=[make_dataset(task.test_x, task.test_y) for task in tasks],
)
benchmark = with_classes_timeline(task_incremental_benchmark(benchmark))


def learn(make_method):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()), features=100)
    method = make_method(model)
    strategy = Naive(
        model=AvalancheModel(model),  # adds a head with each experience
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=20,
        eval_mb_size=256,
        plugins=[AvalanchePlugin(method)],  # all there is to add
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    [accuracy] = [value for name, value in strategy.eval(benchmark.test_stream).items() if "Acc_Stream" in name]
    return accuracy, method


results = learn(FineTune), learn(lambda model: AGSCL(model, tasks[0].train_x[:2]))
print(f"fine-tuning  {results[0][0]:6.1%}")
print(f"AGS-CL       {results[1][0]:6.1%}")
print(results[1][1].certificate())
