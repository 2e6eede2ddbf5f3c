from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl import MultiHead, NodeGraph
from agscl.experiments.method_entries import METHODS
from agscl.methods import find_methods
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.memory_forecast import COMMON_PURPOSES, Memory, Outline
from agscl.methods._parts.node_method import NodeMethod
from agscl.networks import NETWORKS

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

USABLE = [name for name, listed in METHODS.items() if not listed.is_bound]


class Conv(nn.Module):
    """Convolutions, one of them grouped, BatchNorm, pooling, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12 * 4, 16),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OneHead(nn.Module):
    """Every task reads the same output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def multi_head(trunk: nn.Module) -> MultiHead:
    model = MultiHead(trunk)
    model.add_head("t0", 3)
    return model


@dataclass(frozen=True)
class Net:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    heads: str | None = None
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        return self.make().to(self.dtype)

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, *self.shape, dtype=self.dtype)

    def outline(self) -> Outline:
        model, example = self.model(), (self.inputs(2),)
        example = (*example, "t0") if self.heads is None else example
        with torch.no_grad():
            model(*example)
        return Outline.from_graph(NodeGraph(model, example, heads=self.heads), example)


def bottom_frozen() -> nn.Module:
    trunk = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU())
    trunk[0].requires_grad_(False)
    return multi_head(trunk)


NETS = {
    "dense": Net(lambda: multi_head(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU())), (6,)),
    "convolutions and BatchNorm": Net(lambda: multi_head(Conv()), (2, 8, 8)),
    "a head that all tasks share": Net(OneHead, (6,), "out"),
    "a frozen first layer": Net(bottom_frozen, (6,)),
}


def learn(net: Net, name: str, tasks: int, settings: dict[str, Any]) -> list[dict[str, int]]:
    """What the method itself reports after each of so many tasks."""
    torch.manual_seed(0)
    model, kind = net.model(), METHODS[name].method_class
    if issubclass(kind, NodeMethod):
        settings = {**settings, "example_input": net.inputs(2)}
    method: Method = kind(model, **settings, **({"heads": net.heads} if net.heads else {}))
    found = []
    for number in range(tasks):
        task = f"t{number}"
        if isinstance(model, MultiHead) and task not in model.heads:
            model.add_head(task, 3)
        x, y = net.inputs(24), torch.randint(3, (24,))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        method.begin_task(task, optimizer, epochs=2, steps_per_epoch=2)
        for _ in range(2):
            for some in (slice(12), slice(12, 24)):
                output = model(x[some], task) if net.heads is None else model(x[some])
                loss = F.cross_entropy(output, y[some]) + method.loss(x[some], output)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            method.end_epoch()
        method.end_task([(x, y)])
        found.append(method.memory())
    method.close()
    return found


def check(forecast: Memory, reported: dict[str, int]) -> None:
    """The same purposes, and the same count of each, or no more where it depends on training."""
    assert forecast.counts.keys() == reported.keys()
    for purpose, count in forecast.counts.items():
        if purpose in forecast.upper_bounds:
            assert reported[purpose] <= count, purpose
        else:
            assert reported[purpose] == count, purpose


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
@pytest.mark.parametrize("name", USABLE)
def test_the_forecast_is_what_the_method_reports_after_every_real_task(name, net):
    outline = net.outline()
    for tasks, reported in enumerate(learn(net, name, 3, {}), start=1):
        check(METHODS[name].forecast_memory(outline, tasks), reported)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("agscl", {"reinit_from": "start"}),
        ("ewc", {"batchnorm": "per_task", "accumulation": "merged"}),
        ("rwalk", {"batchnorm": "per_task"}),
        ("l2", {"batchnorm": "shared"}),
        ("gpm", {"samples": 5}),
    ],
)
def test_settings_that_change_the_memory_change_the_forecast(name, settings):
    net = NETS["convolutions and BatchNorm"]
    outline = net.outline()
    for tasks, reported in enumerate(learn(net, name, 2, settings), start=1):
        check(METHODS[name].forecast_memory(outline, tasks, settings), reported)
    if "samples" not in settings and settings.get("batchnorm") != "shared":
        assert METHODS[name].forecast_memory(outline, 2, settings) != METHODS[name].forecast_memory(outline, 2)


@pytest.mark.parametrize("name", USABLE)
def test_bytes_are_those_of_the_models_own_precision(name):
    net = replace(NETS["dense"], dtype=torch.float64)
    (reported,) = learn(net, name, 1, {})
    check(METHODS[name].forecast_memory(net.outline(), 1), reported)


def test_agscl_reaches_its_bound_when_every_node_is_important_and_stays_below_it_otherwise():
    net = NETS["dense"]

    def lively() -> nn.Module:
        model = net.make()
        for layer, bias in ((model.trunk[0], 10.0), (model.trunk[2], 100.0)):
            nn.init.constant_(layer.bias, bias)
        return model

    bound = METHODS["agscl"].forecast_memory(net.outline(), 1)
    (reported,) = learn(Net(lively, net.shape), "agscl", 1, {"budget": None})
    assert reported == bound.counts
    (reported,) = learn(net, "agscl", 1, {})
    assert reported["anchors"] < bound.counts["anchors"]
    assert bound.bytes - reported["bytes"] == 4 * (bound.counts["anchors"] - reported["anchors"])
    assert reported["importances"] == bound.importances


def test_gpm_reaches_its_bound_where_every_direction_counts():
    net = NETS["dense"]
    outline = net.outline()
    (reported,) = learn(net, "gpm", 1, {"samples": 4, "threshold": 1.0})
    bound = METHODS["gpm"].forecast_memory(outline, 1, {"samples": 4})
    assert bound.counts["bases"] == 6 * 4 + 10 * 4
    assert reported["bases"] == bound.counts["bases"]
    assert METHODS["gpm"].forecast_memory(outline, 50).counts["bases"] == 6 * 6 + 10 * 10, (
        "no more directions than columns"
    )


def test_every_method_has_a_forecast_and_reports_the_common_purposes():
    assert list(find_methods()) == USABLE
    for name in USABLE:
        kind, net = METHODS[name].method_class, NETS["dense"]
        example = {"example_input": net.inputs(2)} if issubclass(kind, NodeMethod) else {}
        assert {*COMMON_PURPOSES, "bytes"} <= kind(net.model(), heads=net.heads, **example).memory().keys()


def test_after_no_task_or_for_an_unknown_method_there_is_no_forecast():
    outline = NETS["dense"].outline()
    with pytest.raises(ValueError, match="at least 1, not 0"):
        METHODS["ewc"].forecast_memory(outline, 0)
    with pytest.raises(ValueError, match="no memory forecast for method 'joint'"):
        METHODS["joint"].forecast_memory(outline, 1)


def test_for_alexnet_agscl_keeps_9344_importances_where_ewc_keeps_57_million():
    trunk = NETWORKS["alexnet"]()
    model = MultiHead(trunk, features=trunk.features)
    model.add_head("birds", 20)
    example = (torch.zeros(2, 3, 63, 63), "birds")  # the graph is that of 224×224, and sooner found
    outline = Outline.from_graph(NodeGraph(model, example), example)
    ours, theirs = METHODS["agscl"].forecast_memory(outline, 10), METHODS["ewc"].forecast_memory(outline, 10)
    assert (ours.importances, theirs.importances) == (9_344, 57_003_840)
    assert theirs.total == 114_007_680
    assert theirs.importances / ours.importances < 10**4 < theirs.total / ours.importances
    assert ours.total == 57_003_840 + 2 * 9_344
    assert "anchors" in ours.upper_bounds


def test_the_total_counts_all_numbers_but_neither_digests_nor_bytes():
    kept = Memory({"importances": 10, "anchors": 300, "masks": 10, "bases": 7, "digests": 160, "bytes": 99_999})
    assert (kept.importances, kept.total, kept.other_counts, kept.bytes) == (10, 327, {"bases": 7}, 99_999)
