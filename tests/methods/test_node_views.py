"""Important nodes read what later tasks add; earlier tasks do not see it."""

import copy
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from agscl import AGSCL, MultiHead, PackNet, PaperAGSCL
from agscl.certificate import NEVER, verify
from agscl.graph.rows import FlatRows, Rows
from loops import adam, bits, blobs, learn, mlp, same

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


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
def test_the_chain_of_certificates_verifies_and_finds_any_changed_weight_that_a_task_sees(trunk):
    model, method, _, certificates = learn_tasks(TRUNKS[trunk])
    assert [certificate.zero_rule for certificate in certificates] == ["earlier_tasks"] * 3
    assert all(certificate.kind == "guaranteed" for certificate in certificates)
    state = bits(model)
    assert verify(certificates, state).ok
    draw = torch.Generator().manual_seed(1)
    for name, layer in method.graph.layers.items():
        important = (method.knowledge.first_task[layer.groups] != NEVER).nonzero().flatten()
        hidden = torch.zeros_like(layer.weight, dtype=torch.bool)
        if reader := method.graph.readers.get(name):  # from nodes that no task owns
            hidden = reader.reads(method.free).expand_as(layer.weight)
        for row in important[torch.randperm(len(important), generator=draw)[:4]]:
            changed = copy.deepcopy(state)
            number = torch.randint(hidden[row].numel(), (1,), generator=draw)
            changed[f"{name}.weight"][row].view(-1)[number] += 1.0
            assert verify(certificates, changed).ok == bool(hidden[row].reshape(-1)[number]), (name, row)


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
        rows.skip_inputs_from(method.graph, free)
        rows.scatter_([torch.full_like(row, 7.0) for row in rows.gather()])
        kept.append(bits(model))
        for name, layer in method.graph.layers.items():
            written = (layer.weight == 7.0).detach()
            expected = ~free[layer.groups].view(-1, *[1] * (layer.weight.dim() - 1)).expand_as(layer.weight)
            if reader := method.graph.readers.get(name):
                expected = expected & ~reader.reads(free)
            assert torch.equal(written, expected), name
    assert same(*kept)


def test_an_interrupted_look_at_an_old_task_leaves_nothing_behind_when_the_next_task_begins():
    model, method, _, _ = learn_tasks()

    def interrupt(*_):
        raise KeyboardInterrupt

    with model.trunk[3].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
        model(X, "t0")
    model.add_head("t3", 3)
    method.begin_task("t3", adam(model))
    assert method.plan.schedule.rates.untrained == []
    assert any(skipped is not None for skipped in method.plan.important_rows._skipped)


def test_an_error_within_an_inner_view_brings_back_the_outer_one():
    model, method, _, _ = learn_tasks()
    model.eval()

    def fail():
        raise ValueError("mine")

    with torch.no_grad(), method.viewing("t0"):
        before = model.trunk(X)
        with pytest.raises(ValueError, match="mine"), method.viewing("t2"):
            fail()
        assert torch.equal(model.trunk(X), before)


def test_the_certificate_of_an_early_task_holds_for_the_weights_of_a_later_one():
    model, method, _, certificates = learn_tasks()
    assert count_later_inputs(method) > 0
    assert certificates[0].check(bits(model)).ok
    assert verify(certificates[:1], bits(model)).ok


def test_a_task_that_was_cancelled_leaves_no_trace_in_learned_ones():
    model, method, outputs, _ = learn_tasks()
    learn(method, adam(model), 3, end=False)
    method.cancel_task()
    model.eval()
    with torch.no_grad():
        for task, expected in outputs.items():
            assert torch.equal(model(X, task), expected), task
    with pytest.raises(RuntimeError, match="outside a task"):
        method.cancel_task()


class OwnHeads(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.body, self.heads = mlp(), heads

    def forward(self, x, task_id):
        return self.heads[task_id if isinstance(self.heads, nn.ModuleList) else str(task_id)](self.body(x))


def make_with_heads(kind):
    """Deep heads; those of a `MultiHead` named by a string, others by a number."""
    torch.manual_seed(0)
    heads = [nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
    if kind == "MultiHead":
        model = MultiHead(mlp(), features=32)
        for number, head in enumerate(heads):
            model.add_head(str(number), head)
        return model, AGSCL(model, X), str
    container = nn.ModuleList(heads) if kind == "list" else nn.ModuleDict({str(n): h for n, h in enumerate(heads)})
    model = OwnHeads(container)
    return model, AGSCL(model, X, heads="heads", zero_init="earlier_tasks"), int


def learn_with_heads(kind):
    model, method, name = make_with_heads(kind)
    optimizer, outputs = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for number in range(3):
        method.begin_task(str(number), optimizer, epochs=2, steps_per_epoch=8)
        model.train()
        for _ in range(2):
            for x, y in blobs(number)[:8]:
                optimizer.zero_grad()
                F.cross_entropy(model(x, name(number)), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(number)[:8])
        model.eval()
        outputs.append(model(X, name(number)).detach())
    return model, method, outputs


@pytest.mark.parametrize("kind", ["MultiHead", "list", "dict"])
def test_a_method_is_loaded_again_whatever_the_heads_are(kind):
    model, method, outputs = learn_with_heads(kind)
    again, other, name = make_with_heads(kind)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(method.state_dict())
    again.eval()
    for number, expected in enumerate(outputs):
        assert torch.equal(again(X, name(number)), expected)
    assert other.certificate().kind == "guaranteed"


def test_a_call_may_name_its_task_by_keyword_by_any_integer_or_by_its_number_from_the_end():
    model, _, outputs = learn_with_heads("list")
    for number in (numpy.int64(0), torch.tensor(0), -3):
        assert torch.equal(model(X, number), outputs[0]), number
    assert torch.equal(model(X, task_id=0), outputs[0])
    model, _, outputs = learn_with_heads("dict")
    assert torch.equal(model(X, task_id="0"), outputs[0])
    assert torch.equal(model(X, 0), outputs[0])


def test_what_zero_init_meant_when_the_method_was_made_stays_with_it():
    model, method, outputs, _ = learn_tasks()
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # a timer, say
    model.eval()
    assert method.zero_rule == "earlier_tasks"
    assert torch.equal(model(X, "t0"), outputs["t0"])
    del model.forward

    again, other = make(zero_init="paper")
    for number in range(3):
        again.add_head(f"t{number}", 3)
    again.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="zero_init='earlier_tasks', which continues"):
        other.load_state_dict(method.state_dict())
    again.eval()
    for task, expected in outputs.items():
        assert torch.equal(again(X, task), expected)
    assert other.certificate().guarantees_outputs


def test_a_closed_method_guarantees_nothing_and_learns_no_further_task():
    model, method, outputs, _ = learn_tasks()
    method.close()
    plain = MultiHead(mlp()).eval()
    for number in range(3):
        plain.add_head(f"t{number}", 3)
    plain.load_state_dict(method.state_dict_for("t0"))
    assert torch.equal(plain(X, "t0"), outputs["t0"])
    assert not method.certificate().guarantees_outputs
    assert "was closed" in str(method.certificate())
    model.add_head("t3", 3)
    with pytest.raises(RuntimeError, match="was closed"):
        method.begin_task("t3", adam(model))


def test_the_gradient_of_an_old_task_is_that_of_the_weights_it_sees():
    model, method, _, _ = learn_tasks()
    model.eval()
    model.zero_grad()
    model(X, "t0").sum().backward()
    plain = MultiHead(mlp()).eval()
    for number in range(3):
        plain.add_head(f"t{number}", 3)
    plain.load_state_dict(method.state_dict_for("t0"))
    plain(X, "t0").sum().backward()
    later = method.graph.readers["trunk.2"].reads(method.knowledge.first_task > 0)
    expected = plain.trunk[2].weight.grad.masked_fill(later, 0.0)
    assert torch.equal(model.trunk[2].weight.grad, expected)
    assert bool(expected.any())


def test_a_task_viewed_may_be_differentiated_again_and_again():
    model, method, _, _ = learn_tasks()
    x = X.clone().requires_grad_()
    with method.viewing("t0"):
        for _ in range(2):
            model.trunk(x).sum().backward()
    assert bool(x.grad.any())


def test_weights_averaged_since_before_a_task_show_the_one_before_it_as_it_was():
    model, method, outputs, _ = learn_tasks(tasks=2)
    average = torch.optim.swa_utils.AveragedModel(model)
    learn(method, adam(model), 2)
    average.module.trunk.load_state_dict(model.trunk.state_dict())
    average.eval()
    assert torch.equal(average(X, "t1"), outputs["t1"])


def test_weights_that_are_computed_now_and_layers_that_were_replaced_are_named():
    model, _, _, _ = learn_tasks()
    model.eval()
    quantised = copy.deepcopy(model)
    quantised.trunk[2] = nn.Linear(32, 32)
    with pytest.warns(UserWarning, match=r"trunk\.2 was replaced"):
        quantised(X, "t0")
    prune.l1_unstructured(model.trunk[2], "weight", 0.1)
    with pytest.raises(RuntimeError, match=r"weight of trunk\.2 is computed now"):
        model(X, "t0")


def test_a_function_that_runs_an_old_task_compiles_as_one_graph():
    torch._dynamo.reset()
    model, _, outputs, _ = learn_tasks()
    model.eval()
    compiled = torch.compile(lambda x: model(x, "t0"), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(X), outputs["t0"])
