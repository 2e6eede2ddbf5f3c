"""A trunk's forward pass, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NARROW = 32
"""The most numbers an output of a convolution may read for it to be computed as a matrix product."""
ALIGNED = 16
"""Columns of that product come in multiples of this, as tensor cores take them."""


class CompileFailed(RuntimeError):
    """Torch could not compile the network on this machine."""


class Compiled:
    """The compiled call of a module, for all its copies of the same form.

    On a GPU the convolution that reads the pictures is computed as a matrix product, on tensor cores: for so few
    channels cuDNN chose none of its kernels that use them.
    """

    def __init__(self, module: nn.Module, products: bool) -> None:
        self.module = module
        self.call: Callable[..., Any] = torch.compile(_calling(module), dynamic=False)
        self.narrow = [part for part in module.modules() if products and _narrow(part)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let calls of the module run as compiled, unless there are hooks within it."""
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())
        if hooked:
            yield
            return
        narrow = [part for part in self.narrow if "forward" not in vars(part)]  # leave a user's own alone
        self.module._compiled_call_impl = self.call
        for convolution in narrow:
            convolution.forward = MethodType(as_product, convolution)
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CompileFailed(
                "the network could not be compiled, which needs a C++ compiler and Python's headers (gcc, "
                f"python3-dev): leave out --fast, or use --set compile=false. Torch said: {reason}"
            ) from error
        finally:
            self.module._compiled_call_impl = None
            for convolution in narrow:
                del convolution.forward


def as_product(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """What the convolution gives of `x`, as the product of its weights and all that they are laid over."""
    padding = convolution.padding
    assert not isinstance(padding, str)
    if x.requires_grad or x.dim() != 4:
        return F.conv2d(x, convolution.weight, convolution.bias, padding=padding)
    (height, width), (above, left) = convolution.kernel_size, padding
    windows = F.pad(x, (left, left, above, above)).unfold(2, height, 1).unfold(3, width, 1)
    columns = windows.permute(0, 2, 3, 4, 5, 1).flatten(3)  # as channels-last weights lie in memory
    weight = convolution.weight.permute(0, 2, 3, 1).flatten(1)
    spare = (0, -weight.shape[1] % ALIGNED)
    return F.linear(F.pad(columns, spare), F.pad(weight, spare), convolution.bias).permute(0, 3, 1, 2)


def _narrow(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.weight[0].numel() <= NARROW
        and module.stride == module.dilation == (1, 1)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _calling(module: nn.Module) -> Callable[..., Any]:
    """What calling a module does. `module.compile()` leaves torch's own containers uncompiled, without a word."""

    def call(*inputs: Any, **named: Any) -> Any:
        return module._call_impl(*inputs, **named)

    return call
