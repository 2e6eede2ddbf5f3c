"""A trunk compiled by torch, with some layers computed in another way that compiles into faster code.

On a GPU, and equal to rounding:
- 3 × 3 convolutions in bfloat16 use our weight gradient (`conv3x3`);
- other convolutions over few inputs become matrix products (im2col), as cuDNN has no tensor-core kernel for them;
- where a convolution, a ReLU and max pooling follow each other, the maximum is taken before bias and ReLU, which then
  read a quarter of the elements, as do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.fast._torch_internals import allow_cached_autograd_functions, is_torch_compile_error
from agscl.fast.conv3x3 import conv3x3, conv_relu_input, supports_conv_relu_input, supports_layer
from agscl.fast.max_pool import max_pool
from agscl.fast.replaced_forwards import can_replace_forward, replaced_forwards
from agscl.fast.warm_up import warm_up_during_import
from agscl.system.process import gc_paused
from agscl.training.engine import CompileFailed

MAX_IM2COL_INPUTS = 32
"""The most inputs that an output of a convolution may read for it to be computed as a matrix product."""
COLUMN_ALIGNMENT = 16
"""The number of columns of that product is a multiple of this, as tensor cores need it."""


class TorchCompiledTrunk:
    """A trunk compiled by torch for full batches; other batches run uncompiled, but with rewritten layers too."""

    def __init__(
        self, network: nn.Module, device: torch.device, *, rewrite_layers: bool, own_convolutions: bool = True
    ) -> None:
        self.network = network
        on_gpu = device.type == "cuda"
        options: dict[str, Any] | None = {"combo_kernels": True} if on_gpu else None  # fuse small kernels
        with warm_up_during_import(device), gc_paused():  # torch.compile imports much that is never freed
            self.compiled_call: Callable[..., Any] = torch.compile(_call, dynamic=False, options=options)
        modules = list(network.modules()) if rewrite_layers else []
        self.im2col_layers = [module for module in modules if supports_im2col(module)]
        convolutions = modules if own_convolutions else []
        self.conv3x3_layers = [m for m in convolutions if supports_layer(m) and m not in self.im2col_layers]
        self.pool_chains = [m for m in modules if type(m) is nn.Sequential and _find_pooled_convolutions(m)]
        self.own_convolutions = own_convolutions

    @contextmanager
    def use_compiled_forward(self, full_batch: bool) -> Iterator[None]:
        """Let calls of the trunk run compiled; batches that are not full run uncompiled, with rewritten layers."""
        compiled: dict[nn.Module, Any] = {}
        caches = allow_cached_autograd_functions() if self.pool_chains or self.conv3x3_layers else nullcontext()
        with replaced_forwards(self._rewritten_forwards(full_batch)):
            if full_batch:
                compiled[self.network] = partial(self.compiled_call, self.network.forward)
            try:
                with replaced_forwards(compiled), gc_paused(), caches:
                    yield
            except Exception as error:
                if not is_torch_compile_error(error):
                    raise
                raise compile_failure(error) from error

    def _rewritten_forwards(self, full_batch: bool) -> dict[nn.Module, Any]:
        """The forwards of rewritten layers, where `can_replace_forward`."""
        forwards: dict[nn.Module, Any] = {}
        for module in self.im2col_layers if full_batch else []:
            if can_replace_forward(module):
                forwards[module] = MethodType(conv_im2col, module)
        for module in self.conv3x3_layers:
            if can_replace_forward(module):
                forwards[module] = MethodType(conv3x3, module)
        pool = pool_before_relu if self.own_convolutions else pool_before_relu_with_cudnn
        for chain in self.pool_chains:
            if all(map(can_replace_forward, chain.modules())):
                forwards[chain] = MethodType(pool, chain)
        return forwards


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is compiled. Given `nn.Sequential.forward` itself, torch would silently leave it uncompiled."""
    return forward(*args, **kwargs)


def compile_failure(error: Exception) -> CompileFailed:
    """The error that says in one line why a network could not be compiled, and what to do."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CompileFailed(
        "the network could not be compiled, which needs a C++ compiler and Python's headers (gcc, python3-dev): "
        f"leave out --fast, or use --set compile=false. Torch said: {reason}"
    )


def supports_im2col(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.weight.shape[1:].numel() <= MAX_IM2COL_INPUTS
        and module.stride == module.dilation == (1, 1)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def conv_im2col(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """For torch's compiler: the convolution of `x` as the product of its weight and the windows it is applied to."""
    padding = layer.padding
    assert not isinstance(padding, str)
    if x.requires_grad or x.dim() != 4:
        return F.conv2d(x, layer.weight, layer.bias, padding=padding)
    (height, width), (above, left) = layer.kernel_size, padding
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # which autocast leaves as it is
        x = x.to(torch.get_autocast_dtype(x.device.type))  # before each element is written many times over
    # Windows and channels are padded to powers of two, by which indices are quickly divided.
    extra_width, extra_channels = _missing_to_power_of_two(width), _missing_to_power_of_two(layer.in_channels)
    padded = F.pad(x, (left, left + extra_width, above, above, 0, extra_channels))
    windows = padded.unfold(2, height, 1).unfold(3, width + extra_width, 1)
    columns = windows.permute(0, 2, 3, 4, 5, 1).flatten(3)  # in the order of a channels-last weight
    weight = F.pad(layer.weight, (0, extra_width, 0, 0, 0, extra_channels)).permute(0, 2, 3, 1).flatten(1)
    extra_columns = (0, -weight.shape[1] % COLUMN_ALIGNMENT)
    return F.linear(F.pad(columns, extra_columns), F.pad(weight, extra_columns), layer.bias).permute(0, 3, 1, 2)


def _missing_to_power_of_two(count: int) -> int:
    return (1 << (count - 1).bit_length()) - count


def pool_before_relu(chain: nn.Sequential, x: Tensor) -> Tensor:
    """For torch's compiler: a chain's output, with max pooling before bias and ReLU, which keep elements in order."""
    return _pool_before_relu(chain, x, own_convolutions=True)


def pool_before_relu_with_cudnn(chain: nn.Sequential, x: Tensor) -> Tensor:
    """As `pool_before_relu`, for torch's compiler too, without our convolutions."""
    return _pool_before_relu(chain, x, own_convolutions=False)


def _pool_before_relu(chain: nn.Sequential, x: Tensor, own_convolutions: bool) -> Tensor:
    layers, pooled = list(chain), _find_pooled_convolutions(chain)
    kinds, index = [type(layer) for layer in layers], 0
    while index < len(layers):
        layer: Any = layers[index]
        if index in pooled:
            pool: Any = layers[index + 2]
            x = max_pool(pool, _conv_without_bias(layer, x, own_convolutions))
            if layer.bias is not None:
                x = x + layer.bias.to(x.dtype)[:, None, None]
            x = F.relu(x)
            index += 3
        elif (
            own_convolutions and kinds[index : index + 2] == [nn.Conv2d, nn.ReLU] and supports_conv_relu_input(layer, x)
        ):
            x = conv_relu_input(layer, x)
            index += 2
        else:
            x = layer(x)
            index += 1
    return x


def _conv_without_bias(layer: nn.Conv2d, x: Tensor, own_convolutions: bool) -> Tensor:
    if own_convolutions:
        return conv3x3(layer, x, with_bias=False)
    return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _find_pooled_convolutions(chain: nn.Sequential) -> tuple[int, ...]:
    """The indices of convolutions that a ReLU and then max pooling follow."""
    indices = []
    for index in range(len(chain) - 2):
        convolution, relu, pool = list(chain)[index : index + 3]
        is_pooled = (type(convolution), type(relu), type(pool)) == (nn.Conv2d, nn.ReLU, nn.MaxPool2d)
        if not is_pooled or supports_im2col(convolution):
            continue
        if convolution.padding_mode == "zeros" and not pool.return_indices:
            indices.append(index)
    return tuple(indices)
