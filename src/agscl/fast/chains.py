"""Chains of layers in bfloat16 with kernels of our own all along, so that torch's compiler is not needed.

A link of a chain is a convolution or a dense layer, its ReLU, and what may follow: the largest of blocks of neighbours,
dropout. All but the layer itself is one kernel forward and one backward. Numbers are rounded less often than torch's
autocast rounds them. Each kernel has a twin in plain torch, which a CPU runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agscl.fast.convolution import (
    COLOURS,
    MOST,
    SHARES,
    TRITON,
    Convolved,
    laid_out,
    of_pictures,
    refuse_second,
    rounds,
    seen,
    suits,
    takes,
    total,
)
from agscl.system.bitwise import PIECES, concat_pieces, split_pieces

BLOCK = 4
"""The widest block of neighbours whose numbers are compared one by one."""
FEATURES = 1024
"""The most outputs of a dense layer that are summed up over examples at a time."""


class Link(NamedTuple):
    """Some layers that follow each other."""

    layer: nn.Conv2d | nn.Linear
    others: tuple[nn.Module, ...]
    """ReLU and what comes after it."""

    @property
    def size(self) -> int:
        """Of the blocks whose largest number is taken."""
        sizes: list[Any] = [layer.kernel_size for layer in self.others if isinstance(layer, nn.MaxPool2d)]
        return sizes[0] if sizes else 1

    @property
    def dropped(self) -> float:
        """The share of numbers that dropout sets to zero."""
        return next((layer.p for layer in self.others if isinstance(layer, nn.Dropout) and layer.training), 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        for layer in (self.layer, *self.others):
            x = layer(x)
        return x


def links(chain: nn.Sequential) -> list[Link | nn.Module]:
    """The links of a chain; layers that belong to none stay by themselves."""
    found: list[Link | nn.Module] = []
    layers = list(chain)
    while layers:
        link = Link(layers[0], _after(layers[1:]))  # type: ignore[arg-type]
        found.append(link if _may(link) else layers[0])
        layers = layers[1 + len(link.others) if found[-1] is link else 1 :]
    return found


def _after(layers: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """A ReLU, which must be first, a maximum of blocks and dropout."""
    found: list[nn.Module] = []
    for kind in (nn.ReLU, nn.MaxPool2d, nn.Dropout) if layers and type(layers[0]) is nn.ReLU else ():
        layer = layers[len(found)] if len(found) < len(layers) else None
        if type(layer) is kind and (not isinstance(layer, nn.MaxPool2d) or in_blocks(layer)):
            found.append(layer)
    return tuple(found)


def _may(link: Link) -> bool:
    layer = link.layer
    if not link.others or type(layer) not in (nn.Conv2d, nn.Linear) or layer.bias is None:
        return False
    if any(isinstance(other, nn.Dropout) and other.p == 1 for other in link.others):
        return False
    if isinstance(layer, nn.Linear):
        return link.size == 1 and layer.out_features <= FEATURES
    return suits(layer) and (layer.in_channels not in COLOURS or len(link.others) == 1)


def in_blocks(pool: nn.MaxPool2d) -> bool:
    """Whether the windows of a maximum lie side by side."""
    size = pool.kernel_size
    plain = not pool.return_indices and (pool.stride, pool.padding, pool.dilation) == (size, 0, 1)
    return isinstance(size, int) and size <= BLOCK and plain


def covers(module: nn.Module) -> bool:
    """Whether all layers of a module are in links, but for those that only change shapes."""
    known = {layer for link in links_of(module) for layer in (link.layer, *link.others)}
    for part in module.modules():
        container = any(True for _ in part.children())
        shapes = type(part) in (nn.Flatten, nn.Identity)
        if not (part in known or shapes or (container and not part._parameters and not part._buffers)):
            return False
    return bool(known)


def chains_of(module: nn.Module) -> list[nn.Sequential]:
    return [part for part in module.modules() if type(part) is nn.Sequential]


def links_of(module: nn.Module) -> list[Link]:
    return [link for chain in chains_of(module) for link in links(chain) if isinstance(link, Link)]


def chained(chain: nn.Sequential, x: Tensor, used: set[nn.Module]) -> Tensor:
    """What the chain gives of `x`. Layers for which kernels of ours were used are added to `used`."""
    parts = links(chain)
    weights = [part.layer.weight for part in parts if isinstance(part, Link)]
    rounded = dict(zip(weights, _rounded(weights), strict=True)) if rounds(x) else {}
    drawn = sum(part.dropped > 0 for part in parts if isinstance(part, Link))
    seeds = torch.randint(2**62, (drawn,), device=x.device) if drawn and rounded else x.new_empty(0, dtype=torch.long)
    place = 0
    for part in parts:
        if not isinstance(part, Link) or not rounded:
            x = part(x)
        elif len(part.others) == 1 and isinstance(part.layer, nn.Conv2d) and of_pictures(part.layer, x):
            x = seen(part.layer, x)
            used.add(part.layer)
        elif _fits(part, x):
            layer: Any = Convolved if isinstance(part.layer, nn.Conv2d) else Weighed
            y = layer.apply(x.to(torch.bfloat16), part.layer.weight, rounded[part.layer.weight])
            used.add(part.layer)
            x = Activated.apply(y, part.layer.bias, part.size, part.dropped, seeds, place)  # type: ignore[no-untyped-call]
        else:
            x = part(x)
        place += isinstance(part, Link) and part.dropped > 0
    return x


def _fits(link: Link, x: Tensor) -> bool:
    """Whether the kernels can be used for these inputs."""
    if isinstance(link.layer, nn.Linear):
        some = x.is_floating_point() and x.dtype != torch.float64 and 0 < len(x) * FEATURES < MOST
        return x.dim() == 2 and some and (TRITON or not x.is_cuda)
    return link.layer.in_channels not in COLOURS and takes(x) and not any(side % link.size for side in x.shape[2:])


def _rounded(weights: Sequence[Tensor]) -> list[Tensor]:
    """In bfloat16, with one kernel for all."""
    with torch.no_grad():
        found = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        if found:
            new, old = concat_pieces(split_pieces(PIECES, found, weights))
            torch._foreach_copy_(new, old)
    return found


class Weighed(torch.autograd.Function):
    """Numbers in bfloat16 times the weights of a dense layer in float32, which are given rounded to bfloat16 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(x, rounded)
        return x @ rounded.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        refuse_second()
        x, rounded = ctx.saved_tensors
        of_x = gradient @ rounded if ctx.needs_input_grad[0] else None
        return of_x, (gradient.t() @ x).float(), None


class Activated(torch.autograd.Function):
    """What a link makes of what its layer gives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, size: int, dropped: float, seeds: Tensor, place: int) -> Tensor:
        z, which = activate(y, bias, size, dropped, seeds, place)
        ctx.save_for_backward(
            which if marks(size, dropped) else z, which
        )  # no more than torch: `z` may change in place
        ctx.size, ctx.dropped = size, dropped
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        refuse_second()
        z, which = ctx.saved_tensors
        of_y, sums = activated(gradient, z, which, ctx.size, ctx.dropped)
        return of_y, total(sums), None, None, None, None


def marks(size: int, dropped: float) -> bool:
    """Whether `activate` tells which numbers ReLU or dropout set to zero."""
    return size > 1 or dropped > 0


def activate(y: Tensor, bias: Tensor, size: int, dropped: float, seeds: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Largest of each block, bias, ReLU and dropout, by the seed at its place; and, if it `marks`, which one it was.

    That is its place in the block, or the one behind the last where ReLU or dropout set it to zero.
    """
    y = _laid_out(y)
    z = y[:, :, ::size, ::size] if size > 1 else y
    z = torch.empty_like(z, memory_format=torch.channels_last if z.dim() == 4 else torch.contiguous_format)
    which = torch.empty_like(z, dtype=torch.uint8) if marks(size, dropped) else z.new_empty(0, dtype=torch.uint8)
    if y.is_cuda:
        from agscl.fast import kernels

        kernels.activate(y, bias, seeds, z, which, size=size, dropped=dropped, place=place)
        return z, which
    largest, places = largest_of_blocks(y, size) if size > 1 else (y, torch.zeros_like(y, dtype=torch.uint8))
    largest = largest.float() + bias.view(-1, *[1] * (y.dim() - 2))
    dead = largest <= 0  # NaN is not
    if dropped:
        draws = torch.rand(z.shape, generator=torch.Generator().manual_seed(int(seeds[place])))
        dead |= (draws < dropped) & ~largest.isnan()
    if marks(size, dropped):
        which.copy_(torch.where(dead, size * size, places))
    return z.copy_(torch.where(dead, 0, largest / (1 - dropped))), which


def activated(gradient: Tensor, z: Tensor, which: Tensor, size: int, dropped: float) -> tuple[Tensor, Tensor]:
    """Of `activate`, which gave `z` and `which`, the gradient of `y`; and (shares, channels), of the bias.

    If it `marks`, all that matters of `z` is its shape.
    """
    gradient = _laid_out(gradient)
    sums = z.new_empty((min(SHARES, z.numel() // z.shape[1]), z.shape[1]), dtype=torch.float32)
    if z.is_cuda:
        from agscl.fast import kernels

        sides = [size * side for side in z.shape[2:]]
        layout = torch.channels_last if sides else torch.contiguous_format
        of_y = torch.empty((*z.shape[:2], *sides), dtype=gradient.dtype, device=z.device, memory_format=layout)
        kernels.activated(gradient, z, which, of_y, sums, size=size, dropped=dropped)
        return of_y, sums
    dead = which == size * size if marks(size, dropped) else z <= 0
    gradient = torch.where(dead, 0, gradient.float() / (1 - dropped)).to(gradient.dtype)
    sums.zero_()[0] = gradient.float().sum([side for side in range(z.dim()) if side != 1])
    return spread_over_blocks(gradient, which, size) if size > 1 else gradient, sums


def largest_of_blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest number of each block of `size` × `size` and its place there, the first of them where several are."""
    largest = x[:, :, ::size, ::size]
    which = torch.zeros_like(largest, dtype=torch.uint8)
    for place in range(1, size * size):
        value = x[:, :, place // size :: size, place % size :: size]
        larger = (value > largest) | value.isnan()
        largest, which = torch.where(larger, value, largest), torch.where(larger, place, which)
    return largest, which


def spread_over_blocks(gradient: Tensor, which: Tensor, size: int) -> Tensor:
    """The gradient of what `largest_of_blocks` was given, channels last."""
    rows, columns = (torch.arange(size, device=which.device).view(shape) for shape in ((size, 1, 1, 1), (size, 1)))
    which, gradient = (one.permute(0, 2, 3, 1)[:, :, None, :, None] for one in (which, gradient))
    spread = torch.where(which == rows * size + columns, gradient, 0)
    return spread.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


def _laid_out(x: Tensor) -> Tensor:
    return laid_out(x) if x.dim() == 4 else x.contiguous()
