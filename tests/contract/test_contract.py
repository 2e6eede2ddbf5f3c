"""Every method through the same checks. The whole matrix is `benchmarks/contract.py`; its result is in results/."""

from __future__ import annotations

from typing import Any

import pytest
from settings import IDLE, METHODS, settings_of

from agscl import AGSCL, EWC, HAT, MAS, SI, FineTune, PackNet
from agscl.methods.base import Method
from agscl.testing import CHECKS, ContractBroken, check_method, measure


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_passes_every_cheap_check_and_says_when_it_does_nothing(name):
    check_method(METHODS[name], settings_of(name, "mlp", "adam"), least_saved=None, idle=IDLE.get(name))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_saves_at_least_half_of_what_fine_tuning_loses(name):
    settings = {"lam": 0.7} if name == "L2" else settings_of(name, "mlp", "adam")
    check_method(METHODS[name], settings, seeds=2, checks=())


@pytest.mark.slow
@pytest.mark.parametrize("network", ["cnn", "residual"])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_passes_every_cheap_check_on_convolutions_and_batchnorm(name, network):
    check_method(
        METHODS[name], settings_of(name, network, "adamw"), network=network, optimizer="adamw", least_saved=None
    )


# What the contract must catch: each penalty, mask and gate switched off in turn ---------------------------------------


def without(method: type[Method], *phases: str) -> type[Method]:
    """The method with some of its phases doing nothing."""

    def nothing(self: Method, *args: Any) -> None: ...

    return type(method.__name__, (method,), dict.fromkeys(phases, nothing))


MUTANTS = {
    "EWC without its penalty": (EWC, ("_add_penalty",)),
    "SI without its penalty": (SI, ("_add_penalty",)),
    "MAS without its penalty": (MAS, ("_add_penalty",)),
    "AGS-CL without its proximal step": (AGSCL, ("_proximal", "_run_proximal", "_end_epoch")),
    "PackNet without its masks": (PackNet, ("_restore",)),
    "HAT without its masks": (HAT, ("_restore", "_add_penalty")),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_the_contract_fails_a_method_whose_work_is_switched_off(mutant):
    method, phases = MUTANTS[mutant]
    report = measure(
        without(method, *phases),
        settings_of(method.__name__, "mlp", "adam"),
        network="mlp",
        optimizer="adam",
        seeds=range(2),
    )
    assert report.complaint(0.5) is not None, f"saved {report.saved:.2f}"


class Leaky(FineTune):
    """Breaks one promise at a time."""

    fault = ""

    def close(self) -> None:
        if self.fault != "close":
            super().close()

    def memory(self) -> dict[str, int]:
        return {**super().memory(), "bytes": 8 if self.fault == "memory" else 0}

    def _hold_still(self, parameters: Any) -> None:
        if self.fault != "heads":
            super()._hold_still(parameters)

    def _add_penalty(self, optimizer: Any, scale: Any) -> None:
        count = self.__dict__.setdefault("count", 0)
        self.count = count + 1
        if self.fault == "resume":  # depends on something that state_dict does not hold
            for parameter in self.model.trunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 1e-3 * (self.count % 7))

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
        check_method(broken, least_saved=None, checks=[fault])
    if fault not in ("closure", "heads"):  # these two break resuming as well
        check_method(broken, least_saved=None, checks=others)


def test_a_method_that_does_nothing_and_keeps_quiet_is_failed():
    with pytest.raises(ContractBroken, match="did not say so"):
        check_method(FineTune, least_saved=None, checks=(), idle={})
