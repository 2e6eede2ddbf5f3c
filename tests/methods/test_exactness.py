"""What AGS-CL promises in bits: frozen rows, zeros from free to important nodes, old heads and their logits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl import MultiHead, NodeGraph, PaperAGSCL
from agscl.graph.rows import FlatRows
from agscl.methods._agscl.proximal import shrink
from replayed_graphs import use_forms_for_a_gpu
from zoo import DIFFICULT, SUPPORTED, OwnHeads

torch.set_num_threads(1)

RATE, MU = 0.005, 60.0  # one proximal step takes 0.3 off a free node's norm
MODERATE = 10.0  # lam at which some important rows freeze and others drift
BATCHES, BATCH = 2, 6
TASKS = ("a", "b", "c")
EPOCHS = {"a": 2, "b": 1, "c": 1}  # 0.3 per epoch leaves a fresh row (norm 0.58) alive for one, not for two

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=RATE),
    "AdamW with weight decay": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.1),
    "SGD with momentum and weight decay": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=0.01),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=RATE, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=RATE, foreach=True),
    "Adam with its rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(RATE)),
    "Adam, one tensor at a time": lambda p: torch.optim.Adam(p, lr=RATE, foreach=False, weight_decay=0.01),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view({4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def data(shape: tuple[int, ...], task: str, batches: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    """Random batches whose mean and labels belong to the task."""
    generator = torch.Generator().manual_seed(sum(task.encode()))
    shift = torch.randn(shape, generator=generator)
    return [
        (
            shift + torch.randn(BATCH, *shape, generator=generator),
            torch.randint(3, (BATCH,), generator=generator),
        )
        for _ in range(batches)
    ]


def probe(shape: tuple[int, ...]) -> Tensor:
    return 2 * torch.randn(7, *shape, generator=torch.Generator().manual_seed(99))


def split_weak_from_strong(graph: NodeGraph) -> None:
    """Every second group starts so small that the first proximal step zeroes it; the others survive the task."""
    with torch.no_grad():
        for layer in graph.layers.values():
            weak = layer.groups % 2 == 1
            for p in layer.module.parameters(recurse=False):
                p[weak] *= 0.02
                p[~weak] *= 3
        for norm in graph.norms.values():
            for p in norm.module.parameters(recurse=False):
                p[norm.groups % 2 == 1] *= 0.02


@functools.cache
def prepared(name: str, exclude: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(1)
    entry = SUPPORTED.get(name) or DIFFICULT[name]
    whole = MultiHead(entry.trunk())
    whole.add_head("split", 3)
    example = (entry.example(), "split")
    with torch.no_grad():
        whole.eval()(*example)
    split_weak_from_strong(NodeGraph(whole, example, exclude=exclude))
    return whole.trunk.train()


def build(name: str, exclude: tuple[str, ...] = ()) -> tuple[MultiHead, tuple[int, ...]]:
    """A network of the zoo without heads, with weak and strong nodes in every layer."""
    trunk = copy.deepcopy(prepared(name, exclude))
    torch.manual_seed(2)
    return MultiHead(trunk), (SUPPORTED.get(name) or DIFFICULT[name]).shape


def importance(method: PaperAGSCL) -> Tensor:
    """Ω, one float per group."""
    return method.knowledge.omega.detach().clone()


@dataclass
class Record:
    """Everything seen while three tasks were learned."""

    model: nn.Module
    method: PaperAGSCL
    optimizer: torch.optim.Optimizer | None = None
    first: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # (groups,) number of its first important task, or inf
    free: list[Tensor] = field(default_factory=list)  # after each task
    states: list[dict[str, Tensor]] = field(default_factory=list)  # after each task
    logits: list[dict[str, Tensor]] = field(default_factory=list)  # after each task, of every head so far
    statistics: list[dict[str, Any]] = field(default_factory=list)
    zeros: int = 0  # weights that had to be 0 and were looked at
    steps: int = 0

    @property
    def graph(self) -> NodeGraph:
        return self.method.graph


def weight_sources(graph: NodeGraph, reader: str) -> Tensor:
    """(rows, columns of the stored weight): the group that each weight reads, -1 for none."""
    module, sources = graph.readers[reader].module, graph.readers[reader].sources
    weight = module.weight
    if isinstance(module, nn.Linear) or module.groups == 1:
        return sources.expand(weight.shape[0], -1)
    rows = torch.arange(weight.shape[0]) // (weight.shape[0] // module.groups)
    return sources.view(module.groups, weight.shape[1])[rows]


def must_be_zero(record: Record, rule: str) -> Iterator[tuple[str, Tensor]]:
    """Every weight that no step may leave other than 0, by the rule in force: (layer's name, the weights)."""
    graph, first = record.graph, torch.cat([record.first, torch.tensor([-1.0])])  # column -1 is always older
    for name, reader in graph.readers.items():
        sources = first[weight_sources(graph, name)]
        if name in graph.layers:
            rows = first[graph.layers[name].groups][:, None]
            wanted = sources > rows if rule == "paper" else sources.isinf() & rows.isfinite()
            yield name, reader.module.weight[wanted]
    for number, task in enumerate(TASKS[: len(record.states)]):
        head = f"heads.{task}"
        if head in graph.readers:  # a task's head reads no node that was free when the task ended
            yield head, graph.readers[head].module.weight[first[weight_sources(graph, head)] > number]


def check_step(record: Record, rule: str) -> None:
    record.steps += 1
    if not record.states:
        return
    for name, weights in must_be_zero(record, rule):
        assert not weights.count_nonzero(), f"{name}: a weight from a free to an important node is not 0"
        record.zeros += weights.numel()
    for task in TASKS[: len(record.states)]:
        for name, parameter in record.model.named_parameters():
            if name.startswith(f"heads.{task}."):
                assert same_bits(parameter, record.states[-1][name]), f"{name} moved while another task was learned"


def look(record: Record, shape: tuple[int, ...], tasks: list[str]) -> None:
    """Write down the state after a task."""
    omega = importance(record.method)
    if not len(record.first):
        record.first = torch.full((len(omega),), math.inf)
    record.first[(omega > 0) & record.first.isinf()] = len(record.states)
    record.free.append(omega == 0)
    record.states.append({name: tensor.clone() for name, tensor in record.model.state_dict().items()})
    record.statistics.append(dict(record.method.statistics()))
    modes = [module.training for module in record.model.modules()]
    with torch.no_grad():
        record.model.eval()
        record.logits.append({task: record.model(probe(shape), task).clone() for task in tasks})
    for module, mode in zip(record.model.modules(), modes, strict=True):
        module.training = mode


def plain_epoch(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    """The loop of the design: zero_grad, backward, step."""
    assert record.optimizer is not None
    for x, y in batches:
        loss = F.cross_entropy(record.model(x, task), y)
        record.optimizer.zero_grad()
        loss.backward()
        record.optimizer.step()


Epoch = Callable[[Record, str, list[tuple[Tensor, Tensor]]], None]


def learn(
    name: str,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    zero_init: str = "paper",
    epoch: Epoch = plain_epoch,
    graph_options: dict[str, Any] | None = None,
    begin: dict[str, Any] | None = None,
    **options: Any,
) -> Record:
    """Three tasks in a row on one network, one optimizer for all of them, checked after every step."""
    model, shape = build(name, tuple((graph_options or {}).get("exclude", ())))
    settings = {"mu": MU, "rho": 0.5, "zero_init": zero_init, **(graph_options or {}), **options}
    record = Record(model, PaperAGSCL(model, torch.zeros(2, *shape), **settings))
    record.optimizer = optimizer(model.parameters())
    for task in TASKS:
        model.add_head(task, 3)
        record.method.begin_task(task, record.optimizer, **(begin or {}))
        watch = record.optimizer.register_step_post_hook(lambda *_: check_step(record, zero_init))
        batches = data(shape, task)
        for _ in range(EPOCHS[task]):
            epoch(record, task, batches)
            record.method.end_epoch()
        record.method.end_task(batches)
        watch.remove()
        look(record, shape, list(TASKS[: TASKS.index(task) + 1]))
    return record


def learned(name: str, optimizer: str = "Adam", lam: float = math.inf, zero_init: str = "paper") -> Record:
    return _learned(name, optimizer, lam, zero_init)


@functools.cache
def _learned(name: str, optimizer: str, lam: float, zero_init: str) -> Record:
    return learn(name, OPTIMIZERS[optimizer], lam=lam, zero_init=zero_init)


def assert_not_empty(record: Record) -> None:
    """Free and important nodes exist throughout, new nodes become important, and zeros were looked at."""
    for free in record.free:
        assert free.any(), "no free node left"
        assert not free.all(), "no important node"
    for earlier, later in zip(record.free, record.free[1:], strict=False):
        assert not (later & ~earlier).any(), "an important node became free again"
        assert (earlier & ~later).any(), "no new node became important"
    assert record.steps >= sum(EPOCHS.values()) * BATCHES
    assert record.zeros > 0


def assert_old_logits_kept(record: Record) -> None:
    for number, task in enumerate(TASKS):
        assert record.logits[number][task].isfinite().all()
        assert record.logits[number][task].unique().numel() > 3, "logits that do not depend on the input prove nothing"
        for later in record.logits[number + 1 :]:
            assert same_bits(later[task], record.logits[number][task]), f"the logits of task {task} moved"


def rows(graph: NodeGraph) -> Iterator[tuple[str, Tensor, bool]]:
    """Every tensor whose rows belong to groups: (name, group of each row, whether it is a running statistic)."""
    for owner in (*graph.layers.values(), *graph.norms.values()):
        for key, _ in owner.module.named_parameters(recurse=False):
            yield f"{owner.name}.{key}", owner.groups, False
    for norm in graph.norms.values():
        for key in ("running_mean", "running_var"):
            yield f"{norm.name}.{key}", norm.groups, True


def moved(record: Record, task: int, *, statistics: bool = False) -> Tensor:
    """(groups,) whether any bit of the group differs between the end of task `task - 1` and the end of `task`."""
    result = torch.zeros(record.graph.size, dtype=torch.bool)
    for name, groups, statistic in rows(record.graph):
        if statistic == statistics:
            before, after = (
                bits(record.states[i][name]).flatten(1 - (record.states[i][name].dim() == 1)) for i in (task - 1, task)
            )
            differs = (before != after).view(len(groups), -1).any(1)
            result[groups[differs]] = True
    return result


networks = pytest.mark.parametrize("name", SUPPORTED)
crossed = pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mlp", optimizer) for optimizer in OPTIMIZERS if optimizer != "Adam"]
    + [(name, optimizer) for name in ("resnet", "vgg") for optimizer in list(OPTIMIZERS)[1:4]],
)


# Every network, every optimizer ------------------------------------------------------------------------------------


@networks
def test_with_infinite_lam_the_logits_of_old_heads_keep_their_bits(name: str) -> None:
    record = learned(name)
    assert_not_empty(record)
    assert_old_logits_kept(record)


@networks
def test_with_a_very_large_lam_and_zeros_only_while_free_the_logits_of_old_heads_keep_their_bits(name: str) -> None:
    record = learned(name, lam=1e15, zero_init="while_free")
    assert_not_empty(record)
    assert_old_logits_kept(record)


@networks
@pytest.mark.parametrize("lam", [math.inf, 30.0])
def test_in_the_form_for_a_gpu_all_is_as_exact_and_the_same_is_learned(name: str, lam: float, monkeypatch) -> None:
    usual = learned(name, lam=lam)
    flat = use_forms_for_a_gpu(monkeypatch)
    record = learn(name, OPTIMIZERS["Adam"], lam=lam)
    assert any(isinstance(rows, FlatRows) for rows in flat)
    if math.isinf(lam):
        assert_not_empty(record)
        assert_old_logits_kept(record)
    assert all(torch.equal(a, b) for a, b in zip(record.free, usual.free, strict=True))
    for state, other in zip(record.states, usual.states, strict=True):
        for key, value in state.items():
            torch.testing.assert_close(
                value, other[key], rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
            )


@crossed
def test_old_logits_keep_their_bits_under(name: str, optimizer: str) -> None:
    record = learned(name, optimizer)
    assert_not_empty(record)
    assert_old_logits_kept(record)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@networks
def test_every_network_keeps_old_logits_and_frozen_rows_under_every_optimizer(name: str, optimizer: str) -> None:
    record = learned(name, optimizer)
    assert_not_empty(record)
    assert_old_logits_kept(record)
    for task in (1, 2):
        assert not (moved(record, task) & ~record.free[task - 1]).any()


@networks
def test_with_infinite_lam_important_rows_keep_their_bits_and_free_ones_move(name: str) -> None:
    record = learned(name)
    for task in (1, 2):
        important = ~record.free[task - 1]
        assert not (moved(record, task) & important).any()
        assert (moved(record, task) & ~important).any()


@pytest.mark.parametrize("zero_init", ["paper", "while_free"])
@networks
def test_zeros_stay_zero_after_every_step_while_important_rows_still_drift(name: str, zero_init: str) -> None:
    record = learned(name, lam=MODERATE, zero_init=zero_init)
    assert_not_empty(record)
    drifted = [(moved(record, task) & ~record.free[task - 1]).any() for task in (1, 2)]
    assert any(drifted), "lam was meant to let important rows drift"


@networks
def test_rows_reported_frozen_kept_their_bits_over_the_task(name: str) -> None:
    record = learned(name, lam=MODERATE)
    frozen_ever = 0
    for task in (1, 2):
        still = ~record.free[task - 1] & ~moved(record, task)
        assert record.statistics[task]["frozen"] == int(still.sum())
        frozen_ever += int(still.sum())
    assert frozen_ever > 0, "lam was meant to freeze some rows"


@pytest.mark.parametrize("optimizer", [optimizer for optimizer in OPTIMIZERS if optimizer != "Adam"])
@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_rows_reported_frozen_kept_their_bits_under(name: str, optimizer: str) -> None:
    record = learned(name, optimizer, lam=MODERATE)
    assert_not_empty(record)
    for task in (1, 2):
        still = ~record.free[task - 1] & ~moved(record, task)
        assert record.statistics[task]["frozen"] == int(still.sum())


@pytest.mark.parametrize(
    "name", [name for name in SUPPORTED if name in ("vgg", "resnet", "densenet", "separable", "padded", "conv1d")]
)
def test_running_statistics_of_important_channels_keep_their_bits_and_those_of_free_ones_move(name: str) -> None:
    for lam in (math.inf, MODERATE):
        record = learned(name, lam=lam)
        for task in (1, 2):
            important = ~record.free[task - 1]
            changed = moved(record, task, statistics=True)
            assert not (changed & important).any()
            assert (changed & ~important).any()


def test_a_frozen_backbone_keeps_every_bit_its_running_statistics_included() -> None:
    record = learned("frozen")
    names = [name for name in record.states[0] if name.startswith("trunk.backbone.") and "num_batches" not in name]
    assert names
    for state in record.states[1:]:
        assert all(same_bits(state[name], record.states[0][name]) for name in names)


@pytest.mark.parametrize("name", ["mlp", "lenet", "alexnet", "vgg", "conv3d"])
def test_a_node_is_free_exactly_if_no_training_sample_activates_it(name: str) -> None:
    """Measured without the method: what the readers of each node see once the task has ended, weights untouched."""
    model, shape = build(name)
    method = PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rand_init=False, zero_init="off")
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    model.add_head("a", 3)
    method.begin_task("a", optimizer)
    batches = data(shape, "a")
    plain_epoch(Record(model, method, optimizer), "a", batches)
    method.end_epoch()
    method.end_task(batches)
    seen = torch.zeros(method.graph.size, dtype=torch.bool)

    def watch(sources: Tensor) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            dim = -1 if isinstance(module, nn.Linear) else 1
            active = (given[0] != 0).movedim(dim, 0).flatten(1).any(1)
            seen[sources[active & (sources >= 0)]] = True

        return hook

    handles = [r.module.register_forward_pre_hook(watch(r.sources)) for r in method.graph.readers.values()]
    model.eval()
    with torch.no_grad():
        for x, _ in batches:
            model(x, "a")
    for handle in handles:
        handle.remove()
    assert torch.equal(importance(method) > 0, seen)
    assert seen.any()
    assert not seen.all()


def test_importance_is_the_mean_activation_and_decays_by_eta() -> None:
    model, shape = build("mlp")
    method = PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rho=0.5, eta=0.5)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    expected = torch.zeros(22)
    for task in TASKS[:2]:
        model.add_head(task, 3)
        method.begin_task(task, optimizer)
        batches = data(shape, task)
        plain_epoch(Record(model, method, optimizer), task, batches)
        method.end_epoch()
        x = torch.cat([x for x, _ in batches])
        with torch.no_grad():
            hidden = F.relu(model.trunk.fc1(x))
            means = torch.cat([hidden.mean(0), F.relu(model.trunk.fc2(hidden)).mean(0)])
        groups = torch.cat([method.graph.layers[f"trunk.{layer}"].groups for layer in ("fc1", "fc2")])
        expected = 0.5 * expected + torch.zeros(22).index_add(0, groups, means)
        method.end_task(batches)
        torch.testing.assert_close(importance(method), expected, rtol=1e-5, atol=1e-7)


def test_free_nodes_reach_no_head_after_the_task() -> None:
    record = learned("lenet")
    for number, task in enumerate(TASKS):
        sources = weight_sources(record.graph, f"heads.{task}")
        columns = record.states[number][f"heads.{task}.weight"][record.free[number][sources]]
        assert columns.numel() > 0
        assert not columns.count_nonzero()


# Old heads ----------------------------------------------------------------------------------------------------------


def epoch_with_zeroed_gradients(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Gradients stay allocated and are zeroed: momentum and weight decay would act on whatever is in reach."""
    assert record.optimizer is not None
    for x, y in batches:
        record.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(record.model(x, task), y).backward()
        record.optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_old_heads_do_not_move_when_gradients_are_zeroed_in_place(optimizer: str) -> None:
    record = learn("mlp", OPTIMIZERS[optimizer], lam=math.inf, epoch=epoch_with_zeroed_gradients)
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_old_heads_do_not_move_although_momentum_was_built_up_on_them() -> None:
    record = learn(
        "mlp",
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.99, weight_decay=0.1, nesterov=True),
        lam=math.inf,
        mu=MU * RATE / 0.05,
        epoch=epoch_with_zeroed_gradients,
    )
    assert_old_logits_kept(record)
    for number, task in enumerate(TASKS):
        for state in record.states[number + 1 :]:
            for key in ("weight", "bias"):
                assert same_bits(state[f"heads.{task}.{key}"], record.states[number][f"heads.{task}.{key}"])


def test_old_heads_do_not_move_although_a_gradient_is_put_on_them() -> None:
    def epoch(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
        assert record.optimizer is not None
        for x, y in batches:
            record.optimizer.zero_grad()
            F.cross_entropy(record.model(x, task), y).backward()
            for name, parameter in record.model.named_parameters():
                if name.startswith("heads.") and not name.startswith(f"heads.{task}."):
                    parameter.grad = torch.ones_like(parameter)
            record.optimizer.step()

    assert_old_logits_kept(learn("mlp", OPTIMIZERS["AdamW with weight decay"], lam=math.inf, epoch=epoch))


def test_the_task_that_is_learned_does_move_its_own_head() -> None:
    model, shape = build("mlp")
    method = PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rho=0.5)
    optimizer = OPTIMIZERS["SGD with momentum and weight decay"](model.parameters())
    for task in TASKS:
        model.add_head(task, 3)
        method.begin_task(task, optimizer)
        batches = data(shape, task)
        model(batches[0][0], task)
        before = model.heads[task].weight.detach().clone()
        plain_epoch(Record(model, method, optimizer), task, batches)
        assert not torch.equal(model.heads[task].weight, before)
        method.end_epoch()
        method.end_task(batches)


def test_a_fresh_optimizer_for_every_task_works_as_well() -> None:
    model, shape = build("vgg")
    record = Record(model, PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rho=0.5))
    for task in TASKS:
        model.add_head(task, 3)
        record.optimizer = OPTIMIZERS["AdamW with weight decay"](model.parameters())
        record.method.begin_task(task, record.optimizer)
        watch = record.optimizer.register_step_post_hook(lambda *_: check_step(record, "paper"))
        for _ in range(EPOCHS[task]):
            plain_epoch(record, task, data(shape, task))
            record.method.end_epoch()
        record.method.end_task(data(shape, task))
        watch.remove()
        look(record, shape, list(TASKS[: TASKS.index(task) + 1]))
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_a_model_with_its_own_heads_keeps_old_logits() -> None:
    torch.manual_seed(1)
    model = OwnHeads()
    split_weak_from_strong(NodeGraph(model, (torch.randn(4, 10), "0"), heads="last"))
    method = PaperAGSCL(model, torch.zeros(2, 10), mu=MU, lam=math.inf, rho=0.5, heads="last")
    optimizer = OPTIMIZERS["SGD with momentum and weight decay"](model.parameters())
    x = probe((10,))
    logits: dict[str, Tensor] = {}
    untouched = model.last[2].weight.detach().clone()
    for task in ("0", "1", "2"):
        method.begin_task(task, optimizer)
        batches = data((10,), task)
        for _ in range(2 if task == "0" else 1):
            epoch_with_zeroed_gradients(Record(model, method, optimizer), task, batches)
            method.end_epoch()
        method.end_task(batches)
        free = importance(method) == 0
        assert free.any()
        assert not free.all()
        with torch.no_grad():
            for old, before in logits.items():
                assert same_bits(model(x, old), before)
            logits[task] = model(x, task).clone()
        if task == "1":
            assert same_bits(model.last[2].weight, untouched), "the head of a task to come has not begun"


READ_NODES = (
    "called twice",
    "attention",
    "no relu",
    "inverted residuals",
    "transposed",
)  # what they exclude reads nodes, and is not protected from them


@pytest.mark.parametrize("name", [name for name, entry in DIFFICULT.items() if entry.exclude])
def test_excluded_layers_are_kept_as_they_are_and_with_them_the_old_logits(name: str) -> None:
    exclude = [f"trunk.{layer}" for layer in DIFFICULT[name].exclude]
    record = learn(name, OPTIMIZERS["AdamW with weight decay"], lam=math.inf, graph_options={"exclude": exclude})
    for number in (1, 2):
        for key, tensor in record.states[number].items():
            if any(key.startswith(f"{layer}.") for layer in exclude) and tensor.is_floating_point():
                assert same_bits(tensor, record.states[0][key]), f"{key} was to be kept as it is"
    if name not in READ_NODES:
        assert_old_logits_kept(record)


@pytest.mark.parametrize("excluded", ["freeze", "train"])
def test_the_last_layer_of_the_trunk_may_be_excluded_although_heads_then_read_no_nodes(excluded: str) -> None:
    options = {"exclude": ["trunk.fc2"], "excluded": excluded}
    record = learn("mlp", OPTIMIZERS["Adam"], lam=math.inf, graph_options=options)
    for task in (1, 2):
        assert not (moved(record, task) & ~record.free[task - 1]).any()


def test_an_excluded_layer_is_trained_by_every_task_if_so_asked() -> None:
    options = {"exclude": ["trunk.fc2"], "excluded": "train"}
    record = learn("no relu", OPTIMIZERS["Adam"], lam=math.inf, graph_options=options)
    for before, after in zip(record.states, record.states[1:], strict=False):
        assert not torch.equal(before["trunk.fc2.weight"], after["trunk.fc2.weight"])


# Other loops --------------------------------------------------------------------------------------------------------


def epoch_with_a_closure(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = record.optimizer
    assert optimizer is not None
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(record.model(x, task), y)
            loss.backward()
            return loss

        returned = optimizer.step(closure)
        assert returned is not None
        assert returned.isfinite()


def epoch_with_accumulation(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    assert record.optimizer is not None
    for x, y in batches:
        record.optimizer.zero_grad()
        for part in range(3):
            half = slice(2 * part, 2 * part + 2)
            (F.cross_entropy(record.model(x[half], task), y[half]) / 3).backward()
        record.optimizer.step()


def epoch_with_clipping(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    assert record.optimizer is not None
    for x, y in batches:
        record.optimizer.zero_grad()
        F.cross_entropy(record.model(x, task), y).backward()
        nn.utils.clip_grad_norm_(record.model.parameters(), 0.1)
        record.optimizer.step()


def epoch_with_penalties_before_clipping(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
    assert record.optimizer is not None
    for x, y in batches:
        record.optimizer.zero_grad()
        output = record.model(x, task)
        (F.cross_entropy(output, y) + record.method.loss(x, output)).backward()
        record.method.add_penalty_gradients()
        nn.utils.clip_grad_norm_(record.model.parameters(), 0.1)
        record.optimizer.step()


LOOPS: dict[str, Epoch] = {
    "a closure": epoch_with_a_closure,
    "gradient accumulation": epoch_with_accumulation,
    "gradient clipping": epoch_with_clipping,
    "penalties added before clipping": epoch_with_penalties_before_clipping,
}


@pytest.mark.parametrize("optimizer", ["Adam", "SGD with momentum and weight decay"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_every_promise_holds_in_a_loop_with(name: str, loop: str, optimizer: str) -> None:
    record = learn(name, OPTIMIZERS[optimizer], lam=math.inf, epoch=LOOPS[loop])
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_every_promise_holds_with_several_parameter_groups_of_different_rates() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        return torch.optim.AdamW([{"params": [first], "lr": 0.003, "weight_decay": 0.2}, {"params": rest}], lr=RATE)

    record = learn("lenet", optimizer, lam=math.inf)
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_every_promise_holds_with_one_optimizer_per_half_of_the_model() -> None:
    model, shape = build("mlp")
    record = Record(model, PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rho=0.5))
    lower = torch.optim.Adam(model.trunk.fc1.parameters(), lr=RATE)
    upper = torch.optim.SGD(model.trunk.fc2.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)
    for task in TASKS:
        model.add_head(task, 3)
        record.method.begin_task(task, lower, upper)
        for _ in range(EPOCHS[task]):
            for x, y in data(shape, task):
                loss = F.cross_entropy(model(x, task), y)
                lower.zero_grad()
                upper.zero_grad()
                loss.backward()
                lower.step()
                upper.step()
                check_step(record, "paper")
            record.method.end_epoch()
        record.method.end_task(data(shape, task))
        look(record, shape, list(TASKS[: TASKS.index(task) + 1]))
    assert_not_empty(record)
    assert_old_logits_kept(record)


# The rate in force, and how often the proximal step is taken -------------------------------------------------------


def first_task(**options: Any) -> tuple[MultiHead, PaperAGSCL, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    model, shape = build("mlp")
    model.add_head("a", 3)
    model(probe(shape), "a")
    method = PaperAGSCL(model, torch.zeros(2, *shape), lam=400, rho=0.3, **options)
    return model, method, torch.optim.SGD(model.parameters(), lr=0.1), data(shape, "a", batches=4)


def group_rows(model: MultiHead) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in layer.parameters()] for layer in (model.trunk.fc1, model.trunk.fc2)]


def assert_shrunk(before: list[list[Tensor]], after: list[list[Tensor]], *thresholds: float) -> None:
    for old, new, threshold in zip(before, after, thresholds, strict=True):
        expected = shrink(old, torch.full((len(old[0]),), threshold, dtype=torch.float64))
        for want, got in zip(expected, new, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
            assert torch.equal(got == 0, want == 0), "exactly the same zeros"
        assert (expected[0] == 0).all(1).any()
        assert (expected[0] != 0).any()


def step(model: MultiHead, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x, "a"), y).backward()
    optimizer.step()


def test_the_proximal_step_takes_the_rate_of_the_last_step_not_the_one_a_scheduler_set_since() -> None:
    for factor in (1e-6, 100.0, 0.0):
        model, method, optimizer, batches = first_task(mu=3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch, f=factor: 1.0 if epoch == 0 else f)
        method.begin_task("a", optimizer)
        for batch in batches:
            step(model, optimizer, batch)
        before = group_rows(model)
        scheduler.step()
        method.end_epoch()
        assert_shrunk(before, group_rows(model), 0.1 * 3, 0.1 * 3)


def test_with_a_scheduler_stepped_with_every_batch_the_mean_rate_of_the_epoch_counts() -> None:
    model, method, optimizer, batches = first_task(mu=6)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    method.begin_task("a", optimizer)
    for _ in range(2):
        rates = []
        for batch in batches:
            rates.append(optimizer.param_groups[0]["lr"])
            step(model, optimizer, batch)
            scheduler.step()
        before = group_rows(model)
        method.end_epoch()
        mean = sum(rates) / len(rates)
        assert_shrunk(before, group_rows(model), mean * 6, mean * 6)


def test_every_parameter_group_has_its_own_rate() -> None:
    model, method, _, batches = first_task(mu=3)
    optimizer = torch.optim.SGD(
        [
            {"params": model.trunk.fc1.parameters(), "lr": 0.1},
            {"params": model.trunk.fc2.parameters(), "lr": 0.2},
            {"params": model.heads.parameters(), "lr": 0.9},
        ]
    )
    method.begin_task("a", optimizer)
    for batch in batches:
        step(model, optimizer, batch)
    before = group_rows(model)
    method.end_epoch()
    assert_shrunk(before, group_rows(model), 0.1 * 3, 0.2 * 3)


@pytest.mark.parametrize(("prox_every", "share"), [("step", 4), (1, 4), (2, 2), (4, 1)])
def test_a_proximal_step_every_few_steps_divides_its_threshold(prox_every: str | int, share: int) -> None:
    model, method, optimizer, batches = first_task(mu=6, prox_every=prox_every)
    stepped: list[list[list[Tensor]]] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(group_rows(model)))  # before the method's own hook
    method.begin_task("a", optimizer, epochs=2, steps_per_epoch=4)
    period = 1 if prox_every == "step" else prox_every
    for number, batch in enumerate(batches * 2, start=1):
        step(model, optimizer, batch)
        if number % period == 0:
            assert_shrunk(stepped[-1], group_rows(model), 0.6 / share, 0.6 / share)
        else:
            assert all(
                same_bits(a, b)
                for old, new in zip(stepped[-1], group_rows(model), strict=True)
                for a, b in zip(old, new, strict=True)
            )
        if number % 4 == 0:
            before = group_rows(model)
            method.end_epoch()
            assert all(
                same_bits(a, b)
                for old, new in zip(before, group_rows(model), strict=True)
                for a, b in zip(old, new, strict=True)
            ), "the epoch's share has been taken already"


@pytest.mark.parametrize("prox_every", ["step", 2, 5])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD with momentum and weight decay", "fused Adam"])
@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_every_promise_holds_with_proximal_steps_within_the_epoch(
    name: str, optimizer: str, prox_every: str | int
) -> None:
    record = learn(name, OPTIMIZERS[optimizer], lam=math.inf, prox_every=prox_every, begin={"steps_per_epoch": BATCHES})
    assert_not_empty(record)
    assert_old_logits_kept(record)


@pytest.mark.parametrize("prox_every", ["step", 2])
def test_every_promise_holds_where_the_steps_of_an_epoch_were_not_told(prox_every: str | int) -> None:
    record = learn("mlp", OPTIMIZERS["Adam"], lam=math.inf, prox_every=prox_every)
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_with_a_proximal_step_per_step_frozen_rows_never_leave_their_anchor() -> None:
    def epoch(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
        for batch in batches:
            plain_epoch(record, task, [batch])
            for name, groups, _ in rows(record.graph) if record.states else ():
                kept = ~record.free[-1][groups]
                assert same_bits(record.model.state_dict()[name][kept], record.states[-1][name][kept])

    record = learn(
        "vgg",
        OPTIMIZERS["AdamW with weight decay"],
        lam=math.inf,
        prox_every="step",
        epoch=epoch,
        begin={"steps_per_epoch": BATCHES},
    )
    assert_not_empty(record)


def test_steps_not_followed_by_end_epoch_get_their_proximal_step_at_the_end_of_the_task() -> None:
    model, method, optimizer, batches = first_task(mu=3, rand_init=False, zero_init="off")
    method.begin_task("a", optimizer)
    for batch in batches:
        step(model, optimizer, batch)
    before = group_rows(model)
    method.end_task(batches)
    assert_shrunk(before, group_rows(model), 0.1 * 3, 0.1 * 3)


def test_infinite_lam_freezes_also_at_rate_zero() -> None:
    model, shape = build("mlp")
    record = Record(model, PaperAGSCL(model, torch.zeros(2, *shape), mu=MU, lam=math.inf, rho=0.5))
    record.optimizer = OPTIMIZERS["Adam"](model.parameters())
    for task in TASKS[:2]:
        model.add_head(task, 3)
        record.method.begin_task(task, record.optimizer)
        plain_epoch(record, task, data(shape, task))
        if task == "b":  # the weights have moved; now a step at rate 0, as a decayed schedule ends
            for group in record.optimizer.param_groups:
                group["lr"] = 0.0
            plain_epoch(record, task, data(shape, task))
        record.method.end_epoch()
        record.method.end_task(data(shape, task))
        look(record, shape, list(TASKS[: TASKS.index(task) + 1]))
    assert same_bits(record.logits[1]["a"], record.logits[0]["a"])
    assert not (moved(record, 1) & ~record.free[0]).any()
    assert all(tensor.isfinite().all() for tensor in record.states[1].values())


# Mixed precision ----------------------------------------------------------------------------------------------------


def epoch_with_a_scaler(overflow: bool) -> Epoch:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def epoch(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
        assert record.optimizer is not None
        for number, (x, y) in enumerate([*batches, batches[0]] if overflow else batches):
            record.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(record.model(x, task), y)).backward()
            skipped = overflow and number == 1
            if skipped:
                next(p for p in record.model.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
            before = {name: p.detach().clone() for name, p in record.model.named_parameters()}
            scale = scaler.get_scale()
            scaler.step(record.optimizer)
            scaler.update()
            if skipped:
                assert scaler.get_scale() < scale, "the overflow was seen"
                for name, p in record.model.named_parameters():
                    assert same_bits(p, before[name]), f"{name} moved in a skipped step"

    return epoch


@pytest.mark.parametrize("prox_every", ["epoch", "step"])
@pytest.mark.parametrize("overflow", [False, True], ids=["no overflow", "an overflow"])
@pytest.mark.parametrize("optimizer", ["Adam", "fused Adam", "SGD with momentum and weight decay"])
def test_every_promise_holds_under_a_gradient_scaler_with(optimizer: str, overflow: bool, prox_every: str) -> None:
    record = learn(
        "mlp",
        OPTIMIZERS[optimizer],
        lam=math.inf,
        epoch=epoch_with_a_scaler(overflow),
        prox_every=prox_every,
        begin={"steps_per_epoch": BATCHES},
    )
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_every_promise_holds_under_bfloat16_autocast() -> None:
    def epoch(record: Record, task: str, batches: list[tuple[Tensor, Tensor]]) -> None:
        assert record.optimizer is not None
        for x, y in batches:
            record.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(record.model(x, task).float(), y)
            loss.backward()
            record.optimizer.step()

    record = learn("vgg", OPTIMIZERS["Adam"], lam=math.inf, epoch=epoch)
    assert_not_empty(record)
    assert_old_logits_kept(record)


def test_after_close_the_optimizer_is_left_alone_again() -> None:
    model, method, optimizer, batches = first_task(mu=1e6)
    method.begin_task("a", optimizer)
    step(model, optimizer, batches[0])
    method.close()
    before = group_rows(model)
    hooks = len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)
    assert hooks == 0
    step(model, optimizer, batches[1])
    assert all(not torch.equal(a[0], b[0]) for a, b in zip(before, group_rows(model), strict=True))
    assert all(p.requires_grad for p in model.parameters())
