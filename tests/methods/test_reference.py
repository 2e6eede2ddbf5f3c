"""AGS-CL as a whole against a second one, written from the paper for one small network, without hooks or graphs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import MultiHead, PaperAGSCL
from agscl.certificate import NEVER

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

MU, LAM, RHO, ETA = 16.0, 5.0, 0.5, 0.9
TASKS, EPOCHS, BATCH = 4, 8, 16


def make_model() -> MultiHead:
    torch.manual_seed(0)
    trunk = nn.Sequential(
        *(nn.Conv2d(2, 7, 3, padding=1), nn.ReLU(), nn.Conv2d(7, 9, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(9 * 2 * 2, 12), nn.ReLU()),
    )
    with torch.no_grad():
        for layer in (trunk[0], trunk[2], trunk[6]):  # some nodes are weak, so that they become free
            layer.weight[:4] *= 0.2
            layer.bias[:4] *= 0.2
    return MultiHead(trunk, features=12).double()


def data(task: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + task)
    y = torch.randint(3, (64,), generator=draw)
    means = torch.randn(3, 2, 6, 6, generator=draw, dtype=torch.float64)
    return means[y] + 0.5 * torch.randn(64, 2, 6, 6, generator=draw, dtype=torch.float64), y


class Reference:
    """The method as the paper has it. `forever`: what a later node feeds an earlier one stays 0 for all tasks."""

    def __init__(self, model: MultiHead, mu: float, lam: float, forever: bool) -> None:
        self.model, self.mu, self.lam, self.forever = model, mu, lam, forever
        self.layers = [model.trunk[0], model.trunk[2], model.trunk[6]]
        self.omega = [torch.zeros(len(layer.weight), dtype=torch.float64) for layer in self.layers]
        self.first = [torch.full((len(layer.weight),), NEVER) for layer in self.layers]
        self.old = copy.deepcopy(self.layers)
        self.task = 0

    def by_source(self, weight: torch.Tensor, sources: int) -> torch.Tensor:
        """(rows, source nodes, weights each): through the flatten a channel has four columns."""
        return weight.view(len(weight), sources, -1)

    @torch.no_grad()
    def after_step(self) -> None:
        for place in (1, 2):
            weight = self.by_source(self.layers[place].weight, len(self.omega[place - 1]))
            for row in range(weight.shape[0]):
                for source in range(weight.shape[1]):
                    later = self.first[place - 1][source] > self.first[place][row]
                    is_free = self.omega[place - 1][source] == 0 and self.omega[place][row] > 0
                    if later if self.forever else is_free:
                        weight[row, source] = 0

    @torch.no_grad()
    def after_epoch(self, rate: float) -> list[str]:
        """What happened to each node: free, zeroed, pulled or frozen."""
        happened = []
        for layer, old, omega in zip(self.layers, self.old, self.omega, strict=True):
            for node in range(len(omega)):
                theta = torch.cat([layer.weight[node].flatten(), layer.bias[node : node + 1]])
                if omega[node] == 0:
                    norm = math.sqrt(float((theta**2).sum()))
                    share = max(0.0, 1 - rate * self.mu / norm) if norm else 0.0
                    theta = share * theta
                    happened.append("free" if share else "zeroed")
                else:
                    anchor = torch.cat([old.weight[node].flatten(), old.bias[node : node + 1]])
                    away = math.sqrt(float(((theta - anchor) ** 2).sum()))
                    share = max(0.0, 1 - rate * self.lam * float(omega[node]) / away) if away else 0.0
                    theta = share * theta + (1 - share) * anchor
                    happened.append("pulled" if share else "frozen")
                layer.weight[node] = theta[:-1].view_as(layer.weight[node])
                layer.bias[node] = theta[-1]
        return happened

    @torch.no_grad()
    def end_task(self, x: torch.Tensor, head: nn.Linear, ours: list[nn.Module]) -> None:
        one = F.relu(self.layers[0](x))
        two = F.relu(self.layers[1](one))
        three = F.relu(self.layers[2](F.max_pool2d(two, 2).flatten(1)))
        means = [one.mean((0, 2, 3)), two.mean((0, 2, 3)), three.mean(0)]
        self.omega = [ETA * omega + mean for omega, mean in zip(self.omega, means, strict=True)]
        for omega, first in zip(self.omega, self.first, strict=True):
            first[(omega > 0) & (first == NEVER)] = self.task
        for place in (1, 2):
            self.by_source(self.layers[place].weight, len(self.omega[place - 1]))[:, self.omega[place - 1] == 0] = 0
        head.weight[:, self.omega[2] == 0] = 0
        for layer, other, omega in zip(self.layers, ours, self.omega, strict=True):  # which, and what, is chance
            fresh = [node for node in range(len(omega)) if not same(layer, other, node)]
            assert all(omega[node] == 0 for node in fresh)
            count = int((omega == 0).sum())
            assert len(fresh) == count - math.floor(count * (1 - RHO))
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for node in fresh:
                assert other.weight[node].abs().max() <= bound
                assert other.weight[node].flatten().count_nonzero() == layer.weight[0].numel()
                layer.weight[node], layer.bias[node] = other.weight[node], other.bias[node]
        self.old = copy.deepcopy(self.layers)
        self.task += 1


def same(one: nn.Module, other: nn.Module, node: int) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(mine[node], theirs[node], rtol=1e-4, atol=1e-6) for mine, theirs in pairs)


@pytest.mark.parametrize("rule", ["paper", "while_free"])
def test_four_tasks_end_with_the_weights_of_an_independent_implementation(rule):
    mine, theirs = make_model(), make_model()
    x = data(0)[0]
    settings = {"mu": MU, "lam": LAM, "rho": RHO, "eta": ETA, "zero_init": rule}
    method = PaperAGSCL(mine, **settings, example_input=x[:2])
    reference = Reference(theirs, MU, LAM, forever=rule == "paper")
    seen: list[str] = []
    for task in range(TASKS):
        name = f"t{task}"
        x, y = data(task)
        torch.manual_seed(task)
        mine.add_head(name, 3).double()
        theirs.add_head(name, 3).double().load_state_dict(mine.heads[name].state_dict())
        optimizer = torch.optim.Adam(mine.parameters(), lr=0.02)
        other = torch.optim.Adam([*theirs.trunk.parameters(), *theirs.heads[name].parameters()], lr=0.02)
        method.begin_task(name, optimizer)
        for epoch in range(EPOCHS):
            for rows in torch.randperm(len(x)).split(BATCH):
                for model, each in ((mine, optimizer), (theirs, other)):
                    each.zero_grad()
                    F.cross_entropy(model(x[rows], name), y[rows]).backward()
                    each.step()
                reference.after_step()
            method.end_epoch()
            seen += reference.after_epoch(other.param_groups[0]["lr"])
            for one, two in zip(mine.trunk.parameters(), theirs.trunk.parameters(), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)  # importances are float32
                assert torch.equal(one == 0, two == 0)
            if epoch == 4:
                for each in (optimizer, other):
                    each.param_groups[0]["lr"] /= 3
        method.end_task([(x, y)])
        reference.end_task(x, theirs.heads[name], [mine.trunk[0], mine.trunk[2], mine.trunk[6]])
        torch.testing.assert_close(
            method.knowledge.omega, torch.cat(reference.omega).to(method.knowledge.omega), rtol=1e-6, atol=1e-9
        )
        assert method.knowledge.first_task.tolist() == torch.cat(reference.first).tolist()
        for number in range(task + 1):
            heads = mine.heads[f"t{number}"].weight, theirs.heads[f"t{number}"].weight
            torch.testing.assert_close(*heads, rtol=1e-4, atol=1e-6)
    assert {"free", "zeroed", "pulled", "frozen"} <= set(seen)
    assert 0 < int((method.knowledge.omega == 0).sum()) < len(method.knowledge.omega)
