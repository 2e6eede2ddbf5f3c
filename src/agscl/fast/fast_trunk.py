"""A trunk's forward and backward pass made faster: with our Triton kernels, else by torch's compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from agscl.fast._torch_internals import has_forward_hooks, is_triton_error
from agscl.fast.fused_trunk import FusedTrunk, supports_network
from agscl.fast.torch_compiled_trunk import TorchCompiledTrunk, compile_failure
from agscl.fast.triton_support import HAS_TRITON
from agscl.fast.warm_up import WarmUp


class FastTrunk:
    """Runs a trunk without forward hooks by our Triton kernels or compiled by torch, within `use_fast_forward()`.

    With `rewrite_layers`, which is for a GPU, some layers are computed in another way, equal to rounding. If the trunk
    also computes in bfloat16, channels last (`bf16_channels_last`), and consists of plain layers alone, our kernels run
    all of it, and torch's compiler, which takes seconds to import, is not used; unless the first pass shows
    that the trunk calls its layers one by one, not through its `nn.Sequential`s.
    """

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        *,
        rewrite_layers: bool,
        bf16_channels_last: bool,
        fused_layers: bool = True,
        own_convolutions: bool = True,
    ) -> None:
        self.network, self.device = network, device
        self.rewrite_layers, self.own_convolutions = rewrite_layers, own_convolutions
        on_gpu = device.type == "cuda"
        fusable = fused_layers and rewrite_layers and bf16_channels_last and (HAS_TRITON or not on_gpu)
        self.fused = FusedTrunk(network, own_convolutions) if fusable and supports_network(network) else None
        self.torch_compiled = None if self.fused else self._compile_with_torch()
        self.version = 0
        """Counts up when torch's compiler replaces our kernels: what is to be captured must be warmed up again then."""
        self._triton_checked = not on_gpu
        self._warm_up = WarmUp(device) if self.fused and on_gpu else None

    def _compile_with_torch(self) -> TorchCompiledTrunk:
        return TorchCompiledTrunk(
            self.network, self.device, rewrite_layers=self.rewrite_layers, own_convolutions=self.own_convolutions
        )

    def wait_for_warm_up(self) -> None:
        """Wait for the threads that warm up the device and Triton; call this before the fast trunk is compiled."""
        if self._warm_up is not None:
            self._warm_up.wait()
            self._warm_up = None

    @contextmanager
    def use_fast_forward(self, full_batch: bool = True) -> Iterator[None]:
        """Let calls of the trunk run with our kernels or compiled; torch's compiler is used for full batches alone."""
        if any(map(has_forward_hooks, self.network.modules())):
            yield
        elif self.torch_compiled is not None:
            with self.torch_compiled.use_compiled_forward(full_batch):
                yield
        else:
            with self._use_fused_layers():
                yield
            assert self.fused is not None
            if not self.fused.all_layers_fused:
                self.fused, self.torch_compiled = None, self._compile_with_torch()
                self.version += 1

    @contextmanager
    def _use_fused_layers(self) -> Iterator[None]:
        assert self.fused is not None
        if not self._triton_checked:
            _check_triton_compiles(self.device)
            self._triton_checked = True
        try:
            with self.fused.use_fused_layers():
                yield
        except Exception as error:
            if not is_triton_error(error):
                raise
            raise compile_failure(error) from error


def _check_triton_compiles(device: torch.device) -> None:
    """Compile one small kernel, to raise a clear error where Triton cannot compile."""
    from agscl.fast import triton_kernels

    partials = torch.zeros(512, 32, device=device)
    try:
        triton_kernels.launch_sum_partials(partials, torch.empty_like(partials[0]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise compile_failure(error) from error
