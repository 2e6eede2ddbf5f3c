"""Tensors come to the host whole."""

from __future__ import annotations

import pytest
import torch

from agscl.system.host_copies import HostCopy, copy_to_host


def test_a_copy_holds_what_the_tensor_was_when_it_was_made():
    tensor = torch.arange(3)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.wait().tolist() == [0, 1, 2]


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
