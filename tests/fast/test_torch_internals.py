"""Private interfaces of torch: each test fails with what to do where torch changed one."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import agscl
from agscl.fast import _torch_internals as internals

FIX = "torch changed it: adapt agscl/fast/_torch_internals.py"
SOURCE = Path(agscl.__file__).parent


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
def test_the_fused_adam_kernels_take_what_they_are_given(name):
    arguments = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    arguments += ["lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize", "grad_scale", "found_inf"]
    tensors = [[torch.ones(2)] for _ in range(4)]
    try:
        kernel = internals.fused_adam_kernel(name == "_fused_adamw_")
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        options |= {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
        kernel(*tensors, [], [torch.ones(())], **options)
    except (AttributeError, TypeError) as error:
        pytest.fail(f"torch.{name}({', '.join(arguments)}): {FIX} ({error})")
    assert not torch.equal(tensors[0][0], torch.ones(2)), f"torch.{name} updates nothing: {FIX}"


@pytest.mark.parametrize("name", ["add_param_group", "zero_grad"])
def test_methods_of_optimizers_are_wrapped_as_expected(name):
    method = getattr(torch.optim.Optimizer, name)
    bare = internals.without_dynamo(method)
    expected = {"add_param_group": ["self", "param_group"], "zero_grad": ["self", "set_to_none"]}[name]
    assert list(inspect.signature(bare).parameters) == expected, f"Optimizer.{name}: {FIX}"
    assert bare.__module__ == "torch.optim.optimizer", f"Optimizer.{name} is wrapped in another way: {FIX}"


def test_hooks_of_modules_are_found():
    message = f"hooks of nn.Module lie elsewhere: {FIX}"
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = nn.Linear(2, 2)
        assert not internals.has_forward_hooks(module), message
        handle = getattr(module, register)(lambda *_: None)
        assert internals.has_forward_hooks(module), message
        handle.remove()
        assert not internals.has_forward_hooks(module), message
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Linear(2, 2)
        assert not internals.has_backward_hooks(module), message
        getattr(module, register)(lambda *_: None)
        assert internals.has_backward_hooks(module), message


def test_the_compilers_cache_can_be_told_to_keep_autograd_functions():
    from torch._functorch import config

    name = "autograd_cache_allow_custom_autograd_functions"
    assert hasattr(config, name), f"torch._functorch.config has no {name}: {FIX}"
    before = getattr(config, name)
    with internals.allow_cached_autograd_functions():
        assert getattr(config, name)
    assert getattr(config, name) == before


def test_the_keys_of_the_compilers_cache_can_be_computed_in_advance():
    from torch._inductor import codecache

    for name in ("torch_key", "CacheBase"):
        assert hasattr(codecache, name), f"torch._inductor.codecache has no {name}: {FIX}"
    assert len(codecache.torch_key()) > 0
    assert "hash" in codecache.CacheBase.get_system(), f"CacheBase.get_system: {FIX}"


def test_torchs_compiler_can_still_join_small_kernels():
    from torch._inductor import config

    assert hasattr(config, "combo_kernels"), "no option combo_kernels any more: adapt torch_compiled_trunk.py"


def test_triton_still_has_a_key():
    cache = pytest.importorskip("triton.runtime.cache")
    assert callable(cache.triton_key), "triton.runtime.cache.triton_key: adapt agscl/fast/_torch_internals.py"


def test_the_processes_in_which_torch_compiles_are_where_they_are_looked_for():
    module = importlib.import_module("torch._inductor.async_compile")
    for name in ("_pool_set", "after_fork"):
        assert hasattr(module, name), f"torch._inductor.async_compile has no {name}: {FIX}"


def test_compile_workers_are_ended_and_forgotten_and_nobody_waits(monkeypatch):
    ended = []
    pool = SimpleNamespace(shutdown=lambda: ended.append(pool))
    pools, started = [pool], []
    module = SimpleNamespace(_pool_set=pools, after_fork=pools.clear)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
    monkeypatch.setattr(internals, "Thread", lambda target: SimpleNamespace(start=lambda: started.append(target)))
    internals.shut_down_compile_workers()
    internals.shut_down_compile_workers()
    assert pools == []
    assert ended == []
    assert len(started) == 1
    started[0]()
    assert ended == [pool]


def test_where_torch_never_compiled_there_are_no_workers_to_end(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    internals.shut_down_compile_workers()
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace())  # another version of it
    internals.shut_down_compile_workers()


def test_errors_of_torchs_compiler_are_told_from_others():
    from torch._dynamo.exc import TorchDynamoException

    assert internals.is_torch_compile_error(TorchDynamoException("")), f"TorchDynamoException moved: {FIX}"
    assert not internals.is_torch_compile_error(ValueError(""))


PRIVATE = re.compile(r"^_(?!_|foreach_|torch_internals$)")
"""Names with one underscore; `torch._foreach_*` are what torch's own optimizers offer, and stable."""


def private_torch_names(path):
    """Private attributes and modules that a file reads from torch, or from objects that are not its own."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if PRIVATE.match(name))
        elif isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "nn", "F", "module", "optimizer", "layer"):
                yield node.attr


@pytest.mark.parametrize("room", ["fast", "training", "system"])
def test_no_other_file_uses_a_private_name_of_torch(room):
    found = {
        path.name: names
        for path in sorted((SOURCE / room).glob("*.py"))
        if path.name != "_torch_internals.py" and (names := list(private_torch_names(path)))
    }
    assert not found, "use something public, or put it into agscl/fast/_torch_internals.py with a test"
