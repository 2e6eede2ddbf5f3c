"""Tensors come to the host whole."""

from __future__ import annotations

import pytest
import torch

from agscl.system.host_copies import copy_to_host


def test_what_is_on_the_host_stays_as_it_is():
    tensor = torch.arange(3)
    assert copy_to_host(tensor) is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_holds_what_was_launched_on_the_same_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(2**22, device="cuda")
        for _ in range(50):
            tensor += 1
        copy = copy_to_host(tensor)
    assert copy.device.type == "cpu"
    assert bool((copy == 50).all())
