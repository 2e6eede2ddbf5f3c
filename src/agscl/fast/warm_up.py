"""Start-up work done in background threads: loading a GPU's libraries, hashing compilers' code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread

import torch
import torch.nn.functional as F

from agscl.fast._torch_internals import precompute_compiler_cache_keys, precompute_triton_cache_key
from agscl.methods._agscl.proximal import pull, shrink


class WarmUp:
    """Warms up the device and Triton in two threads, unless Triton was imported before."""

    def __init__(self, device: torch.device) -> None:
        self._threads: list[Thread] = []
        if "triton" not in sys.modules:
            self._threads = [
                Thread(target=warm_up_device, args=(device,)),
                Thread(target=precompute_triton_cache_key),
            ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Call this before work is launched on another stream, which would not wait for the warm-up."""
        for thread in self._threads:
            thread.join()


@contextmanager
def warm_up_during_import(device: torch.device) -> Iterator[None]:
    """Warm up the device while torch's compiler is imported, which keeps only the CPU busy.

    Afterwards compute the keys of the compiler's cache, in the background.
    """
    if device.type != "cuda" or "torch._dynamo" in sys.modules:
        yield
        return
    thread = Thread(target=warm_up_device, args=(device,))
    thread.start()
    try:
        yield
    finally:
        thread.join()
    Thread(target=precompute_compiler_cache_keys, daemon=True).start()


def warm_up_device(device: torch.device | str) -> None:
    """Run forward, backward and a proximal step on zeros, so that the libraries they use are loaded.

    No optimizer step, which would import what another thread is importing; and no random numbers.
    """
    with suppress(RuntimeError), torch.enable_grad():  # the same error is raised again by the first step
        zeros = partial(torch.zeros, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            shapes = ((256, 32, 16, 16), (32, 32, 3, 3))
            x, weight = (zeros(shape, dtype=dtype).to(memory_format=torch.channels_last) for shape in shapes)
            bias, head = zeros(32, dtype=dtype), zeros(10, 32 * 8 * 8, dtype=dtype)
            for tensor in (x, weight, bias, head):
                tensor.requires_grad_()
            y = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=1)), 2)
            loss = F.cross_entropy(F.linear(y.flatten(1), head).float(), zeros(256, dtype=torch.long))
            loss.backward()
        rows, members = [zeros(32, 288), zeros(32)], torch.arange(64, device=device).view(2, 32).t()
        shrink(pull(rows, rows, zeros(32), members), zeros(32), members)
