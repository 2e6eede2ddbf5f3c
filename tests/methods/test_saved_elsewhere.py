"""Weights and methods that were saved and loaded: what is said where one is loaded without the other."""

from __future__ import annotations

import warnings

import pytest
import torch

from agscl import AGSCL, EWC, HAT, WSN, FineTune, MultiHead, PackNet
from agscl.methods._parts.warnings import SelfCheckWarning
from loops import adam, bits, learn, make, mlp

KINDS = [AGSCL, EWC, HAT, PackNet, WSN]


def learn_two(kind):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    method, optimizer = make(kind, model), adam(model)
    for number in range(2):
        learn(method, optimizer, number)
    return model, method


def load_elsewhere(model, kind):
    """The weights in a new model, with a new method."""
    again = MultiHead(mlp(), features=32)
    for number in range(2):
        again.add_head(f"t{number}", 3)
    again.load_state_dict(bits(model))
    return again, make(kind, again)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_method_on_loaded_weights_warns_that_learned_heads_are_not_protected(kind):
    model, _ = learn_two(kind)
    again, other = load_elsewhere(model, kind)
    again.add_head("t2", 3)
    with pytest.warns(SelfCheckWarning, match=r"loaded with heads of t0, t1, which this \w+ did not learn"):
        other.begin_task("t2", adam(again), epochs=2)


@pytest.mark.filterwarnings("ignore:.*(closed|fire|pruned|penalty|steps).*")
@pytest.mark.parametrize("kind", [AGSCL, PackNet])
def test_with_its_state_loaded_or_where_nothing_is_protected_there_is_no_such_warning(kind):
    model, method = learn_two(kind)
    for loaded in (kind, FineTune):
        again, other = load_elsewhere(model, loaded)
        if loaded is kind:
            other.load_state_dict(method.state_dict())
        again.add_head("t2", 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.begin_task("t2", adam(again), epochs=2)


@pytest.mark.filterwarnings("ignore")
def test_weights_for_one_task_are_given_or_refused_with_the_way_out():
    for kind in (EWC, WSN, HAT):
        model, method = learn_two(kind)
        if kind is EWC:
            assert torch.equal(method.state_dict_for("t0")["trunk.0.weight"], model.trunk[0].weight)
        else:
            with pytest.raises(NotImplementedError, match="Save the method with the model"):
                method.state_dict_for("t0")
        with pytest.raises(ValueError, match="has not begun"):
            method.state_dict_for("other")


@pytest.mark.parametrize("kind", [EWC, PackNet, WSN])
def test_a_method_that_takes_the_model_alone_says_so(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes the model alone"):
        kind(MultiHead(mlp()), torch.zeros(2, 16))


def test_a_subclass_may_take_what_it_likes():
    class Passed(AGSCL):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)

    class Weighted(EWC):
        def __init__(self, model, strength):
            super().__init__(model, lam=10 * strength)

    assert Passed(MultiHead(mlp()), torch.zeros(2, 16), budget=0.5).config.budget == 0.5
    assert Weighted(MultiHead(mlp()), 3.0).config.lam == 30


@pytest.mark.filterwarnings("ignore")
def test_a_check_that_found_a_change_is_false():
    model, method = learn_two(AGSCL)
    certificate = method.certificate()
    assert certificate.check(bits(model))
    model.trunk[0].weight.data += 1
    assert not certificate.check(bits(model))
