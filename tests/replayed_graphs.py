"""CUDA graphs on a CPU: the operations of captured work, run again on the same memory without its Python.

What a captured step may not do shows as it would on a GPU: count in Python, wait for the device, decide on the host, or
read a tensor that was freed or replaced since. Copies to the host do not show.
"""

import weakref
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from agscl.fast.cuda_graphs import GraphRunner
from agscl.fast.fast_engine import GraphEngine
from agscl.graph.rows import FlatRows, Rows
from agscl.methods._agscl.learning_rates import LayerRates
from agscl.training.optimizers import make_optimizer

CONSTANTS = {"lift_fresh"}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "repeat_interleave"}
CHOOSING = {"index", "index_put", "index_put_"}  # these wait for the device if an index is of booleans


class OperationGraph(TorchDispatchMode):
    """Records operations; `replay` runs them again. It keeps its results, as a graph does, and no tensor of others."""

    def __init__(self):
        super().__init__()
        self.calls, self.own = [], set()
        self.is_done = True  # once: unlike a GPU, a CPU runs what is recorded

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = any(torch.is_tensor(leaf) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2]))
        if name in WAITING or (name in CHOOSING and by_mask):
            raise RuntimeError(f"{function} would wait for the device within a captured graph")
        result = function(*args, **(kwargs or {}))
        held = (args, kwargs or {}) if name in CONSTANTS else tree_map(self._hold, (args, kwargs or {}))
        written = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in written:
                self.own.add(leaf.untyped_storage().data_ptr())
        self.calls.append((function, held, result))
        return result

    def _hold(self, value):
        """Others' tensors weakly: what nobody else keeps would be freed on a GPU, and its memory used for others."""
        is_other = isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in self.own
        return weakref.ref(value) if is_other else value

    @staticmethod
    def _get(value):
        if not isinstance(value, weakref.ref):
            return value
        tensor = value()
        assert tensor is not None, "a captured step reads a tensor that was freed"
        return tensor

    @torch.no_grad()
    def replay(self):
        calls, self.is_done = () if self.is_done else self.calls, False
        for function, held, result in calls:
            args, kwargs = tree_map(self._get, held)
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class ReplayingRunner(GraphRunner):
    """As on a GPU, with an `OperationGraph` for each CUDA graph. Counts its captures."""

    def __init__(self, device, before_capture):
        super().__init__(device, before_capture=before_capture)
        self.stream, self.captures = object(), 0

    def on_stream(self):
        return nullcontext()

    def _capture(self, work):
        self.before_capture()
        self.captures += 1
        with OperationGraph() as graph, patch.object(LayerRates, "is_capturing", True):
            work()
        return graph

    def release(self):
        self.graphs.clear()


class ReplayingEngine(GraphEngine):
    """A `GraphEngine` that replays its graphs on a CPU, with the optimizer that keeps its counts in tensors."""

    replays = True

    def __init__(self, trainer):
        super().__init__(trainer)
        if self.replays:
            self.runner = ReplayingRunner(trainer.device, self._drop_gradients)

    def make_optimizer(self):
        config = self.trainer.config
        return make_optimizer(config, self.trainer.model.parameters(), lr=torch.tensor(config.lr), fused=True)


class EagerEngine(ReplayingEngine):
    """The same without graphs."""

    replays = False


def use_forms_for_a_gpu(monkeypatch):
    """Let AGS-CL work on a CPU as it does on a GPU; returns the rows it makes, as it makes them."""
    made = []

    def make_rows(graph, chosen):
        rows = Rows(graph, chosen)
        made.append(FlatRows(rows) if FlatRows.supports(rows) else rows)
        return made[-1]

    monkeypatch.setattr("agscl.methods.agscl.make_rows", make_rows)
    for room in ("zero_init", "node_pruner"):
        monkeypatch.setattr(f"agscl.methods._agscl.{room}.uses_bits", lambda tensor: True)
    return made
