"""All private interfaces of torch and Triton that this package's fast engines use, in one place.

Each is here because nothing public does the same. `tests/fast/test_torch_internals.py` checks each of them and names
what to change where torch changed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from inspect import unwrap
from threading import Thread
from typing import Any

import torch
from torch import nn


def fused_adam_kernel(decoupled_weight_decay: bool) -> Callable[..., None]:
    """The kernel behind `torch.optim.Adam(fused=True)` or, with decoupled weight decay, `AdamW(fused=True)`.

    The public `torch.optim.adam.adam` counts the steps up once for each tensor; pieces of a parameter share a counter.
    """
    kernel: Callable[..., None] = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    return kernel


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's method without the wrapper that imports torch's compiler, which takes two seconds."""
    bare: Callable[..., Any] = unwrap(method)
    return bare


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward (pre-)hook is registered on the module itself, which only torch's internals tell."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a backward (pre-)hook is registered on the module itself, which only torch's internals tell."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def allow_cached_autograd_functions() -> AbstractContextManager[Any]:
    """Let torch's compiler cache networks that contain an `autograd.Function`: saves a new process two of four seconds.

    By default torch does not, as such a function might read what it was not given. Ours do not: their code is part of
    the cache's key, and all that shapes within depend on is an argument.
    """
    from torch._functorch import config

    option = "autograd_cache_allow_custom_autograd_functions"
    return config.patch({option: True}) if hasattr(config, option) else nullcontext()


def precompute_compiler_cache_keys() -> None:
    """Hash the code of torch and Triton, by which torch's compiler finds what it compiled before; torch keeps it."""
    with suppress(Exception):  # where torch changed these, it computes them itself when it needs them
        from torch._inductor import codecache

        codecache.torch_key()
        codecache.CacheBase.get_system()


def precompute_triton_cache_key() -> None:
    """Private to Triton: the hash of its code, by which it finds kernels compiled before; Triton keeps it."""
    with suppress(Exception):  # as above
        from triton.runtime.cache import triton_key

        triton_key()


def shut_down_compile_workers() -> None:
    """End the processes in which torch compiles, without waiting: at exit torch would wait for seconds.

    Whoever compiles later starts new ones.
    """
    module: Any = sys.modules.get("torch._inductor.async_compile")
    pools = list(getattr(module, "_pool_set", ()))
    if pools:
        module.after_fork()  # forgets them
        Thread(target=lambda: [pool.shutdown() for pool in pools]).start()


def is_torch_compile_error(error: BaseException) -> bool:
    """Whether torch's compiler raised this, told by the name of an internal module, not the code that was compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def is_triton_error(error: BaseException) -> bool:
    """Whether Triton raised this, told by the name of an internal module."""
    return type(error).__module__.startswith("triton")
