"""Important nodes read what later tasks add; earlier tasks do not see it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, MultiHead, PackNet, PaperAGSCL
from agscl.certificate import NEVER, verify
from agscl.graph.rows import FlatRows, Rows
from loops import adam, bits, blobs, learn, mlp, same

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.lifecycle.SelfCheckWarning")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.norm(self.second(x)))
        return torch.relu(self.third(x))


class Grouped(nn.Module):
    """Convolutions, of which one reads its input in two groups."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, groups=2)

    def forward(self, x):
        x = torch.relu(self.first(x.view(-1, 1, 4, 4)))
        return torch.relu(self.second(x)).flatten(1)


TRUNKS = {"mlp": mlp, "residual, with BatchNorm": Residual, "grouped convolutions": Grouped}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def make(trunk=mlp, kind=AGSCL, **settings):
    torch.manual_seed(0)
    model = MultiHead(trunk())
    return model, kind(model, torch.randn(4, 16), **settings)


def learn_tasks(trunk=mlp, tasks=3, **settings):
    """Also each task's outputs as it was learned, and its certificate."""
    model, method = make(trunk, **settings)
    optimizer, outputs, certificates = adam(model), {}, []
    for number in range(tasks):
        learn(method, optimizer, number)
        model.eval()
        with torch.no_grad():
            outputs[f"t{number}"] = model(X, f"t{number}")
        certificates.append(method.certificate())
    return model, method, outputs, certificates


def count_later_inputs(method):
    """How many weights from a later node into an earlier one are not 0."""
    graph, first, count = method.graph, method.knowledge.first_task, 0
    for name, layer in graph.layers.items():
        if reader := graph.readers.get(name):
            sources = torch.cat([first, torch.tensor([-1])])[reader.source_groups()]
            own = first[layer.groups].view(-1, *[1] * (layer.weight.dim() - 1))
            count += int((layer.weight * (sources > own)).count_nonzero())
    return count


@pytest.mark.parametrize("trunk", TRUNKS)
def test_old_outputs_keep_their_bits_after_every_step_while_old_nodes_learn_to_read_new_ones(trunk):
    model, method = make(TRUNKS[trunk])
    optimizer = adam(model)
    outputs = {}

    def look(_=None):
        model.eval()
        with torch.no_grad():
            for task, expected in outputs.items():
                assert torch.equal(model(X, task), expected), task
        model.train()

    for number in range(4):
        learn(method, optimizer, number, after_step=look)
        model.eval()
        outputs[f"t{number}"] = model(X, f"t{number}").detach()
    look()
    assert method.zero_rule == "earlier_tasks"
    assert count_later_inputs(method) > 0
    assert method.certificate().guarantees_outputs


def test_the_newest_task_uses_what_old_nodes_read_of_new_ones():
    model, method, outputs, _ = learn_tasks()
    layer, first = model.trunk[2], method.knowledge.first_task
    with torch.no_grad():
        later = first[:32][None, :] > first[32:][:, None]
        layer.weight[later] = 0.0
        assert torch.equal(model(X, "t0"), outputs["t0"])
        assert not torch.equal(model(X, "t2"), outputs["t2"])


def test_in_the_papers_form_and_where_the_model_is_not_told_the_task_such_weights_are_zero():
    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = mlp(), nn.ModuleDict({"t0": nn.Linear(32, 3), "t1": nn.Linear(32, 3)})

        def forward(self, x):
            features = self.body(x)
            return {task: head(features) for task, head in self.heads.items()}

    assert make(kind=PaperAGSCL)[1].zero_rule == "paper"
    assert make(kind=PaperAGSCL, lam=math.inf)[1].zero_rule == "paper"
    assert make(lam=10.0)[1].zero_rule == "paper"
    model = AllHeads()
    assert AGSCL(model, torch.randn(4, 16), heads="heads").zero_rule == "paper"
    assert AGSCL(model, torch.randn(4, 16), heads="heads", zero_init="earlier_tasks").zero_rule == "earlier_tasks"
    with pytest.raises(ValueError, match=r"lam=math\.inf"):
        make(zero_init="earlier_tasks", lam=10.0)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_the_chain_of_certificates_verifies_and_finds_any_flipped_weight_of_an_important_node(trunk):
    model, method, _, certificates = learn_tasks(TRUNKS[trunk])
    assert [certificate.zero_rule for certificate in certificates] == ["earlier_tasks"] * 3
    assert all(certificate.kind == "guaranteed" for certificate in certificates)
    state = bits(model)
    assert verify(certificates, state).ok
    draw = torch.Generator().manual_seed(1)
    for name, layer in method.graph.layers.items():
        important = (method.knowledge.first_task[layer.groups] != NEVER).nonzero().flatten()
        for row in important[torch.randperm(len(important), generator=draw)[:4]]:
            changed = copy.deepcopy(state)
            weight = changed[f"{name}.weight"][row].view(-1)
            weight[torch.randint(len(weight), (1,), generator=draw)] += 1.0
            assert not verify(certificates, changed).ok, (name, row)


def test_a_node_is_said_to_have_kept_its_bits_although_it_learned_to_read_later_ones():
    _, method, _, certificates = learn_tasks()
    assert count_later_inputs(method) > 0
    assert certificates[-1].held
    assert not certificates[-1].moved


def test_a_frozen_weight_that_was_learned_from_a_later_node_cannot_move_either():
    model, method, _, _ = learn_tasks(tasks=2)
    model.add_head("t2", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    method.begin_task("t2", optimizer)
    first = torch.cat([method.knowledge.first_task, torch.tensor([-1])])
    fixed = {}
    for name, layer in method.graph.layers.items():
        reader, own = method.graph.readers.get(name), first[layer.groups] != NEVER
        mask = own[:, None] & (
            torch.ones(1, 1, dtype=bool) if reader is None else first[reader.source_groups()] != NEVER
        )
        fixed[name] = mask.expand_as(layer.weight), layer.weight.detach().clone()
    for x, y in blobs(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x, "t2"), y).backward()
        optimizer.step()
    for name, (mask, before) in fixed.items():
        weight = method.graph.layers[name].weight
        assert torch.equal(weight[mask], before[mask])
        assert not torch.equal(weight[~mask], before[~mask])


def test_a_task_that_is_resumed_ends_with_the_same_bits():
    whole, method, _, _ = learn_tasks(tasks=2)
    optimizer = adam(whole)
    learn(method, optimizer, 2)

    model, method, _, _ = learn_tasks(tasks=2)
    optimizer = adam(model)
    learn(method, optimizer, 2, steps=range(10), end=False)
    state = method.state_dict(), optimizer.state_dict(), bits(model)

    again, other = make()
    for number in range(3):
        again.add_head(f"t{number}", 3)
    again.load_state_dict(state[2])
    optimizer = adam(again)
    other.load_state_dict(state[0], optimizer)
    optimizer.load_state_dict(state[1])
    learn(other, optimizer, 2, steps=range(10, 32), begin=False)
    assert same(bits(again), bits(whole))
    again.eval(), whole.eval()
    for number in range(3):
        assert torch.equal(again(X, f"t{number}"), whole(X, f"t{number}"))


@pytest.mark.parametrize("kind", [AGSCL, PackNet])
def test_the_weights_of_a_task_run_it_in_a_plain_model(kind):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    method = kind(model, torch.zeros(2, 16)) if kind is AGSCL else kind(model)
    optimizer = adam(model)
    for number in range(3):
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer, epochs=4)
        for _ in range(4):
            for x, y in blobs(number):
                optimizer.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(number))
    model.eval()
    plain = MultiHead(mlp()).eval()
    for number in range(3):
        plain.add_head(f"t{number}", 3)
    for task in method.tasks:
        plain.load_state_dict(method.state_dict_for(task))
        assert torch.equal(plain(X, task), model(X, task))
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(plain(X, "t0"), model(X, "t0"))
    with pytest.raises(ValueError, match="has not begun"):
        method.state_dict_for("other")


@pytest.mark.parametrize("trunk", TRUNKS)
def test_flat_rows_leave_the_same_weights_alone_as_rows_do(trunk):
    kept = []
    for flat in (False, True):
        model, method = make(TRUNKS[trunk])
        draw = torch.Generator().manual_seed(0)
        free = torch.rand(method.graph.size, generator=draw) < 0.5
        rows = Rows(method.graph, ~free)
        rows = FlatRows(rows) if flat else rows
        rows.leave_inputs(method.graph, free)
        rows.scatter_([torch.full_like(row, 7.0) for row in rows.gather()])
        kept.append(bits(model))
        for name, layer in method.graph.layers.items():
            written = (layer.weight == 7.0).detach()
            expected = ~free[layer.groups].view(-1, *[1] * (layer.weight.dim() - 1)).expand_as(layer.weight)
            if reader := method.graph.readers.get(name):
                expected = expected & ~reader.reads(free)
            assert torch.equal(written, expected), name
    assert same(*kept)
