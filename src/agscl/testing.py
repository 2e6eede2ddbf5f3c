"""The contract every method passes, public so that you can hold a method of your own to it.

>>> from agscl.testing import check_method
>>> check_method(MyMethod, {"strength": 3.0}, idle={"strength": 0.0})

Real handwritten digits (scikit-learn's) as five tasks of two classes, networks of at least 64 nodes, three optimizers,
and a plain training loop. A check that fails raises `ContractBroken` with what was expected and what came.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from agscl.certificate import verify
from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import Method, SelfCheckWarning
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.tasks import Task, load

__all__ = [
    "CHECKS",
    "NETWORKS",
    "OPTIMIZERS",
    "Cell",
    "ContractBroken",
    "Report",
    "check_method",
    "forgetting_of",
    "measure",
]

BATCH = 32
LEAST_LOSS = 0.15  # what fine-tuning must lose for a cell to mean anything


class ContractBroken(AssertionError):
    """A method does not do what every method must."""


# The cells ------------------------------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before in (64, 50, 50):
        layers += [nn.Linear(before, 50), nn.ReLU()]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24 * 4, 48), nn.ReLU()),
    )


class _Residual(nn.Module):
    """A BatchNorm network with two residual blocks, the second with a projection."""

    def __init__(self, narrow: int = 32, wide: int = 48) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow)
        self.a1, self.a1_norm = nn.Conv2d(narrow, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow)
        self.a2, self.a2_norm = nn.Conv2d(narrow, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow)
        self.b1, self.b1_norm = nn.Conv2d(narrow, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide)
        self.b2, self.b2_norm = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.way, self.way_norm = nn.Conv2d(narrow, wide, 1, 2, bias=False), nn.BatchNorm2d(wide)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = F.relu(x + self.a2_norm(self.a2(F.relu(self.a1_norm(self.a1(x))))))
        inner = self.b2_norm(self.b2(F.relu(self.b1_norm(self.b1(x)))))
        return F.relu(self.way_norm(self.way(x)) + inner).mean((2, 3))


@dataclass(frozen=True)
class _Network:
    make: Callable[[], nn.Module]
    epochs: int


NETWORKS: dict[str, _Network] = {
    "mlp": _Network(_mlp, 30),
    "cnn": _Network(_cnn, 15),
    "residual": _Network(_Residual, 15),
}


def _adam(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {"adam": _adam, "sgd": _sgd, "adamw": _adamw}

Make = Callable[[MultiHead], Method]


@dataclass
class Cell:
    """One network with one optimizer and one seed, and a plain loop over the digits."""

    network: str
    optimizer: str
    seed: int = 0
    tasks: Sequence[Task] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.tasks = load("digits", seed=self.seed)
        self.epochs = NETWORKS[self.network].epochs

    def model(self) -> MultiHead:
        torch.manual_seed(self.seed)
        model = MultiHead(NETWORKS[self.network].make())
        model(self.tasks[0].train_x[:2].view(-1, 1, 8, 8), self._head(model, 0))
        return model

    def _head(self, model: MultiHead, number: int) -> str:
        task = self.tasks[number]
        if task.name not in model.heads:
            torch.manual_seed(1000 * self.seed + number)
            model.add_head(task.name, task.classes)
        return task.name

    def make_method(self, method: type[Method], model: MultiHead, settings: Mapping[str, Any]) -> Method:
        """A method on the cell's model; one that knows the nodes is given an example input."""
        if issubclass(method, NodeMethod):
            return method(model, self.tasks[0].train_x[:2].view(-1, 1, 8, 8), **settings)
        return method(model, **settings)

    def optimizer_of(self, model: MultiHead) -> Optimizer:
        return OPTIMIZERS[self.optimizer](model.parameters())

    def batches(self, number: int, epoch: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """The task's batches in the epoch's order, or as they lie."""
        task = self.tasks[number]
        rows = torch.arange(len(task.train_y))
        if epoch is not None:
            rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(97 * number + epoch))
        return [(task.train_x[part].view(-1, 1, 8, 8), task.train_y[part]) for part in rows.split(BATCH)]

    def learn(
        self,
        model: MultiHead,
        method: Method,
        optimizer: Optimizer,
        number: int,
        *,
        epochs: int | None = None,
        steps: range | None = None,
        begin: bool = True,
        end: bool = True,
        closure: bool = False,
    ) -> None:
        """Learn task `number`, or only some of its `steps`, as anybody's loop would."""
        epochs, task = epochs or self.epochs, self._head(model, number)
        each = len(self.batches(number))
        if begin:
            torch.manual_seed(self.seed)
            method.begin_task(task, optimizer, epochs=epochs, steps_per_epoch=each)
        model.train()
        for step in steps if steps is not None else range(epochs * each):
            x, y = self.batches(number, step // each)[step % each]

            def backward(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad(set_to_none=False)  # zeros let momentum and decay move what is not held still
                output = model(x, task)
                loss = F.cross_entropy(output, y) + method.loss(x, output)
                loss.backward()
                return loss

            if closure:
                optimizer.step(backward)  # type: ignore[arg-type]
            else:
                backward()
                optimizer.step()
            if step % each == each - 1:
                method.end_epoch()
        if end:
            method.end_task(self.batches(number, epochs))

    @torch.no_grad()
    def accuracy(self, model: MultiHead, method: Method, number: int) -> float:
        task = self.tasks[number]
        model.eval()
        with method.viewing(task.name):
            output = model(task.test_x.view(-1, 1, 8, 8), task.name)
        return float((output.argmax(1) == task.test_y).float().mean())

    def accuracies(self, make: Make) -> list[list[float]]:
        """A[i][j]: accuracy on task j after learning task i."""
        model = self.model()
        method, optimizer = make(model), self.optimizer_of(model)
        matrix = []
        for number in range(len(self.tasks)):
            self.learn(model, method, optimizer, number)
            matrix.append([self.accuracy(model, method, old) for old in range(number + 1)])
        method.close()
        return matrix


def forgetting_of(matrix: Sequence[Sequence[float]]) -> float:
    """What was lost of the tasks before the last, on average, since each was learned."""
    last = len(matrix) - 1
    return sum(matrix[j][j] - matrix[last][j] for j in range(last)) / last


# The checks -----------------------------------------------------------------------------------------------------------


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def _bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _two_tasks(cell: Cell, make: Make, closure: bool) -> dict[str, Tensor]:
    model = cell.model()
    method, optimizer = make(model), cell.optimizer_of(model)
    for number in range(2):
        cell.learn(model, method, optimizer, number, epochs=4, closure=closure)
    method.close()
    return _bits(model)


def a_closure_gives_the_same_weights(cell: Cell, make: Make) -> None:
    if names := _same(_two_tasks(cell, make, False), _two_tasks(cell, make, True)):
        raise ContractBroken(f"step() and step(closure) gave other weights: {', '.join(names[:3])}")


def resuming_in_the_middle_of_a_task_changes_no_bit(cell: Cell, make: Make) -> None:
    def run(at: int | None) -> dict[str, Tensor]:
        model = cell.model()
        method, optimizer = make(model), cell.optimizer_of(model)
        cell.learn(model, method, optimizer, 0, epochs=4)
        whole = range(4 * len(cell.batches(1)))
        if at is None:
            cell.learn(model, method, optimizer, 1, epochs=4)
        else:
            cell.learn(model, method, optimizer, 1, epochs=4, steps=whole[:at], end=False)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), method.state_dict()))
            random = torch.get_rng_state()
            method.close()
            heads = [cell.tasks[0].name, cell.tasks[1].name]
            model = cell.model()
            for number in range(2):
                cell._head(model, number)
            model.load_state_dict(saved[0])
            optimizer = cell.optimizer_of(model)
            assert list(model.heads) == heads
            method = make(model)
            method.load_state_dict(saved[2], optimizer)
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(random)
            cell.learn(model, method, optimizer, 1, epochs=4, steps=whole[at:], begin=False)
        cell.learn(model, method, optimizer, 2, epochs=2)
        method.close()
        return _bits(model)

    if names := _same(run(None), run(2 * len(cell.batches(1)) + 3)):
        raise ContractBroken(f"after resuming in the middle of a task these came out other: {', '.join(names[:3])}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key != "generator":  # its state
                yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def memory_reported_is_memory_held(cell: Cell, make: Make) -> None:
    model = cell.model()
    method, optimizer = make(model), cell.optimizer_of(model)
    for number in range(2):
        cell.learn(model, method, optimizer, number, epochs=2)
        held = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(method.state_dict()))
        reported = method.memory()["bytes"] - method.memory().get("digests", 0)
        if held != reported:
            raise ContractBroken(
                f"after {number + 1} tasks memory() reports {reported} bytes; its state holds {held} bytes of tensors"
            )
    method.close()


def nothing_is_left_behind(cell: Cell, make: Make) -> None:
    model = cell.model()
    cell._head(model, 1)
    keys = list(model.state_dict())
    required = [p.requires_grad for p in model.parameters()]
    method, optimizer = make(model), cell.optimizer_of(model)
    cell.learn(model, method, optimizer, 0, epochs=1)
    cell.learn(model, method, optimizer, 1, epochs=1, steps=range(3), end=False)
    if list(model.state_dict()) != keys:
        raise ContractBroken("the model's state_dict has other keys than before")
    method.close()
    hooks = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    if hooks or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ContractBroken(f"close() left hooks behind, on {', '.join(hooks) or 'the optimizer'}")
    if [p.requires_grad for p in model.parameters()] != required:
        raise ContractBroken("close() did not give requires_grad back")
    if any("forward" in vars(module) for module in model.modules()):
        raise ContractBroken("close() left a changed forward behind")


def old_heads_stay_put(cell: Cell, make: Make) -> None:
    model = cell.model()
    method, optimizer = make(model), cell.optimizer_of(model)
    cell.learn(model, method, optimizer, 0, epochs=2)
    old = _bits(model.heads[cell.tasks[0].name])
    cell.learn(model, method, optimizer, 1, epochs=2)
    method.close()
    if names := _same(old, _bits(model.heads[cell.tasks[0].name])):
        raise ContractBroken(f"the first task's head moved during the second: {', '.join(names)}")


def certificates_hold(cell: Cell, make: Make) -> None:
    model = cell.model()
    method, optimizer = make(model), cell.optimizer_of(model)
    certificates = []
    for number in range(3):
        cell.learn(model, method, optimizer, number, epochs=4)
        certificates.append(method.certificate())
    method.close()
    verdict = verify(certificates, model.state_dict())
    if not verdict.ok:
        raise ContractBroken(f"its certificates do not hold: {'; '.join(verdict.lines)}")


CHECKS: dict[str, Callable[[Cell, Make], None]] = {
    "closure": a_closure_gives_the_same_weights,
    "resume": resuming_in_the_middle_of_a_task_changes_no_bit,
    "memory": memory_reported_is_memory_held,
    "close": nothing_is_left_behind,
    "heads": old_heads_stay_put,
    "certificates": certificates_hold,
}


@dataclass(frozen=True)
class Report:
    """What a method did in one cell, per seed."""

    network: str
    optimizer: str
    fine_tuning_lost: list[float]
    method_lost: list[float]
    fine_tuning_average: list[float]
    method_average: list[float]

    @property
    def saved(self) -> float:
        """The share of fine-tuning's loss that the method saved, over all seeds."""
        return 1 - sum(self.method_lost) / sum(self.fine_tuning_lost)

    def complaint(self, least_saved: float) -> str | None:
        """What is wrong with it, if anything."""
        lost = sum(self.fine_tuning_lost) / len(self.fine_tuning_lost)
        if lost < LEAST_LOSS:
            return f"fine-tuning lost only {100 * lost:.1f} points here, so nothing is shown"
        if self.saved < least_saved:
            return f"saved {100 * self.saved:.0f} % of the {100 * lost:.1f} points that fine-tuning lost"
        if sum(self.method_average) <= sum(self.fine_tuning_average):
            return "forgot less than fine-tuning only because it learned less: its average accuracy is no better"
        return None


def check_method(
    method: type[Method],
    settings: Mapping[str, Any] | None = None,
    *,
    network: str = "mlp",
    optimizer: str = "adam",
    seeds: int = 3,
    least_saved: float | None = 0.5,
    idle: Mapping[str, Any] | None = None,
    checks: Sequence[str] = tuple(CHECKS),
) -> Report | None:
    """Hold a method to the contract in one cell; raises `ContractBroken` where it fails.

    `settings` are the method's own. `idle` are settings with which it does nothing: it must then warn. With
    `least_saved=None` only the cheap `checks` run; otherwise the method must save that share of what fine-tuning loses.
    """

    cell = Cell(network, optimizer)

    def make(model: MultiHead) -> Method:
        return cell.make_method(method, model, settings or {})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfCheckWarning)
        for name in checks:
            try:
                CHECKS[name](cell, make)
            except ContractBroken as broken:
                raise ContractBroken(f"{method.__name__}, {network}, {optimizer}: {broken}") from None
    if idle is not None:
        _check_idle(cell, method, {**(settings or {}), **idle})
    if least_saved is None:
        return None
    report = measure(method, settings or {}, network=network, optimizer=optimizer, seeds=range(seeds))
    if complaint := report.complaint(least_saved):
        raise ContractBroken(f"{method.__name__}, {network}, {optimizer}, {seeds} seeds: {complaint}")
    return report


def measure(
    method: type[Method], settings: Mapping[str, Any], *, network: str, optimizer: str, seeds: Iterable[int]
) -> Report:
    """Learn the five tasks with fine-tuning and with the method."""
    report = Report(network, optimizer, [], [], [], [])
    for seed in seeds:
        cell = Cell(network, optimizer, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfCheckWarning)
            plain = _fine_tuning(network, optimizer, seed)
            guarded = cell.accuracies(partial(cell.make_method, method, settings=settings))
        report.fine_tuning_lost.append(forgetting_of(plain))
        report.method_lost.append(forgetting_of(guarded))
        report.fine_tuning_average.append(sum(plain[-1]) / len(plain))
        report.method_average.append(sum(guarded[-1]) / len(guarded))
    return report


@cache
def _fine_tuning(network: str, optimizer: str, seed: int) -> list[list[float]]:
    """What every method in a cell is compared with."""
    return Cell(network, optimizer, seed).accuracies(FineTune)


def _check_idle(cell: Cell, method: type[Method], settings: Mapping[str, Any]) -> None:
    model = cell.model()
    idle, optimizer = cell.make_method(method, model, settings), cell.optimizer_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            cell.learn(model, idle, optimizer, number, epochs=2)
    idle.close()
    if not any(issubclass(warning.category, SelfCheckWarning) for warning in caught):
        raise ContractBroken(f"{method.__name__} does nothing with {dict(settings)} and did not say so")
