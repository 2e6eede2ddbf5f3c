"""What a new user may get wrong: each is a sentence that says what came and what to do, or it works."""

import copy
import math
import traceback
import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import agscl.methods._parts.batches as batches_module
from agscl import AGSCL, EWC, GPM, HAT, L2, MAS, SI, TRGP, WSN, LwF, MultiHead, PackNet, PaperAGSCL, RWalk, Together
from agscl.graph.nodes import NodeGraphError
from agscl.methods import find_methods
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.training import TrainingConfig
from loops import adam, bits, blobs, make, mlp, same

METHODS = [*find_methods().values()]
pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def fresh(cls=AGSCL, make_trunk=mlp, **settings):
    torch.manual_seed(0)
    model = MultiHead(make_trunk())
    if cls is AGSCL:
        settings = {"mu": 1.0, "lam": math.inf, **settings}
    method = make(cls, model, **settings)
    return method, model, adam(model)


def train(method, optimizer, number, *, dtype=torch.float32, batches=None, **arguments):
    """Two epochs of a task, with all that any method may need."""
    task, data = f"t{number}", [(x.to(dtype), y) for x, y in blobs(number)]
    if task not in method.model.heads:
        method.model.add_head(task, 3)
    method.begin_task(task, optimizer, epochs=2, steps_per_epoch=len(data))
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            output = method.model(x, task)
            (F.cross_entropy(output.float(), y) + method.loss(x, output)).backward()
            optimizer.step()
        method.end_epoch()
    method.end_task(data if batches is None else batches, **arguments)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (AGSCL, {"lam": "inf"}, "AGSCL: lam must be a number, not 'inf' .infinity is math.inf."),
        (AGSCL, {"mu": None}, "mu must be a number, not None"),
        (AGSCL, {"rho": "0.3"}, "rho must be a number, not '0.3'"),
        (AGSCL, {"prox": "no"}, "prox must be True or False, not 'no'"),
        (AGSCL, {"seed": 1.5}, "seed must be a whole number, not 1.5"),
        (AGSCL, {"prox_every": "day"}, "prox_every must be one of 'epoch', 'step', a whole number, not 'day'"),
        (EWC, {"lam": "inf"}, "EWC: lam must be a number"),
        (EWC, {"clip_penalty_step": 1}, "clip_penalty_step must be True or False, not 1"),
        (SI, {"c": [1]}, "SI: c must be a number"),
        (GPM, {"samples": "many"}, "GPM: samples must be a whole number"),
        (LwF, {"weight": True}, "LwF: weight must be a number, not True"),
        (HAT, {"s_max": "400"}, "HAT: s_max must be a number"),
        (PackNet, {"share": torch.tensor(0.5)}, "PackNet: share must be a number"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(cls, settings, words):
    with pytest.raises(ValueError, match=words):
        make(cls, MultiHead(mlp()), **settings)


def test_numbers_of_numpy_are_settings_too_and_are_kept_as_python_numbers():
    method = EWC(MultiHead(mlp()), lam=np.float32(0.5), batch=np.int64(4))
    assert (method.config.lam, type(method.config.lam), type(method.config.batch)) == (0.5, float, int)


@pytest.mark.parametrize(
    "settings",
    [{"lr": "fast"}, {"lr": math.inf}, {"lr": -1.0}, {"weight_decay": math.inf}, {"weight_decay": math.nan},
     {"epochs": 2.5}, {"factor": math.nan}, {"optimizer": "lion"}, {"restore_best": "yes"}],
)  # fmt: skip
def test_absurd_settings_of_training_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        TrainingConfig(**settings)


def learn_two_tasks(cls, settings):
    torch.manual_seed(0)
    method = make(cls, MultiHead(mlp()), **settings)
    optimizer = adam(method.model)
    for number in range(2):
        train(method, optimizer, number)
    return bits(method.model)


@pytest.mark.parametrize(
    ("cls", "form", "name", "value"),
    [
        (AGSCL, {}, "eta", 0.5),
        (AGSCL, {}, "tau", 0.1),
        (AGSCL, {}, "by_layer", "both"),
        (AGSCL, {"lam": 0.0}, "eta", 0.5),
        (PaperAGSCL, {"lam": math.inf}, "eta", 0.5),
        (PaperAGSCL, {"mu": 0.0}, "by_layer", "mu"),
        (PaperAGSCL, {"lam": math.inf}, "by_layer", "lam"),
        (EWC, {"accumulation": "merged"}, "gamma", 0.5),
        (EWC, {"fisher": "empirical"}, "batch", 5),
        (GPM, {"threshold": 1.0}, "increase", 0.1),
        (TRGP, {"related": 0}, "trust", 0.9),
    ],
)
def test_a_setting_that_changes_nothing_in_the_chosen_form_is_warned_of_by_name(cls, form, name, value):
    with pytest.warns(SelfCheckWarning, match=f"{cls.__name__}: {name}={value!r} changes nothing .* Leave it out"):
        method = make(cls, MultiHead(mlp()), **form, **{name: value})
    assert getattr(method.config, name) == value
    assert same(learn_two_tasks(cls, form), learn_two_tasks(cls, {**form, name: value}))


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        *[(cls, {}) for cls in METHODS],
        *[(cls, dict(cls.paper)) for cls in METHODS],
        (AGSCL, {"eta": 0.9, "tau": 1e-4}),  # the defaults, as a saved state names them
        (AGSCL, {"lam": 400.0, "eta": 0.5}),
        (AGSCL, {"mu": 1.0, "by_layer": "mu"}),
        (PaperAGSCL, {"prox": False, "eta": 0.5, "tau": 0.1, "by_layer": "both"}),
        (PaperAGSCL, {"rand_init": False, "rho": 0.5}),  # a study's form of a preset
        (EWC, {"accumulation": "online", "gamma": 0.5, "fisher": "batched", "batch": 5}),
        (TRGP, {"increase": 0.1, "trust": 0.9}),
    ],
)
def test_settings_with_an_effect_and_defaults_are_not_warned_of(cls, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(cls, MultiHead(mlp()), **settings)


# Making a method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (np.zeros((2, 16), np.float32), "torch.from_numpy.* got an ndarray"),
        (TensorDataset(torch.zeros(4, 16)), r"next\(iter\(loader\)\).* got a TensorDataset"),
        (DataLoader(TensorDataset(torch.zeros(4, 16))), "got a DataLoader"),
        (torch.zeros(2, 15), r"cannot run on example_input, a tensor of \[2, 15\] \(float32, cpu\)"),
        (torch.zeros(16), r"a tensor of \[16\]"),
        (torch.zeros(()), "one example or more"),
        (torch.zeros(0, 16), "one example or more"),
        (torch.zeros(2, 16, dtype=torch.float64), r"float64, cpu\).*weights are float32 on cpu"),
        (torch.zeros(2, 16, device="meta"), "dense tensor that holds values"),
        (torch.zeros(2, 16).to_sparse(), "dense tensor"),
        ((torch.zeros(2, 16), torch.zeros(2)), "not for inputs and labels"),
        ({"x": torch.zeros(2, 16)}, "a dict with the keys 'x'"),
        (torch.full((2, 16), math.nan), "finite"),
    ],
)
@pytest.mark.parametrize("cls", [AGSCL, HAT])
def test_an_example_that_the_model_cannot_run_on_is_described(cls, example, words):
    with pytest.raises((TypeError, ValueError), match=words):
        cls(MultiHead(mlp()), example)


def test_what_is_no_module_is_refused():
    for call in (
        lambda: AGSCL(torch.zeros(2, 16), MultiHead(mlp())),
        lambda: EWC("model"),
        lambda: MultiHead(nn.Sequential),
    ):
        with pytest.raises(TypeError, match="needs a torch module, got"):
            call()


@pytest.mark.parametrize("cls", METHODS)
def test_a_trunk_of_lazy_modules_works_or_is_refused_until_it_was_run_once(cls):
    def learn(number):
        method = make(cls, model)
        train(method, adam(model), number)

    x, _ = blobs(0)[0]
    model = MultiHead(nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(32), nn.ReLU()))
    if issubclass(cls, NodeMethod) or cls in (SI, RWalk, PackNet, WSN):
        with pytest.raises(ValueError, match=r"(?is)trunk\.0.* lazy.*run the model once on a batch") as caught:
            learn(0)
        assert "exclude" not in str(caught.value)
        model.trunk(x)
    learn(1)


def test_a_model_called_with_its_arguments_in_the_wrong_order_says_so():
    model = MultiHead(mlp())
    with pytest.raises(TypeError, match="task's name as its second argument, got a tensor of"):
        model("t0", torch.zeros(2, 16))


class ByBatch(nn.Module):
    """Normalises by the batch, or lets examples attend to each other."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(16, 32), nn.Linear(32, 32), how

    def forward(self, x):
        h = F.relu(self.first(x))
        if self.how == "normalise":
            h = (h - h.mean(0)) / (h.std(0) + 1)
        elif self.how == "attend":
            h = torch.softmax(x @ x.T, -1) @ h
        else:
            h = h.view(len(h) // 2, 2, -1).flip(1).flatten(0, 1)
        return F.relu(self.second(h))


@pytest.mark.parametrize("cls", [AGSCL, HAT])
@pytest.mark.parametrize("how", ["normalise", "attend"])
def test_features_that_couple_the_examples_of_a_batch_are_refused_with_a_way_out(cls, how):
    with pytest.raises(NodeGraphError, match="depends on other examples of the batch") as caught:
        make(cls, MultiHead(ByBatch(how)))
    exclude = caught.value.args[0].split("exclude=")[1].split("]")[0] + "]"
    method, _, optimizer = fresh(cls, partial(ByBatch, how), exclude=["trunk.first"])
    assert "trunk.first" in exclude
    train(method, optimizer, 0)
    assert method.certificate().task == "t0"


@pytest.mark.parametrize(("cls", "way_out"), [(EWC, {"fisher": "batched", "batch": 4}), (MAS, {"batch": 4})])
@pytest.mark.parametrize("how", ["normalise", "pairs"])
def test_where_one_example_alone_cannot_be_run_importances_are_measured_by_mini_batches(cls, way_out, how):
    method, _, optimizer = fresh(cls, partial(ByBatch, how))
    with pytest.raises(
        (FloatingPointError, RuntimeError), match=r"measure by mini-batches.*fisher='batched'"
    ) as caught:
        train(method, optimizer, 0)
    assert "training diverged" not in str(caught.value)
    method, _, optimizer = fresh(cls, partial(ByBatch, how), **way_out)
    train(method, optimizer, 0)


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("when", ["before", "after"], ids=["head made before the method", "head added to it"])
def test_a_head_with_weight_norm_works_or_is_refused_with_a_way_out(cls, when):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    if when == "before":
        model.add_head("t0", weight_norm(nn.Linear(32, 3)))

    def begin():
        method, optimizer = make(cls, model), adam(model)
        if "t0" not in model.heads:
            model.add_head("t0", weight_norm(nn.Linear(32, 3)))
        train(method, optimizer, 0)
        train(method, optimizer, 1)
        return method

    if not issubclass(cls, NodeMethod):
        assert begin().tasks == ["t0", "t1"]
        return
    with pytest.raises(NodeGraphError, match=r"heads.t0: its weight is computed.*remove_parametrizations"):
        begin()
    nn.utils.parametrize.remove_parametrizations(model.heads["t0"], "weight")
    assert begin().tasks == ["t0", "t1"]


# Tasks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda o: ("", o), "the task's name, a non-empty string; got ''"),
        (lambda o: (3, o), "the task's name, a non-empty string; got 3"),
        (lambda o: (o, "t0"), "the task's name.*got an Adam"),
        (lambda o: ("t0", [o]), "got list"),
    ],
)
def test_a_task_that_cannot_begin_says_what_is_missing(cls, arguments, words):
    method, model, optimizer = fresh(cls)
    model.add_head("t0", 3)
    with pytest.raises((TypeError, ValueError), match=words):
        method.begin_task(*arguments(optimizer), epochs=2, steps_per_epoch=4)
    assert method.tasks == []


@pytest.mark.parametrize("count", [0, -1, 2.5, "3", math.nan, True])
@pytest.mark.parametrize("name", ["epochs", "steps_per_epoch"])
def test_counts_of_epochs_and_steps_are_whole_numbers_above_0(name, count):
    method, model, optimizer = fresh(HAT)
    model.add_head("t0", 3)
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        method.begin_task("t0", optimizer, **{"epochs": 2, "steps_per_epoch": 4, name: count})


@pytest.mark.parametrize("cls", [AGSCL, EWC, HAT])
def test_a_head_that_all_tasks_share_is_warned_of_when_the_second_task_begins(cls, recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(*mlp(), nn.Linear(32, 3))
    method, optimizer = make(cls, model, heads="4"), adam(model)
    for number in (0, 1):
        method.begin_task(f"t{number}", optimizer, epochs=1, steps_per_epoch=4)
        assert any("All tasks share one head ('4')" in str(w.message) for w in recwarn) == (number == 1)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        method.end_task([X])


def test_a_method_made_anew_for_the_next_task_warns_that_the_first_is_not_protected():
    _, model, optimizer = fresh()
    train(EWC(model), optimizer, 0)
    with pytest.warns(SelfCheckWarning, match="learned t0 with another method object.*Make the method once"):
        train(EWC(model), optimizer, 1)


def test_a_method_that_was_closed_or_loaded_or_acts_beside_another_is_not_warned_of(recwarn):
    _, model, optimizer = fresh()
    first = EWC(model)
    train(first, optimizer, 0)
    again = EWC(model)
    again.load_state_dict(first.state_dict())
    train(again, optimizer, 1)
    again.close()
    both = Together(SI(model), L2(model))
    train(both, optimizer, 2)
    train(both, optimizer, 3)
    assert not [w for w in recwarn if "another method object" in str(w.message)]


def test_a_second_hat_on_a_model_says_to_close_the_first():
    method, model, optimizer = fresh(HAT)
    train(method, optimizer, 0)
    with pytest.raises(ValueError, match=r"Another HAT .* close\(\)"):
        make(HAT, model)
    method.close()
    other, third = make(HAT, model), make(HAT, model)
    train(other, optimizer, 1)
    with pytest.raises(ValueError, match=r"Another HAT .* close\(\)"):
        train(third, optimizer, 2)


@pytest.mark.parametrize("cls", METHODS)
def test_all_heads_may_be_added_before_the_first_task(cls):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    for number in range(3):
        model.add_head(f"t{number}", 3)
    method, optimizer = make(cls, model), torch.optim.SGD(model.trunk.parameters(), lr=0.05)
    train(method, optimizer, 0)
    first_head = bits(model.heads["t0"])
    train(method, optimizer, 1)
    train(method, optimizer, 2)
    assert same(bits(model.heads["t0"]), first_head)
    assert method.certificate().task == "t2"


# Another dtype -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AGSCL, EWC])
@pytest.mark.parametrize("changed", [0, 1])
def test_an_old_head_that_changed_between_tasks_is_warned_of(cls, changed):
    method, model, optimizer = fresh(cls)
    for number in range(2):
        train(method, optimizer, number)
    decay = torch.optim.SGD(model.heads[f"t{changed}"].parameters(), lr=0.1, weight_decay=0.1)
    model.heads[f"t{changed}"](torch.zeros(1, 32)).sum().backward()
    decay.step()
    model.add_head("t2", 3)
    with pytest.warns(SelfCheckWarning, match=f"heads of t{changed} changed .* before 't2' began"):
        method.begin_task("t2", optimizer)


def test_old_heads_that_were_written_with_their_own_bits_are_not_warned_of(recwarn):
    method, model, optimizer = fresh(EWC)
    for number in range(3):
        train(method, optimizer, number)
        model.load_state_dict(bits(model))
    model.add_head("t3", 3)
    method.begin_task("t3", optimizer)
    assert not [w for w in recwarn if "changed" in str(w.message)]


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_after_a_change_of_dtype_a_method_continues_and_says_what_that_means(cls, dtype):
    method, model, optimizer = fresh(cls)
    train(method, optimizer, 0)
    model.to(dtype)
    str(method.certificate())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(SelfCheckWarning, match=r"and were float32 when task 't0' ended.*torch\.autocast"):
        train(method, optimizer, 1, dtype=dtype)
    train(method, optimizer, 2, dtype=dtype)
    assert all(p.isfinite().all() for p in model.parameters())
    str(method.certificate())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_with_infinite_lam_nodes_converted_between_tasks_keep_their_new_bits(dtype):
    method, model, optimizer = fresh()
    train(method, optimizer, 0)
    important = ~method.free[:32]
    model.to(dtype)
    before = bits(model)
    assert "another dtype?" in str(method.certificate())
    train(method, torch.optim.SGD(model.parameters(), lr=0.05), 1, dtype=dtype)
    assert important.any()
    assert torch.equal(model.trunk[0].weight[important], before["trunk.0.weight"][important])
    assert torch.equal(model.heads["t0"].weight, before["heads.t0.weight"])


# Batches -------------------------------------------------------------------------------------------------------------

X = torch.cat([x for x, _ in blobs(0)])
Y = torch.cat([y for _, y in blobs(0)])


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (X, r"list of batches.*got a tensor of \[48, 16\]"),
        ((X, Y), "one batch by itself: put it into a list"),
        ({"x": X, "y": Y}, "got a dict with the keys 'x', 'y'"),
        (TensorDataset(X, Y), r"DataLoader\(dataset, batch_size="),
        ("data", "got 'data'"),
        (5, "got 5"),
    ],
)
def test_what_is_no_series_of_batches_is_refused_and_the_task_can_still_be_ended(cls, batches, words):
    method, _, optimizer = fresh(cls)
    with pytest.raises(TypeError, match=words):
        train(method, optimizer, 0, batches=batches)
    assert method.task == "t0"
    method.end_task([(X, Y)])
    assert method.task is None


@pytest.mark.parametrize("cls", [AGSCL, EWC, MAS, GPM])
@pytest.mark.parametrize("batch", [{"x": X, "y": Y}, (X.numpy(), Y.numpy()), [{"x": X}, Y]])
def test_batches_of_dicts_or_arrays_need_a_forward_and_say_so(cls, batch):
    method, model, optimizer = fresh(cls)
    with pytest.raises(TypeError, match=r"cannot run the model on a .*forward=lambda batch"):
        train(method, optimizer, 0, batches=[batch])
    expected = fresh(cls)
    train(expected[0], expected[2], 0, batches=[(X, Y)])
    if isinstance(batch, dict):
        method.end_task([batch], forward=lambda batch: model(batch["x"], "t0"))
        assert same(bits(model), bits(expected[1]))


class ReadsDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs):
        return self.layers(inputs["x"])


@pytest.mark.parametrize("cls", [AGSCL, EWC, MAS])
def test_a_trunk_that_takes_a_dict_is_given_it(cls):
    torch.manual_seed(0)
    model = MultiHead(ReadsDict())
    method = AGSCL(model, {"x": X}) if cls is AGSCL else cls(model)
    optimizer = adam(model)
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer)
    F.cross_entropy(model({"x": X}, "t0"), Y).backward()
    optimizer.step()
    method.end_task([{"x": X}])
    assert method.task is None


def test_an_error_within_end_task_names_the_batch_and_the_models_dtype():
    method, _, optimizer = fresh()
    with pytest.raises(RuntimeError) as caught:
        train(method, optimizer, 0, batches=[(X.double(), Y)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "In end_task, on a tuple of 2 (a tensor of [48, 16] (float64, cpu)" in shown
    assert "weights are float32 on cpu" in shown


def test_gpm_needs_no_labels_to_end_a_task():
    method, _, optimizer = fresh(GPM)
    train(method, optimizer, 0, batches=[(X, Y.float() / 2)])
    assert method.task is None


def test_lwf_says_what_its_loss_was_given():
    method, model, optimizer = fresh(LwF)
    train(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer)
    with pytest.raises(TypeError, match=r"loss\(x, output\) cannot run the model on x, a dict with the keys 'x'"):
        method.loss({"x": X}, model(X, "t1"))


@pytest.mark.parametrize("probe", [{"x": X}, X[:, :15], X.numpy()])
def test_a_probe_that_the_model_cannot_run_on_is_described(probe):
    method, _, optimizer = fresh(EWC)
    train(method, optimizer, 0)
    with pytest.raises(ValueError, match=r"certificate\(probe\): the model cannot run on a"):
        method.certificate(probe)


@pytest.mark.parametrize("state", [{}, {"trunk.0.weight": X}, None])
def test_what_is_no_state_of_a_method_is_refused(state):
    with pytest.raises(ValueError, match=r"give what method.state_dict\(\) returned"):
        fresh()[0].load_state_dict(state)


# Batches that are needed twice ---------------------------------------------------------------------------------------


def with_norm():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())


class Counted:
    """Makes iterators over batches and counts those that are alive at a time."""

    def __init__(self, count=8):
        self.count, self.made, self.read = count, 0, 0

    def __call__(self) -> Iterator:
        self.made += 1
        for number in range(self.count):
            self.read += 1
            yield X.clone() + number / 100, Y


@pytest.mark.parametrize("kind", ["AGS-CL with BatchNorm", "several methods"])
def test_an_iterator_that_is_needed_twice_is_held_up_to_a_limit_and_then_refused(kind, monkeypatch):
    def make_method():
        method, model, optimizer = fresh(AGSCL, with_norm)
        return (Together(method, EWC(model)) if kind == "several methods" else method), model, optimizer

    method, model, optimizer = make_method()
    train(method, optimizer, 0, batches=Counted()())
    expected = bits(model)

    monkeypatch.setattr(batches_module, "MAX_HELD_BYTES", 3 * X.nbytes)
    source, (method, model, optimizer) = Counted(), make_method()
    with pytest.raises(ValueError, match=r"needed twice.*call end_task again with a DataLoader"):
        train(method, optimizer, 0, batches=source())
    assert source.read == 3  # no more was read, or held
    method.end_task(Counted())  # the function that makes the iterator
    assert same(bits(model), expected)

    method, model, optimizer = make_method()
    train(method, optimizer, 0, batches=list(Counted()()))
    assert same(bits(model), expected)


def test_batches_that_are_views_of_one_tensor_are_held_at_no_cost(monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_HELD_BYTES", X.nbytes // 2)
    method, _, optimizer = fresh(AGSCL, with_norm)
    train(method, optimizer, 0, batches=zip(X.split(12), Y.split(12), strict=True))
    assert method.task is None


def test_without_batchnorm_an_iterator_is_run_through_once_and_not_held(monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_HELD_BYTES", 0)
    method, _, optimizer = fresh()
    train(method, optimizer, 0, batches=Counted()())
    assert method.task is None


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_empty_batches_among_others_change_nothing_for_methods_with_bases(cls):
    def learn(batches):
        method, model, optimizer = fresh(cls)
        model.add_head("a", 3)
        model(batches[-1][0], "a")
        method.begin_task("a", optimizer)
        method.end_task(batches)
        return method.knowledge.bases

    empty = (torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))
    first, *others = blobs(0)
    assert same(learn([empty, first, empty, *others]), learn([first, *others]))


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_head_deleted_after_its_task_is_said_to_be_needed(gone):
    method, model, optimizer = fresh(AGSCL)
    for task in ("a", "b"):
        model.add_head(task, 3)
        model(blobs(0)[0][0], task)
        method.begin_task(task, optimizer, epochs=1)
        method.end_task(blobs(0))
    head = model.heads.pop(gone)
    model.add_head("c", 3)
    with pytest.raises(ValueError, match=f"Task '{gone}' was learned, and its head is gone: .* must stay"):
        method.begin_task("c", optimizer, epochs=1)
    model.heads[gone] = head
    method.begin_task("c", optimizer, epochs=1)


@pytest.mark.parametrize("fisher", ["estimated", "exact", "sampled"])
def test_ewc_says_that_a_softmax_over_one_output_is_always_certain(fisher):
    method, model, optimizer = fresh(EWC, fisher=fisher)
    data = [(x, (y > 0).float()) for x, y in blobs(0)]
    model.add_head("a", 1)
    model(data[0][0], "a")
    method.begin_task("a", optimizer)
    with pytest.warns(SelfCheckWarning, match=r"'a' has one output.*always certain.*fisher='empirical'.*torch\.cat"):
        method.end_task(data)


def binary_loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0], "a")[:, 0], batch[1])


def both_logits(model, batch):
    output = model(batch[0], "a")
    return torch.cat([0 * output, output], 1)


@pytest.mark.parametrize(("fisher", "forward"), [("empirical", binary_loss), ("exact", both_logits)])
def test_ewc_measures_one_output_in_the_two_ways_that_its_warning_names(fisher, forward):
    method, model, optimizer = fresh(EWC, fisher=fisher)
    data = [(x, (y > 0).float()) for x, y in blobs(0)]
    model.add_head("a", 1)
    model(data[0][0], "a")
    method.begin_task("a", optimizer)
    method.end_task(data, partial(forward, model))
    assert any(bool(importance.any()) for importance in method.knowledge.importances.values())


@pytest.mark.parametrize("cls", [AGSCL, HAT])
def test_a_layer_frozen_when_the_graph_was_built_and_trained_later_is_refused(cls):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 16), *mlp()), features=32)
    model.trunk[0].requires_grad_(False)
    method, optimizer = make(cls, model), adam(model)
    model.add_head("a", 3)
    model.trunk[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"trunk\.0\.weight, .*frozen when the graph was built and trained now"):
        method.begin_task("a", optimizer, epochs=1)
    model.trunk[0].requires_grad_(False)
    method.begin_task("a", optimizer, epochs=1)


# What a newcomer tried -----------------------------------------------------------------------------------------------


class RunningMean(nn.Module):
    """Subtracts a mean that it follows while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.layers = mlp()

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layers(x - self.mean)


@pytest.mark.parametrize("cls", [AGSCL, PackNet])
def test_a_buffer_of_the_trunk_that_changes_after_the_first_task_is_warned_about_by_name(cls):
    method, _, optimizer = fresh(cls, make_trunk=RunningMean, **({} if cls is PackNet else {"mu": 0.0}))
    train(method, optimizer, 0)
    with pytest.warns(SelfCheckWarning, match=r"Buffers of the trunk changed since task 't0' ended: trunk.mean\."):
        train(method, optimizer, 1)


def test_batchnorm_whose_statistics_are_frozen_by_node_is_no_reason_to_warn(recwarn):
    def make_trunk():
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())

    method, _, optimizer = fresh(AGSCL, make_trunk=make_trunk)
    for number in range(2):
        train(method, optimizer, number)
    assert not [each for each in recwarn if "Buffers" in str(each.message)]


@pytest.mark.parametrize("cls", [AGSCL, PackNet, EWC])
def test_the_batchnorm_of_an_old_head_keeps_its_statistics_when_the_task_is_called_in_train_mode(cls):
    method, model, optimizer = fresh(cls, **({"mu": 0.0} if cls is AGSCL else {}))
    for number in range(2):
        model.add_head(f"t{number}", nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    train(method, optimizer, 0)
    kept = bits(model.heads["t0"])
    method.begin_task("t1", optimizer, epochs=2, steps_per_epoch=4)
    for x, y in blobs(1):
        optimizer.zero_grad()
        F.cross_entropy(model(x, "t1"), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x, "t0")  # without eval()
    assert same(bits(model.heads["t0"]), kept)
    assert model.heads["t1"][1].num_batches_tracked == 4
    method.end_task(blobs(1))
    assert not any(module._forward_pre_hooks for module in model.heads["t0"].modules()), "no hook is left"


def test_heads_of_two_tasks_that_share_a_layer_are_warned_about_when_the_second_begins():
    method, model, optimizer = fresh(AGSCL)
    shared = nn.Linear(32, 8)
    for number in range(2):
        model.add_head(f"t{number}", nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 3)))
    with pytest.warns(SelfCheckWarning, match=r"share parameters \(heads.t1.0.weight is heads.t0.0.weight\)"):
        train(method, optimizer, 0)


def test_a_second_method_on_a_model_that_one_has_learned_with_is_refused_with_the_reason():
    method, model, optimizer = fresh(AGSCL)
    for number in range(2):
        train(method, optimizer, number)
    with pytest.raises(RuntimeError, match="learned t0, t1 with another method object, which still acts on it"):
        AGSCL(model, torch.zeros(2, 16))
    method.close()
    AGSCL(model, torch.zeros(2, 16))


def test_exclude_takes_a_single_name():
    model = MultiHead(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU()))
    assert list(AGSCL(model, torch.zeros(2, 16), exclude="trunk.0").graph.layers) == ["trunk.2"]


@pytest.mark.parametrize("cls", [AGSCL, PackNet, EWC])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_beside_muon_the_other_optimizer_gets_the_biases_of_new_heads(cls):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method = make(cls, model)
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)
    x, y = blobs(0)[0]
    for number in range(2):
        model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", muon, adamw, epochs=1, steps_per_epoch=4)
        old = {} if number == 0 else {"t0": method.head_outputs(x, ["t0"])["t0"]}
        for _ in range(4):
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
            F.cross_entropy(model(x, f"t{number}"), y).backward()
            for optimizer in (muon, adamw):
                optimizer.step()
        method.end_epoch()
        method.end_task([(x, y)])
        if cls is not EWC:
            assert same(old, method.head_outputs(x, list(old)))
    assert any(p is model.heads["t1"].bias for p in adamw.param_groups[0]["params"])
    model.add_head("t2", 3)
    with pytest.raises(ValueError, match=r"Muon trains matrices alone, and the new head has heads.t2.bias"):
        method.begin_task("t2", muon, epochs=1, steps_per_epoch=4)


@pytest.mark.parametrize("cls", [AGSCL, PackNet, EWC])
def test_a_task_is_resumed_with_an_optimizer_that_was_made_before_the_heads(cls):
    def advance(method, model, optimizer):
        for x, y in blobs(1):
            optimizer.zero_grad()
            F.cross_entropy(model(x, "t1"), y).backward()
            optimizer.step()

    method, model, optimizer = fresh(cls, **({"mu": 0.0} if cls is AGSCL else {}))
    train(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer, epochs=2, steps_per_epoch=8)
    advance(method, model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), method.state_dict()))
    advance(method, model, optimizer)

    resumed, again, other = fresh(cls, **({"mu": 0.0} if cls is AGSCL else {}))
    for number in range(2):
        again.add_head(f"t{number}", 3)
    again.load_state_dict(saved[0])
    with pytest.raises(
        ValueError, match=r"Give the optimizer that trains the model: load_state_dict\(state, optimizer"
    ):
        resumed.load_state_dict(saved[2])
    resumed.load_state_dict(saved[2], other)
    other.load_state_dict(saved[1])
    advance(resumed, again, other)
    assert same(bits(model), bits(again))


def test_a_model_converted_within_a_task_goes_on_with_its_frozen_rows():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = AGSCL(model, torch.zeros(2, 16)), torch.optim.SGD(model.parameters(), lr=0.1)
    train(method, optimizer, 0)
    model.add_head("t1", 3)
    method.begin_task("t1", optimizer, epochs=2, steps_per_epoch=4)
    model.double()
    important = ~method.free[method.graph.layers["trunk.0"].groups]
    frozen = model.trunk[0].weight[important].clone()
    for x, y in blobs(1):
        optimizer.zero_grad()
        F.cross_entropy(model(x.double(), "t1"), y).backward()
        optimizer.step()
    assert important.any()
    assert torch.equal(model.trunk[0].weight[important], frozen)


class AllHeads(nn.Module):
    """Returns the outputs of all its heads, in a list or by name."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.body = mlp()
        heads = {f"t{number}": nn.Linear(32, 3) for number in range(2)}
        self.outs = nn.ModuleDict(heads) if kind is dict else nn.ModuleList(heads.values())

    def forward(self, x):
        features = self.body(x)
        if isinstance(self.outs, nn.ModuleDict):
            return {name: head(features) for name, head in self.outs.items()}
        return [head(features) for head in self.outs]


@pytest.mark.parametrize("kind", [list, dict])
def test_of_a_model_that_returns_the_outputs_of_all_heads_each_task_has_its_own(kind):
    torch.manual_seed(0)
    model = AllHeads(kind)
    method, optimizer = AGSCL(model, torch.zeros(2, 16), heads="outs"), adam(model)
    for number in range(2):
        key = f"t{number}" if kind is dict else number
        method.begin_task(f"t{number}", optimizer, epochs=2, steps_per_epoch=4)
        for _ in range(2):
            for x, y in blobs(number):
                optimizer.zero_grad()
                F.cross_entropy(model(x)[key], y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(blobs(number))
    assert [output.shape[1] for output in method.head_outputs(blobs(0)[0][0]).values()] == [3, 3]
    assert "guaranteed for good" in str(method.certificate())


class Siamese(nn.Module):
    """Runs both halves of an example through the same layers."""

    def __init__(self, join) -> None:
        super().__init__()
        self.layers, self.join = mlp(inputs=8), join

    def forward(self, x):
        views = x.chunk(2, 1)
        if self.join == "cat":
            return torch.cat(self.layers(torch.cat(views)).chunk(2), 1)
        return self.layers(torch.stack(views, 1).flatten(0, 1)).unflatten(0, (-1, 2)).flatten(1)


def test_a_siamese_trunk_that_is_refused_is_told_the_form_that_works():
    with pytest.raises(NodeGraphError, match=r"torch.stack\(views, 1\).flatten\(0, 1\), and unflatten"):
        AGSCL(MultiHead(Siamese("cat")), torch.randn(4, 16))
    assert len(AGSCL(MultiHead(Siamese("stack")), torch.randn(4, 16)).graph.layers) == 2
