"""Several optimizers, steps that fail, closures, names, schedules and how long things live."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import (
    AGSCL,
    EWC,
    GPM,
    HAT,
    L2,
    MAS,
    SI,
    SPG,
    TRGP,
    WSN,
    FineTune,
    LwF,
    MultiHead,
    PackNet,
    PaperAGSCL,
    RWalk,
    Together,
)
from agscl.graph.nodes import NodeGraph
from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.warnings import SelfCheckWarning
from loops import adam, bits, blobs, learn, make, mlp, same

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

EXAMPLE = torch.zeros(2, 16)
ALL = [PaperAGSCL, EWC, SI, RWalk, HAT, PackNet, WSN, LwF, FineTune]


def build(seed=0):
    torch.manual_seed(seed)
    return MultiHead(mlp(), features=32)


def split(model, kind=torch.optim.Adam, rate=1e-2):
    """An optimizer for each half of the trunk; the first also trains the heads."""
    lower = kind([*model.trunk[0].parameters(), *model.heads.parameters()], lr=rate)
    return lower, kind(model.trunk[2].parameters(), lr=rate)


def learn_with(method, optimizers, number, *, steps=range(16), begin=True, end=True, order=(0, 1)):
    model, task, data = method.model, f"t{number}", blobs(number)
    if begin:
        torch.manual_seed(number)
        if task not in model.heads:
            model.add_head(task, 3)
        method.begin_task(task, *optimizers, epochs=4, steps_per_epoch=len(data))
    model.train()
    for step in steps:
        x, y = data[step % len(data)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = model(x, task)
        (F.cross_entropy(output, y) + method.loss(x, output)).backward()
        for place in order:
            optimizers[place].step()
        if step % len(data) == len(data) - 1:
            method.end_epoch()
    if end:
        method.end_task(data)


def test_the_factor_of_hat_is_applied_once_with_two_optimizers():
    def gradients(optimizers_of):
        model = build()
        method = HAT(model, EXAMPLE, mask="gradient")
        optimizers = optimizers_of(model)
        learn_with(method, optimizers, 0, order=range(len(optimizers)))
        method.knowledge.used.fill_(0.5)
        learn_with(method, optimizers, 1, steps=range(1), order=range(len(optimizers)), end=False)
        return bits(model.trunk)

    one = gradients(lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2),))
    two = gradients(lambda model: split(model, torch.optim.SGD))
    assert same(one, two)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_without_proximal_steps_every_optimizer_gets_the_penalty_of_its_weights_in_any_order(order):
    model = build()
    method = PaperAGSCL(model, EXAMPLE, mu=0.5, lam=50, rho=0.3, prox=False, tau=0.05)
    optimizers = split(model, torch.optim.SGD)
    learn_with(method, optimizers, 0)
    learn_with(method, optimizers, 1, steps=range(3), end=False)
    x, y = blobs(1)[3]
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.cross_entropy(model(x, "t1"), y).backward()
    before = {name: p.grad.clone() for name, p in model.trunk.named_parameters()}
    seen = {}

    def look(optimizer, *_):
        trained = {id(p) for p in optimizer.param_groups[0]["params"]}
        seen.update({n: p.grad.clone() for n, p in model.trunk.named_parameters() if id(p) in trained})

    for place in order:
        optimizers[place].register_step_pre_hook(look)
        optimizers[place].step()
    for name in ("0.weight", "2.weight"):
        assert not torch.equal(seen[name], before[name]), name


def resume(method, optimizers):
    """A new method, model and optimizers with the state of these."""
    saved = copy.deepcopy((method.model.state_dict(), [o.state_dict() for o in optimizers], method.state_dict()))
    model = build(seed=9)
    for task in ("t0", "t1"):
        model.add_head(task, 3)
    model.load_state_dict(saved[0])
    method, optimizers = make(type(method), model), split(model)
    method.load_state_dict(saved[2], *optimizers)
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    return method, optimizers


@pytest.mark.parametrize("cls", ALL)
def test_saved_in_the_middle_of_a_task_with_two_optimizers_it_continues_bit_identically(cls):
    def run(stop_at):
        model = build()
        method, optimizers = make(cls, model), split(model)
        learn_with(method, optimizers, 0)
        if stop_at is None:
            learn_with(method, optimizers, 1)
        else:
            learn_with(method, optimizers, 1, steps=range(stop_at), end=False)
            method, optimizers = resume(method, optimizers)
            learn_with(method, optimizers, 1, steps=range(stop_at, 16), begin=False)
            model = method.model
        learn_with(method, optimizers, 2)
        return bits(model)

    assert same(run(None), run(6))


@pytest.mark.parametrize("cls", [AGSCL, EWC])
def test_a_state_saved_within_a_task_of_two_optimizers_is_not_loaded_with_one(cls):
    model = build()
    method = make(cls, model)
    learn_with(method, split(model), 0, end=False)
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="a task that has 2 optimizers, and 1 are given"):
        make(cls, other).load_state_dict(method.state_dict(), adam(other))


def test_saved_after_a_step_of_the_second_optimizer_alone_its_weights_still_get_their_proximal_step():
    results = []
    for resumed in (False, True):
        model = build()
        method, optimizers = make(PaperAGSCL, model), split(model)
        learn_with(method, optimizers, 0)
        learn_with(method, optimizers, 1, end=False)
        learn_with(method, optimizers, 1, steps=range(1), begin=False, end=False, order=(1,))
        if resumed:
            method, optimizers = resume(method, optimizers)
        before = bits(method.model)
        method.end_task(blobs(1))
        results.append(bits(method.model))
    assert not torch.equal(before["trunk.2.weight"], results[1]["trunk.2.weight"])
    assert same(*results)


def torch_save_and_load(objects):
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda objects: pickle.loads(pickle.dumps(objects)),
    "torch.save": torch_save_and_load,
}


@pytest.mark.parametrize(
    ("copier", "order"), [("deepcopy", (0, 1, 2)), ("pickle", (2, 1, 0)), ("torch.save", (0, 2, 1))]
)
@pytest.mark.parametrize("cls", [*ALL, AGSCL, L2, MAS, GPM, TRGP, SPG])
def test_a_copy_made_in_the_middle_of_a_task_goes_on_as_the_original_bit_for_bit(cls, copier, order):
    model = build()
    originals = [model, split(model), make(cls, model)]
    learn_with(originals[2], originals[1], 0)
    learn_with(originals[2], originals[1], 1, steps=range(6), end=False)
    copied = COPIERS[copier](tuple(originals[place] for place in order))
    copies = [copied[order.index(place)] for place in range(3)]
    results = []
    for model, optimizers, method in (originals, copies):
        assert method.model is model
        learn_with(method, optimizers, 1, steps=range(6, 16), begin=False)
        learn_with(method, optimizers, 2, steps=range(8))
        results.append(bits(model))
        assert not any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers)
    assert same(*results)


def test_methods_copied_together_in_the_middle_of_a_task_go_on_as_the_originals():
    model = build()
    method, optimizer = Together(EWC(model, lam=400), SI(model, c=0.1)), adam(model)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(6), end=False)
    twin, step, other = copy.deepcopy((model, optimizer, method))
    learn(method, optimizer, 1, steps=range(6, 16), begin=False)
    learn(other, step, 1, steps=range(6, 16), begin=False)
    assert same(bits(model), bits(twin))


@pytest.mark.filterwarnings("error::agscl.methods._parts.warnings.SelfCheckWarning")
def test_a_method_copied_without_the_optimizer_that_steps_warns_when_the_epoch_ends():
    model = build()
    method, optimizer = L2(model, lam=10), adam(model)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(6), end=False)
    copied = copy.deepcopy(method)
    with pytest.warns(SelfCheckWarning, match="copied or unpickled within task 't1'.*has not stepped since"):
        learn(copied, adam(copied.model), 1, steps=range(6, 8), begin=False, end=False)
    unpickled = [pickle.loads(pickle.dumps(one)) for one in (model, optimizer, method)]
    unpickled[2].end_epoch()
    with pytest.warns(SelfCheckWarning, match="copied or unpickled within task 't1'.*has not stepped since"):
        unpickled[2].end_epoch()


@pytest.mark.filterwarnings("error::agscl.methods._parts.warnings.SelfCheckWarning")
def test_a_method_copied_at_the_end_of_a_task_may_end_it_without_a_warning():
    model = build()
    method, optimizer = L2(model, lam=10), adam(model)
    learn(method, optimizer, 0, end=False)
    for objects in (method, (model, optimizer, method)):
        copied = copy.deepcopy(objects)
        copied = copied[2] if isinstance(copied, tuple) else copied
        copied.end_epoch()
        copied.end_task(blobs(0))


@pytest.mark.parametrize("cls", ALL)
def test_what_is_dropped_in_the_middle_of_a_task_is_freed(cls):
    model = build()
    method, optimizer = make(cls, model), adam(model)
    learn_with(method, (optimizer,), 0, steps=range(4), order=(0,))
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer, epochs=2, steps_per_epoch=4)
    dropped = [weakref.ref(thing) for thing in (model, method, optimizer)]
    del model, method, optimizer
    gc.collect()
    assert [ref() for ref in dropped] == [None, None, None]


def test_nested_excluded_modules_are_given_back_as_they_were():
    model = MultiHead(nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 32), nn.ReLU()))
    model.trunk[0][0].bias.requires_grad_(False)
    required = [p.requires_grad for p in model.parameters()]
    method = PaperAGSCL(model, EXAMPLE, exclude=["trunk.0", "trunk.0.0"])
    model.add_head("t0", 3)
    method.begin_task("t0", adam(model))
    assert not any(p.requires_grad for p in model.trunk[0].parameters())
    method.close()
    assert [p.requires_grad for p in model.parameters()] == [*required, True, True]


def test_building_a_graph_seeds_no_gpu(monkeypatch):
    def refuse(*_):
        raise AssertionError("every GPU of the process was seeded")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    model, state = MultiHead(mlp(), features=32), torch.get_rng_state()
    NodeGraph(model, EXAMPLE)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("cls", [SI, RWalk])
@pytest.mark.parametrize("gradient", ["task", "total"])
def test_under_lbfgs_a_path_starts_where_the_step_starts(cls, gradient):
    model = build()
    model.add_head("t0", 3)
    method = cls(model, gradient=gradient)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    method.begin_task("t0", optimizer)
    x, y = blobs(0)[0]
    start, first = bits(model.trunk), {}

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, "t0"), y)
        loss.backward()
        first.update({} if first else {n: p.grad.clone() for n, p in model.trunk.named_parameters()})
        return loss

    optimizer.step(closure)
    if cls is SI:
        for name, parameter in model.trunk.named_parameters():
            expected = first[name] * (start[name] - parameter.detach())
            torch.testing.assert_close(method.plan.path[f"trunk.{name}"], expected)
    else:
        for name, parameter in model.trunk.named_parameters():
            change = parameter.detach() - start[name]
            gain = (-first[name] * change).clamp(min=0)
            expected = gain / (0.5 * method.config.alpha * (first[name] * change).square() + method.config.eps)
            torch.testing.assert_close(method.plan.path[f"trunk.{name}"], expected)


@pytest.mark.parametrize("cls", [SI, RWalk])
def test_a_path_leaves_out_a_step_that_raised(cls):
    paths = []
    for raises in (False, True):
        model = build()
        model.add_head("t0", 3)
        method, optimizer = cls(model), torch.optim.SGD(model.parameters(), lr=0.1)
        method.begin_task("t0", optimizer)
        for number in (1, 0) if raises else (0,):
            x, y = blobs(0)[number]
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            if number == 1:
                handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                handle.remove()
        optimizer.step()
        paths.append(method.plan.path)
    assert same(*paths)


@pytest.mark.parametrize("how", ["begin_task fails", "cancel_task"])
def test_a_task_that_is_not_begun_leaves_its_head_in_no_optimizer(how):
    model = build()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-2)
    method = L2(model)
    learn(method, optimizer, 0, epochs=1)
    (group,) = optimizer.param_groups
    held, names = list(group["params"]), list(group["param_names"])
    model.add_head("t1", 3)
    if how == "cancel_task":
        method.begin_task("t1", optimizer)
        method.cancel_task()
    else:
        group["maximize"] = True
        with pytest.raises(ValueError, match="maximise the penalty"):
            method.begin_task("t1", optimizer)
    assert [id(p) for p in group["params"]] == [id(p) for p in held]
    assert group["param_names"] == names
    assert StepHooks.get(optimizer) is None
    assert method.state_dict()["knowledge"]["parameter_order"] == [[names]]


@pytest.mark.parametrize("cls", [FineTune, PaperAGSCL, HAT])
def test_an_optimizer_made_of_named_parameters_keeps_a_name_for_each(cls):
    model = build()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-2)
    method = make(cls, model)
    for number in range(2):
        learn(method, optimizer, number, epochs=1, end=False)
        (group,) = optimizer.param_groups
        assert len(group["param_names"]) == len(group["params"])
        method.end_task(blobs(number))
        assert group["param_names"] == [
            next(name for name, p in model.named_parameters() if p is held) for held in group["params"]
        ]


def test_a_step_that_raises_loses_no_gradient_and_brings_no_stale_one_back():
    model = build()
    for task in ("t0", "t1"):
        model.add_head(task, 3)
    optimizer, method = adam(model), FineTune(model)
    learn(method, optimizer, 0, epochs=1)
    method.begin_task("t1", optimizer)
    frozen = model.heads["t0"].weight

    def raise_within_a_step():
        frozen.grad = torch.ones_like(frozen)
        handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()

    raise_within_a_step()
    model(blobs(1)[0][0], "t1").sum().backward()
    optimizer.step()
    assert torch.equal(frozen.grad, torch.ones_like(frozen)), "it was hidden from the step, and is there again"
    raise_within_a_step()
    frozen.grad = torch.zeros_like(frozen)
    optimizer.step()
    assert torch.equal(frozen.grad, torch.zeros_like(frozen)), "the one of the step that raised is stale"


class HeadsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.ModuleDict({"t0": nn.Linear(32, 3)})
        self.body = mlp()

    def forward(self, x, task):
        return self.out[task](self.body(x))


@pytest.mark.parametrize("middle", [True, False])
def test_moments_find_their_parameters_where_heads_are_declared_before_the_trunk(middle):
    def begin(model, method, optimizer, number, steps=8, end=True):
        task = f"t{number}"
        method.begin_task(task, optimizer)
        for x, y in blobs(number) * (steps // 4):
            optimizer.zero_grad()
            F.cross_entropy(model(x, task), y).backward()
            optimizer.step()
        if end:
            method.end_task(blobs(number))

    torch.manual_seed(0)
    model = HeadsFirst()
    optimizer, method = adam(model), FineTune(model, heads="out")
    begin(model, method, optimizer, 0)
    model.out["t1"] = nn.Linear(32, 3)
    begin(model, method, optimizer, 1, end=not middle)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), method.state_dict()))
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}

    model = HeadsFirst()
    model.out["t1"] = nn.Linear(32, 3)
    model.load_state_dict(saved[0])
    optimizer, method = adam(model), FineTune(model, heads="out")
    method.load_state_dict(saved[2], optimizer)
    optimizer.load_state_dict(saved[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[name]), name

    optimizer, method = adam(model), FineTune(model, heads="out")
    optimizer.load_state_dict(saved[1])
    with pytest.raises(ValueError, match=r"Load the method's state first.* and then the optimizer's"):
        method.load_state_dict(saved[2], optimizer)


@pytest.mark.parametrize("made", ["before the heads", "after them"])
def test_names_stay_beside_their_parameters_when_a_task_is_resumed(made):
    def fresh(heads):
        model = HeadsFirst()
        model.out = nn.ModuleDict({task: nn.Linear(32, 3) for task in heads})
        return model, torch.optim.Adam(model.named_parameters(), lr=1e-2)

    model, optimizer = fresh(["t0"])
    method = FineTune(model, heads="out")
    learn(method, optimizer, 0, epochs=1)
    model.out["t1"] = nn.Linear(32, 3)
    learn(method, optimizer, 1, epochs=1, end=False)
    expected = optimizer.param_groups[0]["param_names"]

    resumed, other = fresh([] if made == "before the heads" else ["t0", "t1"])
    resumed.out.update({task: nn.Linear(32, 3) for task in model.out if task not in resumed.out})
    FineTune(resumed, heads="out").load_state_dict(method.state_dict(), other)
    (group,) = other.param_groups
    assert group["param_names"] == expected
    assert [id(p) for p in group["params"]] == [id(resumed.get_parameter(name)) for name in expected]


def test_a_rate_that_ends_every_epoch_near_zero_frees_nodes_all_the_same():
    def count_free(anneal):
        model = build()
        method, optimizer = PaperAGSCL(model, EXAMPLE, mu=20, lam=1000, rho=0.3), adam(model)
        model.add_head("t0", 3)
        method.begin_task("t0", optimizer)
        for _ in range(12):
            for step, (x, y) in enumerate(blobs(0)):
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 3)) / 2 if anneal else 5e-3
                optimizer.zero_grad()
                F.cross_entropy(model(x, "t0"), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(0))
        return int(method.free.sum())

    annealed, constant = count_free(True), count_free(False)
    assert constant > 10
    assert annealed > constant / 2


def test_detached_hooks_leave_nothing_on_the_optimizer():
    model = build()
    optimizer, method = adam(model), FineTune(model)
    learn(method, optimizer, 0, epochs=1)
    assert StepHooks.get(optimizer) is None
    assert not [name for name in vars(optimizer) if "agscl" in name]


@pytest.mark.parametrize("cls", [EWC, HAT, PaperAGSCL])
def test_an_lbfgs_object_can_be_used_for_all_tasks(cls):
    torch.manual_seed(0)
    model = MultiHead(mlp(8), features=8)
    method, optimizer = make(cls, model), torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for number in range(3):
        task, (x, y) = f"t{number}", blobs(number)[0]
        model.add_head(task, 3)
        before = bits(model)
        method.begin_task(task, optimizer, epochs=1, steps_per_epoch=2)

        def closure(x=x, y=y, task=task):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, task), y)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        changed = {name for name, tensor in bits(model).items() if not torch.equal(tensor, before[name])}
        assert {name for name in changed if name.startswith("heads")} == {f"heads.{task}.weight", f"heads.{task}.bias"}
        assert any(name.startswith("trunk") for name in changed)
        method.end_epoch()
        method.end_task(blobs(number))


@pytest.mark.parametrize("kind", [AGSCL, PackNet])
def test_lbfgs_starts_anew_when_weights_are_pruned(kind):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    model.add_head("t0", 3)
    method = make(kind, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    x, y = (torch.cat(parts) for parts in zip(*blobs(0), strict=True))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, "t0"), y)
        loss.backward()
        return loss

    method.begin_task("t0", optimizer, epochs=20)
    pruned = 0
    for _ in range(20):
        optimizer.step(closure)
        version = method.plan_version
        method.end_epoch()
        if method.plan_version != version:
            pruned += 1
            assert not optimizer.state, "what it knew of the weights before"
    assert pruned
    assert closure().item() < 0.1
    method.end_task(blobs(0))


@pytest.mark.parametrize("cls", [AGSCL, EWC])
def test_a_state_loaded_within_a_task_without_the_models_weights_is_warned_of(cls):
    def begin():
        model = MultiHead(mlp(), features=32)
        return model, make(cls, model), adam(model)

    model, method, optimizer = begin()
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer, epochs=1)
    other, continued, its_optimizer = begin()
    for task in ("t0", "t1"):
        other.add_head(task, 3)
    with pytest.warns(SelfCheckWarning, match=r"the heads of t0 differ.*Load the model's weights first"):
        continued.load_state_dict(method.state_dict(), its_optimizer)
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(cls, other).load_state_dict(method.state_dict(), its_optimizer)
