import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from agscl import AGSCL, PackNet
from agscl.experiments.method_entries import METHODS
from agscl.heads import MultiHead
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.runs import hash_state
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig, TrainingFailed, derive_seed
from trainers import QUICK, TASKS, finish, make_scripted_trainer, make_task, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


@pytest.mark.parametrize("method", [FineTune, PaperAGSCL])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stopped_after_any_unit_and_continued_it_ends_with_the_same_bits(method, optimizer):
    momentum = 0.9 if optimizer == "sgd" else 0.0
    config = TrainingConfig(epochs=2, batch_size=16, lr=1e-2, optimizer=optimizer, momentum=momentum, patience=1)
    expected = finish(make_trainer(method, config))
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
        assert finish(continued) == expected, f"after {stopped_after} units"
    assert not stopped.advance()


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_a_last_batch_that_batchnorm_cannot_learn_from_is_named(engine):
    trainer = make_trainer(FineTune, replace(QUICK, batch_size=39, engine=engine))
    with pytest.raises(ValueError, match=r"last batch of task 'first' is one example.* another batch_size than 39"):
        finish(trainer)


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
    before, after = stopped.optimizer.state, continued.optimizer.state
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
    assert torch.equal(one.epoch_order(), other.epoch_order())
    assert sorted(one.epoch_order().tolist()) == list(range(40))


def test_no_two_places_share_a_seed():
    places = [place for length in (1, 2, 3) for place in itertools.product(range(9), repeat=length)]
    assert len({derive_seed(*place) for place in places}) == len(places) == 9 + 81 + 729


def test_the_rate_drops_after_patience_epochs_without_a_better_loss_and_adam_starts_anew():
    trainer = make_scripted_trainer([5.0, 6.0, 5.0, 4.0, 4.5, 4.1])
    events, moments = [], []
    trainer.emit = events.append
    while trainer.advance():
        if trainer.step == 0 and trainer.optimizer is not None and trainer.epoch:
            moments.append(len(trainer.optimizer.state))
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    assert rates == pytest.approx([0.09, 0.09, 0.09, 0.03, 0.03, 0.03])
    assert [count == 0 for count in moments] == [False, False, True, False, False, True]


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
    kind = METHODS[name].method_class
    example = {"example_input": PICTURES[0].train_x[:2]} if issubclass(kind, NodeMethod) else {}
    return Trainer(model, kind(model, **example), PICTURES, config, seed=0)


@pytest.mark.parametrize("engine", ["plain", "captured"])
@pytest.mark.parametrize("name", [name for name, each in METHODS.items() if not each.is_bound])
def test_with_channels_last_a_run_stopped_within_a_task_continues_with_the_same_bits(name, engine):
    if engine == "captured" and name == "trgp":
        pytest.skip("its first step decides on the host, so it is not captured")
    config = replace(QUICK, engine=engine, channels_last=True)
    expected = finish(convolutional(name, config))
    stopped = convolutional(name, config)
    while not (stopped.task_index == 1 and stopped.epoch == 2):
        assert stopped.advance()
    stored = unflatten_state(*flatten_state(stopped.state_dict()))
    continued = convolutional(name, config)
    continued.load_state_dict(stored)
    for parameter, moments in continued.optimizer.state.items():
        for moment in moments.values():
            assert moment.shape != parameter.shape or moment.stride() == parameter.stride()
    assert finish(continued) == expected


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
        def validation_loss(self):
            return torch.tensor(float(self.epoch), dtype=torch.float64)  # the first epoch is the best of all

    made = make_trainer(PackNet, replace(QUICK, engine=engine, epochs=6, restore_best=True), tasks=TASKS[:1])
    trainer = Rising(made.model, made.method, made.tasks, made.config, seed=0)
    pruned, weights = None, {}
    while trainer.advance():
        if trainer.optimizer is not None and trainer.step == 0 and trainer.epoch:
            weights[trainer.epoch] = trainer.model.trunk[0].weight.detach().clone()
            if pruned is None and trainer.method.plan_version:
                pruned = trainer.epoch
    assert pruned is not None
    assert 1 < pruned < 6
    assert torch.equal(trainer.model.trunk[0].weight, weights[pruned])


@pytest.mark.parametrize("engine", ["plain", "captured"])
@pytest.mark.parametrize("kind", [PackNet, lambda model: AGSCL(model, TASKS[0].train_x)], ids=["PackNet", "AGSCL"])
def test_after_a_pruning_the_rate_is_that_of_a_new_task_and_moments_start_over(kind, engine):
    class Rising(Trainer):
        def validation_loss(self):
            return torch.tensor(float(self.epoch), dtype=torch.float64)  # the rate drops as often as it may

    made = make_trainer(kind, replace(QUICK, engine=engine, epochs=24, patience=2), tasks=TASKS[:1])
    events = []
    trainer = Rising(made.model, made.method, made.tasks, made.config, seed=0, emit=events.append)
    versions, steps = [], []
    while trainer.advance() and trainer.optimizer is not None:
        if trainer.step == 0 and trainer.epoch:
            versions.append(trainer.method.plan_version)
            steps.append(max((float(state["step"]) for state in trainer.optimizer.state.values()), default=0.0))
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    prunings = [epoch for epoch in range(1, 24) if versions[epoch] != versions[epoch - 1]]
    assert len(prunings) == (1 if kind is PackNet else 4)
    for epoch in prunings:
        assert rates[epoch + 1] == pytest.approx(QUICK.lr)
        assert steps[epoch] == 0
    assert min(rates[: prunings[0] + 1]) < QUICK.lr
    assert min(rates[prunings[-1] + 1 :]) < QUICK.lr


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_a_pruning_does_not_undo_the_drop_at_a_given_epoch(engine):
    options = {"engine": engine, "epochs": 12, "patience": 9, "drop_at": 4, "factor": 10.0}
    made = make_trainer(PackNet, replace(QUICK, **options), tasks=TASKS[:1])
    events = []
    trainer = Trainer(made.model, made.method, made.tasks, made.config, seed=0, emit=events.append)
    finish(trainer)
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    assert rates == pytest.approx([QUICK.lr] * 4 + [QUICK.lr / 10] * 8)


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
        finish(trainer)
        return trainer

    plain, last = train(), train(channels_last=True)
    assert last.model.trunk[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert plain.losses[0] == pytest.approx(last.losses[0], rel=1e-4)
    assert plain.losses[0] == pytest.approx(train(precision="bf16").losses[0], rel=0.05)


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_the_rate_drops_at_a_given_epoch_and_the_optimizer_keeps_its_state(engine):
    trainer = make_scripted_trainer([5.0, 6.0, 7.0], patience=None, drop_at=2, engine=engine)
    events = []
    trainer.emit = events.append
    while trainer.epoch < 2:
        trainer.advance()
    assert trainer.optimizer.state
    finish(trainer)
    rates = [event["lr"] for event in events if event["event"] == "epoch"]
    assert rates == pytest.approx([0.09, 0.09, 0.03])


def test_no_patience_keeps_the_rate():
    trainer = make_scripted_trainer([5.0, 6.0, 7.0, 8.0], patience=None)
    events = []
    trainer.emit = events.append
    finish(trainer)
    assert {event["lr"] for event in events if event["event"] == "epoch"} == {0.09}


def test_the_weights_of_the_best_epoch_are_back_when_the_task_ends():
    trainer = make_scripted_trainer([5.0, 3.0, 4.0])
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
        if trainer.optimizer is not None and trainer.optimizer not in optimizers:
            optimizers.append(trainer.optimizer)
            assert trainer.optimizer.param_groups[0]["lr"] == QUICK.lr
            assert not trainer.optimizer.state
    assert len(optimizers) == 3


def test_accuracies_are_measured_on_every_task_learned_so_far():
    trainer = make_trainer()
    finish(trainer)
    assert 0 < trainer.statistics[-1]["free"] < trainer.statistics[-1]["nodes"]
    assert [len(row) for row in trainer.accuracies] == [1, 2, 3]
    assert [len(row) for row in trainer.losses] == [3, 3, 3]
    assert trainer.progress == 1


def test_a_loss_that_is_not_a_number_stops_training_and_names_the_place():
    broken = make_task("second", 1)
    trainer = make_trainer(FineTune, tasks=(TASKS[0], broken))
    broken.train_x[3] = float("nan")  # since it was looked over
    with pytest.raises(TrainingFailed, match=r"task 2 \(second\), epoch 1; a lower learning rate"):
        finish(trainer)


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
    finish(make_trainer(FineTune, config, tasks=tasks))


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0}, {"patience": 0}, {"factor": 1}, {"engine": "?"}]
)
def test_a_setting_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingConfig(**wrong)


@pytest.mark.parametrize("engine", ["plain", "captured"])
def test_a_validation_loss_that_is_not_a_number_stops_training(engine):
    trainer = make_trainer(FineTune, replace(QUICK, engine=engine))
    trainer.validation_loss = lambda: torch.tensor(math.nan, dtype=torch.float64)
    with pytest.raises(TrainingFailed, match=r"NaN in task 1 \(first\), epoch 1"):
        finish(trainer)


@pytest.mark.parametrize(("matters", "sizes"), [(True, [16, 16, 4]), (False, [32, 4])])
def test_a_task_ends_with_batches_twice_as_large_where_their_size_does_not_matter(matters, sizes):
    met = []

    class Watching(FineTune):
        depends_on_batch_size = matters

        def _finish_task(self, batches, forward):
            met.extend(len(y) for _, y in batches)

    task = replace(TASKS[0], train_x=TASKS[0].train_x[:36], train_y=TASKS[0].train_y[:36])
    finish(make_trainer(Watching, replace(QUICK, epochs=1, batch_size=16), tasks=(task,)))
    assert met == sizes


@pytest.mark.parametrize(
    ("between", "settings", "matters"),
    [([], {}, False), ([nn.BatchNorm1d(8)], {}, True), ([], {"importance_mode": "train"}, True)],
)
def test_what_agscl_measures_does_not_depend_on_the_size_of_batches_unless_something_does(between, settings, matters):
    model = MultiHead(nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU()), features=8)
    method = PaperAGSCL(model, example_input=torch.randn(2, 4), **settings)
    assert method.depends_on_batch_size == matters


def test_where_only_some_tasks_have_a_validation_split_none_is_scored_on_it():
    first, second = TASKS[:2]
    none = {"valid_x": None, "valid_y": None}
    for tasks in ((replace(first, **none), second), (first, replace(second, **none))):
        trainer = make_trainer(FineTune, replace(QUICK, epochs=1, patience=None, restore_best=False), tasks=tasks)
        finish(trainer)
        assert [len(row) for row in trainer.accuracies] == [1, 2]
        assert trainer.valid_accuracies == []
