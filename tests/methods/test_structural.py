"""The structural methods: gates, packed weights, taught outputs, projected updates, frozen features."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import socket
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import agscl
from agscl import EWC, GPM, HAT, SPG, TRGP, WSN, FineTune, Frozen, LwF, MultiHead, PackNet, PaperAGSCL, Together
from agscl.experiments.presets import PRESETS
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.subspaces import extend_basis, extract_inputs, project
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.networks import NETWORKS
from agscl.runs.nested_state import flatten_state, hash_state, unflatten_state
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig, derive_seed
from loops import OneHead, bits, blobs, leave_process_group, make, mlp, same
from zoo import SUPPORTED

ALL = [HAT, PackNet, WSN, LwF, GPM, TRGP, SPG, Frozen]
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, weight_decay=1e-3),
}
EPOCHS = 6

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def fresh(cls: type[Method], optimizer="adam", seed=0, **settings):
    torch.manual_seed(seed)
    model = MultiHead(mlp(), features=32)
    return make(cls, model, **settings), model, OPTIMIZERS[optimizer](model.parameters())


def learn(method, optimizer, number, *, data=None, epochs=EPOCHS, steps=None, begin=True, end=True, step=None):
    """Task `number` in a loop of one's own; `steps` picks a part of it, `step(loss)` takes a step in another way."""
    model, task, data = method.model, f"t{number}", data or blobs(number)
    if begin:
        torch.manual_seed(number)
        if task not in model.heads:
            model.add_head(task, 3)
        method.begin_task(task, optimizer, epochs=epochs, steps_per_epoch=len(data))
    model.train()

    def compute(x, y):
        optimizer.zero_grad()
        output = model(x, task)
        return F.cross_entropy(output, y) + method.loss(x, output)

    for at in range(epochs * len(data)) if steps is None else steps:
        x, y = data[at % len(data)]
        if step is None:
            compute(x, y).backward()
            optimizer.step()
        else:
            step(lambda x=x, y=y: compute(x, y))
        if at % len(data) == len(data) - 1:
            method.end_epoch()
    if end:
        method.end_task(data)


def logits(model, x, task):
    model.eval()
    with torch.no_grad():
        return model(x, task)


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if issubclass(w.category, SelfCheckWarning)]


def decide(method, seed=0):
    """Make every gate of the task under way exactly 0 or 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        open_ = torch.rand(method.graph.size, generator=draw) < 0.5
        method.embedding.copy_(torch.where(open_, 6.0, -6.0))


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cls", ALL)
def test_resumed_in_the_middle_of_a_task_it_continues_bit_identically(cls, optimizer):
    whole, model, step = fresh(cls, optimizer)
    for number in range(3):
        learn(whole, step, number)

    method, first, step = fresh(cls, optimizer)
    learn(method, step, 0)
    learn(method, step, 1, steps=range(18), end=False)
    saved = copy.deepcopy((first.state_dict(), step.state_dict(), method.state_dict()))

    torch.manual_seed(99)
    second = MultiHead(mlp(), features=32)
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    step = OPTIMIZERS[optimizer]([*second.trunk.parameters(), *second.heads.parameters()])
    resumed = make(cls, second)
    resumed.load_state_dict(saved[2], step)
    step.load_state_dict(saved[1])
    learn(resumed, step, 1, steps=range(18, 24), begin=False)
    learn(resumed, step, 2)

    assert same(bits(model), bits(second))
    assert whole.statistics() == resumed.statistics()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    for task in whole.tasks:
        assert torch.equal(logits(model, x, task), logits(second, x, task))


@pytest.mark.parametrize("cls", ALL)
def test_a_state_can_be_stored_and_a_certificate_made(cls):
    method, model, optimizer = fresh(cls)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(14), end=False)
    plain, tensors = flatten_state(method.state_dict())
    state = unflatten_state(json.loads(json.dumps(plain)), tensors)
    assert hash_state(state) == hash_state(method.state_dict())
    method.end_task(blobs(1))
    x = torch.randn(4, 16)
    outputs = method.head_outputs(x)
    assert all(torch.equal(outputs[task], logits(model, x, task)) for task in method.tasks)
    assert method.certificate(x).task == "t1"


@pytest.mark.parametrize("cls", ALL)
def test_a_state_taken_up_between_tasks_shows_old_tasks_as_before(cls):
    method, model, optimizer = fresh(cls)
    for number in range(2):
        learn(method, optimizer, number)
    x = torch.randn(8, 16)
    torch.manual_seed(1)
    other = MultiHead(mlp(), features=32)
    for task in ("t0", "t1"):
        other.add_head(task, 3)
    other.load_state_dict(model.state_dict())
    make(cls, other).load_state_dict(method.state_dict())
    for task in ("t0", "t1"):
        assert torch.equal(logits(model, x, task), logits(other, x, task))


@pytest.mark.parametrize("cls", ALL)
def test_close_leaves_no_hook_behind_and_the_models_keys_stay_as_they_are(cls):
    method, model, optimizer = fresh(cls)
    model.add_head("t0", 3)
    keys = list(model.state_dict())
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    learn(method, optimizer, 1, end=False)
    assert [key for key in model.state_dict() if "t1" not in key] == keys
    method.close()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert all(p.requires_grad for p in model.parameters())
    assert list(model.state_dict()) == [*keys, "heads.t1.weight", "heads.t1.bias"]
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert all(isinstance(p, nn.Parameter) for p in module._parameters.values())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("cls", ALL)
def test_step_with_a_closure_gives_the_same_weights_as_step(cls):
    results = []
    for closed in (False, True):
        method, model, optimizer = fresh(cls)

        def step(compute, optimizer=optimizer):
            def closure():
                loss = compute()
                loss.backward()
                return loss

            optimizer.step(closure)

        for number in range(2):
            learn(method, optimizer, number, step=step if closed else None)
        results.append(bits(model))
    assert same(*results)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", ALL)
def test_a_gradient_scaler_changes_nothing_and_an_overflow_moves_no_bit(cls, fused):
    def run(scaled):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        method = make(cls, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6, enabled=scaled)
        count = 0

        def step(compute):
            nonlocal count
            count += 1
            if scaled and count % 11 == 0:
                scaler.scale(compute()).backward()
                next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
                before, embedding = bits(model), copy.deepcopy(getattr(method, "embedding", None))
                scaler.step(optimizer)
                scaler.update(2.0**12)
                assert same(before, bits(model)), "a skipped step moved weights"
                assert embedding is None or torch.equal(embedding, method.embedding)
                method.plan.position = getattr(method.plan, "position", 0) - int(fused)  # the same step once more
            scaler.scale(compute()).backward()
            scaler.step(optimizer)
            scaler.update()

        for number in range(2):
            learn(method, optimizer, number, step=step)
        return bits(model)

    plain, scaled = run(False), run(True)
    if cls is not HAT:  # the scaled embedding's gradient rounds elsewhere, and the gates are steep
        for name in plain:
            torch.testing.assert_close(plain[name], scaled[name], atol=2e-3, rtol=1e-2)
    assert all(bool(t.isfinite().all()) for t in scaled.values())


@pytest.mark.parametrize("cls", ALL)
def test_on_real_digits_it_saves_at_least_half_of_what_fine_tuning_loses(cls):
    plain, ours = digits(FineTune), digits(cls)
    lost = plain[0] - plain[1]
    assert lost > 0.15
    assert ours[0] - ours[1] <= lost / 2
    if cls is Frozen:  # forgets nothing, and learns less: features of one pair of digits serve the others poorly
        assert ours[0] == ours[1] > plain[1]
    else:
        assert ours[1] >= plain[1] + lost / 2


@functools.cache
def digits(cls: type[Method]) -> tuple[float, float]:
    """Mean accuracy of a task just learned, and of all tasks in the end."""
    preset, seed = PRESETS["digits"], 0
    torch.manual_seed(derive_seed(seed))
    trunk = NETWORKS[preset.network](**preset.network_options)
    model = MultiHead(trunk, features=trunk.features)
    training = replace(preset.training, epochs=10)
    trainer = Trainer(model, make(cls, model, inputs=64), agscl.tasks.load("digits", seed=seed), training, seed=seed)
    while trainer.advance():
        pass
    table = trainer.accuracies
    return sum(row[-1] for row in table) / len(table), sum(table[-1]) / len(table)


@pytest.mark.parametrize("cls", ALL)
def test_a_model_with_heads_of_its_own_in_a_users_own_loop(cls):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.outputs = nn.ModuleList(nn.Linear(32, 3) for _ in range(3))

        def forward(self, x, task):
            return self.outputs[int(task[1:])](self.body(x))

    for heads in ("outputs", lambda model, task: model.outputs[int(task[1:])]):
        torch.manual_seed(0)
        model = Own()
        untouched = copy.deepcopy(model.outputs[2].state_dict())
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        method = make(cls, model, heads=heads)
        x = torch.randn(8, 16)
        before = None
        for number in range(2):
            task, data = f"t{number}", blobs(number)
            method.begin_task(task, optimizer, epochs=4, steps_per_epoch=len(data))
            for _ in range(4):
                for a, y in data:
                    optimizer.zero_grad()
                    output = model(a, task)
                    (F.cross_entropy(output, y) + method.loss(a, output)).backward()
                    optimizer.step()
                method.end_epoch()
            if cls is HAT:
                decide(method, number)
            method.end_task(data)
            if number == 0:
                before = logits(model, x, "t0")
                model.train()
        if cls in (HAT, PackNet, WSN, Frozen):
            assert torch.equal(before, logits(model, x, "t0"))
        assert same(untouched, model.outputs[2].state_dict())


def _rank(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for cls in ALL:
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        for task in ("t0", "t1"):
            model.add_head(task, 3)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        method = make(cls, parallel, **({"seed": rank} if cls in (HAT, GPM, TRGP, WSN) else {}))
        for number in range(2):
            task, mine = f"t{number}", blobs(number)[rank::2]  # other data on each rank
            method.begin_task(task, optimizer, epochs=4, steps_per_epoch=2)
            for _ in range(4):
                for x, y in mine:
                    optimizer.zero_grad()
                    output = parallel(x, task)
                    (F.cross_entropy(output, y) + method.loss(x, output)).backward()
                    optimizer.step()
                method.end_epoch()
            method.end_task(mine)
        held = {HAT: "embeddings", GPM: "bases", TRGP: "bases", SPG: "importances", PackNet: "owner", WSN: "masks"}.get(
            cls
        )
        torch.save(
            [model.state_dict(), getattr(method.knowledge, held) if held else {}], f"{folder}/{cls.__name__}-{rank}.pt"
        )
    leave_process_group()


def test_two_ranks_with_other_data_and_other_seeds_agree_to_the_bit(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    for cls in ALL:
        a, b = (torch.load(tmp_path / f"{cls.__name__}-{rank}.pt", weights_only=True) for rank in (0, 1))
        for one, other in zip(a, b, strict=True):
            assert same(one, other), cls.__name__


@pytest.mark.parametrize("cls", ALL)
def test_what_memory_reports_is_what_is_held(cls):
    method, _, optimizer = fresh(cls)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1)
    names = {
        HAT: ("embeddings", "used"),
        PackNet: ("owner",),
        WSN: ("masks", "scores"),
        GPM: ("bases",),
        TRGP: ("bases", "used", "scales"),
        SPG: ("importances",),
    }.get(cls, ())
    tensors = tree_leaves([getattr(method.knowledge, name) for name in names])
    assert method.memory()["bytes"] == sum(t.numel() * t.element_size() for t in tensors)
    learn(method, optimizer, 2, end=False)
    assert method.memory()["bytes"] > 0 or cls is Frozen


@pytest.mark.parametrize("cls", ALL)
def test_an_ordinary_run_warns_of_nothing(cls):
    method, _, optimizer = fresh(cls)
    assert warned(lambda: [learn(method, optimizer, n) for n in range(2)]) == []


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (HAT, {"c": -1}),
        (HAT, {"s_max": 1}),
        (HAT, {"mask": "no"}),
        (PackNet, {"share": 1}),
        (PackNet, {"prune_at": 0}),
        (WSN, {"c": 0}),
        (WSN, {"c": 1}),
        (LwF, {"temperature": 0}),
        (LwF, {"weight": -1}),
        (GPM, {"threshold": 0}),
        (GPM, {"samples": 0}),
        (TRGP, {"trust": 1.5}),
        (TRGP, {"related": -1}),
        (SPG, {"mask": "weights"}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(cls, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(cls, MultiHead(mlp()), **wrong)


@pytest.mark.parametrize("name", ["vgg", "resnet", "separable", "densenet"])
@pytest.mark.parametrize("cls", [HAT, PackNet, WSN, Frozen])
def test_old_logits_keep_their_bits_through_batch_norm_residuals_and_depthwise_filters(cls, name):
    entry = SUPPORTED[name]
    torch.manual_seed(0)
    model = MultiHead(entry.trunk())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    method = make(cls, model, **({"example_input": entry.example(2, 0)} if cls is HAT else {}))
    kept = []
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        y = torch.randint(3, (8,), generator=draw)
        learn(method, optimizer, number, data=[(entry.example(8, number), y)] * 2, epochs=3, end=False)
        if cls is HAT:
            decide(method, number)
        method.end_task([(entry.example(8, number), y)])
        probe = entry.example(8, 100)
        kept.append(logits(model, probe, f"t{number}"))
        for old, before in enumerate(kept):
            assert torch.equal(before, logits(model, probe, f"t{old}")), f"task {old} after task {number}"
    trained = logits(model, entry.example(8, 100), "t2")
    assert bool(trained.isfinite().all())


# HAT ------------------------------------------------------------------------------------------------------------------


def interrupted(model, x, task):
    """A forward pass that Ctrl-C ends at its last layer: torch then calls no hook that comes after."""

    def stop(module, args):
        raise KeyboardInterrupt

    handle = model.heads[task].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x, task)
    handle.remove()


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        *((cls, {}) for cls in (HAT, PackNet, WSN, LwF, GPM, TRGP, SPG, Frozen, PaperAGSCL, EWC)),
        (EWC, {"batchnorm": "per_task"}),
    ],
)
@pytest.mark.parametrize("when", ["between tasks", "within a task"])
def test_a_forward_pass_stopped_by_ctrl_c_does_no_harm(cls, settings, when):
    outcomes = []
    for stopped in (False, True):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        model = MultiHead(trunk, features=32)
        method = make(cls, model, **settings)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = blobs(0)[0][0]
        for number in range(3):
            half = range(len(blobs(0)) * EPOCHS // 2)
            learn(method, optimizer, number, steps=half, end=False)
            if stopped and when == "within a task" and number:
                model.eval()
                interrupted(model, x, "t0")
            learn(method, optimizer, number, steps=range(half.stop, 2 * half.stop), begin=False)
            if stopped and when == "between tasks" and number:
                model.eval()
                interrupted(model, x, "t0")
        model.eval()
        outcomes.append([logits(model, x, f"t{number}") for number in range(3)])
        assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_a_copy_of_a_model_with_gates_has_gates_of_its_own():
    method, model, optimizer = fresh(HAT)
    for number in range(2):
        learn(method, optimizer, number)
    x = blobs(0)[0][0]
    twin = copy.deepcopy(model)
    for task in ("t0", "t1"):
        assert torch.equal(logits(twin, x, task), logits(model, x, task))


def test_a_model_with_gates_may_be_copied_between_forward_and_backward():
    method, model, optimizer = fresh(HAT)
    learn(method, optimizer, 0, steps=range(3), end=False)
    x, y = blobs(0)[0]
    loss = F.cross_entropy(model(x, "t0"), y)
    twin = copy.deepcopy(model)
    loss.backward()
    assert method.embedding.grad is not None
    assert torch.equal(logits(twin, x, "t0"), logits(model, x, "t0"))


class Repeated(nn.Module):
    """A trunk whose second half runs once more to go backward, to save memory."""

    def __init__(self, repeats):
        super().__init__()
        self.layers, self.repeats = mlp(), repeats

    def forward(self, x):
        x = self.layers[:2](x)
        return checkpoint(self.layers[2:], x, use_reentrant=False) if self.repeats else self.layers[2:](x)


def repeated(repeats):
    torch.manual_seed(0)
    model = MultiHead(Repeated(repeats), features=32)
    return HAT(model, example_input=blobs(0)[0][0]), model, OPTIMIZERS["adam"](model.parameters())


def test_gates_of_layers_that_run_again_to_go_backward_learn_the_same():
    found = []
    for repeats in (False, True):
        method, model, optimizer = repeated(repeats)
        for number in range(2):
            learn(method, optimizer, number)
        found.append([*method.knowledge.embeddings.values(), *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_that_run_again_to_go_backward_do_not_mind_a_look_at_an_old_task_meanwhile():
    found = []
    for looks in (False, True):
        method, model, optimizer = repeated(True)
        learn(method, optimizer, 0)
        learn(method, optimizer, 1, steps=range(3), end=False)
        optimizer.zero_grad()
        x, y = blobs(1)[0]
        loss = F.cross_entropy(model(x, "t1"), y)
        if looks:
            with torch.no_grad():
                model(x, "t0")
        loss.backward()
        found.append(method.embedding.grad)
    assert torch.equal(*found)


def test_a_layer_called_outside_the_models_forward_pass_has_its_gates_too():
    method, model, optimizer = fresh(HAT)
    learn(method, optimizer, 0, steps=range(3), end=False)
    x, _ = blobs(0)[0]
    whole = model(x, "t0")
    parts = model.heads["t0"](model.trunk(x))
    assert torch.equal(whole, parts)
    (whole.sum() + parts.sum()).backward()
    assert method.embedding.grad is not None


def test_scoring_a_model_in_inference_mode_before_its_gates_are_there_does_no_harm():
    method, model, optimizer = fresh(HAT)
    for number in range(2):
        learn(method, optimizer, number, steps=range(0), end=False)
        with torch.inference_mode():
            model(blobs(number)[0][0], f"t{number}")
        learn(method, optimizer, number, begin=False)
    assert method.statistics()["nodes"] == 64


def test_lwf_asks_heads_in_a_list_by_their_number():
    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.outputs = mlp(), nn.ModuleList(nn.Linear(32, 3) for _ in range(2))

        def forward(self, x, task):
            return self.outputs[task](self.body(x))

    model = Numbered()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = LwF(model, heads="outputs")
    for number in range(2):
        method.begin_task(f"t{number}", optimizer)
        for x, y in blobs(number):
            output = model(x, number)
            loss = method.loss(x, output)
            assert bool(loss) == bool(number)
            optimizer.zero_grad()
            (F.cross_entropy(output, y) + loss).backward()
            optimizer.step()
        method.end_task(blobs(number))


def test_packnet_keeps_a_layer_that_was_left_out_of_the_first_step():
    method, model, optimizer = fresh(PackNet)
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer, epochs=2)
    for epoch in range(2):
        for step, (x, y) in enumerate(blobs(0)):
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            if (epoch, step) == (0, 0):
                model.trunk[2].weight.grad = None
            optimizer.step()
        method.end_epoch()
    method.end_task(blobs(0))
    assert all(bool((owner == 1).any()) for owner in method.knowledge.owner.values())


def tiny_hat(**settings):
    """Two inputs, two nodes, two nodes, a head."""
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), features=2)
    model.add_head("t0", 2)
    return HAT(model, example_input=torch.zeros(1, 2), **settings), model


def test_the_mask_algebra_of_hat_on_an_example_worked_by_hand():
    method, model = tiny_hat(c=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method.knowledge.used = torch.tensor([1.0, 0.25, 0.5, 0.0])  # nodes of the first layer, of the second
    method.begin_task("t0", optimizer, steps_per_epoch=4)
    before = bits(model)
    first, second = model.trunk[0], model.trunk[2]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    change = {name: before[name] - now for name, now in model.state_dict().items()}
    expected = {
        "trunk.0.weight": [[0.0, 0.0], [0.75, 0.75]],  # 1 − mask_out: the first layer reads the input
        "trunk.0.bias": [0.0, 0.75],
        "trunk.2.weight": [[0.5, 0.75], [1.0, 1.0]],  # 1 − min(mask_out, mask_in)
        "trunk.2.bias": [0.5, 1.0],
        "heads.t0.weight": [[1.0, 1.0], [1.0, 1.0]],
    }
    for name, factors in expected.items():
        torch.testing.assert_close(change[name], torch.tensor(factors), msg=name)
    assert torch.equal(first.weight[0], before["trunk.0.weight"][0])
    assert torch.equal(second.weight[1], before["trunk.2.weight"][1] - 1)

    with torch.no_grad():
        method.embedding.zero_()  # every gate one half: (0 + 0.75 + 0.5 + 1) / 2 over 2.25
    assert method.penalty().item() == pytest.approx(2.0 * 0.5)


def test_hat_masks_gradients_in_the_papers_form():
    method, model = tiny_hat(**HAT.paper)
    method.knowledge.used = torch.tensor([1.0, 0.25, 0.5, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method.begin_task("t0", optimizer, steps_per_epoch=4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    method.add_penalty_gradients()
    assert torch.equal(model.trunk[2].weight.grad, torch.tensor([[0.5, 0.75], [1.0, 1.0]]))
    assert torch.equal(model.trunk[0].bias.grad, torch.tensor([0.0, 0.75]))


def test_a_gate_multiplies_the_activation_of_its_node():
    method, model = tiny_hat(s_max=2.0)
    model.add_head("t1", 2)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    method.begin_task("t0", optimizer, steps_per_epoch=3)
    x = torch.randn(5, 2)
    with torch.no_grad():
        method.embedding.copy_(torch.tensor([0.5, -1.0, 2.0, 0.1]))

    def by_hand(s):
        gates = torch.sigmoid(s * method.embedding)
        inner = F.relu(model.trunk[0](x)) * gates[:2]  # called as functions below: no gate there
        inner = F.relu(F.linear(inner, model.trunk[2].weight, model.trunk[2].bias)) * gates[2:]
        return F.linear(inner, model.heads["t0"].weight, model.heads["t0"].bias)

    seen = []
    for _ in range(4):
        seen.append(method.plan.s)
        torch.testing.assert_close(model(x, "t0"), by_hand(method.plan.s))
        optimizer.step()
    assert seen == [0.5, 1.25, 2.0, 0.5]  # from 1/s_max to s_max, and again
    model.eval()
    torch.testing.assert_close(model(x, "t0"), by_hand(2.0))


def test_without_steps_per_epoch_the_first_epoch_is_counted():
    method, model, optimizer = fresh(HAT)
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer)
    seen = []
    for _ in range(2):
        for x, y in blobs(0):
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t0"), y).backward()
            seen.append(method.plan.s)
            optimizer.step()
        method.end_epoch()
    low = 1 / 400
    assert seen == pytest.approx([1, 1, 1, 1, low, low + (400 - low) / 3, low + (400 - low) * 2 / 3, 400])


def test_the_compensated_gradient_is_s_max_times_that_of_a_gentle_gate():
    method, model = tiny_hat(c=0.7, s_max=40.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    method.knowledge.used = torch.tensor([1.0, 0.25, 0.5, 0.0], dtype=torch.float64)
    method.begin_task("t0", optimizer, steps_per_epoch=5)
    e = torch.tensor([0.3, -0.8, 0.05, -0.02], dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    for method.plan.position in range(5):
        free = 1 - method.knowledge.used
        m = torch.sigmoid(method.plan.s * e)
        loss = (slopes * m).sum() + 0.7 * (m * free).sum() / free.sum()
        (whole,) = torch.autograd.grad(loss, e)
        (task,) = torch.autograd.grad((slopes * torch.sigmoid(method.plan.s * e)).sum(), e)
        torch.testing.assert_close(task + method.plan.penalty_gradient(method.plan.s, e.detach()), whole)
        total = slopes + 0.7 * free / free.sum()
        (gentle,) = torch.autograd.grad((total * torch.sigmoid(e)).sum(), e)
        torch.testing.assert_close(method.plan.compensate(whole, e.detach(), method.plan.s), 40.0 * gentle)


def test_the_exact_gradient_of_hat_is_that_of_the_compensated_formula_in_float64_and_lives_for_open_gates():
    method, model = tiny_hat(c=0.7)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    method.knowledge.used = torch.tensor([1.0, 0.25, 0.5, 0.0])
    method.begin_task("t0", optimizer, steps_per_epoch=5)
    method.plan.position = 1  # s is about 100
    with torch.no_grad():
        method.embedding.copy_(torch.tensor([0.5, -0.01, 0.02, 5.0]))
    F.cross_entropy(model(torch.randn(8, 2), "t0"), torch.randint(2, (8,))).backward()
    by_gate, e = method.embedding.grad.double(), method.embedding.detach().double()
    s, free = method.plan.s, 1 - method.knowledge.used.double()
    m = torch.sigmoid(s * e)
    through = s * m * torch.sigmoid(-s * e) * (by_gate + 0.7 * free / free.sum())
    steep = (400 / s) * (torch.cosh(s * e) + 1) / (torch.cosh(e) + 1)
    torch.testing.assert_close(
        method.plan.exact_gradient(by_gate.float(), e.float()).double(), through * steep, rtol=1e-5, atol=1e-7
    )
    assert method.plan.exact_gradient(by_gate.float(), e.float())[3] != 0, "an open gate learns too"
    authors = method.plan.penalty_gradient(400.0, method.embedding.detach())
    assert authors[3] == 0, "through a float32 gate nothing is left of it"


@pytest.mark.parametrize("settings", [{}, HAT.paper])
def test_the_embedding_receives_the_gradient_by_the_gate_and_in_the_papers_form_that_through_it(settings):
    method, model = tiny_hat(s_max=2.0, **settings)
    method.begin_task("t0", torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=1)
    with torch.no_grad():
        method.embedding.copy_(torch.tensor([0.5, -1.0, 2.0, 0.1]))
        for parameter in model.parameters():
            parameter.abs_()  # so that every node fires
    x, y = torch.rand(8, 2), torch.randint(2, (8,))
    gates = torch.sigmoid(2 * method.embedding.detach()).requires_grad_()
    inner = F.relu(model.trunk[0](x)) * gates[:2]  # called as functions below: no gate there
    inner = F.relu(F.linear(inner, model.trunk[2].weight, model.trunk[2].bias)) * gates[2:]
    output = F.linear(inner, model.heads["t0"].weight, model.heads["t0"].bias)
    (expected,) = torch.autograd.grad(F.cross_entropy(output, y), gates)
    F.cross_entropy(model(x, "t0"), y).backward()
    through = 2 * gates * (1 - gates) if settings else 1.0
    torch.testing.assert_close(method.embedding.grad, expected * through)
    assert bool(expected.all())


@pytest.mark.parametrize(("settings", "learns"), [({}, True), (HAT.paper, False)])
def test_open_gates_learn_at_the_steepest_s_by_default_and_not_in_the_papers_form(settings, learns):
    method, model = tiny_hat(c=0.7, **settings)
    method.begin_task("t0", torch.optim.SGD(model.parameters(), lr=1e-3), steps_per_epoch=1)
    with torch.no_grad():
        method.embedding.fill_(1.0)  # gates of exactly 1 in float32, as s is 400
    model.train()
    F.cross_entropy(model(torch.randn(8, 2), "t0"), torch.randint(2, (8,))).backward()
    method.plan.optimizers[0].step()
    assert torch.equal(method.embedding != 1, torch.full((4,), learns))


def test_compensation_clips_the_steep_argument_at_fifty_and_embeddings_stay_within_six():
    method, model = tiny_hat()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    method.begin_task("t0", optimizer, steps_per_epoch=1)
    e = torch.tensor([6.0], dtype=torch.float64)
    expected = (math.cosh(50) + 1) / (math.cosh(6) + 1)
    assert method.plan.compensate(torch.ones_like(e), e, method.plan.s).item() == pytest.approx(expected)
    model.train()
    F.cross_entropy(model(torch.randn(8, 2), "t0"), torch.randint(2, (8,))).backward()
    optimizer.step()
    assert float(method.embedding.detach().abs().max()) <= 6.0


@pytest.mark.parametrize("form", ["update", "gradient"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_between_used_nodes_keep_their_bits_under_momentum_and_decay(optimizer, form):
    method, model, step = fresh(HAT, optimizer, mask=form)
    learn(method, step, 0, end=False)
    decide(method)
    method.end_task(blobs(0))
    used, before = method.knowledge.used, bits(model)
    learn(method, step, 1)
    now = model.state_dict()
    rows, columns = used[:32] == 1, used[32:] == 1
    assert torch.equal(now["trunk.0.weight"][rows], before["trunk.0.weight"][rows])
    assert torch.equal(now["trunk.0.bias"][rows], before["trunk.0.bias"][rows])
    assert torch.equal(now["trunk.2.weight"][columns][:, rows], before["trunk.2.weight"][columns][:, rows])
    assert not torch.equal(now["trunk.0.weight"][~rows], before["trunk.0.weight"][~rows])
    assert not torch.equal(now["trunk.2.weight"][columns][:, ~rows], before["trunk.2.weight"][columns][:, ~rows])


def test_a_nearly_used_weight_hardly_moves_under_adam_too():
    method, model = tiny_hat()
    method.knowledge.used = torch.tensor([0.999, 0.0, 0.0, 0.0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    method.begin_task("t0", optimizer, steps_per_epoch=1)
    before = bits(model)["trunk.0.bias"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(before - model.trunk[0].bias, torch.tensor([1e-4, 0.1]), atol=1e-6, rtol=0)


def test_a_task_is_viewed_through_its_own_gates_where_the_model_takes_no_task():
    torch.manual_seed(0)
    model = OneHead()
    method = HAT(model, torch.zeros(2, 16), heads="out")
    optimizer = OPTIMIZERS["adam"](model.body.parameters())
    x = torch.randn(4, 16)
    for number in range(2):
        method.begin_task(f"t{number}", optimizer, steps_per_epoch=4)
        for a, y in blobs(number) * 4:
            optimizer.zero_grad()
            F.cross_entropy(model(a), y).backward()
            optimizer.step()
        decide(method, number)
        method.end_task(blobs(number))
        if number == 0:
            model.eval()
            with torch.no_grad():
                body = {k: v.clone() for k, v in model.body.state_dict().items()}
                before = F.linear(hidden(method, body, x, "t0"), model.out.weight, model.out.bias)
            model.train()
    model.eval()
    with torch.no_grad():
        with method.viewing("t0"):
            viewed = model(x)
        now = F.linear(hidden(method, model.body.state_dict(), x, "t0"), model.out.weight, model.out.bias)
        torch.testing.assert_close(viewed, now)
        assert not torch.equal(viewed, model(x))
        torch.testing.assert_close(
            hidden(method, model.body.state_dict(), x, "t0"), hidden(method, body, x, "t0"), atol=0, rtol=0
        )
    assert before.shape == viewed.shape


def hidden(method, body, x, task):
    gates = method.mask(task)
    inner = F.relu(F.linear(x, body["0.weight"], body["0.bias"])) * gates[:32]
    return F.relu(F.linear(inner, body["2.weight"], body["2.bias"])) * gates[32:]


def test_hat_warns_when_gates_are_never_steep_when_all_are_shut_and_when_none_is_left():
    def blind():
        method, model, optimizer = fresh(HAT)
        model.add_head("t0", 3)
        method.begin_task("t0", optimizer)
        x, y = blobs(0)[0]
        F.cross_entropy(model(x, "t0"), y).backward()
        optimizer.step()
        method.end_task(blobs(0))

    assert any("steps_per_epoch" in m for m in warned(blind))
    for value, words in ((-6.0, "smaller c"), (6.0, "larger c")):
        method, _, optimizer = fresh(HAT)
        learn(method, optimizer, 0, end=False)
        with torch.no_grad():
            method.embedding.fill_(value)

        def end(method=method, optimizer=optimizer):
            method.end_task(blobs(0))
            learn(method, optimizer, 1)

        assert any(words in m for m in warned(end))


def test_a_frozen_group_of_an_excluded_layer_and_two_optimizers_are_no_obstacle():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    model.add_head("t0", 3)
    method = HAT(model, torch.zeros(2, 16), exclude=["trunk.0"])
    pair = (torch.optim.Adam(model.trunk.parameters(), lr=1e-2), torch.optim.SGD(model.heads.parameters(), lr=0.1))
    before = bits(model)["trunk.0.weight"]
    method.begin_task("t0", *pair, steps_per_epoch=4)
    for x, y in blobs(0) * 3:
        for optimizer in pair:
            optimizer.zero_grad()
        F.cross_entropy(model(x, "t0"), y).backward()
        for optimizer in pair:
            optimizer.step()
    method.end_task(blobs(0))
    assert method.graph.size == 32
    assert torch.equal(before, model.trunk[0].weight)


# PackNet --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_packed_tasks_keep_their_bits_and_their_weights(optimizer):
    method, model, step = fresh(PackNet, optimizer)
    x, kept = torch.randn(8, 16), []
    for number in range(3):
        frozen = {name: owner != 0 for name, owner in method.knowledge.owner.items()}
        before = bits(model)
        learn(method, step, number)
        for name, fixed in frozen.items():
            assert torch.equal(model.state_dict()[name][fixed], before[name][fixed])
        if number:
            assert torch.equal(model.trunk[0].bias, before["trunk.0.bias"])
        kept.append(logits(model, x, f"t{number}"))
        for old, was in enumerate(kept):
            assert torch.equal(was, logits(model, x, f"t{old}"))
            with method.viewing(f"t{old}"), torch.no_grad():
                assert torch.equal(was, model.heads[f"t{old}"](model.trunk(x)))
    learn(method, step, 3, end=False)
    for old, was in enumerate(kept):
        assert torch.equal(was, logits(model, x, f"t{old}")), "in the middle of a task"


def test_each_task_gives_back_its_share_of_every_layer_and_what_is_free_is_zero():
    method, model, optimizer = fresh(PackNet, share=0.75)
    for number, left in enumerate([0.75, 0.75**2, 0.75**3]):
        learn(method, optimizer, number)
        for name, owner in method.knowledge.owner.items():
            free = owner == 0
            assert float(free.float().mean()) == pytest.approx(left, abs=0.01)
            assert not bool(model.state_dict()[name][free].any())
    assert method.memory()["masks"] == 16 * 32 + 32 * 32
    assert all(owner.dtype == torch.uint8 for owner in method.knowledge.owner.values())
    assert method.statistics()["sparsity"] == pytest.approx(0.75**3, abs=0.01)


def test_the_smallest_weights_are_pruned_at_their_time_and_stay_zero():
    method, model, optimizer = fresh(PackNet, prune_at=0.5)
    model.add_head("t0", 3)
    learn(method, optimizer, 0, epochs=4, steps=range(7), end=False)
    weight = model.trunk[0].weight
    assert not bool((weight == 0).any())
    learn(method, optimizer, 0, epochs=4, steps=[7], begin=False, end=False)
    assert int((weight == 0).sum()) == weight.numel() // 2
    learn(method, optimizer, 0, epochs=4, steps=range(8, 16), begin=False)
    assert int((weight == 0).sum()) == weight.numel() // 2


def test_packnet_needs_the_number_of_epochs_and_says_so():
    method, model, optimizer = fresh(PackNet)
    model.add_head("t0", 3)
    with pytest.raises(ValueError, match="epochs="):
        method.begin_task("t0", optimizer)
    assert method.task is None
    assert not optimizer._optimizer_step_post_hooks


def test_packnet_warns_when_it_could_not_train_on_and_when_nothing_is_free():
    method, _, optimizer = fresh(PackNet)
    assert any("end_epoch" in m for m in warned(lambda: learn(method, optimizer, 0, epochs=6, steps=range(3))))
    method, _, optimizer = fresh(PackNet, share=0.001)
    messages = warned(lambda: [learn(method, optimizer, n) for n in range(3)])
    assert any("larger share" in m for m in messages)


def test_going_back_to_weights_from_before_the_pruning_does_not_break_the_packing():
    method, model, optimizer = fresh(PackNet)
    learn(method, optimizer, 0)
    x, was = torch.randn(8, 16), None
    was = logits(model, x, "t0")
    learn(method, optimizer, 1, steps=range(4), end=False)
    best = bits(model)
    learn(method, optimizer, 1, steps=range(4, 24), begin=False, end=False)
    model.load_state_dict(best)
    method.end_task(blobs(1))
    after = logits(model, x, "t1")
    learn(method, optimizer, 2)
    assert torch.equal(was, logits(model, x, "t0"))
    assert torch.equal(after, logits(model, x, "t1"))


def test_an_old_task_may_be_looked_at_between_forward_and_backward():
    method, model, optimizer = fresh(PackNet)
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer, epochs=3)
    x, y = blobs(1)[0]
    loss = F.cross_entropy(model(x, "t1"), y)
    with torch.no_grad():
        model(x, "t0")
    loss.backward()
    assert model.trunk[0].weight.grad is not None


# LwF ------------------------------------------------------------------------------------------------------------------


def test_the_loss_of_lwf_is_the_cross_entropy_of_softened_outputs_over_all_old_tasks():
    method, model, optimizer = fresh(LwF, temperature=3.0, weight=0.5)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1)
    teacher = copy.deepcopy(model.trunk), copy.deepcopy(model.heads)
    learn(method, optimizer, 2, steps=range(5), end=False)
    x = torch.randn(10, 16)
    expected = 0.0
    for task in ("t0", "t1"):
        p = torch.softmax(teacher[1][task](teacher[0](x)) / 3.0, 1)
        q = torch.log_softmax(model.heads[task](model.trunk(x)) / 3.0, 1)
        expected = expected - 0.5 * (p * q).sum(1).mean()
    weights = list(model.trunk.parameters())
    wanted = torch.autograd.grad(expected, weights)
    for prepared in (True, False):
        output = model(x, "t2") if prepared else None
        term = method.loss(x, output)
        torch.testing.assert_close(term, expected)
        for a, b in zip(torch.autograd.grad(term, weights), wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_lwf_asks_nothing_in_the_first_task_and_holds_its_copy_only_while_a_task_is_under_way():
    method, model, optimizer = fresh(LwF)
    learn(method, optimizer, 0, end=False)
    x, _ = blobs(0)[0]
    assert float(method.loss(x, model(x, "t0"))) == 0
    method.end_task(blobs(0))
    learn(method, optimizer, 1, steps=range(4), end=False)
    trunk = sum(p.numel() for p in model.trunk.parameters())
    assert method.memory()["anchors"] == trunk
    assert method.memory()["bytes"] == 4 * trunk
    method.end_task(blobs(1))
    assert method.memory()["bytes"] == 0


def test_lwf_teaches_a_head_that_all_tasks_share():
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), nn.Linear(32, 3))
    method, optimizer = LwF(model, heads="1"), OPTIMIZERS["sgd"](model.parameters())
    for number in range(2):
        teacher = copy.deepcopy(nn.Sequential(*model.children()).state_dict())
        method.begin_task(f"t{number}", optimizer)
        for x, y in blobs(number):
            optimizer.zero_grad()
            output = model(x)
            term = method.loss(x, output)
            (F.cross_entropy(output, y) + term).backward()
            optimizer.step()
        if number:
            said = torch.func.functional_call(model, teacher, (x,))
            expected = -(torch.softmax(said / 2, 1) * torch.log_softmax(output / 2, 1)).sum(1).mean()
            torch.testing.assert_close(term, expected)
        method.end_task(blobs(number))


def test_lwf_runs_the_trunk_once_for_the_task_and_leaves_batch_norm_and_modes_alone():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.ReLU()), features=32)
    method, optimizer = LwF(model), OPTIMIZERS["adam"](model.parameters())
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(2), end=False)
    x, _ = blobs(1)[0]
    model.train()
    output = model(x, "t1")
    statistics = bits(model)
    method.loss(x, output)
    assert same(statistics, bits(model))
    assert all(module.training for module in model.modules())


def test_lwf_warns_when_its_loss_is_never_asked_for():
    method, model, optimizer = fresh(LwF)
    learn(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    x, y = blobs(1)[0]
    F.cross_entropy(model(x, "t1"), y).backward()
    optimizer.step()
    assert any("method.loss" in m for m in warned(lambda: method.end_task(blobs(1))))


# GPM ------------------------------------------------------------------------------------------------------------------


def flat(number, inputs=16, rank=4):
    """Batches that lie in a few directions of their own."""
    draw = torch.Generator().manual_seed(50 + number)
    span = torch.randn(rank, inputs, generator=draw)
    return [(torch.randn(12, rank, generator=draw) @ span, y) for _, y in blobs(number)[:2]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_update_of_gpm_is_at_right_angles_to_the_inputs_of_old_tasks(optimizer):
    method, model, step = fresh(GPM, optimizer, threshold=1.0)
    learn(method, step, 0, data=flat(0))
    x = torch.cat([x for x, _ in flat(0)])
    before, was, bases = bits(model), logits(model, x, "t0"), dict(method.knowledge.bases)
    with torch.no_grad():
        inner = model.trunk[1](model.trunk[0](x))
    assert bases["trunk.0.weight"].shape == (1, 16, 4)
    learn(method, step, 1, data=flat(1))
    for name, basis in bases.items():
        change = model.state_dict()[name] - before[name]
        assert float(change.norm()) > 1e-2
        assert float((change @ basis[0]).abs().max()) < 1e-5
    with torch.no_grad():
        assert float((model.trunk[1](model.trunk[0](x)) - inner).abs().max()) < 1e-5
    assert float((logits(model, x, "t0") - was).abs().max()) < 1e-5
    assert torch.equal(model.trunk[0].bias, before["trunk.0.bias"])


def test_a_basis_grows_until_it_holds_the_threshold_of_the_energy():
    inputs = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))[None]  # energies 16, 9, 4, 1 of 30
    assert extend_basis(None, inputs, 0.5).shape[2] == 1
    first = extend_basis(None, inputs, 0.8)
    assert first.shape[2] == 2
    torch.testing.assert_close(first[0].abs(), torch.eye(4)[:, :2])
    assert extend_basis(first, inputs, 0.8).shape[2] == 2  # 25 of 30 is held already
    grown = extend_basis(first, inputs, 0.96)
    assert grown.shape[2] == 3
    torch.testing.assert_close(grown[0].T @ grown[0], torch.eye(3))
    assert extend_basis(grown, inputs, 1.0).shape[2] == 4
    assert extend_basis(None, torch.zeros(1, 4, 3), 0.97).shape[2] == 0


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1, stride=2, bias=False),
        nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2, bias=False),
        nn.Conv1d(4, 4, 3, padding="same", groups=4, bias=False),
        nn.Conv3d(4, 2, 2, padding=1, padding_mode="circular", bias=False),
        nn.Linear(4, 3, bias=False),
    ],
    ids=str,
)
def test_the_inputs_of_a_layer_are_what_its_weight_is_multiplied_with(layer):
    dims = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[type(layer)]
    x = torch.randn(2, 4, *[6] * dims)
    inputs = extract_inputs(layer, x, 10**6, torch.Generator())
    rows = layer.weight.reshape(len(inputs), -1, inputs.shape[1])
    by_hand = (rows @ inputs).flatten(0, 1)  # (outputs, batch and positions)
    with torch.no_grad():
        torch.testing.assert_close(by_hand, layer(x).movedim(1, 0).flatten(1))
    assert extract_inputs(layer, x, 1, torch.Generator()).shape[2] == 1


def test_gpm_keeps_the_answers_of_convolutions_too():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Flatten()]
    model = MultiHead(nn.Sequential(*layers))
    optimizer, method = OPTIMIZERS["adam"](model.parameters()), GPM(model, threshold=1.0)
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(6) % 3
    colour = torch.tensor([1.0, -2.0, 0.5])[:, None, None]
    old = [(torch.rand(6, 1, 1, 1, generator=draw) * colour.expand(3, 6, 6), y)]  # every window in one direction
    learn(method, optimizer, 0, data=old)
    assert method.statistics()["directions"]["trunk.0.weight"] == 1
    was, before = logits(model, old[0][0], "t0"), bits(model)
    learn(method, optimizer, 1, data=[(torch.randn(6, 3, 6, 6, generator=draw), y)])
    for name in ("trunk.0.weight", "trunk.3.weight"):
        assert float((model.state_dict()[name] - before[name]).abs().max()) > 1e-2
    assert float((logits(model, old[0][0], "t0") - was).abs().max()) < 1e-5


def test_projection_leaves_what_the_basis_does_not_hold():
    basis = torch.eye(3)[None, :, :1]
    change = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(project(change, basis), torch.tensor([[0.0, 2.0, 3.0]]))
    assert torch.equal(project(change, basis[..., :0]), change)


def test_the_sample_of_gpm_is_of_all_batches_and_leaves_random_state_alone():
    method, _, optimizer = fresh(GPM, samples=20)
    learn(method, optimizer, 0, end=False)
    state = torch.get_rng_state()
    seen = []
    method.end_task(blobs(0), lambda batch: seen.append(batch) or method._default_forward(batch))
    assert torch.equal(state, torch.get_rng_state())
    rows = torch.cat([x for x, _ in seen])
    assert len(rows) == 20
    for x, _ in blobs(0):
        assert any(bool((row == x).all(1).any()) for row in rows)


def test_gpm_warns_when_a_layer_has_no_direction_left_and_then_keeps_its_bits():
    method, model, optimizer = fresh(GPM, threshold=1.0)
    assert any("lower threshold" in m for m in warned(lambda: learn(method, optimizer, 0)))
    before = bits(model)
    learn(method, optimizer, 1)
    assert torch.equal(before["trunk.0.weight"], model.trunk[0].weight)


@pytest.mark.parametrize("cls", [GPM, TRGP, SPG])
def test_a_task_without_data_cannot_be_ended(cls):
    method, _, optimizer = fresh(cls)
    learn(method, optimizer, 0, end=False)
    with pytest.raises(RuntimeError, match="batches"):
        method.end_task([])
    assert method.task == "t0"


# Frozen ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_trunk_keeps_its_bits_and_statistics_after_the_first_task(optimizer):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()), features=32)
    method, step = Frozen(model), OPTIMIZERS[optimizer](model.parameters())
    start = bits(model)
    learn(method, step, 0)
    before = bits(model)
    assert not torch.equal(start["trunk.0.weight"], before["trunk.0.weight"])
    learn(method, step, 1)
    assert same(before, {k: v for k, v in bits(model).items() if "t1" not in k})
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_when_the_rate_drops_the_embedding_starts_anew_as_adam_does(engine, together):
    class Scripted(Trainer):
        def validation_loss(self):
            return torch.tensor([3.0, 4.0, 4.0][self.epoch], dtype=torch.float64)

    torch.manual_seed(0)
    model = MultiHead(mlp(16), features=16)
    x, y = torch.randn(32, 16), torch.arange(32) % 2
    hat = HAT(model, c=0.1, example_input=x[:2])
    method = Together(hat, EWC(model, lam=1.0)) if together else hat
    config = TrainingConfig(epochs=3, batch_size=8, patience=2, engine=engine)
    trainer = Scripted(model, method, (Task("t", 2, x, y, x, y, x, y),), config, seed=0)
    ages = []
    while trainer.epoch < 3:
        before = trainer.epoch
        trainer.advance()
        if trainer.epoch > before:
            ages.append((int(hat.plan.moment_age), int(hat.plan.moves), bool(hat.plan.moments[0].any())))
    assert ages == [(4, 4, True), (8, 8, True), (0, 12, False)]
