"""A trunk's forward pass, compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Thread
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agscl.fast.chains import (
    chained,
    chains_of,
    covers,
    in_blocks,
    largest_of_blocks,
    links_of,
    spread_over_blocks,
)
from agscl.fast.convolution import TRITON, convolved, of_pictures, seen, suits
from agscl.methods._parts.proximal import pull, shrink
from agscl.system.process import gc_paused

NARROW = 32
"""The most numbers an output of a convolution may read for it to be computed as a matrix product."""
ALIGNED = 16
"""Columns of that product come in multiples of this, as tensor cores take them."""


class CompileFailed(RuntimeError):
    """The network could not be compiled on this machine."""

    @classmethod
    def because(cls, error: Exception) -> CompileFailed:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return cls(
            "the network could not be compiled, which needs a C++ compiler and Python's headers (gcc, python3-dev): "
            f"leave out --fast, or use --set compile=false. Torch said: {reason}"
        )


class Compiled:
    """The compiled call of a module, for all its copies of the same form.

    With `rearranged`, which is for a GPU, some things are computed otherwise, equal to rounding. Convolutions may have
    kernels of our own (`convolution.py`). Else the one that reads the pictures becomes a matrix product, on tensor
    cores: for so few channels cuDNN chose none of its kernels that use them. And where a convolution, a ReLU and a
    maximum over neighbours follow each other, the maximum is taken first: bias and ReLU then see a quarter of the
    numbers, and so do their gradients.

    With `rounded` too, numbers will be in bfloat16, channels last. A network that `covers` takes then has kernels of
    our own from end to end, and torch's compiler, which takes seconds to import alone, is left out; unless, when first
    used, the network turns out to call its layers in some other way.
    """

    def __init__(
        self, module: nn.Module, rearranged: bool, rounded: bool = False, device: torch.device | None = None
    ) -> None:
        self.module, self.rearranged = module, rearranged
        self.device = device or next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        on_gpu = self.device.type == "cuda"
        self.ours = chains_of(module) if rearranged and rounded and covers(module) and (TRITON or not on_gpu) else []
        self.layers = {link.layer for link in links_of(module)} if self.ours else set()
        self.used: set[nn.Module] = set()  # those that have had kernels of ours
        self.tried = not on_gpu  # whether Triton can compile
        self.version = 0  # counts how often it was compiled in another way
        self.waking: Thread | None = None
        if not self.ours:
            self._use_torch()
        elif on_gpu and "triton" not in sys.modules:
            self.waking = Thread(target=_wake_with_triton, args=(self.device,))
            self.waking.start()

    def _use_torch(self) -> None:
        """Have it compiled by torch."""
        module, self.ours = self.module, []
        on_gpu = self.device.type == "cuda"
        options: dict[str, Any] | None = {"combo_kernels": True} if on_gpu else None  # small ones joined
        with _waking(self.device), gc_paused():  # much is imported, and nothing is let go
            self.call: Callable[..., Any] = torch.compile(_calling(module), dynamic=False, options=options)
        parts = list(module.modules()) if self.rearranged else []
        self.narrow = [part for part in parts if _narrow(part)]
        self.suited = [part for part in parts if suits(part) and part not in self.narrow]
        self.chains = [part for part in parts if type(part) is nn.Sequential and _pooling(part)]

    @contextmanager
    def in_use(self, compiled: bool = True) -> Iterator[None]:
        """Let calls of the module run as compiled, or as rearranged alone, unless there are hooks within it."""
        if self.waking is not None:
            self.waking.join()
            self.waking = None
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())
        if hooked:
            yield
            return
        if self.ours:
            with self._chained():
                yield
            if self.used != self.layers:
                self._use_torch()
                self.version += 1
            return
        other = {part: MethodType(as_product, part) for part in self.narrow if compiled and _as_made(part)}
        other |= {part: MethodType(convolved, part) for part in self.suited if _as_made(part)}
        other |= {part: MethodType(pooled_first, part) for part in self.chains if all(map(_as_made, part.modules()))}
        self.module._compiled_call_impl = self.call if compiled else None
        for part, forward in other.items():
            part.forward = forward
        try:
            with gc_paused(), _found_again() if self.chains or self.suited else nullcontext():
                yield
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise CompileFailed.because(error) from error
        finally:
            self.module._compiled_call_impl = None
            for part in other:
                del part.forward

    @contextmanager
    def _chained(self) -> Iterator[None]:
        if not self.tried:
            _try_triton(self.device)
            self.tried = True
        chains = [chain for chain in self.ours if all(map(_as_made, chain.modules()))]
        for chain in chains:
            chain.forward = partial(chained, chain, used=self.used)  # type: ignore[method-assign]
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith("triton"):
                raise
            raise CompileFailed.because(error) from error
        finally:
            for chain in chains:
                del chain.forward


def let_compilers_go() -> None:
    """End the processes that torch compiled in, without waiting for them: at its own end this one would, for seconds.

    Whoever compiles later starts new ones.
    """
    pooling: Any = sys.modules.get("torch._inductor.async_compile")
    pools = list(getattr(pooling, "_pool_set", ()))
    if pools:
        pooling.after_fork()  # forgets them
        Thread(target=lambda: [pool.shutdown() for pool in pools]).start()


@contextmanager
def _waking(device: torch.device) -> Iterator[None]:
    """While torch's compiler is imported, which is Python's work alone, let the libraries of the GPU start.

    And afterwards, while other things begin, let that be hashed by which torch looks for what it compiled before.
    """
    if device.type != "cuda" or "torch._dynamo" in sys.modules:
        yield
        return
    waking = Thread(target=_wake, args=(device,))
    waking.start()
    try:
        yield
    finally:
        waking.join()
    Thread(target=_hash, daemon=True).start()


def _hash() -> None:
    """The code of torch and Triton. Torch keeps the result."""
    with suppress(Exception):  # names of its own, which may change: it then does so when it needs it
        from torch._inductor import codecache

        codecache.torch_key()
        codecache.CacheBase.get_system()


def _wake_with_triton(device: torch.device) -> None:
    """And let Triton hash its code, by which it looks for the kernels it compiled before. It keeps the result."""
    _wake(device)
    with suppress(Exception):  # as above
        from triton.runtime.cache import triton_key

        triton_key()


def _try_triton(device: torch.device) -> None:
    """Say at once where Triton cannot compile."""
    from agscl.fast import kernels

    some = torch.zeros(512, 32, device=device)
    try:
        kernels.total(some, torch.empty_like(some[0]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CompileFailed.because(error) from error


def _wake(device: torch.device | str) -> None:
    """Forward, backward and a proximal step, of nothing but zeros: what they use is then loaded.

    No optimizer: that would import what is being imported.
    """
    with suppress(RuntimeError), torch.enable_grad():  # what is wrong will be said where it matters
        zeros = partial(torch.zeros, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            sizes = ((256, 32, 16, 16), (32, 32, 3, 3))
            x, weight = (zeros(size, dtype=dtype).to(memory_format=torch.channels_last) for size in sizes)
            bias, head = zeros(32, dtype=dtype), zeros(10, 32 * 8 * 8, dtype=dtype)
            for one in (x, weight, bias, head):
                one.requires_grad_()
            y = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=1)), 2)
            loss = F.cross_entropy(F.linear(y.flatten(1), head).float(), zeros(256, dtype=torch.long))
            loss.backward()
        rows, members = [zeros(32, 288), zeros(32)], torch.arange(64, device=device).view(2, 32).t()
        shrink(pull(rows, rows, zeros(32), members), zeros(32), members)


def _found_again() -> AbstractContextManager[Any]:
    """Let torch look in its cache for what it made of our own functions, which saves a new process two of four seconds.

    It does so for no function with a gradient of its own unless told, since one might read what it was not given. These
    do not: where their code changes the cache has nothing for them, and all that sizes within depend on is an argument.
    """
    from torch._functorch import config

    option = "autograd_cache_allow_custom_autograd_functions"
    return config.patch({option: True}) if hasattr(config, option) else nullcontext()


def as_product(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """What the convolution gives of `x`, as the product of its weights and all that they are laid over."""
    padding = convolution.padding
    assert not isinstance(padding, str)
    if x.requires_grad or x.dim() != 4:
        return F.conv2d(x, convolution.weight, convolution.bias, padding=padding)
    (height, width), (above, left) = convolution.kernel_size, padding
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # which is left as it is
        x = x.to(torch.get_autocast_dtype(x.device.type))  # before each number is written many times over
    wider, more = _to_power_of_two(width), _to_power_of_two(convolution.in_channels)
    windows = F.pad(x, (left, left + wider, above, above, 0, more)).unfold(2, height, 1).unfold(3, width + wider, 1)
    columns = windows.permute(0, 2, 3, 4, 5, 1).flatten(3)  # as channels-last weights lie in memory
    weight = F.pad(convolution.weight, (0, wider, 0, 0, 0, more)).permute(0, 2, 3, 1).flatten(1)
    spare = (0, -weight.shape[1] % ALIGNED)
    return F.linear(F.pad(columns, spare), F.pad(weight, spare), convolution.bias).permute(0, 3, 1, 2)


def _to_power_of_two(count: int) -> int:
    """What is missing to the next power of two, by which places in memory are quickly divided."""
    return (1 << (count - 1).bit_length()) - count


def pooled_first(chain: nn.Sequential, x: Tensor) -> Tensor:
    """What the chain gives of `x`. Adding a bias and ReLU keep the order of numbers, so the maximum may come first."""
    layers, pooling = list(chain), _pooling(chain)
    kinds, place = [type(layer) for layer in layers], 0
    while place < len(layers):
        if place in pooling:
            convolution, _, pool = layers[place : place + 3]
            assert isinstance(convolution, nn.Conv2d)
            x = pooled(pool, convolved(convolution, x, with_bias=False))  # type: ignore[arg-type]
            if convolution.bias is not None:
                x = x + convolution.bias.to(x.dtype)[:, None, None]
            x = F.relu(x)
            place += 3
        elif kinds[place : place + 2] == [nn.Conv2d, nn.ReLU] and of_pictures(layers[place], x):  # type: ignore[arg-type]
            x = seen(layers[place], x)  # type: ignore[arg-type]
            place += 2
        else:
            x = layers[place](x)
            place += 1
    return x


def pooled(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    """What the pool gives of `x`, block by block where its windows are blocks, which pays where it is compiled."""
    size: Any = pool.kernel_size
    whole = in_blocks(pool) and x.dim() == 4 and not any(side % size for side in x.shape[2:])
    return Largest.apply(x, size) if whole and torch.compiler.is_compiling() else pool(x)  # type: ignore[no-untyped-call,no-any-return]


class Largest(torch.autograd.Function):
    """The largest number of each block of `size` × `size`, the first of them where several are.

    As `F.max_pool2d`, compiled into less arithmetic than windows take that may overlap.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        largest, which = largest_of_blocks(x, size)
        ctx.size = size
        ctx.save_for_backward(which)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (which,) = ctx.saved_tensors
        return spread_over_blocks(gradient, which, ctx.size), None


def _pooling(chain: nn.Sequential) -> tuple[int, ...]:
    """The places of convolutions that a ReLU and then a maximum follow."""
    places = []
    for place in range(len(chain) - 2):
        layers = list(chain)[place : place + 3]
        kinds = tuple(type(layer) for layer in layers) == (nn.Conv2d, nn.ReLU, nn.MaxPool2d)
        if kinds and not _narrow(layers[0]) and not layers[2].return_indices:
            places.append(place)
    return tuple(places)


def _as_made(module: nn.Module) -> bool:
    """Whether a module computes as its class does: a forward pass or a hook that a user gave it is left alone."""
    return "forward" not in vars(module) and not module._backward_hooks and not module._backward_pre_hooks


def _narrow(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.weight.shape[1:].numel() <= NARROW
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
