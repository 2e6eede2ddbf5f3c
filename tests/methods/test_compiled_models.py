"""Models compiled by torch.compile, as a whole or in part: the same nodes, the same weights, the same old bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, MultiHead
from loops import adam, blobs

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def make_trunk(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(12)] if norm else []
    return nn.Sequential(nn.Linear(16, 12), *norms, nn.ReLU(), nn.Linear(12, 10), nn.ReLU())


class OwnHeads(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.last = body, nn.ModuleList(nn.Linear(10, 3) for _ in range(2))

    def forward(self, x, task):
        return self.last[int(task)](self.body(x))


def compile_part(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def compile_first_layer(trunk: nn.Module) -> nn.Module:
    trunk[0] = compile_part(trunk[0])
    return trunk


def compile_heads(model: nn.Module) -> nn.Module:
    model.last = nn.ModuleList(compile_part(head) for head in model.last)
    return model


FORMS = {
    "whole": lambda trunk: compile_part(MultiHead(trunk)),
    "whole in place": lambda trunk: compile_in_place(MultiHead(trunk)),
    "trunk": lambda trunk: MultiHead(compile_part(trunk)),
    "trunk in place": lambda trunk: MultiHead(compile_in_place(trunk)),
    "one layer": lambda trunk: MultiHead(compile_first_layer(trunk)),
    "own heads, whole": lambda trunk: compile_part(OwnHeads(trunk)),
    "own heads, in place": lambda trunk: compile_in_place(OwnHeads(trunk)),
    "own heads, body": lambda trunk: OwnHeads(compile_part(trunk)),
    "own heads, heads": lambda trunk: compile_heads(OwnHeads(trunk)),
}


def learn_two_tasks(model: nn.Module) -> tuple[AGSCL, list[torch.Tensor]]:
    """The method, and the first task's logits after each task."""
    own = {"heads": "last"} if hasattr(model, "last") else {}
    method, optimizer = AGSCL(model, torch.zeros(2, 16), **own), adam(model)
    logits = []
    for number, task in enumerate(("0", "1")):
        if not own:
            torch.manual_seed(number)
            method.model.add_head(task, 3)
        method.begin_task(task, optimizer, epochs=3)
        model.train()
        for _ in range(3):
            for x, y in blobs(number):
                optimizer.zero_grad()
                F.cross_entropy(model(x, task), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(number))
        with torch.no_grad():
            logits.append(model.eval()(blobs(0)[0][0], "0"))
    return method, logits


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_model_learns_the_same_weights_and_keeps_old_bits(form, norm):
    torch.compiler.reset()
    method, (before, after) = learn_two_tasks(FORMS[form](make_trunk(norm)))
    assert torch.equal(before, after)
    kind = OwnHeads if form.startswith("own") else MultiHead
    uncompiled, _ = learn_two_tasks(kind(make_trunk(norm)))
    assert [layer.groups.tolist() for layer in method.graph.layers.values()] == [
        layer.groups.tolist() for layer in uncompiled.graph.layers.values()
    ]
    pairs = zip(method.model.state_dict().items(), uncompiled.model.state_dict().items(), strict=True)
    for (name, value), (plain_name, plain_value) in pairs:
        assert name.replace("_orig_mod.", "") == plain_name
        assert torch.equal(value, plain_value), name
