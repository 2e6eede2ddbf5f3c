import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import FineTune, MultiHead, cpr_loss, tasks
from agscl.experiments.bounds import Joint, Separate, all_heads
from agscl.experiments.build import build_trainer
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run_config import configure
from agscl.methods._parts.lifecycle import Method
from agscl.runs import hash_state
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.tasks import Task
from agscl.training import Trainer, TrainingConfig

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")

DIGITS = tasks.load("digits", seed=0)[:3]
VALIDATED = tuple(dataclasses.replace(task, valid_x=task.train_x[::5], valid_y=task.train_y[::5]) for task in DIGITS)


def trainer(name: str, sequence: tuple[Task, ...] = DIGITS, **changes) -> Trainer:
    config = configure("digits", method=name, batch_size=64, **{"epochs": 2, **changes})
    return build_trainer(config, name, sequence)


def finish(running: Trainer) -> Trainer:
    while running.advance():
        pass
    return running


def outcome(ended: Trainer) -> str:
    return hash_state([ended.model.state_dict(), ended.method.state_dict(), ended.accuracies, ended.losses])


@pytest.mark.parametrize("name", METHODS)
def test_everything_listed_continues_within_a_task_with_the_same_bits(name):
    validating = {"patience": 1, "restore_best": True}
    expected = outcome(finish(trainer(name, VALIDATED, **validating)))
    stopped = trainer(name, VALIDATED, **validating)
    while not (stopped.task_index == 1 and stopped.epoch == 1 and stopped.step == 2):
        assert stopped.advance()
    stored = unflatten_state(*flatten_state(stopped.state_dict()))
    torch.manual_seed(999)
    continued = trainer(name, VALIDATED, **validating)
    continued.load_state_dict(stored)
    assert outcome(finish(continued)) == expected


def test_joint_trains_each_task_on_the_data_of_all_tasks_so_far():
    joint = trainer("joint", epochs=1)
    steps = []
    while joint.advance():
        if joint.step == 1:
            steps.append(joint.steps_per_epoch)
    sizes = [len(task.train_y) for task in DIGITS]
    assert steps == [-(-sum(sizes[: count + 1]) // 64) for count in range(3)]


@pytest.mark.parametrize("cpr", [0.0, 0.3])
def test_joints_loss_is_the_mean_over_all_examples_each_with_its_own_head(cpr):
    joint = trainer("joint", epochs=1, cpr=cpr)
    while joint.task_index < 2 or joint.step < 1:
        joint.advance()
    rows = torch.arange(0, joint.examples, 7)
    x = torch.cat([task.train_x for task in DIGITS])[rows]
    y = torch.cat([task.train_y for task in DIGITS])[rows]
    names = [task.name for task in DIGITS for _ in task.train_y]
    outputs = [joint.model(x[place : place + 1], names[row]) for place, row in enumerate(rows.tolist())]
    losses = [F.cross_entropy(output, y[place : place + 1]) for place, output in enumerate(outputs)]
    losses = [loss + cpr_loss(output, cpr) for loss, output in zip(losses, outputs, strict=True)]
    torch.testing.assert_close(joint.training_loss(rows), torch.stack(losses).mean())


def test_joint_reads_pictures_as_every_other_method_does_with_crops_drawn_anew():
    def pictures(seed):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randint(256, (20, 3, 16, 16), generator=draw, dtype=torch.uint8)
        y = torch.arange(20) % 2
        shapes = torch.full((20, 2), 16)
        return Task(f"t{seed}", 2, x, y, None, None, x, y, torch.zeros(3), torch.ones(3), crop=8, shapes=shapes)

    model = MultiHead(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), features=4 * 6 * 6)
    config = TrainingConfig(epochs=1, batch_size=8, patience=None, restore_best=False)
    joint = Joint(model, FineTune(model, heads=all_heads), (pictures(0), pictures(1)), config, seed=0)
    while joint.task_index < 1 or joint.step < 1:
        joint.advance()
    rows = torch.arange(0, 40, 3)
    losses = {joint.training_loss(rows).item() for _ in range(4)}
    assert len(losses) == 4
    assert joint.training_loss(rows[:3]).isfinite(), "a batch without a picture of the second task"
    torch.manual_seed(0)
    loss = joint.training_loss(rows)
    torch.manual_seed(0)
    parts = [(0, rows[rows < 20]), (1, rows[rows >= 20] - 20)]
    batches = [(place, *joint.task_at(place).make_batch(within)) for place, within in parts]
    each = [F.cross_entropy(model(x, f"t{place}"), y, reduction="sum") for place, x, y in batches]
    torch.testing.assert_close(loss, sum(each) / len(rows))


def test_joint_moves_the_heads_of_old_tasks_and_forgets_next_to_nothing():
    joint = trainer("joint", epochs=8)
    while joint.task_index == 0:
        joint.advance()
    before = joint.model.heads[DIGITS[0].name].weight.clone()
    finish(joint)
    assert not torch.equal(before, joint.model.heads[DIGITS[0].name].weight)
    assert min(joint.accuracies[-1]) > 0.9


def test_with_separate_networks_no_other_task_moves_a_bit():
    separate = trainer("separate")
    kept = {}
    while separate.advance():
        if separate.task_index == 1 and not kept:
            kept = {name: tensor.clone() for name, tensor in separate.model.state_dict().items()}
    assert isinstance(separate.model, Separate)
    after = separate.model.state_dict()
    assert len(after) == 3 * len(kept)
    assert all(torch.equal(tensor, after[name]) for name, tensor in kept.items())
    assert [row[0] for row in separate.accuracies] == [separate.accuracies[0][0]] * 3


@pytest.mark.parametrize("name", ["ewc", "si", "mas", "l2", "lwf", "hat"])
def test_the_validation_loss_is_the_loss_that_training_lowers_penalty_included(name):
    running = trainer(name, VALIDATED, patience=5)
    while running.task_index < 1 or running.epoch < 1:
        running.advance()
    task = VALIDATED[1]
    running.model.eval()
    with torch.no_grad():
        output = running.model(task.valid_x, task.name)
        plain = F.cross_entropy(output, task.valid_y).item()
        extra = (running.method.loss(task.valid_x, output) + running.method.penalty()).item()
    running.model.train()
    assert extra > 0
    assert running.validation_loss().item() == pytest.approx(plain + extra)


def test_agscls_validation_loss_is_the_tasks_loss_alone():
    running = trainer("agscl", VALIDATED, patience=5)
    while running.task_index < 1 or running.epoch < 1:
        running.advance()
    with running._eval_mode():
        output = running.model(VALIDATED[1].valid_x, VALIDATED[1].name)
    assert running.validation_loss().item() == pytest.approx(F.cross_entropy(output, VALIDATED[1].valid_y).item())


def test_what_a_method_trains_beside_the_model_returns_to_the_best_epoch_too():
    running = trainer("hat", VALIDATED, epochs=3, restore_best=True)
    losses = iter([1.0, 2.0, 3.0])
    running.validation_loss = lambda: torch.tensor(next(losses))
    while running.epoch < 1:
        running.advance()
    task = DIGITS[0].name
    best = running.method.mask(task).clone()
    while running.epoch < 3:
        running.advance()
    assert not torch.equal(running.method.mask(task), best)
    running.advance()
    assert torch.equal(running.method.mask(task), best)


def test_the_methods_come_in_the_order_of_the_papers_table_and_each_says_what_it_does():
    assert list(METHODS)[:7] == ["agscl", "paper-agscl", "ewc", "si", "rwalk", "mas", "hat"]
    for each in METHODS.values():
        assert each.about.endswith(".")
        assert issubclass(each.method_class, Method) != each.is_bound
