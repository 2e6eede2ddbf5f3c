"""The same promises on a GPU; everything here has a counterpart that runs on the CPU."""

from __future__ import annotations

import math
from functools import partial

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
    WSN,
    FineTune,
    Frozen,
    LwF,
    MultiHead,
    NodeGraph,
    PackNet,
    PaperAGSCL,
    RWalk,
)
from agscl.fast import fused_trunk
from agscl.fast.fast_engine import GraphEngine, Pieces, make_fast_engine
from agscl.fast.fused_trunk import FusedTrunk, compile_chain
from agscl.methods._agscl.proximal import pull, shrink
from agscl.networks.cifar import CifarTrunk
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.system.tf32 import tf32_allowed
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig
from loops import bits, blobs, mlp
from small_networks import LayerByLayer
from zoo import SUPPORTED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.cuda(), y.cuda()) for x, y in blobs(number)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operators_are_exact_there_too(dtype):
    rows = [torch.randn(64, 20, device="cuda").to(dtype), torch.randn(64, device="cuda").to(dtype)]
    norms = torch.cat([rows[0].double(), rows[1].double()[:, None]], 1).norm(dim=1)
    threshold = torch.where(torch.arange(64, device="cuda") % 2 == 0, norms * 1.01, norms * 0.5)
    small, _ = shrink(rows, threshold)
    assert bool((small[::2] == 0).all())
    assert not bool(torch.signbit(small[::2]).any())
    assert bool((small[1::2] != 0).any(1).all())
    anchors = [row + 1e-3 for row in rows]
    back, bias = pull(rows, anchors, torch.full((64,), math.inf, device="cuda"))
    assert torch.equal(back, anchors[0])
    assert torch.equal(bias, anchors[1])
    same, _ = pull(rows, anchors, torch.zeros(64, device="cuda"))
    assert torch.equal(same, rows[0])


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_the_graph_found_there_is_the_one_found_on_the_cpu(name):
    entry = SUPPORTED[name]
    torch.manual_seed(0)
    model = MultiHead(entry.trunk())
    model.add_head("a", 3)
    example = entry.example()
    here = NodeGraph(model, example)
    there = NodeGraph(model.cuda(), example.cuda())
    assert here.layers.keys() == there.layers.keys()
    for layer in here.layers:
        assert torch.equal(here.layers[layer].groups, there.layers[layer].groups)
    for reader in here.readers:
        assert torch.equal(here.readers[reader].sources, there.readers[reader].sources)


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "capturable AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, capturable=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2, device="cuda"), capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.001),
}


def step(model, optimizer, task, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x, task), y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("every", ["epoch", "step"])
def test_old_logits_keep_their_bits_and_no_step_waits_for_the_device(name, every):
    torch.manual_seed(0)
    model = MultiHead(mlp(64), features=64).cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    mu = 0.8 if name == "SGD" else 12
    method = PaperAGSCL(model, torch.zeros(2, 16).cuda(), mu=mu, lam=math.inf, rho=0.3, prox_every=every)
    probe = torch.randn(16, 16, device="cuda")
    old = {}
    for number in range(3):
        task, data = f"t{number}", batches(number)
        model.add_head(task, 3)
        method.begin_task(task, optimizer, steps_per_epoch=4)
        for epoch in range(8):
            for i, (x, y) in enumerate(data):
                quiet = epoch > 0 or i > 1
                torch.cuda.set_sync_debug_mode("error" if quiet else "default")
                step(model, optimizer, task, x, y)
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.set_sync_debug_mode("error" if epoch > 0 else "default")
            method.end_epoch()
            torch.cuda.set_sync_debug_mode("default")
        method.end_task(data)
        model.eval()
        for earlier, logits in old.items():
            assert torch.equal(logits, model(probe, earlier)), earlier
        old[task] = model(probe, task).detach()
        model.train()
        assert 0 < method.statistics()["free"] < 128


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradscaler_overflow_counts_for_nothing(fused):
    torch.manual_seed(0)
    model = MultiHead(mlp(64), features=64).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    method = PaperAGSCL(model, torch.zeros(2, 16).cuda(), mu=12, lam=1000, rho=0.3, prox_every="step")
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer, steps_per_epoch=4)
    for number, (x, y) in enumerate(batches(0) * 4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x, "t0"), y)
        scaler.scale(loss * (math.inf if number == 5 else 1.0)).backward()
        before = bits(model)
        scaler.step(optimizer)
        scaler.update()
        if number == 5:
            assert all(torch.equal(a, b) for a, b in zip(before.values(), bits(model).values(), strict=True))
    method.end_task(batches(0))


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_captured_step_masks_and_shrinks_as_the_plain_one_does(every):
    def run(captured):
        torch.manual_seed(0)
        model = MultiHead(mlp(64), features=64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = PaperAGSCL(model, mu=0.8, lam=1000, rho=0.3, prox_every=every, example_input=torch.zeros(2, 16).cuda())
        for number in range(2):
            task, data = f"t{number}", batches(number)
            torch.manual_seed(number)
            model.add_head(task, 3)
            method.begin_task(task, optimizer, steps_per_epoch=4)
            x, y = data[0][0].clone(), data[0][1].clone()
            graph = None
            for at in range(32):
                x.copy_(data[at % 4][0])
                y.copy_(data[at % 4][1])
                if captured and at == 3:
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    optimizer.zero_grad(set_to_none=True)
                    with torch.cuda.graph(graph):
                        step(model, optimizer, task, x, y)
                if graph is not None:
                    graph.replay()
                else:
                    step(model, optimizer, task, x, y)
                if at % 4 == 3:
                    method.end_epoch()
            method.end_task(data)
        return method, model

    plain, captured = run(False), run(True)
    assert 0 < int(plain[0].free.sum()) < 128
    assert torch.equal(plain[0].knowledge.first_task, captured[0].knowledge.first_task)
    for a, b in zip(bits(plain[1]).values(), bits(captured[1]).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_batchnorm_keeps_the_statistics_of_important_channels():
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()
    )
    model = MultiHead(trunk, features=64).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = PaperAGSCL(model, torch.zeros(2, 16).cuda(), mu=10, lam=math.inf, rho=0.3)
    probe = torch.randn(16, 16, device="cuda")
    for number in range(2):
        data = batches(number)
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer)
        model.train()
        for _ in range(8):
            for x, y in data:
                step(model, optimizer, f"t{number}", x, y)
            method.end_epoch()
        method.end_task(data)
        model.eval()
        if number == 0:
            before = model(probe, "t0").detach()
    assert method.statistics()["important_before"] > 0
    assert torch.equal(before, model(probe, "t0"))


@pytest.mark.parametrize(("every", "steps"), [(3, 4), ("step", None)])
def test_what_a_captured_step_cannot_do_is_a_clear_error(every, steps):
    model = MultiHead(mlp(64), features=64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    method = PaperAGSCL(model, prox_every=every, example_input=torch.zeros(2, 16).cuda())
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer, steps_per_epoch=steps)
    x, y = batches(0)[0]
    step(model, optimizer, "t0", x, y)
    optimizer.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(model, optimizer, "t0", x, y)


def trained(method, capture=True, dropout=0.2, engine=None, **options):
    """Three tasks of the trainer's own tests, on the GPU."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU())
    model = MultiHead(trunk, features=64).cuda()
    tasks = []
    for number in range(3):
        x, y = (torch.cat(part) for part in zip(*blobs(number), strict=True))
        tasks.append(Task(f"t{number}", 3, x, y, x[::3], y[::3], x, y))
    config = TrainingConfig(epochs=12, batch_size=48, lr=1e-2, patience=2, **options)
    engine = partial(engine or make_fast_engine, captured=True, pieces=Pieces(cuda_graphs=capture))
    trainer = Trainer(model, method(model), tuple(tasks), config, seed=0, device="cuda", engine=engine)
    while trainer.advance():
        pass
    return trainer


KINDS = {
    "FineTune": FineTune,
    "AGSCL": lambda m: AGSCL(m, torch.zeros(2, 16).cuda()),
    "PaperAGSCL": lambda m: PaperAGSCL(m, mu=12, lam=1000, rho=0.3, example_input=torch.zeros(2, 16).cuda()),
    "PaperAGSCL per step": lambda m: PaperAGSCL(
        m, mu=12, lam=1000, prox_every="step", example_input=torch.zeros(2, 16).cuda()
    ),
    "EWC": lambda m: EWC(m, lam=100.0),
    "SI": lambda m: SI(m, c=1.0),
    "RWalk": lambda m: RWalk(m, lam=1.0),
    "MAS": lambda m: MAS(m, lam=1.0),
    "L2": lambda m: L2(m, lam=0.1),
    "HAT": lambda m: HAT(m, torch.zeros(2, 16).cuda(), c=0.5),
    "PackNet": lambda m: PackNet(m, share=0.5),
    "WSN": WSN,
    "GPM": lambda m: GPM(m, threshold=0.95),
    "SPG": SPG,
    "LwF": LwF,
    "Frozen": Frozen,
}


@pytest.mark.parametrize("name", list(KINDS))
def test_replayed_graphs_train_as_the_same_steps_do_one_by_one(name):
    captured, plain = trained(KINDS[name]), trained(KINDS[name], capture=False)
    for one, other in zip(captured.losses, plain.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    for one, other in zip(captured.accuracies, plain.accuracies, strict=True):
        assert one == pytest.approx(other, abs=0.05)


def test_a_budget_in_replayed_graphs_prunes_to_its_share_and_forgets_nothing():
    trainer = trained(KINDS["AGSCL"])
    for layer in trainer.method.capacity().layers:
        assert 27 <= layer.free < 48  # of 64, three tasks took a quarter of what was free each: at most 16, 12 and 9
    assert all(row[0] == trainer.accuracies[0][0] for row in trainer.accuracies)


class SlowDevice(GraphEngine):
    """The GPU is behind the host: before each epoch it does nothing for a while."""

    def __init__(self, trainer, captured, pieces):
        super().__init__(trainer, None, pieces)

    def advance(self):
        with self.runner.on_stream():
            torch.cuda._sleep(50_000_000)  # cycles, about 30 ms: an epoch of these takes the host far less
        super().advance()


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("name", ["AGSCL", "PaperAGSCL", "FineTune"])
def test_steps_give_the_same_bits_however_far_the_host_is_ahead_of_the_gpu(name, capture):
    behind, usual = trained(KINDS[name], capture, engine=SlowDevice), trained(KINDS[name], capture=False)
    assert behind.losses == usual.losses


@pytest.mark.parametrize("name", ["AGSCL", "PaperAGSCL"])
def test_with_the_same_arithmetic_replayed_graphs_give_the_same_bits(name):
    captured, plain = trained(KINDS[name]), trained(KINDS[name], capture=False)
    assert captured.losses == plain.losses
    for name, value in captured.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
    assert captured.accuracies == plain.accuracies


def test_the_graphs_of_one_task_leave_no_memory_behind_for_the_next():
    reserved = []
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.ReLU())
    model = MultiHead(trunk, features=64).cuda()
    x, y = torch.randn(4096, 16), torch.randint(3, (4096,))
    tasks = tuple(Task(f"t{number}", 3, x, y, x, y, x, y) for number in range(6))
    config = TrainingConfig(epochs=4, batch_size=3000)
    trainer = Trainer(model, FineTune(model), tasks, config, seed=0, device="cuda")
    while trainer.advance():
        if trainer.optimizer is None:
            reserved.append(torch.cuda.memory_reserved())
    assert len(reserved) == 6
    assert reserved[-1] < reserved[1] + 2**25, reserved


@pytest.mark.parametrize(
    ("options", "apart"),
    [({"compile": True}, 0.001), ({"precision": "bf16"}, 0.1), ({"precision": "bf16", "compile": True}, 0.1)],
)
def test_other_arithmetic_follows_the_plain_one(options, apart):
    """Without dropout: a compiled network draws other nodes, and on so little data that alone moves accuracy by 0.1."""
    fast, plain = (trained(KINDS["PaperAGSCL"], dropout=0.0, **each) for each in (options, {}))
    for one, other in zip(fast.losses, plain.losses, strict=True):
        assert one == pytest.approx(other, rel=apart)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "compile": True}, {"optimizer": "sgd", "momentum": 0.9}])
def test_with_channels_last_a_run_stopped_within_a_task_goes_on_where_it_stood(options):
    def make():
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        model = MultiHead(trunk, features=32).cuda()
        tasks = []
        for number in range(2):
            draw = torch.Generator().manual_seed(number)
            x, y = torch.randn(48, 4, 6, 6, generator=draw), torch.randint(3, (48,), generator=draw)
            tasks.append(Task(f"t{number}", 3, x, y, x[::3], y[::3], x, y))
        method = PaperAGSCL(model, mu=1, lam=100, example_input=tasks[0].train_x[:2].cuda())
        config = TrainingConfig(**{"epochs": 6, "batch_size": 16, "lr": 1e-2, "channels_last": True, **options})
        return Trainer(model, method, tuple(tasks), config, seed=0, device="cuda")

    whole, stopped, continued = make(), make(), make()
    while whole.advance():
        pass
    while not (stopped.task_index == 1 and stopped.epoch == 3):
        stopped.advance()
    continued.load_state_dict(unflatten_state(*flatten_state(stopped.state_dict())))
    for parameter, moments in continued.optimizer.state.items():
        for moment in moments.values():
            assert (
                not isinstance(moment, torch.Tensor)
                or moment.shape != parameter.shape
                or (moment.stride() == parameter.stride())
            )
    while continued.advance():
        pass
    for one, other in zip(whole.losses, continued.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-2)


class DropoutRecorder(nn.Module):
    """Drops nodes, and keeps what was left of a batch of ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 64)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("left", torch.zeros(48, 64))

    def forward(self, x):
        kept = self.drop(torch.ones_like(self.left))
        self.left.copy_(kept)
        return F.relu(self.layer(x)) * kept


@pytest.mark.parametrize("compiled", [False, True])
def test_every_replayed_step_drops_other_nodes_and_as_many_as_it_should(compiled):
    model = MultiHead(DropoutRecorder(), features=64).cuda()
    x, y = torch.randn(48, 16), torch.randint(3, (48,))
    options = {"engine": "captured", "patience": None, "restore_best": False, "compile": compiled}
    config = TrainingConfig(epochs=24, batch_size=48, **options)
    tasks = (Task("t0", 3, x, y, None, None, x, y),)
    trainer = Trainer(model, FineTune(model), tasks, config, seed=0, device="cuda")
    seen = []
    while trainer.epoch < config.epochs:
        trainer.advance()
        seen.append(model.trunk.left.clone())
    masks = torch.stack(seen[5:]) > 0  # the first are not replayed yet
    assert len(masks.flatten(1).unique(dim=0)) == len(masks)
    assert masks.float().mean().item() == pytest.approx(0.75, abs=0.01)
    assert masks.float().mean(0).min() > 0.2  # no node is dropped for good
    assert (torch.stack(seen[5:])[masks] - 1 / 0.75).abs().max() < 1e-5


def test_every_replayed_step_of_a_chain_drops_other_nodes():
    """Seen in the loss, of weights that hardly move."""
    model = MultiHead(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5)), features=64).cuda()
    x, y = torch.randn(48, 16), torch.randint(3, (48,))
    fast = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
    config = TrainingConfig(epochs=24, batch_size=48, lr=1e-12, patience=None, restore_best=False, **fast)
    tasks = (Task("t0", 3, x, y, None, None, x, y),)
    trainer = Trainer(model, FineTune(model), tasks, config, seed=0, device="cuda")
    assert trainer.engine.trunk.fused
    while trainer.advance():
        pass
    assert len(set(trainer.losses[0])) == config.epochs


def test_a_network_that_turns_out_to_be_torchs_to_compile_is_captured_all_the_same():
    model = MultiHead(LayerByLayer(16, 64), features=64).cuda()
    x, y = torch.randn(96, 16), torch.randint(3, (96,))
    fast = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
    config = TrainingConfig(epochs=30, batch_size=32, lr=1e-2, patience=None, restore_best=False, **fast)
    tasks = (Task("t0", 3, x, y, None, None, x, y),)
    trainer = Trainer(model, FineTune(model), tasks, config, seed=0, device="cuda")
    assert trainer.engine.trunk.fused
    while trainer.advance():
        pass
    assert not trainer.engine.trunk.fused
    assert trainer.losses[0][-1] < trainer.losses[0][0]


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_compiles_no_kernel_that_was_not_compiled_before_it(monkeypatch, training):
    knobs = pytest.importorskip("triton.knobs")
    trunk = CifarTrunk().cuda().to(memory_format=torch.channels_last).train(training)
    x = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(training):
        compile_chain(trunk.conv, x)
        compile_chain(trunk.dense, torch.empty(32, 128, 4, 4, device="cuda", dtype=torch.bfloat16))
        compiled = []
        monkeypatch.setattr(knobs.compilation, "listener", lambda **found: compiled.append(found["metadata"]["name"]))
        with FusedTrunk(trunk).use_fused_layers():
            monkeypatch.setattr(fused_trunk, "compile_chain", lambda *_: None)
            output = trunk(x)
        if training:
            output.float().sum().backward()
    assert compiled == []


@pytest.mark.parametrize("size", [256, 148])
def test_the_fast_ways_gradients_point_where_those_of_float32_do(size):
    def gradients(**options):
        torch.manual_seed(0)
        trunk = CifarTrunk()
        for module in trunk.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model = MultiHead(trunk, features=trunk.features).cuda()
        draw = torch.Generator().manual_seed(1)
        x = torch.randint(256, (256, 3, 32, 32), generator=draw, dtype=torch.uint8)
        y = torch.randint(10, (256,), generator=draw)
        some = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.25, 0.25, 0.25])
        tasks = (Task("t0", 10, x, y, x, y, x, y, *some),)
        config = TrainingConfig(engine="plain", **options)
        trainer = Trainer(model, FineTune(model), tasks, config, seed=0, device="cuda")
        trainer.advance()
        rows = torch.arange(size, device="cuda")
        trainer.training_loss(rows).backward()
        return {name: p.grad.flatten().double() for name, p in model.named_parameters()}

    exact = gradients()
    fast = gradients(precision="bf16", channels_last=True, compile=True)
    for name, gradient in exact.items():
        assert F.cosine_similarity(gradient, fast[name], dim=0) > 0.95, name  # bf16 keeps 8 bits
        assert fast[name].norm().item() == pytest.approx(gradient.norm().item(), rel=0.05), name


@pytest.mark.parametrize(("precision", "expected"), [("float32", False), ("tf32", True), ("bf16", True)])
def test_arithmetic_is_that_of_the_trainer_while_it_works_and_the_users_own_before_and_after(precision, expected):
    before, seen = tf32_allowed(), []
    model = MultiHead(mlp(64), features=64).cuda()
    x, y = torch.randn(48, 16), torch.randint(3, (48,))
    config = TrainingConfig(epochs=1, patience=None, restore_best=False, precision=precision)
    trainer = Trainer(model, FineTune(model), (Task("t0", 3, x, y, None, None, x, y),), config, seed=0, device="cuda")
    model.trunk.register_forward_hook(lambda *call: seen.append(tf32_allowed()))
    while trainer.advance():
        pass
    assert seen
    assert all(allowed == {"matmul": expected, "cudnn": expected} for allowed in seen)
    assert tf32_allowed() == before
