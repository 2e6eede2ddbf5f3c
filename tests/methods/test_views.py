"""Looking at tasks: from several threads at once, in compiled trunks, in copies, by parts of a model."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from agscl import AGSCL, EWC, GPM, HAT, TRGP, WSN, Frozen, LwF, MultiHead, PackNet, Together
from loops import adam, bits, blobs, make, mlp, same

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

KINDS = {
    "HAT": (HAT, {}),
    "PackNet": (PackNet, {}),
    "EWC, statistics per task": (EWC, {"batchnorm": "per_task"}),
    "AGS-CL": (AGSCL, {"zero_init": "earlier_tasks"}),
    "LwF": (LwF, {}),
    "GPM": (GPM, {}),
    "TRGP": (TRGP, {}),
    "WSN": (WSN, {}),
    "Frozen": (Frozen, {}),
}
SWITCHING = ["HAT", "PackNet", "EWC, statistics per task", "AGS-CL"]  # methods that change the model from task to task
TASKS = 3


def normed_mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())


def learn(method, optimizer, number, epochs=3):
    model, task, data = method.model, f"t{number}", blobs(number)
    torch.manual_seed(number)
    model.add_head(task, 3)
    method.begin_task(task, optimizer, epochs=epochs, steps_per_epoch=len(data))
    model.train()
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            output = model(x, task)
            (F.cross_entropy(output, y) + method.loss(x, output)).backward()
            optimizer.step()
        method.end_epoch()
    method.end_task(data)


def train(kind, trunk=normed_mlp, tasks=TASKS):
    cls, settings = KINDS[kind]
    torch.manual_seed(0)
    model = MultiHead(trunk(), features=32)
    method, optimizer = make(cls, model, **settings), adam(model)
    for number in range(tasks):
        learn(method, optimizer, number)
    model.eval()
    return method, model, optimizer


class Untold(nn.Module):
    """All tasks share its head, and it is not told the task."""

    def __init__(self):
        super().__init__()
        self.body, self.out = normed_mlp(), nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.body(x))


def train_untold(kind):
    cls, settings = KINDS[kind]
    torch.manual_seed(0)
    model = Untold()
    method, optimizer = make(cls, model, heads="out", **settings), adam(model)
    for number in range(TASKS):
        method.begin_task(f"t{number}", optimizer, epochs=2, steps_per_epoch=4)
        for step in range(8):
            x, y = blobs(number)[step % 4]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 4 == 3:
                method.end_epoch()
        method.end_task(blobs(number))
    model.eval()
    return method, model


def in_threads(look, count=4, looks=60):
    """Call `look(task)` for all tasks in `count` threads at once; the outputs that differ from a single thread's."""
    torch.set_grad_enabled(False)
    try:
        expected = {f"t{number}": look(f"t{number}") for number in range(TASKS)}
        wrong, errors, ready = [], [], threading.Barrier(count)

        def run(offset):
            try:
                ready.wait()
                with torch.no_grad():
                    for number in range(looks):
                        task = f"t{(number + offset) % TASKS}"
                        if not torch.equal(look(task), expected[task]):
                            wrong.append(task)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(offset,)) for offset in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        wrong += [f"{task} afterwards" for task in expected if not torch.equal(look(task), expected[task])]
        return wrong
    finally:
        torch.set_grad_enabled(True)


@pytest.fixture
def hasty_threads():
    """Threads take turns far more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("viewing", [False, True])
def test_threads_that_look_at_different_tasks_at_once_get_the_same_bits_as_one_thread(kind, viewing):
    method, model, _ = train(kind)
    x, before = torch.randn(8, 16), bits(model)

    def look(task):
        with method.viewing(task) if viewing else nullcontext():
            return model(x, task)

    assert in_threads(look) == []
    assert same(bits(model), before)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


@pytest.mark.parametrize("kind", SWITCHING)
def test_threads_that_are_within_a_pass_at_once_see_each_its_own_task_and_no_parameter_is_replaced(kind):
    method, model, _ = train(kind)
    x, before, own = torch.randn(8, 16), bits(model), dict(model.named_parameters())
    with torch.no_grad():
        expected = {task: model(x, task) for task in method.tasks}
    meeting, found = threading.Barrier(TASKS, timeout=20), []

    def meet(module, args):  # until every thread is in the middle of its pass
        meeting.wait()
        found.append(all(own[name] is parameter for name, parameter in model.named_parameters()))

    def look(task):
        with torch.no_grad():
            found.extend(torch.equal(model(x, task), expected[task]) for _ in range(5))

    for layer in (0, 3):
        model.trunk[layer].register_forward_pre_hook(meet)
    threads = [threading.Thread(target=look, args=(task,)) for task in method.tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * (3 * 5 * TASKS)
    assert same(bits(model), before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("kind", SWITCHING)
def test_every_thread_views_a_task_of_its_own_where_the_model_is_not_told_the_task(kind):
    method, model = train_untold(kind)
    x, before = torch.randn(8, 16), bits(model)

    def look(task):
        with method.viewing(task):
            return model(x)

    assert len({look(f"t{number}").detach().numpy().tobytes() for number in range(TASKS)}) == TASKS
    assert in_threads(look) == []
    assert same(bits(model), before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("kind", ["HAT", "PackNet", "AGS-CL"])
def test_a_thread_that_looks_at_old_tasks_does_not_disturb_another_that_learns(kind):
    found = []
    for looked_at in (False, True):
        method, model, optimizer = train(kind, mlp)
        stop = threading.Event()

        def look(model=model, stop=stop):
            with torch.no_grad():
                while not stop.is_set():
                    for number in range(TASKS):
                        model(torch.ones(8, 16), f"t{number}")

        thread = threading.Thread(target=look)
        if looked_at:
            thread.start()
        learn(method, optimizer, TASKS)
        stop.set()
        if looked_at:
            thread.join()
        found.append(bits(model))
    assert same(*found)


@pytest.mark.parametrize("kind", SWITCHING)
def test_views_of_interleaved_coroutines_do_not_mix(kind):
    method, model = train_untold(kind)
    x = torch.randn(8, 16)

    def look(task):
        with method.viewing(task), torch.no_grad():
            return model(x)

    async def look_slowly(task):
        with method.viewing(task):
            await asyncio.sleep(0)
            with torch.no_grad():
                output = model(x)
            await asyncio.sleep(0)
        return output

    async def look_at_all():
        return await asyncio.gather(*(look_slowly(f"t{number}") for number in range(TASKS)))

    last = model(x)
    for number, output in enumerate(asyncio.run(look_at_all())):
        assert torch.equal(output, look(f"t{number}"))
    assert torch.equal(model(x), last)
    assert torch.equal(model.out(model.body(x)), last)


@pytest.mark.parametrize("kind", ["HAT", "PackNet", "AGS-CL"])
def test_a_part_of_the_model_called_within_a_view_runs_for_that_task(kind):
    method, model, _ = train(kind)
    x = torch.randn(8, 16)
    with torch.no_grad():
        for task in method.tasks:
            with method.viewing(task):
                assert torch.equal(model.heads[task](model.trunk(x).flatten(1)), model(x, task))
        with method.viewing("t0"):
            assert torch.equal(model.heads["t2"](model.trunk(x)), model.heads["t2"](model.trunk(x)))
            looked_at = model(x, "t2")
            inner = model.trunk(x)
            with method.viewing("t1"):
                assert not torch.equal(model.trunk(x), inner)
            assert torch.equal(model.trunk(x), inner)
        assert torch.equal(model(x, "t2"), looked_at)


@pytest.mark.parametrize("kind", SWITCHING)
def test_within_a_view_the_models_own_tensors_are_saved_and_copied(kind):
    method, model, _ = train(kind)
    x, before = torch.randn(8, 16), bits(model)
    outputs = {task: model(x, task) for task in method.tasks}
    with method.viewing("t0"):
        assert same(bits(model), before)
        twin = copy.deepcopy(model)
    assert same(bits(twin), before)
    for task in method.tasks:
        assert torch.equal(twin(x, task), outputs[task])


@pytest.mark.parametrize("kind", SWITCHING)
def test_other_tensors_put_in_for_one_call_within_a_view_leave_the_models_own_alone(kind):
    method, model, _ = train(kind)
    x, before = torch.randn(8, 16), bits(model)
    with torch.no_grad(), method.viewing("t0"):
        expected = model(x, "t0")
        functional_call(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()}, (x, "t0"))
        assert torch.equal(model(x, "t0"), expected)
    assert same(bits(model), before)
    assert torch.equal(model(x, "t0"), expected)


def test_methods_together_show_a_task_as_both_do():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    packnet, hat = PackNet(model), HAT(model, torch.zeros(2, 16))
    method, optimizer = Together(packnet, hat), adam(model)
    for number in range(TASKS):
        learn(method, optimizer, number)
    model.eval()
    x, owner = torch.randn(8, 16), packnet.knowledge.owner
    with torch.no_grad():
        for number, task in enumerate(method.tasks):
            gates, features = hat.mask(task), x
            for layer, gate in (("0", torch.ones(16)), ("2", gates[:32])):
                own = owner[f"trunk.{layer}.weight"]
                weight = model.trunk[int(layer)].weight * ((own > 0) & (own <= number + 1)) * gate
                features = torch.relu(F.linear(features, weight, model.trunk[int(layer)].bias))
            head = model.heads[task]
            expected = F.linear(features, head.weight * gates[32:], head.bias)
            torch.testing.assert_close(model(x, task), expected)


@pytest.mark.parametrize("kind", SWITCHING)
def test_close_leaves_modules_with_dicts_of_their_own_kind(kind):
    method, model, _ = train(kind)
    for task in method.tasks:
        model(torch.randn(8, 16), task)
    method.close()
    for module in model.modules():
        assert type(module._parameters) is type(nn.Linear(1, 1)._parameters)
        assert type(module._buffers) is type(nn.Linear(1, 1)._buffers)


@pytest.mark.parametrize("kind", [*SWITCHING, "WSN", "TRGP", "Frozen"])
def test_close_warns_where_tasks_no_longer_run_as_they_were_learned(kind):
    method, model, _ = train(kind, trunk=mlp)
    x = torch.randn(8, 16)
    model.eval()
    with torch.no_grad():
        before = [model(x, task) for task in method.tasks]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            method.close()
        warned = any("Keep the method as long as the model is used" in str(one.message) for one in caught)
        after = [model(x, task) for task in method.tasks]
        assert warned != same(dict(enumerate(before)), dict(enumerate(after)))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("PackNet", "trunk"),
        ("AGS-CL", "trunk"),
        pytest.param("PackNet", "model", marks=pytest.mark.slow),
        pytest.param("HAT", "model", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_shows_old_tasks_as_an_uncompiled_one_does(kind, place):

    def outputs(compiled):
        torch._dynamo.reset()
        _, model, _ = train(kind, lambda: torch.compile(mlp(), backend="eager") if compiled == "trunk" else mlp())
        call = torch.compile(model, backend="eager") if compiled == "model" else model
        with torch.no_grad():
            return [call(torch.ones(8, 16), f"t{number}") for number in (0, 2, 1, 2, 0)]

    assert all(torch.equal(one, other) for one, other in zip(outputs(None), outputs(place), strict=True))


@pytest.mark.parametrize("kind", ["PackNet", "AGS-CL"])
def test_a_trunk_compiled_as_one_graph_shows_old_tasks(kind):
    torch._dynamo.reset()
    method, model, _ = train(kind, lambda: torch.compile(mlp(), backend="eager", fullgraph=True))
    inner, x = model.trunk._orig_mod, torch.randn(8, 16)
    with torch.no_grad():
        for task in method.tasks:
            with method.viewing(task):
                assert torch.equal(model(x, task), model.heads[task](inner(x)))
