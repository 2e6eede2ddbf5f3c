"""Models that return more, or something else, than one tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, EWC, SPG, MultiHead, PackNet
from agscl.methods._parts.recorded_outputs import concat_tensors
from loops import adam, blobs, mlp

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


class Opaque:
    """An output that is no container torch knows."""

    def __init__(self, logits):
        self.logits = logits


OUTPUTS = {
    "dict with None": (lambda logits: {"logits": logits, "attentions": None}, lambda output: output["logits"]),
    "tuple": (lambda logits: (logits, logits.sum()), lambda output: output[0]),
    "nested": (lambda logits: {"out": [logits, {"size": 3, "mean": logits.mean(1)}]}, lambda output: output["out"][0]),
    "opaque": (Opaque, lambda output: output.logits),
}


class Net(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.body, self.pack = mlp(), pack
        self.heads = nn.ModuleDict({task: nn.Linear(32, 3) for task in ("a", "b")})

    def forward(self, x, task):
        return self.pack(self.heads[task](self.body(x)))


def learn_both(cls, kind):
    torch.manual_seed(0)
    pack, unpack = OUTPUTS[kind]
    model = Net(pack)
    optimizer = adam(model)
    arguments = (blobs(0)[0][0],) if cls is AGSCL else ()
    method = cls(model, *arguments, heads="heads")
    for number, task in enumerate(model.heads):
        method.begin_task(task, optimizer, epochs=2)
        for _ in range(2):
            for x, y in blobs(number):
                optimizer.zero_grad()
                F.cross_entropy(unpack(model(x, task)), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(number), lambda batch, t=task: F.cross_entropy(unpack(model(batch[0], t)), batch[1]))
    return method


@pytest.mark.parametrize("kind", ["dict with None", "tuple", "nested"])
def test_a_certificate_holds_the_tensors_of_outputs_of_any_form(kind):
    method = learn_both(AGSCL, kind)
    certificate = method.certificate()
    assert certificate.kind == "guaranteed"
    assert set(certificate.probe.outputs) == {"a", "b"}
    with torch.no_grad():
        method.model.heads["a"].bias += 1
    assert method.certificate().changed_outputs == ["a"]


def test_a_certificate_notes_that_outputs_without_a_tensor_were_not_compared():
    certificate = learn_both(AGSCL, "opaque").certificate()
    assert certificate.probe is None
    assert any("a, b were not compared: the model returns no tensor" in note for note in certificate.notes)


@pytest.mark.parametrize("cls", [EWC, PackNet])
def test_a_probe_of_ones_own_takes_outputs_of_any_form(cls):
    pack, _ = OUTPUTS["dict with None"]
    model = Net(pack)
    method, optimizer = cls(model, heads="heads", **({"fisher": "empirical"} if cls is EWC else {})), adam(model)
    method.begin_task("a", optimizer, epochs=1)
    method.end_task(blobs(0), lambda batch: F.cross_entropy(model(batch[0], "a")["logits"], batch[1]))
    assert method.certificate(blobs(0)[0][0]).probe.outputs["a"]["shape"] == [12, 3]


@pytest.mark.parametrize("kind", ["dict with None", "tuple", "nested"])
def test_spg_measures_old_heads_whatever_form_their_outputs_have(kind):
    assert learn_both(SPG, kind).statistics()["importance_max"] > 0


def test_spg_says_that_an_output_holds_no_tensor():
    with pytest.raises(ValueError, match="task 'a'; the model returned an Opaque, which holds no tensor"):
        learn_both(SPG, "opaque")


def test_a_trunk_that_returns_a_tuple_is_an_error_that_says_so():
    class Pair(nn.Module):
        def forward(self, x):
            return x, None

    model = MultiHead(Pair(), features=16)
    model.add_head("a", 3)
    with pytest.raises(TypeError, match=r"the trunk returned a tuple of 2 .* returns the features alone"):
        model(torch.zeros(2, 16), "a")


def test_tensors_of_an_output_keep_their_samples_where_all_have_as_many():
    assert concat_tensors((torch.zeros(4, 2, 3), torch.zeros(4), None)).shape == (4, 7)
    assert concat_tensors((torch.zeros(4, 2), torch.zeros(3))).shape == (1, 11)
    assert concat_tensors([None, 3]) is None
