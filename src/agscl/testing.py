"""The contract that every method passes, public so that you can check a method of your own.

>>> from agscl.testing import check_method
>>> check_method(MyMethod, {"strength": 3.0}, idle_settings={"strength": 0.0})

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
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.methods.finetune import FineTune
from agscl.tasks import Task, load

__all__ = [
    "CHECKS",
    "NETWORKS",
    "OPTIMIZERS",
    "ContractBroken",
    "DigitsLoop",
    "Report",
    "check_method",
    "mean_forgetting",
    "measure_forgetting",
]

BATCH_SIZE = 32
MIN_FORGETTING = 0.15  # accuracy that fine-tuning must lose, or a comparison with it shows nothing


class ContractBroken(AssertionError):
    """A method under test does not do what every method must."""


# Networks, optimizers, loop -------------------------------------------------------------------------------------------


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
        self.shortcut, self.shortcut_norm = nn.Conv2d(narrow, wide, 1, 2, bias=False), nn.BatchNorm2d(wide)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = F.relu(x + self.a2_norm(self.a2(F.relu(self.a1_norm(self.a1(x))))))
        inner = self.b2_norm(self.b2(F.relu(self.b1_norm(self.b1(x)))))
        return F.relu(self.shortcut_norm(self.shortcut(x)) + inner).mean((2, 3))


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

MakeMethod = Callable[[MultiHead], Method]


@dataclass
class DigitsLoop:
    """The loop in which a method is tested: a plain one over the digits, with one network, optimizer and seed."""

    network: str
    optimizer: str
    seed: int = 0
    tasks: Sequence[Task] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.tasks = load("digits", seed=self.seed)
        self.epochs = NETWORKS[self.network].epochs

    def make_model(self) -> MultiHead:
        torch.manual_seed(self.seed)
        model = MultiHead(NETWORKS[self.network].make())
        model(self.tasks[0].train_x[:2].view(-1, 1, 8, 8), self.ensure_head(model, 0))
        return model

    def ensure_head(self, model: MultiHead, number: int) -> str:
        task = self.tasks[number]
        if task.name not in model.heads:
            torch.manual_seed(1000 * self.seed + number)
            model.add_head(task.name, task.classes)
        return task.name

    def make_method(self, method: type[Method], model: MultiHead, settings: Mapping[str, Any]) -> Method:
        """Make the method under test on `model`; a `NodeMethod` gets an example input."""
        if issubclass(method, NodeMethod):
            return method(model, self.tasks[0].train_x[:2].view(-1, 1, 8, 8), **settings)
        return method(model, **settings)

    def make_optimizer(self, model: MultiHead) -> Optimizer:
        return OPTIMIZERS[self.optimizer](model.parameters())

    def batches(self, number: int, epoch: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Batches of a task of the test, shuffled for `epoch`, or in the order of the data."""
        task = self.tasks[number]
        rows = torch.arange(len(task.train_y))
        if epoch is not None:
            rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(97 * number + epoch))
        return [
            (task.train_x[batch_rows].view(-1, 1, 8, 8), task.train_y[batch_rows])
            for batch_rows in rows.split(BATCH_SIZE)
        ]

    def train_task(
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
        """Train task `number` of the test, or only some of its `steps`, as a user's loop would."""
        epochs, task = epochs or self.epochs, self.ensure_head(model, number)
        steps_per_epoch = len(self.batches(number))
        if begin:
            torch.manual_seed(self.seed)
            method.begin_task(task, optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch)
        model.train()
        for step in steps if steps is not None else range(epochs * steps_per_epoch):
            x, y = self.batches(number, step // steps_per_epoch)[step % steps_per_epoch]

            def backward(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad(
                    set_to_none=False
                )  # with zero gradients momentum and decay still move what is not frozen
                output = model(x, task)
                loss = F.cross_entropy(output, y) + method.loss(x, output)
                loss.backward()
                return loss

            if closure:
                optimizer.step(backward)  # type: ignore[arg-type]
            else:
                backward()
                optimizer.step()
            if step % steps_per_epoch == steps_per_epoch - 1:
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

    def accuracy_matrix(self, make: MakeMethod) -> list[list[float]]:
        """`A[i][j]`: accuracy on the test's task j after learning task i."""
        model = self.make_model()
        method, optimizer = make(model), self.make_optimizer(model)
        matrix = []
        for number in range(len(self.tasks)):
            self.train_task(model, method, optimizer, number)
            matrix.append([self.accuracy(model, method, old) for old in range(number + 1)])
        method.close()
        return matrix


def mean_forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """Forgetting as a test counts it: accuracy lost since each task was learned, averaged over all but the last."""
    last = len(matrix) - 1
    return sum(matrix[j][j] - matrix[last][j] for j in range(last)) / last


# The checks -----------------------------------------------------------------------------------------------------------


def _differing_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [name for name in left if not torch.equal(left[name], right[name])]


def _copy_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _train_two_tasks(loop: DigitsLoop, make: MakeMethod, closure: bool) -> dict[str, Tensor]:
    model = loop.make_model()
    method, optimizer = make(model), loop.make_optimizer(model)
    for number in range(2):
        loop.train_task(model, method, optimizer, number, epochs=4, closure=closure)
    method.close()
    return _copy_state(model)


def a_closure_gives_the_same_weights(loop: DigitsLoop, make: MakeMethod) -> None:
    if names := _differing_tensors(_train_two_tasks(loop, make, False), _train_two_tasks(loop, make, True)):
        raise ContractBroken(f"step() and step(closure) gave different weights: {', '.join(names[:3])}")


def resuming_in_the_middle_of_a_task_changes_no_bit(loop: DigitsLoop, make: MakeMethod) -> None:
    def run(interrupt_at: int | None) -> dict[str, Tensor]:
        model = loop.make_model()
        method, optimizer = make(model), loop.make_optimizer(model)
        loop.train_task(model, method, optimizer, 0, epochs=4)
        steps = range(4 * len(loop.batches(1)))
        if interrupt_at is None:
            loop.train_task(model, method, optimizer, 1, epochs=4)
        else:
            loop.train_task(model, method, optimizer, 1, epochs=4, steps=steps[:interrupt_at], end=False)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), method.state_dict()))
            rng_state = torch.get_rng_state()
            method.close()
            heads = [loop.tasks[0].name, loop.tasks[1].name]
            model = loop.make_model()
            for number in range(2):
                loop.ensure_head(model, number)
            model.load_state_dict(saved[0])
            optimizer = loop.make_optimizer(model)
            assert list(model.heads) == heads
            method = make(model)
            method.load_state_dict(saved[2], optimizer)
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(rng_state)
            loop.train_task(model, method, optimizer, 1, epochs=4, steps=steps[interrupt_at:], begin=False)
        loop.train_task(model, method, optimizer, 2, epochs=2)
        method.close()
        return _copy_state(model)

    if names := _differing_tensors(run(None), run(2 * len(loop.batches(1)) + 3)):
        raise ContractBroken(f"resuming in the middle of a task changed {', '.join(names[:3])}")


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key != "generator":  # its state
                yield from _iterate_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _iterate_tensors(part)


def memory_reported_is_memory_held(loop: DigitsLoop, make: MakeMethod) -> None:
    model = loop.make_model()
    method, optimizer = make(model), loop.make_optimizer(model)
    for number in range(2):
        loop.train_task(model, method, optimizer, number, epochs=2)
        stored = sum(tensor.numel() * tensor.element_size() for tensor in _iterate_tensors(method.state_dict()))
        reported = method.memory()["bytes"] - method.memory().get("digests", 0)
        if stored != reported:
            raise ContractBroken(
                f"after {number + 1} tasks memory() reports {reported} bytes; its state holds {stored} bytes of tensors"
            )
    method.close()


def nothing_is_left_behind(loop: DigitsLoop, make: MakeMethod) -> None:
    model = loop.make_model()
    loop.ensure_head(model, 1)
    keys = list(model.state_dict())
    required = [p.requires_grad for p in model.parameters()]
    method, optimizer = make(model), loop.make_optimizer(model)
    loop.train_task(model, method, optimizer, 0, epochs=1)
    loop.train_task(model, method, optimizer, 1, epochs=1, steps=range(3), end=False)
    if list(model.state_dict()) != keys:
        raise ContractBroken("the method changed the keys of the model's state_dict")
    method.close()
    hooks = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    if hooks or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ContractBroken(f"close() left hooks behind, on {', '.join(hooks) or 'the optimizer'}")
    if [p.requires_grad for p in model.parameters()] != required:
        raise ContractBroken("close() did not restore requires_grad")
    if any("forward" in vars(module) for module in model.modules()):
        raise ContractBroken("close() left a replaced forward on a module")


def old_heads_stay_put(loop: DigitsLoop, make: MakeMethod) -> None:
    model = loop.make_model()
    method, optimizer = make(model), loop.make_optimizer(model)
    loop.train_task(model, method, optimizer, 0, epochs=2)
    old = _copy_state(model.heads[loop.tasks[0].name])
    loop.train_task(model, method, optimizer, 1, epochs=2)
    method.close()
    if names := _differing_tensors(old, _copy_state(model.heads[loop.tasks[0].name])):
        raise ContractBroken(f"training the second task changed the head of the first: {', '.join(names)}")


def certificates_hold(loop: DigitsLoop, make: MakeMethod) -> None:
    model = loop.make_model()
    method, optimizer = make(model), loop.make_optimizer(model)
    certificates = []
    for number in range(3):
        loop.train_task(model, method, optimizer, number, epochs=4)
        certificates.append(method.certificate())
    method.close()
    verdict = verify(certificates, model.state_dict())
    if not verdict.ok:
        raise ContractBroken(f"its certificates do not hold: {'; '.join(verdict.lines)}")


CHECKS: dict[str, Callable[[DigitsLoop, MakeMethod], None]] = {
    "closure": a_closure_gives_the_same_weights,
    "resume": resuming_in_the_middle_of_a_task_changes_no_bit,
    "memory": memory_reported_is_memory_held,
    "close": nothing_is_left_behind,
    "heads": old_heads_stay_put,
    "certificates": certificates_hold,
}


@dataclass(frozen=True)
class Report:
    """What a test of a method found: its forgetting and accuracy, and fine-tuning's, per seed."""

    network: str
    optimizer: str
    fine_tuning_lost: list[float]
    method_lost: list[float]
    fine_tuning_average: list[float]
    method_average: list[float]

    @property
    def avoided_forgetting(self) -> float:
        """Of a tested method, the share of fine-tuning's forgetting that it avoided, over all seeds."""
        return 1 - sum(self.method_lost) / sum(self.fine_tuning_lost)

    def find_failure(self, min_avoided: float) -> str | None:
        """Why the method under test fails the contract; None if it passes."""
        lost = sum(self.fine_tuning_lost) / len(self.fine_tuning_lost)
        if lost < MIN_FORGETTING:
            return f"fine-tuning lost only {100 * lost:.1f} points here, so the comparison shows nothing"
        if self.avoided_forgetting < min_avoided:
            return (
                f"avoided {100 * self.avoided_forgetting:.0f} % of the {100 * lost:.1f} points that fine-tuning lost; "
                f"at least {100 * min_avoided:.0f} % are required"
            )
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
    min_avoided: float | None = 0.5,
    idle_settings: Mapping[str, Any] | None = None,
    checks: Sequence[str] = tuple(CHECKS),
) -> Report | None:
    """Test a method against the contract with one network and optimizer; raises `ContractBroken` where it fails.

    `settings` are the method's own. With `idle_settings` it does nothing, and must warn. With `min_avoided=None` only
    the cheap `checks` run; otherwise the method must also avoid that share of fine-tuning's forgetting.
    """
    loop = DigitsLoop(network, optimizer)

    def make(model: MultiHead) -> Method:
        return loop.make_method(method, model, settings or {})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfCheckWarning)
        for name in checks:
            try:
                CHECKS[name](loop, make)
            except ContractBroken as broken:
                raise ContractBroken(f"{method.__name__}, {network}, {optimizer}: {broken}") from None
    if idle_settings is not None:
        _check_warns_when_idle(loop, method, {**(settings or {}), **idle_settings})
    if min_avoided is None:
        return None
    report = measure_forgetting(method, settings or {}, network=network, optimizer=optimizer, seeds=range(seeds))
    if failure := report.find_failure(min_avoided):
        raise ContractBroken(f"{method.__name__}, {network}, {optimizer}, {seeds} seeds: {failure}")
    return report


def measure_forgetting(
    method: type[Method], settings: Mapping[str, Any], *, network: str, optimizer: str, seeds: Iterable[int]
) -> Report:
    """Train the test's five tasks with fine-tuning and with the method."""
    report = Report(network, optimizer, [], [], [], [])
    for seed in seeds:
        loop = DigitsLoop(network, optimizer, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfCheckWarning)
            fine_tuning_matrix = _measure_fine_tuning(network, optimizer, seed)
            method_matrix = loop.accuracy_matrix(partial(loop.make_method, method, settings=settings))
        report.fine_tuning_lost.append(mean_forgetting(fine_tuning_matrix))
        report.method_lost.append(mean_forgetting(method_matrix))
        report.fine_tuning_average.append(sum(fine_tuning_matrix[-1]) / len(fine_tuning_matrix))
        report.method_average.append(sum(method_matrix[-1]) / len(method_matrix))
    return report


@cache
def _measure_fine_tuning(network: str, optimizer: str, seed: int) -> list[list[float]]:
    """The accuracy matrix of fine-tuning, with which every method is compared."""
    return DigitsLoop(network, optimizer, seed).accuracy_matrix(FineTune)


def _check_warns_when_idle(loop: DigitsLoop, method: type[Method], settings: Mapping[str, Any]) -> None:
    model = loop.make_model()
    idle_method, optimizer = loop.make_method(method, model, settings), loop.make_optimizer(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            loop.train_task(model, idle_method, optimizer, number, epochs=2)
    idle_method.close()
    if not any(issubclass(warning.category, SelfCheckWarning) for warning in caught):
        raise ContractBroken(f"{method.__name__} does nothing with {dict(settings)} and gave no SelfCheckWarning")
