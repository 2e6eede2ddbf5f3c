import itertools
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agscl import EWC, SI, PackNet, Together
from agscl.experiments.methods import METHODS
from agscl.heads import MultiHead
from agscl.methods._parts.lifecycle import NodeMethod
from agscl.methods.agscl import AGSCL
from agscl.methods.finetune import FineTune
from agscl.runs import hash_state
from agscl.runs.checkpoints import flatten_state, unflatten_state
from agscl.tasks import Task
from agscl.training import CompileFailed, Trainer, TrainingConfig, TrainingFailed
from agscl.training.trainer import mixed_seed

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.lifecycle.SelfCheckWarning")

QUICK = TrainingConfig(epochs=3, batch_size=16, lr=1e-2, patience=1, factor=3.0, restore_best=True)


def make_task(name: str, seed: int, valid: bool = True) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(72, 8, generator=generator)
    y = (x @ torch.randn(8, generator=generator) > 0).long()
    parts = (x[:40], y[:40], x[40:56], y[40:56], x[56:], y[56:])
    return Task(name, 2, *parts) if valid else Task(name, 2, parts[0], parts[1], None, None, parts[4], parts[5])


TASKS = tuple(make_task(name, seed) for seed, name in enumerate(("first", "second", "third")))


def make_trainer(method=AGSCL, config=QUICK, tasks=TASKS, seed=0) -> Trainer:
    torch.manual_seed(seed)
    trunk = nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()
    )
    model = MultiHead(trunk, features=12)
    example = tasks[0].train_x[:2]
    settings = {"mu": 52.0, "lam": 100.0, "rho": 0.5, "example_input": example} if method is AGSCL else {}
    return Trainer(model, method(model, **settings), tasks, config, seed=seed)


def outcome(trainer: Trainer) -> str:
    while trainer.advance():
        pass
    model, method = trainer.model.state_dict(), trainer.method.state_dict()
    return hash_state([model, method, trainer.accuracies, trainer.losses])


@pytest.mark.parametrize("method", [FineTune, AGSCL])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stopped_after_any_unit_and_continued_it_ends_with_the_same_bits(method, optimizer):
    momentum = 0.9 if optimizer == "sgd" else 0.0
    config = TrainingConfig(epochs=2, batch_size=16, lr=1e-2, optimizer=optimizer, momentum=momentum, patience=1)
    expected = outcome(make_trainer(method, config))
    units = len(TASKS) * (1 + 2 * (3 + 1) + 1)  # per task: its start, two epochs of three steps and an end, its end
    for stopped_after in range(units + 1):
        stopped = make_trainer(method, config)
        for _ in range(stopped_after):
            assert stopped.advance()
        stored = unflatten_state(*flatten_state(stopped.state_dict()))
        torch.manual_seed(999)
        continued = make_trainer(method, config)
        continued.load_state_dict(stored)
        assert hash_state(continued.state_dict()) == hash_state(stopped.state_dict()), (
            "stopped again at once, nothing is lost"
        )
        assert outcome(continued) == expected, f"after {stopped_after} units"
    assert not stopped.advance()


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_a_last_batch_that_batchnorm_cannot_learn_from_is_named(engine):
    trainer = make_trainer(FineTune, replace(QUICK, batch_size=39, engine=engine))
    with pytest.raises(ValueError, match=r"last batch of task 'first' is one example.* another batch_size than 39"):
        outcome(trainer)


def test_names_that_tasks_cannot_have_are_refused_before_anything_is_trained():
    for names, message in ((("a", "pop"), "'pop' cannot be a task's name"), (("a", "a"), "two tasks are called 'a'")):
        with pytest.raises(ValueError, match=message):
            make_trainer(tasks=tuple(make_task(name, seed) for seed, name in enumerate(names)))


def test_every_optimizer_tensor_comes_back_with_its_dtype_shape_and_bits():
    stopped = make_trainer()
    for _ in range(4):
        stopped.advance()
    continued = make_trainer()
    continued.load_state_dict(stopped.state_dict())
    before, after = stopped._optimizer.state, continued._optimizer.state
    assert len(before) == len(after) > 0
    for old, new in zip(before.values(), after.values(), strict=True):
        assert old.keys() == new.keys()
        for key in old:
            assert old[key].dtype == new[key].dtype
            assert torch.equal(old[key], new[key])


def test_the_order_of_the_batches_depends_on_the_position_alone():
    one, other = make_trainer(), make_trainer()
    for _ in range(6):
        one.advance()
    other.advance()
    other.epoch = one.epoch
    torch.manual_seed(7)
    assert all(torch.equal(a, b) for a, b in zip(one._batches, other._batches, strict=True))
    assert sorted(torch.cat(one._batches).tolist()) == list(range(40))


def test_no_two_places_share_a_seed():
    places = [place for length in (1, 2, 3) for place in itertools.product(range(9), repeat=length)]
    assert len({mixed_seed(*place) for place in places}) == len(places) == 9 + 81 + 729


class Scripted(Trainer):
    """Validation losses as written down, one per epoch."""

    def _validation_loss(self) -> torch.Tensor:
        return torch.tensor(self.script[self.epoch], dtype=torch.float64)


def scripted(script, **changes) -> Scripted:
    config = TrainingConfig(**{"epochs": len(script), "batch_size": 16, "lr": 0.09, "patience": 2, **changes})
    made = make_trainer(FineTune, config, tasks=TASKS[:1])
    trainer = Scripted(made.model, made.method, made.tasks, config, seed=0)
    trainer.script = script
    return trainer


def test_the_rate_drops_after_patience_epochs_without_a_better_loss_and_adam_starts_anew():
    trainer = scripted([5.0, 6.0, 5.0, 4.0, 4.5, 4.1])
    events, moments = [], []
    trainer.emit = events.append
    while trainer.advance():
        if trainer.step == 0 and trainer._optimizer is not None and trainer.epoch:
            moments.append(len(trainer._optimizer.state))
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    assert rates == pytest.approx([0.09, 0.09, 0.09, 0.03, 0.03, 0.03])
    assert [count == 0 for count in moments] == [False, False, True, False, False, True]


def test_captured_steps_choose_epochs_and_rates_on_the_device_as_the_plain_ones_do_on_the_host():
    script = [5.0, 6.0, 5.0, 4.0, 4.5, 4.1, 4.2, 3.0, 3.5]
    plain, captured = scripted(script), scripted(script, engine="captured")
    for trainer in (plain, captured):
        trainer.told = []
        trainer.emit = trainer.told.append
        outcome(trainer)
    epochs = [[event for event in trainer.told if event["event"] == "epoch"] for trainer in (plain, captured)]
    for one, other in zip(*epochs, strict=True):
        assert one.pop("lr") == pytest.approx(other.pop("lr"))
        assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-4)
        assert one == other
    assert plain.accuracies == captured.accuracies


@pytest.mark.parametrize("method", [FineTune, AGSCL])
def test_captured_steps_stopped_after_any_epoch_and_continued_end_with_the_same_bits(method):
    config = replace(QUICK, engine="captured")
    expected = outcome(make_trainer(method, config))
    for stopped_after in range(len(TASKS) * (1 + 3 + 1)):  # per task: its start, three epochs, its end
        stopped = make_trainer(method, config)
        for _ in range(stopped_after):
            assert stopped.advance()
        stored = unflatten_state(*flatten_state(stopped.state_dict()))
        continued = make_trainer(method, config)
        continued.load_state_dict(stored)
        assert outcome(continued) == expected, f"after {stopped_after} units"


@pytest.mark.parametrize("known", ["example input", "first forward"])
@pytest.mark.parametrize("name", [name for name, each in METHODS.items() if not each.bound])
def test_every_method_is_trained_by_captured_steps_as_by_plain_ones(name, known):
    def train(engine):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        model = MultiHead(trunk, features=24)
        kind = METHODS[name].load()
        given = known == "example input" and issubclass(kind, NodeMethod)
        example = {"example_input": TASKS[0].train_x[:2]} if given else {}
        trainer = Trainer(model, kind(model, **example), TASKS, replace(QUICK, engine=engine, epochs=4), seed=0)
        outcome(trainer)
        return trainer

    plain, captured = train("plain"), train("captured")
    for one, other in zip(plain.losses, captured.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    assert [len(row) for row in captured.valid_accuracies] == [1, 2, 3]


PICTURES = tuple(
    replace(
        task,
        train_x=task.train_x.repeat(1, 18)[:, : 4 * 36].view(-1, 4, 6, 6),
        valid_x=task.valid_x.repeat(1, 18)[:, : 4 * 36].view(-1, 4, 6, 6),
        test_x=task.test_x.repeat(1, 18)[:, : 4 * 36].view(-1, 4, 6, 6),
    )
    for task in TASKS[:2]
)


def convolutional(name, config):
    """A trainer on small pictures; weights of several channels, so that how they lie in memory matters."""
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU()
    )
    model = MultiHead(trunk, features=16)
    kind = METHODS[name].load()
    example = {"example_input": PICTURES[0].train_x[:2]} if issubclass(kind, NodeMethod) else {}
    return Trainer(model, kind(model, **example), PICTURES, config, seed=0)


@pytest.mark.parametrize("engine", ["plain", "captured"])
@pytest.mark.parametrize("name", [name for name, each in METHODS.items() if not each.bound])
def test_with_channels_last_a_run_stopped_within_a_task_continues_with_the_same_bits(name, engine):
    config = replace(QUICK, engine=engine, channels_last=True)
    expected = outcome(convolutional(name, config))
    stopped = convolutional(name, config)
    while not (stopped.task_index == 1 and stopped.epoch == 2):
        assert stopped.advance()
    stored = unflatten_state(*flatten_state(stopped.state_dict()))
    continued = convolutional(name, config)
    continued.load_state_dict(stored)
    for parameter, moments in continued._optimizer.state.items():
        for moment in moments.values():
            assert moment.shape != parameter.shape or moment.stride() == parameter.stride()
    assert outcome(continued) == expected


def test_with_channels_last_lwf_runs_the_trunk_once_a_step():
    trainer = convolutional("lwf", replace(QUICK, channels_last=True))
    while not (trainer.task_index == 1 and trainer.epoch == 1):
        trainer.advance()
    calls = []
    trainer.model.trunk[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trainer.advance()
    assert calls.count(True) == 1


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_weights_from_before_packnet_pruned_are_never_gone_back_to(engine):
    class Rising(Trainer):
        def _validation_loss(self):
            return torch.tensor(float(self.epoch), dtype=torch.float64)  # the first epoch is the best of all

    made = make_trainer(PackNet, replace(QUICK, engine=engine, epochs=6, restore_best=True), tasks=TASKS[:1])
    trainer = Rising(made.model, made.method, made.tasks, made.config, seed=0)
    pruned, weights = None, {}
    while trainer.advance():
        if trainer._optimizer is not None and trainer.step == 0 and trainer.epoch:
            weights[trainer.epoch] = trainer.model.trunk[0].weight.detach().clone()
            if pruned is None and trainer.method.version:
                pruned = trainer.epoch
    assert pruned is not None
    assert 1 < pruned < 6
    assert torch.equal(trainer.model.trunk[0].weight, weights[pruned])


def test_captured_steps_notice_weights_that_the_last_step_broke():
    trainer = make_trainer(FineTune, replace(QUICK, engine="captured"))
    trainer.advance()
    trainer.advance()
    with torch.no_grad():
        trainer.model.heads[TASKS[0].name].bias.fill_(math.nan)
    trainer._loss = lambda rows, compiled=False: sum(p.sum() for p in trainer.model.trunk.parameters()) * 0.0
    with pytest.raises(TrainingFailed, match="infinite or NaN"):
        outcome(trainer)


def test_methods_together_are_captured_if_each_of_them_can_be():
    model = make_trainer(FineTune).model
    together = Together(EWC(model), SI(model))
    assert (together.capturable, together.same_every_epoch, together.version) == (True, True, 0)
    pruning = PackNet(make_trainer(FineTune).model)
    assert not Together(pruning, SI(pruning.model)).same_every_epoch


def test_what_counts_steps_in_python_is_not_captured():
    made = make_trainer(AGSCL)
    method = AGSCL(made.model, prox_every=2, example_input=TASKS[0].train_x[:2])
    with pytest.raises(ValueError, match=r"prox_every=2.*use engine='plain'"):
        Trainer(made.model, method, TASKS, replace(QUICK, engine="captured"), seed=0)
    assert not Trainer(made.model, method, TASKS, QUICK, seed=0).captures


def test_a_run_begun_with_plain_steps_goes_on_with_captured_ones():
    plain, captured = make_trainer(AGSCL, QUICK), make_trainer(AGSCL, replace(QUICK, engine="captured"))
    for _ in range(7):  # in the middle of an epoch
        plain.advance()
    assert plain.step
    captured.load_state_dict(plain.state_dict())
    outcome(captured)
    outcome(plain)
    for one, other in zip(plain.losses, captured.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-2)


def test_captured_steps_stop_at_a_loss_that_is_not_a_number():
    broken = make_task("second", 1)
    trainer = make_trainer(FineTune, replace(QUICK, engine="captured"), tasks=(TASKS[0], broken))
    broken.train_x[3] = float("nan")  # since it was looked over
    with pytest.raises(TrainingFailed, match=r"task 2 \(second\), epoch 1; a lower learning rate"):
        outcome(trainer)


def test_pictures_as_bytes_are_normalised_on_the_device_and_laid_out_as_asked():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.arange(40) % 2
    task = Task("t", 2, x, y, x[:8], y[:8], x, y, mean=torch.full((3,), 0.5), std=torch.full((3,), 0.25))

    def train(**options):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.ReLU())
        model = MultiHead(trunk, features=16)
        trainer = Trainer(model, FineTune(model), (task,), TrainingConfig(epochs=3, batch_size=16, **options), seed=0)
        outcome(trainer)
        return trainer

    plain, last = train(), train(channels_last=True)
    assert last.model.trunk[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert plain.losses[0] == pytest.approx(last.losses[0], rel=1e-4)
    assert plain.losses[0] == pytest.approx(train(precision="bf16").losses[0], rel=0.05)


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_the_rate_drops_at_a_given_epoch_and_the_optimizer_keeps_its_state(engine):
    trainer = scripted([5.0, 6.0, 7.0], patience=None, drop_at=2, engine=engine)
    events = []
    trainer.emit = events.append
    while trainer.epoch < 2:
        trainer.advance()
    assert trainer._optimizer.state
    outcome(trainer)
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    assert rates == pytest.approx([0.09, 0.09, 0.03])


def test_no_patience_keeps_the_rate():
    trainer = scripted([5.0, 6.0, 7.0, 8.0], patience=None)
    events = []
    trainer.emit = events.append
    outcome(trainer)
    assert {event["lr"] for event in events if event["event"] == "epoch"} == {0.09}


def test_the_weights_of_the_best_epoch_are_back_when_the_task_ends():
    trainer = scripted([5.0, 3.0, 4.0])
    after_each_epoch = []
    while trainer.epoch < 3:
        trainer.advance()
        if trainer.step == 0 and trainer.epoch > len(after_each_epoch):
            after_each_epoch.append(hash_state(trainer.model.state_dict()))
    trainer.advance()
    assert hash_state(trainer.model.state_dict()) == after_each_epoch[1]


def test_every_task_starts_with_the_first_rate_and_a_fresh_optimizer():
    trainer = make_trainer()
    optimizers = []
    while trainer.advance():
        if trainer._optimizer is not None and trainer._optimizer not in optimizers:
            optimizers.append(trainer._optimizer)
            assert trainer._optimizer.param_groups[0]["lr"] == QUICK.lr
            assert not trainer._optimizer.state
    assert len(optimizers) == 3


def test_accuracies_are_measured_on_every_task_learned_so_far():
    trainer = make_trainer()
    outcome(trainer)
    assert 0 < trainer.statistics[-1]["free"] < trainer.statistics[-1]["nodes"]
    assert [len(row) for row in trainer.accuracies] == [1, 2, 3]
    assert [len(row) for row in trainer.losses] == [3, 3, 3]
    assert trainer.progress == 1


def test_a_loss_that_is_not_a_number_stops_training_and_names_the_place():
    broken = make_task("second", 1)
    trainer = make_trainer(FineTune, tasks=(TASKS[0], broken))
    broken.train_x[3] = float("nan")  # since it was looked over
    with pytest.raises(TrainingFailed, match=r"task 2 \(second\), epoch 1; a lower learning rate"):
        outcome(trainer)


def test_a_broken_weight_is_never_put_into_a_checkpoint():
    trainer = make_trainer(FineTune)
    trainer.advance()
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("inf"))
    with pytest.raises(TrainingFailed):
        trainer.state_dict()


def test_without_a_validation_split_the_best_epoch_cannot_be_asked_for():
    tasks = (make_task("only", 0, valid=False),)
    with pytest.raises(ValueError, match="no validation split: set patience=None and restore_best=False"):
        make_trainer(tasks=tasks)
    config = TrainingConfig(epochs=1, patience=None, restore_best=False)
    outcome(make_trainer(FineTune, config, tasks=tasks))


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0}, {"patience": 0}, {"factor": 1}, {"engine": "?"}]
)
def test_a_setting_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingConfig(**wrong)


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_a_validation_loss_that_is_not_a_number_stops_training(engine):
    trainer = make_trainer(FineTune, replace(QUICK, engine=engine))
    trainer._validation_loss = lambda: torch.tensor(math.nan, dtype=torch.float64)
    with pytest.raises(TrainingFailed, match=r"NaN in task 1 \(first\), epoch 1"):
        outcome(trainer)


def test_a_trunk_of_torchs_own_containers_is_compiled_and_others_after_it_are_not_compiled_again(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # needs no compiler of the machine's
    torch._dynamo.reset()
    counters.clear()
    for seed in range(10):
        trainer = make_trainer(FineTune, replace(QUICK, epochs=1, compile=True), tasks=TASKS[:1], seed=seed)
        outcome(trainer)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_whole_batches_are_compiled_and_the_last_one_and_validation_rearranged_alone(monkeypatch, engine):
    from agscl.fast.compiled import Compiled

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    used, in_use = [], Compiled.in_use
    monkeypatch.setattr(Compiled, "in_use", lambda self, compiled=True: used.append(compiled) or in_use(self, compiled))
    trainer = make_trainer(FineTune, replace(QUICK, epochs=2, engine=engine, compile=True), tasks=TASKS[:1])
    outcome(trainer)
    whole, rest = divmod(len(TASKS[0].train_y), QUICK.batch_size)
    assert rest, "or the test has nothing to see"
    epoch = [True] * whole + [False, False]
    assert used == [*epoch[1:], *epoch], "a method may look the network over at the first step"


@pytest.mark.parametrize(("matters", "sizes"), [(True, [16, 16, 4]), (False, [32, 4])])
def test_a_task_ends_with_batches_twice_as_large_where_their_size_does_not_matter(matters, sizes):
    met = []

    class Watching(FineTune):
        batch_size_matters = matters

        def _end(self, batches, forward):
            met.extend(len(y) for _, y in batches)

    task = replace(TASKS[0], train_x=TASKS[0].train_x[:36], train_y=TASKS[0].train_y[:36])
    outcome(make_trainer(Watching, replace(QUICK, epochs=1, batch_size=16), tasks=(task,)))
    assert met == sizes


@pytest.mark.parametrize(
    ("between", "settings", "matters"),
    [([], {}, False), ([nn.BatchNorm1d(8)], {}, True), ([], {"importance_mode": "train"}, True)],
)
def test_what_agscl_measures_does_not_depend_on_the_size_of_batches_unless_something_does(between, settings, matters):
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU()), features=8)
    method = AGSCL(model, example_input=torch.randn(2, 4), **settings)
    assert method.batch_size_matters, "nothing is known yet"
    model.add_head("t", 2)
    method.begin_task("t", torch.optim.SGD(model.parameters(), lr=0.1))
    assert method.batch_size_matters == matters


def assert_same_compiled(compiled, trunk, x):
    """Output and gradients."""
    found = []
    for context in (nullcontext(), compiled.in_use()):
        trunk.zero_grad()
        with context:
            output = trunk(x)
        output.square().sum().backward()
        found.append([output.detach(), *[parameter.grad for parameter in trunk.parameters()]])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)


@pytest.mark.parametrize(("channels", "padding"), [(3, 1), (1, 0), (2, (1, 0))])
def test_a_compiled_trunks_first_convolution_gives_the_same_as_a_matrix_product(monkeypatch, channels, padding):
    from agscl.fast.compiled import Compiled

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(channels, 5, 3, padding=padding), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten())
    trunk.double().to(memory_format=torch.channels_last)
    x = torch.randn(6, channels, 8, 9, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    compiled = Compiled(trunk, rearranged=True)
    assert compiled.narrow == [trunk[0]]
    assert_same_compiled(compiled, trunk, x)
    assert "forward" not in vars(trunk[0])
    assert trunk._compiled_call_impl is None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 5),  # reads more than 32 numbers
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(3, 4, 3),
    ],
)
def test_convolutions_that_are_no_plain_product_stay_as_they_are(layer):
    from agscl.fast.compiled import Compiled

    assert Compiled(nn.Sequential(layer), rearranged=True).narrow == []


@pytest.mark.parametrize("side", [9, 10])  # a pool of two has blocks of 10, and not of 9
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1), nn.MaxPool2d(2, ceil_mode=True)]
)
def test_a_compiled_trunk_takes_the_maximum_before_bias_and_relu_and_gives_the_same(monkeypatch, bias, pool, side):
    from agscl.fast.compiled import Compiled

    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1, bias=bias), nn.ReLU(), pool, nn.Conv2d(8, 6, 3, bias=bias), nn.ReLU()]
    trunk = nn.Sequential(nn.Sequential(*layers), nn.MaxPool2d(2), nn.Flatten()).double()
    x = torch.randn(6, 4, side, side, dtype=torch.double)
    compiled = Compiled(trunk, rearranged=True)
    assert compiled.chains == [trunk[0]]  # the second maximum is not of the same chain
    assert_same_compiled(compiled, trunk, x)
    called = {"conv2d": "conv", "relu": "relu", "boolean_dispatch": "maximum", "autograd_function": "maximum"}
    order = [kind for name in names for part, kind in called.items() if part in name]
    assert order == ["conv", "maximum", "relu", "conv", "relu", "maximum"]
    assert "forward" not in vars(trunk[0])


@given(
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_largest_of_each_block_is_what_max_pooling_gives_bit_for_bit(size, shape, dtype, channels_last, seed):
    from agscl.fast.compiled import Largest

    generator = torch.Generator().manual_seed(seed)
    examples, channels, rows, columns = shape
    x = torch.randint(-2, 3, (examples, channels, rows * size, columns * size), generator=generator)  # often equal
    x = x.to(dtype).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    x[torch.rand(x.shape, generator=generator) < 0.05] = math.nan
    x.requires_grad_()
    plain, largest = F.max_pool2d(x, size), Largest.apply(x, size)
    gradient = torch.randn(plain.shape, generator=generator).to(dtype)
    torch.testing.assert_close(largest, plain, rtol=0, atol=0, equal_nan=True)
    of_plain, of_largest = (torch.autograd.grad(output, x, gradient)[0] for output in (plain, largest))
    assert torch.equal(of_largest, of_plain)


@pytest.mark.parametrize(
    ("pool", "blocks"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(4, ceil_mode=True), True),
        (nn.MaxPool2d(17), False),  # more places than a byte tells
        (nn.MaxPool2d(2, stride=1), False),
        (nn.MaxPool2d((2, 2)), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, dilation=2, stride=2), False),
        (nn.MaxPool2d(3), False),  # does not divide the sides
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_only_windows_that_are_blocks_are_compared_block_by_block(monkeypatch, pool, blocks, batched):
    from agscl.fast import compiled

    used = []
    apply = compiled.Largest.apply
    monkeypatch.setattr(compiled.Largest, "apply", lambda *given: used.append(1) or apply(*given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(*[2] * batched, 3, 68, 68, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain, other = pool(x), compiled.pooled(pool, x)
    assert torch.equal(other, plain)
    assert torch.equal(*[torch.autograd.grad(output.square().sum(), x)[0] for output in (other, plain)])
    assert bool(used) == (blocks and batched)


def test_a_rearranged_trunk_is_compiled_once_for_all_its_copies(monkeypatch):
    from torch._dynamo.utils import counters

    from agscl.fast.compiled import Compiled
    from agscl.networks.cifar import CifarTrunk

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        trunk = CifarTrunk()
        compiled = Compiled(trunk, rearranged=True)
        assert compiled.narrow == [trunk.conv[0]]
        assert compiled.chains == [trunk.conv]
        for _ in range(2):  # of each of two tasks, say
            with compiled.in_use():
                trunk(torch.zeros(2, 3, 32, 32))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("maximum", [True, False])
def test_torch_may_keep_what_it_compiles_with_blocks_in_it_and_nothing_else(monkeypatch, maximum):
    from torch._functorch import config

    from agscl.fast.compiled import Compiled

    allowed = []

    def backend(graph, inputs):
        allowed.append(config.autograd_cache_allow_custom_autograd_functions)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    trunk = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2) if maximum else nn.AvgPool2d(2))
    with Compiled(trunk, rearranged=True).in_use():
        trunk(torch.zeros(2, 4, 8, 8))
    assert allowed == [maximum]
    assert not config.autograd_cache_allow_custom_autograd_functions


COMPILED_ONCE_MORE = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from agscl.fast.compiled import Compiled

torch.manual_seed(0)
trunk = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
with Compiled(trunk, rearranged=True).in_use():
    output = trunk(torch.ones(2, 4, 8, 8))
output.square().sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], trunk[0].weight.grad.sum().item())
"""


@pytest.mark.slow
def test_a_new_process_finds_a_rearranged_trunk_compiled_and_computes_the_same(tmp_path):
    """Needs a C++ compiler."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", COMPILED_ONCE_MORE]
    first, second = (subprocess.run(words, env=environment, capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.split()[0] == "0"
    assert second.stdout.split() == ["1", first.stdout.split()[1]]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.LeakyReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AvgPool2d(2)],
        [nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)],
        [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)],  # computed as a product
    ],
)
def test_other_chains_of_layers_stay_as_they_are(layers):
    from agscl.fast.compiled import Compiled

    assert Compiled(nn.Sequential(*layers), rearranged=True).chains == []
    assert Compiled(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), rearranged=False).chains == []


def test_where_only_some_tasks_have_a_validation_split_none_is_scored_on_it():
    first, second = TASKS[:2]
    none = {"valid_x": None, "valid_y": None}
    for tasks in ((replace(first, **none), second), (first, replace(second, **none))):
        trainer = make_trainer(FineTune, replace(QUICK, epochs=1, patience=None, restore_best=False), tasks=tasks)
        outcome(trainer)
        assert [len(row) for row in trainer.accuracies] == [1, 2]
        assert trainer.valid_accuracies == []


def test_a_network_that_cannot_be_compiled_is_said_in_one_line(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    trainer = make_trainer(FineTune, replace(QUICK, epochs=1, compile=True), tasks=TASKS[:1])
    with pytest.raises(CompileFailed, match=r"C\+\+ compiler.*--set compile=false") as caught:
        outcome(trainer)
    assert "\n" not in str(caught.value)
    assert trainer.model.trunk._compiled_call_impl is None


def test_a_forward_pass_that_a_user_gave_to_a_convolution_stays(monkeypatch):
    from agscl.fast.compiled import Compiled

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3))
    own = lambda x: x.new_full((2,), 7.0)  # noqa: E731
    trunk[0].forward = own
    compiled = Compiled(trunk, rearranged=True)
    with compiled.in_use(), compiled.in_use():
        assert trunk(torch.zeros(1, 1, 4, 4)).tolist() == [7, 7]
    assert trunk[0].forward is own
