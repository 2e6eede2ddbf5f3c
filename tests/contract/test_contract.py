"""Every method through the same checks. The whole matrix is `benchmarks/contract.py`; its result is in results/."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from settings import IDLE, METHODS, settings_of

from agscl import AGSCL, EWC, GPM, HAT, L2, MAS, SI, SPG, TRGP, WSN, FineTune, Frozen, LwF, MultiHead, PackNet, RWalk
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.testing import CHECKS, ContractBroken, check_method
from loops import blobs, mlp


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_passes_every_cheap_check_and_says_when_it_does_nothing(name):
    check_method(METHODS[name], settings_of(name, "mlp", "adam"), min_avoided=None, idle_settings=IDLE.get(name))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_saves_at_least_half_of_what_fine_tuning_loses(name):
    check_method(METHODS[name], settings_of(name, "mlp", "adam"), seeds=2, checks=())


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(METHODS))
def test_no_method_is_idle_with_weights_of_another_precision(name, kind):
    def weights(cls, settings):
        torch.manual_seed(0)
        model = MultiHead(mlp().to(kind), features=32)
        example = {"example_input": torch.zeros(2, 16, dtype=kind)} if issubclass(cls, NodeMethod) else {}
        method, optimizer = cls(model, **example, **settings), torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            torch.manual_seed(number)
            model.add_head(f"t{number}", 3)
            data = [(x.to(kind), y) for x, y in blobs(number)]
            method.begin_task(f"t{number}", optimizer, epochs=6, steps_per_epoch=len(data))
            for _ in range(6):
                for x, y in data:
                    optimizer.zero_grad()
                    output = model(x, f"t{number}")
                    (F.cross_entropy(output, y) + method.loss(x, output)).backward()
                    optimizer.step()
                method.end_epoch()
            method.end_task(data)
        return list(model.trunk.parameters())

    plain, held = weights(FineTune, {}), weights(METHODS[name], settings_of(name, "mlp", "sgd"))
    assert all(one.dtype == kind and one.isfinite().all() for one in held)
    assert not all(torch.equal(one, other) for one, other in zip(plain, held, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["cnn", "residual"])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_passes_every_cheap_check_on_convolutions_and_batchnorm(name, network):
    check_method(
        METHODS[name], settings_of(name, network, "adamw"), network=network, optimizer="adamw", min_avoided=None
    )


# What the contract must catch: each penalty, mask and gate switched off in turn ---------------------------------------


def do_nothing(self: Any, *args: Any) -> None: ...


def without(method: type[Method], *names: str) -> type[Method]:
    """The method with some of what it does doing nothing."""
    assert all(hasattr(method, name) for name in names)
    return type(method.__name__, (method,), dict.fromkeys(names, do_nothing))


def without_phases(method: type[Method], *names: str) -> type[Method]:
    """The method whose plan leaves out some phases of a step."""
    assert all(hasattr(method.Plan, name) for name in names)
    plan = type(method.Plan.__name__, (method.Plan,), dict.fromkeys(names, do_nothing))
    return type(method.__name__, (method,), {"Plan": plan})


class Leaky(without(without_phases(AGSCL, "restore"), "_reinitialise_free")):
    def _finish_task(self, *given: Any) -> None:
        with mock.patch("agscl.methods.agscl.zero_outgoing_"):
            super()._finish_task(*given)


class Silent(LwF):
    def loss(self, x: Any, output: Any) -> torch.Tensor:
        return FineTune.loss(self, x, output)


class Blind(PackNet):
    def _replace_weights(self, task: str) -> dict[Any, Any]:
        return {}


class Unmasked(WSN):
    def run_masked(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


class OneView(TRGP):
    """Every task is seen through the scales of the last one."""

    def _find_terms(self, name: str, task: str | None) -> list[Any]:
        return super()._find_terms(name, self.tasks[-1])


class Loose(Frozen):
    def is_frozen(self, name: str) -> bool:
        return False


MUTANTS = {
    "EWC without its penalty": without_phases(EWC, "add_penalty"),
    "SI without its penalty": without_phases(SI, "add_penalty"),
    "RWalk without its penalty": without_phases(RWalk, "add_penalty"),
    "MAS without its penalty": without_phases(MAS, "add_penalty"),
    "L2 without its penalty": without_phases(L2, "add_penalty"),
    "AGS-CL without its proximal step": without_phases(AGSCL, "_run_proximal_step", "_restore_frozen"),
    "AGS-CL without zeros where free nodes feed important ones": Leaky,
    "PackNet without its masks": without_phases(PackNet, "restore_fixed"),
    "PackNet without its views": Blind,
    "WSN without its masks": Unmasked,
    "WSN whose used weights are trained on": without_phases(WSN, "restore_fixed", "add_penalty"),
    "HAT without its masks": without_phases(HAT, "restore", "add_penalty"),
    "HAT without its gates": without(HAT, "_current_gates"),
    "LwF without its loss": Silent,
    "GPM without its projection": without_phases(GPM, "add_penalty", "restore"),
    "TRGP without its projection": without_phases(TRGP, "add_penalty", "restore"),
    "TRGP without its views": OneView,
    "SPG without its masks": without_phases(SPG, "add_penalty", "restore"),
    "Frozen that does not freeze": Loose,
}


LEAST = {"PackNet": 0.9, "WSN": 0.9, "HAT": 0.9, "Frozen": 0.9}
"""What the ones that forget nothing must save. Half of that is saved by weights taken away or gates alone."""


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_the_contract_fails_a_method_whose_work_is_switched_off(mutant):
    method = MUTANTS[mutant]
    name = next(kind.__name__ for kind in method.__mro__[1:] if kind.__name__ in METHODS)
    options = {"seeds": 1, "checks": ["certificates"], "min_avoided": LEAST.get(name, 0.5)}
    with pytest.raises(ContractBroken):
        check_method(method, settings_of(name, "mlp", "adam"), **options)


@pytest.mark.parametrize("name", list(LEAST))
def test_methods_that_forget_nothing_save_all_that_they_are_asked_to(name):
    settings = settings_of(name, "mlp", "adam")
    report = check_method(METHODS[name], settings, seeds=1, checks=[], min_avoided=LEAST[name])
    assert report.avoided_forgetting == 1


class LeakyPlan(FineTune.Plan):
    def freeze(self, parameters: Any, **options: Any) -> None:
        if self.method.fault != "heads":
            super().freeze(parameters, **options)

    def add_penalty(self, optimizer: Any, scale: Any) -> None:
        count = self.__dict__.setdefault("count", 0)
        self.count = count + 1
        if self.method.fault == "resume":  # depends on something that state_dict does not hold
            for parameter in self.method.model.trunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 1e-3 * (self.count % 5))


class Leaky(FineTune):
    """Breaks one promise at a time."""

    Plan = LeakyPlan
    fault = ""

    def close(self) -> None:
        if self.fault != "close":
            super().close()

    def memory(self) -> dict[str, int]:
        return {**super().memory(), "bytes": 8 if self.fault == "memory" else 0}

    def certificate(self, probe: Any = None) -> Any:
        made = super().certificate(probe)
        if self.fault == "certificates":
            made.heads[self.tasks[0]] = "0" * 32
        return made

    def begin_task(self, task: str, *optimizers: Any, **counts: Any) -> None:
        super().begin_task(task, *optimizers, **counts)
        if self.fault == "closure":  # a hook of its own, which runs before a closure's backward pass
            optimizers[0].register_step_pre_hook(self._halve)

    def _halve(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in self.model.trunk.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize("fault", list(CHECKS))
def test_each_cheap_check_fails_a_method_that_breaks_just_that_promise(fault):
    broken = type("Leaky", (Leaky,), {"fault": fault})
    others = [name for name in CHECKS if name not in (fault, "close")]
    with pytest.raises(ContractBroken):
        check_method(broken, min_avoided=None, checks=[fault])
    if fault not in ("closure", "heads"):  # these two break resuming as well
        check_method(broken, min_avoided=None, checks=others)


def test_a_method_that_does_nothing_and_keeps_quiet_is_failed():
    with pytest.raises(ContractBroken, match="gave no SelfCheckWarning"):
        check_method(FineTune, min_avoided=None, checks=(), idle_settings={})
