"""Buffers of the trunk that a module changes as it runs, under methods that keep old outputs exactly."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from agscl import WSN, MultiHead, PackNet
from agscl.methods._parts.warnings import SelfCheckWarning
from loops import adam, blobs

METHODS = [PackNet, WSN]


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(3).to_sparse())

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean += (x.mean(0) - self.mean) / self.count
        return x - self.mean


def learn_tasks(cls, first, *, evaluated=False, resumed=False):
    """Outputs of the first task, then and now, and the warnings given."""
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(first, nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()), features=32)
    method, optimizer, outputs = cls(model), adam(model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            model.add_head(task := f"t{number}", 3)
            method.begin_task(task, optimizer, epochs=3)
            model.train()
            first.train(not (evaluated and number))
            for _ in range(3):
                for x, y in blobs(number):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x, task), y).backward()
                    optimizer.step()
                method.end_epoch()
            method.end_task(blobs(number))
            model.eval()
            outputs.append(model(blobs(0)[0][0], "t0").detach())
            if resumed:
                state = method.state_dict()
                with warnings.catch_warnings(action="ignore"):  # that old tasks need the method
                    method.close()
                method = cls(model)
                method.load_state_dict(state)
    return outputs, [str(w.message) for w in caught if w.category is SelfCheckWarning]


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("resumed", [False, True])
def test_buffers_that_change_after_the_first_task_are_warned_of_once_by_name(cls, resumed):
    outputs, messages = learn_tasks(cls, RunningMean(), resumed=resumed)
    assert not torch.equal(outputs[0], outputs[2])
    (message,) = messages
    assert "since task 't0' ended: trunk.0.mean, trunk.0.count. Outputs of old tasks change" in message


@pytest.mark.parametrize("cls", METHODS)
def test_vectors_of_spectral_norm_that_change_are_warned_of(cls):
    _, messages = learn_tasks(cls, spectral_norm(nn.Linear(16, 16)))
    assert any("trunk.0.parametrizations.weight.0._u" in message for message in messages)


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("make_first", [RunningMean, lambda: spectral_norm(nn.Linear(16, 16))])
def test_old_outputs_keep_their_bits_with_a_module_put_into_eval_mode_as_the_warning_says(cls, make_first):
    outputs, messages = learn_tasks(cls, make_first(), evaluated=True)
    assert torch.equal(outputs[0], outputs[2])
    assert not messages


@pytest.mark.parametrize("cls", METHODS)
def test_batchnorm_statistics_are_frozen_and_not_warned_of(cls):
    outputs, messages = learn_tasks(cls, nn.BatchNorm1d(16))
    assert torch.equal(outputs[0], outputs[2])
    assert not messages
