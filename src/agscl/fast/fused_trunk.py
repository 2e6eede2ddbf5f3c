"""Networks of plain layers in bfloat16 with Triton kernels from end to end, without torch's compiler.

A link is a convolution or a linear layer with its ReLU, and max pooling and dropout where they follow. The layer is a
kernel of cuDNN, cuBLAS or ours (`conv3x3`); all that follows it within the link is one kernel forward and one backward.
Results are rounded less often than under torch's autocast. Each kernel has a counterpart in plain torch, which runs on
a CPU and which the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agscl.fast.conv3x3 import (
    IMAGE_CHANNELS,
    IMAGE_CHUNKS,
    Conv3x3Function,
    conv3x3_weight_grad,
    conv_relu_input,
    conv_relu_input_backward,
    conv_relu_input_forward,
    supports_conv_relu_input,
    supports_input,
    supports_layer,
    to_channels_last,
    weight_grad_tiling,
)
from agscl.fast.max_pool import block_max, block_max_backward, pools_blocks
from agscl.fast.replaced_forwards import can_replace_forward, replaced_forwards
from agscl.fast.triton_support import (
    HAS_TRITON,
    MAX_ELEMENTS,
    autocasts_bf16,
    refuse_double_backward,
    sum_partials,
    uses_triton,
)
from agscl.system.tensor_pieces import FOREACH_PIECES, concat_pieces, split_pieces

MAX_LINEAR_OUTPUTS = 1024
"""The widest linear layer whose bias gradient a program can sum."""
BIAS_CHUNKS = IMAGE_CHUNKS
"""The most chunks of pixels for which bias gradients have partial sums of their own."""


# Finding links --------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """A layer and what follows it, fused: ReLU, max pooling, dropout."""

    layer: nn.Conv2d | nn.Linear
    following: tuple[nn.Module, ...]
    """ReLU, then max pooling and dropout where there are."""

    @property
    def pool_size(self) -> int:
        """The side of the blocks that the fused link pools; 1 without pooling."""
        sizes: list[Any] = [layer.kernel_size for layer in self.following if isinstance(layer, nn.MaxPool2d)]
        return sizes[0] if sizes else 1

    @property
    def dropout(self) -> float:
        """The probability with which the fused link drops an element now."""
        return next((layer.p for layer in self.following if isinstance(layer, nn.Dropout) and layer.training), 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        for layer in (self.layer, *self.following):
            x = layer(x)
        return x


def split_into_links(chain: nn.Sequential) -> list[Link | nn.Module]:
    """The links of a chain of layers in order; modules that belong to none stay by themselves."""
    parts: list[Link | nn.Module] = []
    layers = list(chain)
    while layers:
        link = Link(layers[0], _find_following(layers[1:]))  # type: ignore[arg-type]
        parts.append(link if _supports_link(link) else layers[0])
        layers = layers[1 + len(link.following) if parts[-1] is link else 1 :]
    return parts


def _find_following(layers: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """A ReLU, which must come first, then max pooling and dropout where there are."""
    following: list[nn.Module] = []
    for kind in (nn.ReLU, nn.MaxPool2d, nn.Dropout) if layers and type(layers[0]) is nn.ReLU else ():
        layer = layers[len(following)] if len(following) < len(layers) else None
        if type(layer) is kind and (not isinstance(layer, nn.MaxPool2d) or pools_blocks(layer)):
            following.append(layer)
    return tuple(following)


def _supports_link(link: Link) -> bool:
    layer = link.layer
    if not link.following or type(layer) not in (nn.Conv2d, nn.Linear) or layer.bias is None:
        return False
    if any(isinstance(module, nn.Dropout) and module.p == 1 for module in link.following):
        return False
    if isinstance(layer, nn.Linear):
        return link.pool_size == 1 and layer.out_features <= MAX_LINEAR_OUTPUTS
    return supports_layer(layer) and (layer.in_channels not in IMAGE_CHANNELS or len(link.following) == 1)


def find_chains(network: nn.Module) -> list[nn.Sequential]:
    return [module for module in network.modules() if type(module) is nn.Sequential]


def find_links(network: nn.Module) -> list[Link]:
    return [part for chain in find_chains(network) for part in split_into_links(chain) if isinstance(part, Link)]


def supports_network(network: nn.Module) -> bool:
    """Whether every layer of a network belongs to a link or only changes shapes."""
    in_links = {layer for link in find_links(network) for layer in (link.layer, *link.following)}
    for module in network.modules():
        container = any(True for _ in module.children())
        has_tensors = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        shapes_only = type(module) in (nn.Flatten, nn.Identity)
        if not (module in in_links or shapes_only or (container and not has_tensors)):
            return False
    return bool(in_links)


# Running links --------------------------------------------------------------------------------------------------------


class FusedTrunk:
    """A trunk whose links run with Triton kernels; `network` must be one that `supports_network` accepts."""

    def __init__(self, network: nn.Module, own_convolutions: bool = True) -> None:
        self.own_convolutions = own_convolutions
        self.chains = find_chains(network)
        self.layers = {link.layer for link in find_links(network)}
        self.fused_layers: set[nn.Module] = set()  # those that have run with our kernels
        self._compiled_for: set[tuple[Any, ...]] = set()

    @contextmanager
    def use_fused_layers(self) -> Iterator[None]:
        """Let calls of the trunk run with our kernels, where `can_replace_forward` holds for a whole chain."""
        chains = [chain for chain in self.chains if all(map(can_replace_forward, chain.modules()))]
        with replaced_forwards({chain: partial(self._run_chain, chain) for chain in chains}):
            yield

    def _run_chain(self, chain: nn.Sequential, x: Tensor) -> Tensor:
        signature = (chain, chain.training, torch.is_grad_enabled(), x.shape[1:])
        if x.is_cuda and signature not in self._compiled_for:
            compile_chain(chain, x, self.own_convolutions)
            self._compiled_for.add(signature)
        return run_chain(chain, x, self.fused_layers, self.own_convolutions)

    @property
    def all_layers_fused(self) -> bool:
        """Whether all layers have run with our kernels: a network may call them one by one, not its chains."""
        return self.fused_layers == self.layers


def run_chain(chain: nn.Sequential, x: Tensor, fused_layers: set[nn.Module], own_convolutions: bool = True) -> Tensor:
    """The chain's output. Layers that ran with our kernels are added to `fused_layers`."""
    parts = split_into_links(chain)
    weights = [part.layer.weight for part in parts if isinstance(part, Link)]
    rounded = dict(zip(weights, _round_to_bf16(weights), strict=True)) if autocasts_bf16(x) else {}
    dropouts = sum(part.dropout > 0 for part in parts if isinstance(part, Link)) if rounded else 0
    seeds = torch.randint(2**62, (dropouts,), device=x.device) if dropouts else x.new_empty(0, dtype=torch.long)
    seed_index = 0
    for part in parts:
        if not isinstance(part, Link) or not rounded:
            x = part(x)
        elif own_convolutions and _is_conv_relu_input(part, x):
            x = conv_relu_input(part.layer, x)  # type: ignore[arg-type]
            fused_layers.add(part.layer)
        elif _supports_link_input(part, x, own_convolutions):
            y = _run_layer(part.layer, x.to(torch.bfloat16), rounded[part.layer.weight], own_convolutions)
            x = LinkFunction.apply(y, part.layer.bias, part.pool_size, part.dropout, seeds, seed_index)  # type: ignore[no-untyped-call]
            fused_layers.add(part.layer)
        else:
            x = part(x)
        seed_index += isinstance(part, Link) and part.dropout > 0
    return x


def _is_conv_relu_input(link: Link, x: Tensor) -> bool:
    return len(link.following) == 1 and isinstance(link.layer, nn.Conv2d) and supports_conv_relu_input(link.layer, x)


def _supports_link_input(link: Link, x: Tensor, own_convolutions: bool = True) -> bool:
    if isinstance(link.layer, nn.Linear):
        fits = x.is_floating_point() and x.dtype != torch.float64 and 0 < len(x) * MAX_LINEAR_OUTPUTS < MAX_ELEMENTS
        return x.dim() == 2 and fits and (HAS_TRITON or not uses_triton(x))
    images = link.layer.in_channels in IMAGE_CHANNELS
    blocks = not any(side % link.pool_size for side in x.shape[2:])
    return not (images and own_convolutions) and supports_input(x) and blocks


def _run_layer(layer: nn.Conv2d | nn.Linear, x: Tensor, weight_bf16: Tensor, own_convolutions: bool) -> Tensor:
    """The layer's output without its bias."""
    y: Tensor
    if isinstance(layer, nn.Conv2d):
        y = Conv3x3Function.apply(x, layer.weight, weight_bf16, own_convolutions)  # type: ignore[no-untyped-call]
    else:
        y = LinearFunction.apply(x, layer.weight, weight_bf16)  # type: ignore[no-untyped-call]
    return y


def _round_to_bf16(weights: Sequence[Tensor]) -> list[Tensor]:
    """All weights in bfloat16, with one kernel."""
    with torch.no_grad():
        rounded = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        if rounded:
            targets, sources = concat_pieces(split_pieces(FOREACH_PIECES, rounded, weights))
            torch._foreach_copy_(targets, sources)
    return rounded


def compile_chain(chain: nn.Sequential, x: Tensor, own_convolutions: bool = True) -> None:
    """Compile all kernels of fused layers for a pass on `x` in parallel; the pass would compile one after the other."""
    from agscl.fast import triton_kernels

    if not triton_kernels.COMPILES_IN_PARALLEL:
        return
    with triton_kernels.compiling_only():
        x = torch.empty_like(x, device="meta")
        for part in split_into_links(chain):
            if not isinstance(part, Link):
                x = part(x)
            elif _is_conv_relu_input(part, x) or _supports_link_input(part, x, own_convolutions):
                x = _compile_link(part, x, own_convolutions)
            else:
                break


def _compile_link(link: Link, x: Tensor, own_convolutions: bool) -> Tensor:
    """Call all functions that launch kernels of a link, with tensors on the meta device; the output's shape counts."""
    layer: Any = link.layer
    bias = torch.empty_like(layer.bias, device="meta")
    trains = torch.is_grad_enabled()
    if own_convolutions and _is_conv_relu_input(link, x):
        z: Tensor = conv_relu_input_forward(x, torch.empty_like(layer.weight, device="meta"), bias)
        for partials in conv_relu_input_backward(z, x, z, IMAGE_CHUNKS) if trains else ():
            sum_partials(partials)
        return z
    y = _to_kernel_layout(x.new_empty((len(x), len(bias), *x.shape[2:]), dtype=torch.bfloat16))
    z, argmax = link_forward(y, bias, link.pool_size, link.dropout, x.new_empty(1, dtype=torch.long), 0)
    if trains:
        saved = argmax if stores_argmax(link.pool_size, link.dropout) else z  # as `LinkFunction` does
        sum_partials(link_backward(z, saved, argmax, link.pool_size, link.dropout)[1])
    if trains and own_convolutions and isinstance(layer, nn.Conv2d):
        chunks = weight_grad_tiling(layer.out_channels, layer.in_channels).chunks
        sum_partials(conv3x3_weight_grad(y, x.to(torch.bfloat16), chunks))
    return z


class LinearFunction(torch.autograd.Function):
    """A linear layer to be fused: a product in bfloat16 with a float32 weight, also given rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_bf16: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_bf16)
        return x @ weight_bf16.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        refuse_double_backward()
        x, weight_bf16 = ctx.saved_tensors
        x_grad = grad @ weight_bf16 if ctx.needs_input_grad[0] else None
        return x_grad, (grad.t() @ x).float(), None


class LinkFunction(torch.autograd.Function):
    """All of a link behind its layer: `link_forward` and `link_backward`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, pool_size: int, dropout: float, seeds: Tensor, seed_index: int
    ) -> Tensor:
        z, argmax = link_forward(y, bias, pool_size, dropout, seeds, seed_index)
        # Save no more than torch would: where `argmax` tells what was zeroed, `z` may be changed in place.
        ctx.save_for_backward(argmax if stores_argmax(pool_size, dropout) else z, argmax)
        ctx.pool_size, ctx.dropout = pool_size, dropout
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        refuse_double_backward()
        z, argmax = ctx.saved_tensors
        y_grad, bias_partials = link_backward(grad, z, argmax, ctx.pool_size, ctx.dropout)
        return y_grad, sum_partials(bias_partials), None, None, None, None


def stores_argmax(pool_size: int, dropout: float) -> bool:
    """Whether a fused link stores where each output came from; else the output itself tells where ReLU was 0."""
    return pool_size > 1 or dropout > 0


def link_forward(
    y: Tensor, bias: Tensor, pool_size: int, dropout: float, seeds: Tensor, seed_index: int
) -> tuple[Tensor, Tensor]:
    """What is fused behind a layer: max pooling over blocks, bias, ReLU and dropout, drawn from `seeds[seed_index]`.

    `y` is (examples, channels, height, width) or (examples, channels). Returns the output and, if `stores_argmax`, a
    byte for each of its elements: the place of its maximum in the block, or `pool_size²` where ReLU or dropout made it
    0; else an empty tensor.
    """
    y = _to_kernel_layout(y)
    z = y[:, :, ::pool_size, ::pool_size] if pool_size > 1 else y
    z = torch.empty_like(z, memory_format=torch.channels_last if z.dim() == 4 else torch.contiguous_format)
    has_argmax = stores_argmax(pool_size, dropout)
    argmax = torch.empty_like(z, dtype=torch.uint8) if has_argmax else z.new_empty(0, dtype=torch.uint8)
    if uses_triton(y):
        from agscl.fast import triton_kernels

        triton_kernels.launch_link_forward(
            y, bias, seeds, z, argmax, pool_size=pool_size, dropout=dropout, seed_index=seed_index
        )
        return z, argmax
    maximum, places = block_max(y, pool_size) if pool_size > 1 else (y, torch.zeros_like(y, dtype=torch.uint8))
    maximum = maximum.float() + bias.view(-1, *[1] * (y.dim() - 2))
    zeroed = maximum <= 0  # false for NaN
    if dropout:
        draws = torch.rand(z.shape, generator=torch.Generator().manual_seed(int(seeds[seed_index])))
        zeroed |= (draws < dropout) & ~maximum.isnan()
    if has_argmax:
        argmax.copy_(torch.where(zeroed, pool_size * pool_size, places))
    return z.copy_(torch.where(zeroed, 0, maximum / (1 - dropout))), argmax


def link_backward(grad: Tensor, z: Tensor, argmax: Tensor, pool_size: int, dropout: float) -> tuple[Tensor, Tensor]:
    """The gradient of a fused link's `y`, and (chunks, channels) partial sums of that of the bias.

    `z` and `argmax` are what `link_forward` returned; if it `stores_argmax`, only the shape of `z` is used.
    """
    grad = _to_kernel_layout(grad)
    bias_partials = z.new_empty((min(BIAS_CHUNKS, z.numel() // z.shape[1]), z.shape[1]), dtype=torch.float32)
    if uses_triton(z):
        from agscl.fast import triton_kernels

        sides = [pool_size * side for side in z.shape[2:]]
        layout = torch.channels_last if sides else torch.contiguous_format
        y_grad = torch.empty((*z.shape[:2], *sides), dtype=grad.dtype, device=z.device, memory_format=layout)
        triton_kernels.launch_link_backward(
            grad, z, argmax, y_grad, bias_partials, pool_size=pool_size, dropout=dropout
        )
        return y_grad, bias_partials
    zeroed = argmax == pool_size * pool_size if stores_argmax(pool_size, dropout) else z <= 0
    grad = torch.where(zeroed, 0, grad.float() / (1 - dropout)).to(grad.dtype)
    bias_partials.zero_()[0] = grad.float().sum([dim for dim in range(z.dim()) if dim != 1])
    return block_max_backward(grad, argmax, pool_size) if pool_size > 1 else grad, bias_partials


def _to_kernel_layout(x: Tensor) -> Tensor:
    return to_channels_last(x) if x.dim() == 4 else x.contiguous()
