"""EWC, SI, RWALK, MAS and L2: numbers against slow references, and the life cycle in a loop."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl import AGSCL, EWC, L2, MAS, SI, WSN, FineTune, MultiHead, PackNet, RWalk, Together, tasks
from agscl.methods._parts import sample_gradients as importance
from agscl.methods._parts.hooks import StepHooks
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.methods.ewc import sample_classes
from agscl.networks.mlp import MLP
from loops import OneHead, adam, bits, blobs, learn, make, mlp, same

ALL = {
    "ewc": (EWC, {"lam": 50.0}),
    "ewc merged": (EWC, {"lam": 50.0, "accumulation": "merged"}),
    "ewc online": (EWC, {"lam": 50.0, "accumulation": "online", "gamma": 0.7}),
    "ewc paper": (EWC, {"lam": 1e5, **EWC.paper}),
    "si": (SI, {"c": 1.0}),
    "si paper": (SI, {"c": 1.0, **SI.paper}),
    "rwalk": (RWalk, {"lam": 5.0}),
    "rwalk paper": (RWalk, {"lam": 5.0, **RWalk.paper}),
    "mas": (MAS, {"lam": 1.0}),
    "mas paper": (MAS, {"lam": 1.0, **MAS.paper}),
    "l2": (L2, {"lam": 0.5}),
}
every = pytest.mark.parametrize("name", ALL)
each = pytest.mark.parametrize("name", ["ewc", "si", "rwalk", "mas", "l2"])


def conv_net() -> nn.Sequential:
    """(batch, 16) → (batch, 32), with convolutions and BatchNorm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )


def fresh(name="ewc", seed=0, net=mlp, **more):
    kind, settings = ALL[name]
    torch.manual_seed(seed)
    model = MultiHead(net(), features=32)
    return kind(model, **{**settings, **more}), model, adam(model)


def second_task(method, optimizer):
    """Learn one task and a part of the next, so that weights are away from their anchors."""
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(5), end=False)


def trunk(model) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.startswith("trunk")}


# Penalties ------------------------------------------------------------------------------------------------------------


@every
def test_the_penaltys_gradient_is_autograds_of_the_written_formula(name):
    method, model, optimizer = fresh(name)
    second_task(method, optimizer)
    factor = {"ewc": 0.5, "mas": 0.5, "l2": 0.5}.get(name.split()[0], 1.0) * ALL[name][1].get("lam", 1.0)
    weights, importances = trunk(model), method.plan.importances or {}
    formula = sum(
        (factor * importances.get(n, torch.ones(())) * (p - method.knowledge.anchors[n]) ** 2).sum()
        for n, p in weights.items()
    )
    expected = torch.autograd.grad(formula, list(weights.values()))
    optimizer.zero_grad()
    x, y = blobs(1)[0]
    F.cross_entropy(model(x, "t1"), y).backward()
    before = {n: p.grad.clone() for n, p in weights.items()}
    method.add_penalty_gradients()
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for (n, p), gradient in zip(weights.items(), expected, strict=True):
        torch.testing.assert_close(p.grad, before[n] + gradient)
    if name != "ewc":
        torch.testing.assert_close(method.penalty(), formula.detach().double())


@each
@pytest.mark.parametrize("rate", [0.05, torch.tensor(0.05)])
def test_a_steady_penalty_steps_as_far_as_the_anchor_and_no_further(name, rate):
    setting = "c" if name == "si" else "lam"
    method, _model, optimizer = fresh(name, clip_penalty_step=True, **{setting: 1e6})
    second_task(method, optimizer)
    protected = method.find_protected()
    before = {key: parameter.detach().clone() for key, parameter in protected.items()}
    for parameter in protected.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = rate
    with torch.no_grad():
        method.plan.add_penalty(optimizer, None)
        for key, parameter in protected.items():
            after = parameter - rate * parameter.grad
            assert bool(
                (
                    (after - method.knowledge.anchors[key]).abs()
                    <= (before[key] - method.knowledge.anchors[key]).abs() + 1e-6
                ).all()
            )
            if name == "l2":
                torch.testing.assert_close(after, method.knowledge.anchors[key])


@each
def test_a_weak_steady_penalty_is_the_plain_one(name):
    gradients = []
    for steady in (False, True):
        method, _model, optimizer = fresh(name, clip_penalty_step=steady, **{"c" if name == "si" else "lam": 1e-4})
        second_task(method, optimizer)
        protected = method.find_protected()
        for parameter in protected.values():
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            method.plan.add_penalty(optimizer, None)
        gradients.append([parameter.grad for parameter in protected.values()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_separate_penalties_of_ewc_are_the_sum_over_tasks_of_a_fisher_and_anchor_each():
    method, model, optimizer = fresh("ewc", fisher="exact")
    weights, written = trunk(model), []
    for number in range(3):
        learn(method, optimizer, number, end=False)
        fisher = slow_exact(model, weights, blobs(number), f"t{number}")
        written.append((fisher, {n: p.detach().clone() for n, p in weights.items()}))
        method.end_task(blobs(number))
    learn(method, optimizer, 3, steps=range(5), end=False)
    formula = sum((25.0 * f[n] * (p - a[n]) ** 2).sum() for f, a in written for n, p in weights.items())
    expected = torch.autograd.grad(formula, list(weights.values()))
    for p in weights.values():
        p.grad = torch.zeros_like(p)
    method.add_penalty_gradients()
    for p, gradient in zip(weights.values(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(method.penalty(), formula.detach().double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("accumulation", ["merged", "online"])
def test_fishers_are_accumulated_as_the_definition_says(accumulation):
    method, model, optimizer = fresh("ewc", fisher="exact", accumulation=accumulation, gamma=0.7)
    expected = {}
    for number in range(3):
        learn(method, optimizer, number, end=False)
        new = slow_exact(model, trunk(model), blobs(number), f"t{number}")
        for n, f in new.items():
            old = expected.get(n, torch.zeros(()))
            expected[n] = (f + number * old) / (number + 1) if accumulation == "merged" else f + 0.7 * old
        method.end_task(blobs(number))
    for n, p in trunk(model).items():
        torch.testing.assert_close(method.knowledge.importances[n], expected[n], rtol=1e-4, atol=1e-9)
        assert torch.equal(method.knowledge.anchors[n], p)


def test_a_weight_without_gradient_is_left_out_step_by_step():
    method, model, optimizer = fresh("ewc")
    second_task(method, optimizer)
    for p in trunk(model).values():
        p.grad = torch.zeros_like(p)
    model.trunk[2].weight.grad = None
    method.add_penalty_gradients()
    assert model.trunk[2].weight.grad is None
    assert model.trunk[0].weight.grad.abs().max() > 0
    model.trunk[2].weight.grad = torch.zeros_like(model.trunk[2].weight)
    method.add_penalty_gradients()
    assert model.trunk[2].weight.grad.abs().max() > 0


@each
def test_with_two_optimizers_each_weight_gets_its_penalty_once(name):
    def run(split):
        method, model, _ = fresh(name)
        groups = [trunk(model).values()] if not split else [model.trunk[0].parameters(), model.trunk[2].parameters()]
        optimizers = [torch.optim.SGD(list(group), lr=1e-2, momentum=0.9) for group in groups]
        for number in range(2):
            torch.manual_seed(number)
            model.add_head(f"t{number}", 3)
            method.begin_task(f"t{number}", *optimizers)
            for x, y in blobs(number) * 3:
                model.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
            method.end_task(blobs(number))
        return bits(model)

    assert same(run(False), run(True))


# Fisher ---------------------------------------------------------------------------------------------------------------


def samples(batches) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in batches:
        yield from zip(x.split(1), y.split(1), strict=True)


def slow(weights, values, power=2) -> dict[str, Tensor]:
    """Mean over samples of Σ share·|gradient|^power; `values` yields a list of (value, share) for each sample."""
    total, count = {n: torch.zeros_like(p) for n, p in weights.items()}, 0
    for pairs in values:
        count += 1
        for value, share in pairs:
            found = torch.autograd.grad(value, list(weights.values()), retain_graph=True)
            for n, gradient in zip(weights, found, strict=True):
                total[n] += share * gradient.abs() ** power
    return {n: t / count for n, t in total.items()}


def slow_exact(model, weights, batches, task):
    model.eval()
    logs = (model(x, task).log_softmax(1)[0] for x, _ in samples(batches))
    found = slow(weights, ([(log, float(log.detach().exp())) for log in one] for one in logs))
    model.train()
    return found


NETS = pytest.mark.parametrize("net", [mlp, conv_net])


def measured(net, **settings):
    method, model, optimizer = fresh("ewc", net=net, **settings)
    learn(method, optimizer, 0, epochs=2, end=False)
    model.eval()
    return method, model


@NETS
def test_the_exact_fisher_is_the_expectation_over_the_predicted_classes_per_sample(net):
    method, model = measured(net, fisher="exact")
    expected = slow_exact(model, trunk(model), blobs(0), "t0")
    method.end_task(blobs(0))
    assert max(float(f.max()) for f in expected.values()) > 1e-4
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-3, atol=1e-8)


class AsksItsInput(nn.Sequential):
    """Looks at what is in its input, as the attention masks of Transformers do; vmap cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.any() else torch.zeros(len(x), 32)


@pytest.mark.parametrize(("kind", "settings"), [(EWC, {}), (EWC, {"fisher": "exact"}), (MAS, {})])
def test_models_that_vmap_cannot_run_are_measured_one_sample_at_a_time(kind, settings):
    importances = []
    for trunk in (mlp(), AsksItsInput(*mlp())):
        torch.manual_seed(0)
        for layer in trunk:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        model = MultiHead(trunk, features=32)
        method = kind(model, **({"lam": 1.0} | settings))
        learn(method, adam(model), 0, epochs=1)
        importances.append(torch.cat([tensor.flatten() for tensor in method.knowledge.importances.values()]))
    assert importances[0].any()
    torch.testing.assert_close(importances[1], importances[0])


def test_the_estimated_fisher_is_the_exact_one_in_the_mean_and_near_it_in_every_draw():
    def fisher(seed, kind="estimated"):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        method = EWC(model, fisher=kind, seed=seed)
        learn(method, adam(model), 0, epochs=8)
        return torch.cat([f.flatten() for f in method.knowledge.importances.values()])

    exact, draws = fisher(0, "exact"), torch.stack([fisher(seed) for seed in range(20)])
    assert exact.sum() > 1e-2
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], fisher(0))
    away = (draws - exact).abs().sum(1) / exact.sum()
    assert float(away.max()) < 0.6
    assert float((draws.mean(0) - exact).abs().sum() / exact.sum()) < 0.1


@NETS
def test_the_empirical_fisher_is_the_mean_squared_gradient_per_sample_with_true_labels(net):
    method, model = measured(net, fisher="empirical")
    losses = (F.cross_entropy(model(x, "t0"), y) for x, y in samples(blobs(0)))
    expected = slow(trunk(model), ([(loss, 1.0)] for loss in losses))
    method.end_task(blobs(0))
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-3, atol=1e-8)


@NETS
def test_the_sampled_fisher_squares_the_gradient_for_one_drawn_class_per_sample(net):
    method, model = measured(net, fisher="sampled")
    with torch.no_grad():
        labels = [sample_classes(model(x, "t0"), places) for (x, _), places in method._add_draws(blobs(0), model)]
    losses = (
        F.cross_entropy(model(x, "t0"), y[None]) for (x, _), y in zip(samples(blobs(0)), torch.cat(labels), strict=True)
    )
    expected = slow(trunk(model), ([(loss, 1.0)] for loss in losses))
    method.end_task(blobs(0))
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-3, atol=1e-8)


def test_drawn_classes_follow_the_prediction_and_the_seed():
    logits = torch.tensor([[0.0, -1.0, -200.0, 1.0]]).expand(4000, 4)

    def draw(seed):
        model = MultiHead(mlp(), features=32)
        method = EWC(model, fisher="sampled", seed=seed)
        learn(method, adam(model), 0, epochs=1, end=False)
        [(_, places)] = method._add_draws([logits], model)
        return sample_classes(logits, places)

    labels = draw(3)
    assert torch.equal(labels, draw(3))
    assert not torch.equal(labels, draw(4))
    torch.testing.assert_close(labels.bincount(minlength=4) / 4000, logits[0].softmax(0), atol=0.03, rtol=0)


def test_no_place_falls_beyond_the_last_class_that_is_possible():
    logits = torch.tensor([[1.0, 0.0, -math.inf], [0.0, 0.0, 0.0]])
    assert sample_classes(logits, torch.full((2,), 1 - 2**-53, dtype=torch.float64)).tolist() == [1, 2]
    assert sample_classes(logits, torch.zeros(2, dtype=torch.float64)).tolist() == [0, 0]


@pytest.mark.parametrize("delivered", [7, 12, 48])
def test_the_batched_fisher_squares_the_gradient_of_the_mean_loss_of_mini_batches_of_20(delivered):
    method, model = measured(mlp, **EWC.paper)
    x, y = (torch.cat(parts) for parts in zip(*blobs(0), strict=True))
    expected = {n: torch.zeros_like(p) for n, p in trunk(model).items()}
    for xs, ys in zip(x.split(20), y.split(20), strict=True):
        found = torch.autograd.grad(F.cross_entropy(model(xs, "t0"), ys), list(trunk(model).values()))
        for n, gradient in zip(expected, found, strict=True):
            expected[n] += len(xs) / len(x) * gradient**2
    method.end_task(zip(x.split(delivered), y.split(delivered), strict=True))
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-4, atol=1e-10)


def test_the_papers_fisher_is_measured_in_train_mode_with_dropout_and_leaves_no_trace():
    def with_dropout():
        return nn.Sequential(mlp(), nn.Dropout(0.5))

    def fisher(mode):
        method, model, optimizer = fresh("ewc", net=with_dropout, fisher="batched", mode=mode)
        learn(method, optimizer, 0, epochs=2, end=False)
        state, model_state = torch.get_rng_state(), bits(model)
        method.end_task(blobs(0))
        assert torch.equal(state, torch.get_rng_state())
        assert same(model_state, bits(model))
        assert all(p.grad is not None for p in trunk(model).values())  # as the loop left them
        return method.knowledge.importances["trunk.0.0.weight"]

    assert not torch.equal(fisher("train"), fisher("eval"))


@pytest.mark.parametrize("kind", ["exact", "estimated", "sampled"])
def test_the_fisher_does_not_depend_on_how_the_work_is_cut(monkeypatch, kind):
    def fisher():
        method, _ = measured(mlp, fisher=kind)
        method.end_task(blobs(0))
        return method.knowledge.importances

    whole = fisher()
    monkeypatch.setattr(importance, "MAX_SAMPLES", 5)
    parts = fisher()
    monkeypatch.setattr(importance, "MAX_FLOATS", {"cpu": 1})  # one sample and one class at a time
    for n, f in fisher().items():
        torch.testing.assert_close(f, whole[n], rtol=1e-4, atol=1e-10)
        torch.testing.assert_close(parts[n], whole[n], rtol=1e-4, atol=1e-10)


def test_a_forward_of_ones_own_gives_the_log_probability_of_an_action():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = mlp(), nn.ModuleDict({"t0": nn.Linear(32, 3)})

        def forward(self, x, task):
            return {"logits": self.heads[task](self.body(x))}

    def run(fisher, forward):
        torch.manual_seed(0)
        model = Policy()
        optimizer = adam(model)
        method = EWC(model, heads="heads", fisher=fisher)
        method.begin_task("t0", optimizer)
        x, action = blobs(0)[0]
        F.cross_entropy(model(x, "t0")["logits"], action).backward()
        optimizer.step()
        method.end_task(blobs(0), forward and (lambda batch: forward(model, batch)))
        return method, model

    def log_probability(model, batch):
        return model(batch[0], "t0")["logits"].log_softmax(1).gather(1, batch[1][:, None])[:, 0]

    method, model = run("sampled", log_probability)
    values = (log_probability(model, one)[0] for one in samples(blobs(0)))
    body = {n: p for n, p in model.named_parameters() if n.startswith("body")}
    for n, f in slow(body, ([(value, 1.0)] for value in values)).items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-3, atol=1e-8)
    with pytest.raises(ValueError, match="fisher='sampled'"):
        run("exact", log_probability)
    with pytest.raises(ValueError, match="a dict"):
        run("exact", None)
    method, model = run("exact", lambda model, batch: model(batch[0], "t0")["logits"])
    assert method.knowledge.importances["body.0.weight"].max() > 0


@pytest.mark.parametrize("name", ["ewc", "ewc paper", "mas", "mas paper"])
def test_a_task_without_data_or_with_broken_weights_is_not_ended(name):
    method, model, optimizer = fresh(name)
    learn(method, optimizer, 0, end=False)
    with pytest.raises(RuntimeError, match="batches"):
        method.end_task([])
    with torch.no_grad():
        model.trunk[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        method.end_task(blobs(0))
    assert method.task == "t0"
    assert not method.knowledge.importances


@pytest.mark.parametrize("kind", ["exact", "estimated", "empirical"])
def test_a_weight_of_a_single_number_has_a_fisher_too(kind):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.scale * self.body(x)

    method, _model = measured(Scaled, fisher=kind)
    method.end_task(blobs(0))
    assert method.knowledge.importances["trunk.scale"].shape == ()
    assert method.knowledge.importances["trunk.scale"] > 0


def test_a_model_that_runs_no_single_example_gets_a_way_out():
    class Paired(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 32)

        def forward(self, x):
            first, second = self.layer(x).unflatten(0, (-1, 2)).unbind(1)
            return torch.stack((first, second), 1).flatten(0, 1)

    method, _, optimizer = fresh("ewc", net=Paired)
    learn(method, optimizer, 0, end=False)
    with pytest.raises(RuntimeError, match="fisher='batched'"):
        method.end_task(blobs(0))


# MAS ------------------------------------------------------------------------------------------------------------------


@NETS
def test_mas_is_the_mean_absolute_gradient_of_the_squared_norm_of_each_output(net):
    method, model, optimizer = fresh("mas", net=net)
    expected = {}
    for number in range(2):
        learn(method, optimizer, number, epochs=2, end=False)
        model.eval()
        sizes = (model(x, f"t{number}").square().sum() for x, _ in samples(blobs(number)))
        for n, f in slow(trunk(model), ([(size, 1.0)] for size in sizes), power=1).items():
            expected[n] = expected.get(n, 0) + f
        method.end_task([x for x, _ in blobs(number)])  # no labels needed
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-3, atol=1e-6)


def test_the_papers_mas_takes_absolute_values_of_the_summed_gradients_of_20_plain_norms():
    method, model, optimizer = fresh("mas paper")
    learn(method, optimizer, 0, end=False)
    x = torch.cat([x for x, _ in blobs(0)])
    expected = {n: torch.zeros_like(p) for n, p in trunk(model).items()}
    for part in x.split(20):
        found = torch.autograd.grad(model(part, "t0").norm(dim=1).sum(), list(trunk(model).values()))
        for n, gradient in zip(expected, found, strict=True):
            expected[n] += gradient.abs() / len(x)
    method.end_task(blobs(0))
    for n, f in expected.items():
        torch.testing.assert_close(method.knowledge.importances[n], f, rtol=1e-4, atol=1e-7)


# Paths ----------------------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """½ Σ a θ² as a model: the loss does not look at the data."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.a = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
        self.head = nn.ModuleDict({"t0": nn.Identity(), "t1": nn.Identity()})

    def forward(self, x, task):
        return 0.5 * (self.a * self.theta**2).sum()


def roll(method, optimizer, task="t0", steps=50):
    model = method.model
    method.begin_task(task, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(None, task).backward()
        optimizer.step()


def test_omega_of_si_on_a_quadratic_is_the_analytic_value():
    model, rate, steps, xi = Bowl(), 0.01, 50, 1e-3
    start = model.theta.detach().clone()
    method = SI(model, heads="head", c=1.0, xi=xi)
    roll(method, torch.optim.SGD(model.parameters(), lr=rate), steps=steps)
    method.end_task([])
    ratio = 1 - rate * model.a  # θ shrinks by it at each step, so −g·Δθ = rate·a²·θ² is a geometric series
    path = rate * model.a**2 * start**2 * (1 - ratio ** (2 * steps)) / (1 - ratio**2)
    end = start * ratio**steps
    torch.testing.assert_close(model.theta.detach(), end)
    torch.testing.assert_close(method.knowledge.importances["theta"], path / ((end - start) ** 2 + xi))
    drop = 0.5 * model.a * (start**2 - end**2)  # the continuous path integral is the loss's own decrease
    torch.testing.assert_close(path, drop, rtol=0.03, atol=0)


@pytest.mark.parametrize("kind", [EWC, SI, RWalk, MAS, L2])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_weights_that_join_within_a_task_are_held_as_the_others(kind, how):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method = kind(model, **{kind.strength_setting: 1e4})
    learn(method, adam(model), 0)
    first = model.trunk[0]
    before = first.weight.detach().clone()
    first.requires_grad_(how == "added")
    optimizer = torch.optim.SGD(model.trunk[2 if how == "added" else 0 :].parameters(), lr=1e-6)
    learn(method, optimizer, 1, steps=range(4), end=False)  # a new head warms up first
    first.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": first.parameters()})
    pushed = []
    for x, y in blobs(1):
        optimizer.zero_grad()
        with torch.no_grad():
            first.weight.add_(0.1)  # away from its anchor
        F.cross_entropy(model(x, "t1"), y).backward()
        plain = first.weight.grad.clone()
        optimizer.step()
        pushed.append(not torch.equal(first.weight.grad, plain))
    assert torch.equal(method.knowledge.anchors["trunk.0.weight"], before)
    assert all(pushed)
    method.end_task(blobs(1))


@pytest.mark.parametrize("kind", [EWC, SI, RWalk, MAS, L2])
def test_between_tasks_the_penalty_is_zero_and_an_optimizer_that_maximises_is_refused(kind):
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), features=8)
    method = kind(model)
    model.add_head("t0", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.begin_task("t0", optimizer)
    x, y = blobs(0)[0]
    F.cross_entropy(model(x, "t0"), y).backward()
    optimizer.step()
    method.end_task(blobs(0))
    assert float(method.penalty()) == 0.0
    model.add_head("t1", 3)
    with pytest.raises(ValueError, match="maximize=True would maximise the penalty"):
        method.begin_task("t1", torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_omega_of_si_is_clipped_by_default_and_not_in_the_papers_form():
    def omega(**settings):
        model = Bowl()
        method = SI(model, heads="head", **settings)
        roll(method, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True), steps=5)  # uphill
        method.end_task([])
        return method.knowledge.importances["theta"]

    assert torch.equal(omega(), torch.zeros(3, dtype=torch.float64))
    assert bool((omega(**SI.paper) < 0).all())


def test_si_integrates_the_tasks_gradient_by_default_and_the_total_in_the_papers_form():
    def paths(gradient):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        method = SI(model, heads="head", c=3.0, gradient=gradient)
        roll(method, optimizer)
        method.end_task([])
        before = model.theta.detach().clone()
        omega = method.knowledge.importances["theta"]
        expected = torch.zeros(3, dtype=torch.float64)
        model.a = torch.tensor([3.0, 0.5, 2.0], dtype=torch.float64)
        theta = before.clone()
        for _ in range(50):
            task, pull = model.a * theta, 6.0 * omega * (theta - before)
            step = -0.01 * (task + pull)
            expected -= (task if gradient == "task" else task + pull) * step
            theta = theta + step
        roll(method, optimizer, "t1")
        torch.testing.assert_close(model.theta.detach(), theta)
        torch.testing.assert_close(method.plan.path["theta"], expected)
        return method.plan.path["theta"]

    assert not torch.allclose(paths("task"), paths("total"))


@pytest.mark.parametrize("form", ["own", "paper"])
def test_rwalk_follows_its_definition_step_by_step(form):
    settings = {} if form == "own" else RWalk.paper
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    method = RWalk(model, heads="head", lam=2.0, **settings)
    fisher, score = (torch.zeros(3, dtype=torch.float64) for _ in range(2))
    importances = anchor = None
    for number in range(2):
        path = torch.zeros(3, dtype=torch.float64)
        theta, speed = model.theta.detach().clone(), None
        if number:
            optimizer.state.clear()
        for _ in range(20):
            task = model.a * theta
            total = task if number == 0 else task + 4.0 * importances * (theta - anchor)
            seen = task if form == "own" else total
            speed = total if speed is None else 0.5 * speed + total
            step = -0.02 * speed
            fisher = 0.9 * seen**2 + 0.1 * fisher
            gain = -seen * step
            path += (gain.clamp(min=0) if form == "own" else gain) / (0.5 * fisher * step**2 + method.config.eps)
            theta = theta + step
        roll(method, optimizer, f"t{number}", steps=20)
        torch.testing.assert_close(model.theta.detach(), theta)
        torch.testing.assert_close(method.plan.path["theta"], path)
        method.end_task([])
        score = path if form == "own" and number == 0 else (score + path) / 2
        anchor = theta
        if form == "own":
            importances = sum((t - t.min()) / (t.max() - t.min()) for t in (fisher, score))
        else:
            importances = fisher + score
        torch.testing.assert_close(method.knowledge.fisher["theta"], fisher)
        torch.testing.assert_close(method.knowledge.score["theta"], score)


# A fused optimizer under GradScaler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ewc", "si", "si paper", "rwalk", "rwalk paper", "l2"])
def test_under_a_grad_scaler_penalties_and_paths_are_those_of_unscaled_gradients(name):
    def run(scaled):
        method, model, _ = fresh(name)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for number in range(2):
            torch.manual_seed(number)
            model.add_head(f"t{number}", 3)
            method.begin_task(f"t{number}", optimizer)
            for x, y in blobs(number) * 3:
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x, f"t{number}"), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            if number == 0:
                method.end_task(blobs(number))
        return bits(model), getattr(method, "path", {})

    (scaled, scaled_path), (plain, plain_path) = run(True), run(False)
    for n in plain:
        torch.testing.assert_close(scaled[n], plain[n], rtol=1e-3, atol=1e-4)
    for n in plain_path:
        torch.testing.assert_close(scaled_path[n], plain_path[n], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["si", "si paper", "rwalk", "rwalk paper"])
def test_a_step_skipped_on_overflow_does_not_enter_the_path(name):
    method, model, _ = fresh(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.add_head("t0", 3)
    method.begin_task("t0", optimizer)

    def step(factor):
        x, y = blobs(0)[0]
        optimizer.zero_grad()
        (scaler.scale(F.cross_entropy(model(x, "t0"), y)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    before, known = bits(model), copy.deepcopy(method.state_dict())
    step(math.inf)
    assert same(before, bits(model))
    for kind in ("path", "fisher"):
        for n, tensor in known.get(kind, {}).items():
            assert tensor.abs().max() > 0
            assert torch.equal(tensor, method.state_dict()[kind][n])
    step(1.0)
    assert all(bool(t.isfinite().all()) for t in method.plan.path.values())


# The life cycle -------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(("net", "batchnorm"), [(mlp, "freeze"), (conv_net, "per_task")])
def test_resumed_in_the_middle_of_a_task_it_continues_bit_identically(name, net, batchnorm):
    whole, model, optimizer = fresh(name, net=net, batchnorm=batchnorm)
    for number in range(3):
        learn(whole, optimizer, number, epochs=4 if number == 1 else 1)

    method, first, optimizer = fresh(name, net=net, batchnorm=batchnorm)
    learn(method, optimizer, 0, epochs=1)
    learn(method, optimizer, 1, steps=range(7), end=False)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), method.state_dict()))

    resumed, second, _ = fresh(name, seed=99, net=net, batchnorm=batchnorm)
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    optimizer = torch.optim.Adam([*second.trunk.parameters(), *second.heads.parameters()], lr=1e-2)
    resumed.load_state_dict(saved[2], optimizer)
    optimizer.load_state_dict(saved[1])
    learn(resumed, optimizer, 1, steps=range(7, 16), begin=False)
    learn(resumed, optimizer, 2, epochs=1)

    assert same(bits(model), bits(second))
    assert whole.statistics() == resumed.statistics()
    x = blobs(0)[0][0]
    outputs = [m.head_outputs(x) for m in (whole, resumed)]
    assert all(torch.equal(outputs[0][task], outputs[1][task]) for task in whole.tasks)


@each
def test_a_state_of_another_method_or_network_is_refused(name):
    method, model, optimizer = fresh(name)
    learn(method, optimizer, 0)
    with pytest.raises(ValueError, match="state of"):
        FineTune(model).load_state_dict(method.state_dict())
    torch.manual_seed(0)
    wide = MultiHead(mlp(40), features=40)
    wide.add_head("t0", 3)
    other = type(method)(wide)
    with pytest.raises(ValueError, match="another network"):
        other.load_state_dict(method.state_dict())
    assert other.tasks == []


@each
@pytest.mark.parametrize("batchnorm", ["freeze", "per_task", "shared"])
def test_the_models_keys_stay_as_they_are_and_close_leaves_nothing_behind(name, batchnorm):
    method, model, optimizer = fresh(name, net=conv_net, batchnorm=batchnorm)
    keys = list(model.state_dict())
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    assert [key for key in model.state_dict() if "heads" not in key] == keys
    method.close()
    assert all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert StepHooks.get(optimizer) is None


@each
def test_step_with_a_closure_gives_the_same_weights_as_step(name):
    plain, model_a, optimizer_a = fresh(name)
    closed, model_b, optimizer_b = fresh(name)
    for number in range(2):
        learn(plain, optimizer_a, number, epochs=3)
        task, data = f"t{number}", blobs(number)
        torch.manual_seed(number)
        model_b.add_head(task, 3)
        closed.begin_task(task, optimizer_b)
        for x, y in data * 3:

            def closure(x=x, y=y, task=task):
                optimizer_b.zero_grad()
                loss = F.cross_entropy(model_b(x, task), y)
                loss.backward()
                return loss

            optimizer_b.step(closure)
        closed.end_task(data)
    assert same(bits(model_a), bits(model_b))


@each
def test_penalties_may_be_added_before_a_clip_and_are_not_added_twice(name):
    def run(early):
        method, model, optimizer = fresh(name)
        for number in range(2):
            torch.manual_seed(number)
            model.add_head(f"t{number}", 3)
            method.begin_task(f"t{number}", optimizer)
            for x, y in blobs(number) * 3:
                optimizer.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                if early:
                    method.add_penalty_gradients()
                optimizer.step()
            method.end_task(blobs(number))
        return bits(model)

    assert same(run(True), run(False))


@each
def test_memory_reported_between_tasks_is_memory_held(name):
    method, model, optimizer = fresh(name, net=conv_net, batchnorm="per_task")
    for number in range(2):
        learn(method, optimizer, number, epochs=2)
    weights = sum(p.numel() for p in trunk(model).values())
    memory = method.memory()
    assert memory["importances"] == {"l2": 0, "rwalk": 2 * weights}.get(name.split()[0], weights)
    assert memory["anchors"] == weights
    assert memory["statistics"] == 2 * (4 + 4 + 1)

    def tensors(value, seen):
        if isinstance(value, Tensor):
            seen[value.data_ptr()] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            for one in value.values():
                tensors(one, seen)
        elif isinstance(value, list | tuple):
            for one in value:
                tensors(one, seen)
        return seen

    held = {key: value for key, value in vars(method).items() if key not in ("model", "heads")}
    assert sum(tensors([held, vars(method.knowledge)], {}).values()) == memory["bytes"]


def test_a_model_whose_tasks_share_one_head_has_it_protected():
    torch.manual_seed(0)
    model = OneHead()
    optimizer = adam(model)
    method = EWC(model, heads="out")
    method.begin_task("t0", optimizer)
    for x, y in blobs(0):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    method.end_task(blobs(0))
    assert set(method.knowledge.importances) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (EWC, {"lam": -1}),
        (EWC, {"fisher": "no"}),
        (EWC, {"gamma": 0}),
        (EWC, {"mode": "train"}),
        (EWC, {"batch": 0}),
        (EWC, {"batchnorm": "no"}),
        (SI, {"c": math.inf}),
        (SI, {"xi": 0}),
        (RWalk, {"alpha": 1.5}),
        (RWalk, {"gradient": "all"}),
        (MAS, {"norm": "l1"}),
        (MAS, {"mode": "train"}),
        (L2, {"lam": math.nan}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(kind, wrong):
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*{next(iter(wrong))}"):
        kind(MultiHead(mlp()), **wrong)


# Self-check -----------------------------------------------------------------------------------------------------------


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if issubclass(w.category, SelfCheckWarning)]


@every
def test_an_ordinary_run_warns_of_nothing(name):
    method, _, optimizer = fresh(name)
    assert warned(lambda: [learn(method, optimizer, n, epochs=2) for n in range(2)]) == []


@each
def test_it_warns_once_when_its_strength_is_zero(name):
    setting = "c" if name.startswith("si") else "lam"
    method, _, optimizer = fresh(name, **{setting: 0.0})
    messages = warned(lambda: [learn(method, optimizer, n, epochs=1) for n in range(3)])
    assert len(messages) == 1
    assert f"{setting} is 0" in messages[0]


@pytest.mark.parametrize("name", [name for name in ALL if name != "l2"])
def test_it_warns_with_the_suspected_cause_when_every_importance_is_zero(name):
    method, _, optimizer = fresh(name)
    learn(method, optimizer, 0, epochs=1)
    for table in (value for key, value in vars(method.knowledge).items() if key in ("importances", "fisher", "score")):
        torch._foreach_zero_(list(table.values())) if table else None
    messages = warned(lambda: learn(method, optimizer, 1, epochs=1))
    assert len(messages) == 1
    assert "Every importance is 0" in messages[0]
    assert method.no_importance_advice in messages[0]


def test_it_warns_when_no_protected_weight_moves_or_is_trained():
    method, model, optimizer = fresh("ewc")
    learn(method, optimizer, 0, epochs=1)
    optimizer.param_groups[0]["lr"] = 0.0
    messages = warned(lambda: learn(method, optimizer, 1, epochs=1))
    assert any("stayed 0" in m and "learning rate" in m for m in messages)

    method, model, optimizer = fresh("ewc")
    learn(method, optimizer, 0, epochs=1)
    model.add_head("t1", 3)
    model(blobs(1)[0][0], "t1")
    heads_only = torch.optim.Adam(model.heads["t1"].parameters(), lr=1e-2)
    messages = warned(lambda: learn(method, heads_only, 1, epochs=1))
    assert any("No optimizer given to begin_task" in m for m in messages)


# BatchNorm ------------------------------------------------------------------------------------------------------------


def test_frozen_statistics_stay_as_task_1_left_them_and_are_used_in_training_too():
    method, model, optimizer = fresh("ewc", net=conv_net)
    start = bits(model)
    learn(method, optimizer, 0)
    after = bits(model)
    assert not torch.equal(start["trunk.2.running_mean"], after["trunk.2.running_mean"])
    learn(method, optimizer, 1, end=False)
    x = blobs(1)[0][0]
    model.train()
    in_training = model(x, "t1")
    assert model.trunk[2].training
    model.eval()
    assert torch.equal(in_training, model(x, "t1"))
    method.end_task(blobs(1))
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(after[f"trunk.2.{key}"], bits(model)[f"trunk.2.{key}"])


def test_a_forward_that_fails_leaves_a_frozen_norm_in_training_mode():
    method, model, optimizer = fresh("ewc", net=conv_net)
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, end=False)
    with pytest.raises(ValueError, match="4D"):
        model.trunk[2](torch.zeros(2, 4))
    assert model.trunk[2].training


def test_each_task_sees_its_own_statistics_where_they_are_per_task():
    method, model, optimizer = fresh("ewc", net=conv_net, batchnorm="per_task")
    statistics = []
    for number in range(3):
        learn(method, optimizer, number)
        statistics.append(model.trunk[2].running_mean.clone())
    assert not torch.equal(statistics[0], statistics[2])
    model.eval()
    x, plain = blobs(0)[0][0], copy.deepcopy(model)  # a copy keeps the hooks; take them away
    for module in plain.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    for number in range(3):
        kept = method.knowledge.norm_statistics[f"t{number}"]
        assert torch.equal(kept["trunk.2.running_mean"], statistics[number])
        plain.trunk[2].running_mean, plain.trunk[2].running_var = (
            kept[f"trunk.2.running_{what}"].clone() for what in ("mean", "var")
        )
        expected = plain(x, f"t{number}")
        assert torch.equal(model(x, f"t{number}"), expected)
        assert torch.equal(model(x, task=f"t{number}"), expected)
        assert torch.equal(method.head_outputs(x)[f"t{number}"], expected)
    model(x, "t0").sum().backward()  # statistics were exchanged, not written over
    assert torch.equal(model.trunk[2].running_mean, statistics[2])


def test_viewing_a_task_switches_the_statistics_of_a_model_that_is_not_told_the_task():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.outs = conv_net(), nn.ModuleList(nn.Linear(32, 3) for _ in range(2))

        def forward(self, x):
            return self.body(x)

    torch.manual_seed(0)
    model = Own()
    optimizer = adam(model)
    method = L2(model, heads="outs", batchnorm="per_task")
    for number in range(2):
        method.begin_task(f"t{number}", optimizer)
        for x, y in blobs(number):
            optimizer.zero_grad()
            F.cross_entropy(model.outs[number](model(x)), y).backward()
            optimizer.step()
        method.end_task(blobs(number))
    model.eval()
    x = blobs(0)[0][0]
    last = model(x)
    with method.viewing("t0"):
        first = model(x)
    assert not torch.equal(first, last)
    assert torch.equal(model(x), last)


def test_shared_statistics_are_updated_by_every_task():
    method, model, optimizer = fresh("ewc", net=conv_net, batchnorm="shared")
    learn(method, optimizer, 0)
    before = model.trunk[2].running_mean.clone()
    learn(method, optimizer, 1)
    assert not torch.equal(before, model.trunk[2].running_mean)


# Together -------------------------------------------------------------------------------------------------------------


def together(order, seed=0):
    torch.manual_seed(seed)
    model = MultiHead(mlp(), features=32)
    members = [EWC(model, lam=5.0), EWC(model, lam=20.0), SI(model, c=0.1, **SI.paper), MAS(model, lam=0.1)]
    return Together(*(members[place] for place in order)), model, adam(model)


@pytest.mark.parametrize("kinds", [(PackNet, WSN), (AGSCL, PackNet)], ids=lambda kinds: kinds[0].__name__)
def test_two_methods_that_decide_which_weights_are_free_are_not_put_together(kinds):
    model = MultiHead(mlp())
    with pytest.raises(ValueError, match="would undo each other's work"):
        Together(*(make(kind, model) for kind in kinds))


def test_methods_act_together_and_their_order_makes_no_difference_to_a_single_bit():
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        method, model, optimizer = together(order)
        for number in range(3):
            learn(method, optimizer, number, end=False)
            method.end_task(iter(blobs(number)))  # also batches that can be walked through only once
        assert all(p.requires_grad for p in model.parameters())
        found.append((bits(model), method.memory(), repr(method)))
    assert same(found[0][0], found[1][0])
    assert same(found[0][0], found[2][0])
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("ended", ["in order", "in reverse"])
def test_methods_given_to_one_optimizer_one_by_one_do_not_depend_on_the_order_either(ended):
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        torch.manual_seed(0)
        model = MultiHead(mlp(), features=32)
        kinds = [EWC(model, lam=5.0), EWC(model, lam=20.0), MAS(model, lam=0.1)]
        methods, optimizer = [kinds[place] for place in order], adam(model)
        for number in range(3):
            model.add_head(f"t{number}", 3)
            for method in methods:
                method.begin_task(f"t{number}", optimizer)
            for x, y in blobs(number) * 3:
                optimizer.zero_grad()
                F.cross_entropy(model(x, f"t{number}"), y).backward()
                optimizer.step()
            for method in methods if ended == "in order" else reversed(methods):
                method.end_task(blobs(number))
            assert all(p.requires_grad for p in model.parameters())
        found.append(bits(model))
    assert same(*found)


def test_the_penalties_of_methods_together_add_up():
    method, model, optimizer = together([0, 1, 2, 3])
    learn(method, optimizer, 0)
    learn(method, optimizer, 1, steps=range(5), end=False)
    for p in trunk(model).values():
        p.grad = torch.zeros_like(p)
    weights = trunk(model)
    formula = sum(
        (m.strength * m.knowledge.importances[n] * (p - m.knowledge.anchors[n]) ** 2).sum()
        for m in method.methods
        for n, p in weights.items()
    )
    expected = torch.autograd.grad(formula, list(weights.values()))
    method.add_penalty_gradients()
    for p, gradient in zip(weights.values(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(method.penalty(), formula.detach().double())


def test_methods_together_resume_in_the_middle_of_a_task_and_leave_nothing_behind():
    whole, model, optimizer = together([0, 1, 2, 3])
    for number in range(2):
        learn(whole, optimizer, number, epochs=4)

    method, first, optimizer = together([1, 0, 3, 2])
    learn(method, optimizer, 0, epochs=4)
    learn(method, optimizer, 1, steps=range(7), end=False)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), method.state_dict()))
    resumed, second, _ = together([2, 0, 3, 1], seed=9)
    for task in ("t0", "t1"):
        second.add_head(task, 3)
    second.load_state_dict(saved[0])
    optimizer = torch.optim.Adam([*second.trunk.parameters(), *second.heads.parameters()], lr=1e-2)
    resumed.load_state_dict(saved[2], optimizer)
    optimizer.load_state_dict(saved[1])
    learn(resumed, optimizer, 1, steps=range(7, 16), begin=False)
    assert same(bits(model), bits(second))
    assert resumed.certificate().task == "t1"
    assert all(p.requires_grad for p in second.parameters())
    resumed.close()
    assert not optimizer._optimizer_step_post_hooks


def test_what_cannot_act_together_is_refused():
    model = MultiHead(mlp())
    with pytest.raises(ValueError, match="two methods"):
        Together(EWC(model))
    with pytest.raises(ValueError, match="same model"):
        Together(EWC(model), SI(MultiHead(mlp())))
    with pytest.raises(ValueError, match="add_head"):
        Together(EWC(model), SI(model)).begin_task("t0", adam(model))


# Real digits ----------------------------------------------------------------------------------------------------------


def accuracies(make, seed=0) -> tuple[float, float]:
    """Mean accuracy on 5 tasks of 2 digits each, per cent: just after each was learned, and after all."""
    torch.manual_seed(seed)
    model = MultiHead(MLP(64, (50, 50, 50)), features=50)
    method, sequence, learned = make(model), tasks.load("digits", seed=0), []

    def accuracy(task):
        model.eval()
        with torch.no_grad():
            return 20 * float((model(task.test_x, task.name).argmax(1) == task.test_y).float().mean())

    for task in sequence:
        model.add_head(task.name, task.classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        method.begin_task(task.name, optimizer)
        model.train()
        for _ in range(10):
            for rows in torch.randperm(len(task.train_y)).split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(task.train_x[rows], task.name), task.train_y[rows]).backward()
                optimizer.step()
        method.end_task([(task.train_x, task.train_y)])
        learned.append(accuracy(task))
    return sum(learned), sum(accuracy(task) for task in sequence)


@pytest.fixture(scope="module")
def fine_tuning() -> tuple[float, float]:
    learned, kept = accuracies(FineTune)
    assert learned - kept > 15
    return learned, kept


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (EWC, {"lam": 1e4}),
        (EWC, {"lam": 1e6, **EWC.paper}),
        (SI, {"c": 1.0}),
        (SI, {"c": 10.0, **SI.paper}),
        (RWalk, {"lam": 1.0}),
        (RWalk, {"lam": 8.0, **RWalk.paper}),
        (MAS, {"lam": 2.0}),
        (MAS, {"lam": 4.0, **MAS.paper}),
        (L2, {"lam": 0.7}),
    ],
    ids=str,
)
def test_on_digits_it_saves_at_least_half_of_what_fine_tuning_loses(kind, settings, fine_tuning):
    learned, kept = fine_tuning
    _, mine = accuracies(lambda model: kind(model, **settings))
    assert mine - kept >= (learned - kept) / 2
