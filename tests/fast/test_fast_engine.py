"""The fast engines; on a CPU their work runs uncaptured."""

import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from agscl import AGSCL, EWC, HAT, SI, WSN, PackNet, Together
from agscl.experiments.method_entries import METHODS
from agscl.fast.cuda_graphs import GraphRunner
from agscl.fast.fast_engine import CompiledEngine, GraphEngine, Pieces, make_fast_engine
from agscl.fast.fast_trunk import FastTrunk
from agscl.fast.torch_compiled_trunk import TorchCompiledTrunk
from agscl.heads import MultiHead
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.tasks import Task
from agscl.training import CompileFailed, PlainEngine, Trainer, TrainingConfig, TrainingFailed
from agscl.training.engine import uses_cuda_graphs
from replayed_graphs import EagerEngine, ReplayingEngine, use_forms_for_a_gpu
from small_networks import LayerByLayer
from trainers import QUICK, TASKS, finish, make_scripted_trainer, make_task, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

CAPTURED = [name for name, each in METHODS.items() if not each.is_bound and name != "trgp"]
"""Methods whose steps can be captured: in a task's first step TRGP chooses related tasks on the host."""


def test_captured_steps_choose_epochs_and_rates_on_the_device_as_the_plain_ones_do_on_the_host():
    script = [5.0, 6.0, 5.0, 4.0, 4.5, 4.1, 4.2, 3.0, 3.5]
    plain, captured = make_scripted_trainer(script), make_scripted_trainer(script, engine="captured")
    for trainer in (plain, captured):
        trainer.events = []
        trainer.emit = trainer.events.append
        finish(trainer)
    epochs = [[event for event in trainer.events if event["event"] == "epoch"] for trainer in (plain, captured)]
    for one, other in zip(*epochs, strict=True):
        assert one.pop("lr") == pytest.approx(other.pop("lr"))
        assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-4)
        assert one == other
    assert plain.accuracies == captured.accuracies


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL])
def test_captured_steps_stopped_after_any_epoch_and_continued_end_with_the_same_bits(method):
    config = replace(QUICK, engine="captured")
    expected = finish(make_trainer(method, config))
    for stopped_after in range(len(TASKS) * (1 + 3 + 1)):  # per task: its start, three epochs, its end
        stopped = make_trainer(method, config)
        for _ in range(stopped_after):
            assert stopped.advance()
        stored = unflatten_state(*flatten_state(stopped.state_dict()))
        continued = make_trainer(method, config)
        continued.load_state_dict(stored)
        assert finish(continued) == expected, f"after {stopped_after} units"


@pytest.mark.parametrize("name", CAPTURED)
def test_every_method_is_trained_by_captured_steps_as_by_plain_ones(name):
    def train(engine):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        model = MultiHead(trunk, features=24)
        kind = METHODS[name].method_class
        example = {"example_input": TASKS[0].train_x[:2]} if issubclass(kind, NodeMethod) else {}
        trainer = Trainer(model, kind(model, **example), TASKS, replace(QUICK, engine=engine, epochs=4), seed=0)
        finish(trainer)
        return trainer

    plain, captured = train("plain"), train("captured")
    for one, other in zip(plain.losses, captured.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    assert [len(row) for row in captured.valid_accuracies] == [1, 2, 3]


class OperationRecorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CAPTURED)
def test_from_the_second_step_on_all_steps_of_an_epoch_do_the_same_so_one_warm_up_is_enough(name):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
    model = MultiHead(trunk, features=24)
    kind = METHODS[name].method_class
    example = {"example_input": TASKS[0].train_x[:2]} if issubclass(kind, NodeMethod) else {}
    config = replace(QUICK, engine="captured", batch_size=10, epochs=10)  # so many that none is pruned within one
    trainer = Trainer(model, kind(model, **example), TASKS[:2], config, seed=0)
    steps, train_step = {}, trainer.train_step

    def record(rows):
        with OperationRecorder() as recorder:
            train_step(rows)
        version = trainer.method.plan_version  # counts up where a method changes what a step does
        steps.setdefault((trainer.task_index, version, trainer.epoch), []).append(recorder.operations)

    trainer.train_step = record
    finish(trainer)
    seconds = {}
    for (task, version, _), (_, second, *later) in steps.items():
        assert later == [seconds.setdefault((task, version), second)] * 2


def test_captured_steps_notice_weights_that_the_last_step_broke():
    trainer = make_trainer(FineTune, replace(QUICK, engine="captured"))
    trainer.advance()
    trainer.advance()
    with torch.no_grad():
        trainer.model.heads[TASKS[0].name].bias.fill_(math.nan)
    trainer.training_loss = lambda rows: sum(p.sum() for p in trainer.model.trunk.parameters()) * 0.0
    with pytest.raises(TrainingFailed, match="infinite or NaN"):
        finish(trainer)


def test_methods_together_are_captured_if_each_of_them_can_be():
    model = make_trainer(FineTune).model
    together = Together(EWC(model), SI(model))
    assert (together.capturable, together.end_epoch_capturable, together.plan_version) == (True, True, 0)
    pruning = PackNet(make_trainer(FineTune).model)
    assert not Together(pruning, SI(pruning.model)).end_epoch_capturable


def test_what_counts_steps_in_python_is_not_captured():
    made = make_trainer(PaperAGSCL)
    method = PaperAGSCL(made.model, prox_every=2, example_input=TASKS[0].train_x[:2])
    with pytest.raises(ValueError, match=r"prox_every=2.*use engine='plain'"):
        Trainer(made.model, method, TASKS, replace(QUICK, engine="captured"), seed=0)
    assert type(Trainer(made.model, method, TASKS, QUICK, seed=0).engine) is PlainEngine


def test_a_run_begun_with_plain_steps_goes_on_with_captured_ones():
    plain, captured = make_trainer(PaperAGSCL, QUICK), make_trainer(PaperAGSCL, replace(QUICK, engine="captured"))
    for _ in range(7):  # in the middle of an epoch
        plain.advance()
    assert plain.step
    captured.load_state_dict(plain.state_dict())
    finish(captured)
    finish(plain)
    for one, other in zip(plain.losses, captured.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-2)


def test_captured_steps_stop_at_a_loss_that_is_not_a_number():
    broken = make_task("second", 1)
    trainer = make_trainer(FineTune, replace(QUICK, engine="captured"), tasks=(TASKS[0], broken))
    broken.train_x[3] = float("nan")  # since it was looked over
    with pytest.raises(TrainingFailed, match=r"task 2 \(second\), epoch 1; a lower learning rate"):
        finish(trainer)


def test_a_trunk_of_torchs_own_containers_is_compiled_and_others_after_it_are_not_compiled_again(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # needs no compiler of the machine's
    torch._dynamo.reset()
    counters.clear()
    for seed in range(10):
        trainer = make_trainer(FineTune, replace(QUICK, epochs=1, compile=True), tasks=TASKS[:1], seed=seed)
        finish(trainer)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_full_batches_are_compiled_and_the_last_one_and_validation_have_layers_rewritten_alone(monkeypatch, engine):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    full, use = [], TorchCompiledTrunk.use_compiled_forward
    record = lambda self, batch: full.append(batch) or use(self, batch)  # noqa: E731
    monkeypatch.setattr(TorchCompiledTrunk, "use_compiled_forward", record)
    trainer = make_trainer(FineTune, replace(QUICK, epochs=2, engine=engine, compile=True), tasks=TASKS[:1])
    finish(trainer)
    whole, rest = divmod(len(TASKS[0].train_y), QUICK.batch_size)
    assert rest, "or the test has nothing to see"
    epoch = [True] * whole + [False, False]
    assert full == [*epoch, *epoch]


def test_a_network_that_cannot_be_compiled_is_said_in_one_line(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    trainer = make_trainer(FineTune, replace(QUICK, epochs=1, compile=True), tasks=TASKS[:1])
    with pytest.raises(CompileFailed, match=r"C\+\+ compiler.*--set compile=false") as caught:
        finish(trainer)
    assert "\n" not in str(caught.value)
    assert "forward" not in vars(trainer.model.trunk)


def test_the_trunk_of_a_method_that_hooks_layers_runs_uncompiled(monkeypatch):
    compiled_calls = []

    def compile(call, **options):
        return lambda *args, **kwargs: compiled_calls.append(1) or call(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    config = replace(QUICK, epochs=1, compile=True)
    model = MultiHead(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()), features=24)
    hooked = HAT(model, example_input=TASKS[0].train_x[:2])
    finish(Trainer(model, hooked, TASKS[:2], config, seed=0))
    assert not compiled_calls
    finish(make_trainer(FineTune, config, tasks=TASKS[:2]))
    assert compiled_calls


AS_ON_GPU = {"rewrite_layers": True, "bf16_channels_last": True}
FAST = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}


def test_the_configuration_decides_which_engine_runs(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)

    def kind(**options):
        return type(make_trainer(FineTune, replace(QUICK, **options)).engine)

    assert kind() is kind(engine="plain") is PlainEngine
    assert kind(engine="captured") is kind(engine="captured", compile=True) is GraphEngine
    assert kind(compile=True) is CompiledEngine


@pytest.mark.parametrize(("kind", "epochs", "captured"), [(AGSCL, 9, False), (AGSCL, 10, True), (PaperAGSCL, 1, True)])
def test_on_a_gpu_tasks_that_are_pruned_between_steps_are_not_captured(kind, epochs, captured):
    model = MultiHead(nn.Sequential(nn.Linear(8, 24), nn.ReLU()))
    gpu = SimpleNamespace(config=replace(QUICK, epochs=epochs), device=torch.device("cuda"), capturable=True)
    for gpu.method in (kind(model, TASKS[0].train_x[:2]), Together(kind(model, TASKS[0].train_x[:2]), EWC(model))):
        assert uses_cuda_graphs(gpu) is captured


@pytest.mark.parametrize("piece", ["cuda_graphs", "split_adam", "own_convolutions", "fused_layers"])
def test_a_piece_can_be_switched_off(monkeypatch, piece):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = replace(QUICK, epochs=1, **FAST)
    engine = partial(make_fast_engine, captured=True, pieces=replace(Pieces(), **{piece: False}))
    trainer = make_trainer(FineTune, config, tasks=TASKS[:1], engine=engine)
    finish(trainer)
    assert len(trainer.losses[0]) == 1


WITHOUT_COMPILER = """
import sys
import torch
from agscl import PaperAGSCL, MultiHead
from agscl.fast.fast_trunk import FastTrunk
from agscl.fast.fast_engine import GraphEngine
from agscl.fast.split_adam import SplitAdam
from agscl.networks.cifar import CifarTrunk
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig

class EngineAsOnGpu(GraphEngine):
    def __init__(self, trainer):
        options = {"rewrite_layers": True, "bf16_channels_last": True}
        super().__init__(trainer, FastTrunk(trainer.model.trunk, trainer.device, **options))

    def make_optimizer(self):
        return SplitAdam(self.trainer.model.parameters(), lr=torch.tensor(1e-3), fused=True)

torch.set_num_threads(1)
model = MultiHead(CifarTrunk(), features=256)
x, y = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
tasks = tuple(Task(name, 3, x, y, x, y, x, y) for name in ("a", "b"))
fast = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
config = TrainingConfig(epochs=2, batch_size=4, **fast)
trainer = Trainer(model, PaperAGSCL(model, tasks[0].train_x[:2]), tasks, config, seed=0, engine=EngineAsOnGpu)
while trainer.advance():
    pass
print(len(trainer.accuracies), "torch._dynamo" in sys.modules)
"""


def test_a_network_of_plain_layers_is_trained_without_an_import_of_torchs_compiler():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_what_torch_compiles_after_all_has_run_once_before_it_is_captured(monkeypatch):
    """Within a capture nothing can be compiled. Without a GPU: a capture is recorded, and is the step itself."""
    compiled_calls, calls_before_capture = [], []

    def compile(call, **options):
        return lambda *args, **kwargs: compiled_calls.append(1) or call(*args, **kwargs)

    def capture(self, work):
        calls_before_capture.append(len(compiled_calls))
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(GraphRunner, "on_stream", lambda self: nullcontext())
    monkeypatch.setattr(GraphRunner, "_capture", capture)

    def engine(trainer):
        made = GraphEngine(trainer, FastTrunk(trainer.model.trunk, trainer.device, **AS_ON_GPU))
        made.runner.stream = object()  # as on a GPU
        return made

    x, y = torch.randn(24, 8), torch.arange(24) % 3
    model = MultiHead(LayerByLayer(), features=8)
    config = TrainingConfig(epochs=1, batch_size=4, patience=None, restore_best=False, **FAST)
    tasks = (Task("t", 3, x, y, None, None, x, y),)
    trainer = Trainer(model, FineTune(model), tasks, config, seed=0, engine=engine)
    trainer.advance()
    trainer.advance()
    assert trainer.engine.trunk.fused is None
    assert calls_before_capture[0] == 1, "the first step is ours, the second torch's: a warm-up"
    assert len(compiled_calls) == 5


def test_graphs_are_released_where_training_fails(monkeypatch):
    released = []
    monkeypatch.setattr(GraphRunner, "release", lambda self: released.append(1))
    trainer = make_trainer(FineTune, replace(QUICK, engine="captured"))
    trainer.validation_loss = lambda: torch.tensor(math.nan, dtype=torch.float64)
    with pytest.raises(TrainingFailed):
        finish(trainer)
    assert released == [1]


class RecordingRunner(GraphRunner):
    """As on a GPU, but that a graph is the work itself; records what was run, captured and replayed."""

    def __init__(self, engine):
        super().__init__(engine.trainer.device, before_capture=engine._drop_gradients)
        self.stream, self.log = object(), []

    def on_stream(self):
        return nullcontext()

    def run(self, key, work, may_capture=True):
        before = len(self.log)
        super().run(key, work, may_capture)
        self.log[before:] = [(key, self.log[-1] if len(self.log) > before else "warm-up")]

    def _capture(self, work):
        self.before_capture()
        return SimpleNamespace(replay=lambda: (work(), self.log.append("replay")))

    def release(self):
        self.graphs.clear()


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL, PackNet, WSN])
def test_work_is_warmed_up_captured_and_replayed_in_each_task_and_trains_as_without_graphs(method):
    def engine(trainer):
        made = GraphEngine(trainer)
        made.runner = RecordingRunner(made)
        return made

    config = replace(QUICK, engine="captured", epochs=4)
    trainer = make_trainer(method, config, engine=engine)
    assert finish(trainer) == finish(make_trainer(method, config))
    first_epochs = [(16, "warm-up"), (16, "replay"), (8, "warm-up"), ("end", "warm-up")]
    first_epochs += [(16, "replay"), (16, "replay"), (8, "replay")]
    ends = [how for key, how in trainer.engine.runner.log if key == "end"]
    per_task = len(trainer.engine.runner.log) // len(TASKS)
    for task in range(len(TASKS)):
        log = trainer.engine.runner.log[task * per_task : (task + 1) * per_task]
        assert log[: len(first_epochs)] == first_epochs
    assert ends == ["warm-up", "replay", "replay", "replay"] * len(TASKS)


@pytest.mark.parametrize("name", [name for name in CAPTURED if name != "hat"])  # on a CPU, HAT counts in Python
def test_what_a_captured_step_did_once_is_right_in_every_replay(name, monkeypatch):
    """Not captured anew where AGS-CL prunes: three graphs a task, of two batch sizes and the end of an epoch."""
    use_forms_for_a_gpu(monkeypatch)

    def train(engine):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.ReLU())
        model = MultiHead(trunk, features=24)
        kind = METHODS[name].method_class
        example = {"example_input": TASKS[0].train_x[:2]} if issubclass(kind, NodeMethod) else {}
        config = replace(QUICK, engine="captured", epochs=12, patience=None, restore_best=False)
        trainer = Trainer(model, kind(model, **example), TASKS, config, seed=0, engine=engine)
        finish(trainer)
        return trainer

    eager, replayed = train(EagerEngine), train(ReplayingEngine)
    torch.testing.assert_close(replayed.model.state_dict(), eager.model.state_dict(), rtol=0, atol=0)
    assert (replayed.losses, replayed.accuracies) == (eager.losses, eager.accuracies)
    assert replayed.engine.runner.captures == len(TASKS) * 3 * (1 + (name == "packnet"))
