"""`freeze`: parts of tensors that keep their bits in any training loop, without being told the optimizer.

The frozen entries are copied. After every step of any torch optimizer they are put back; their gradients are 0 from
the start, so that they count neither for clipping nor for what an optimizer knows of a whole tensor (LBFGS, trust
ratios). Weight decay, momentum and moments gathered earlier move them within a step, never beyond it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle, unserializable_hook

from agscl.digests import describe_conversion, read_row_bytes
from agscl.methods._parts.batchnorm import ChannelFreezer, StatisticsFreezer, find_batchnorms
from agscl.methods._parts.ddp_and_compile import unwrap_model
from agscl.methods._parts.frozen_by_hand import frozen_by_hand
from agscl.methods._parts.warnings import warn_user
from agscl.system.describe import describe_value
from agscl.system.files import write_atomically

__all__ = ["FreezeCertificate", "FreezeReport", "FrozenEntries", "freeze"]

Index = int | slice | Sequence[int] | Sequence[bool] | range | Tensor | np.ndarray[Any, Any]
"""Which rows or columns: a position, positions, a slice, or a mask with one truth value for each."""

FORMAT = "agscl-freeze-1"
LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag),
    *(_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)
"""Layers in which row r of the weight and entry r of the bias belong together."""

_live: WeakValueDictionary[int, FrozenEntries] = WeakValueDictionary()  # in the order in which they were frozen
_numbers = count()


def freeze(
    target: nn.Module | nn.Parameter, *, rows: Index | None = None, columns: Index | None = None
) -> FrozenEntries:
    """Freeze a module, a parameter, or some rows or columns of one, bit for bit.

    >>> frozen = agscl.freeze(model.embedding, rows=slice(0, 32_000))  # train the new tokens only
    >>> ...                                                            # any loop, any optimizer of torch
    >>> print(frozen.verify())
    32000 rows of weight kept every bit

    `rows` are positions along the first dimension of a layer's weight, with the same entries of its bias, and for a
    BatchNorm the statistics of these channels; `columns` are positions along the second dimension of the weight.
    With both, the entries that lie in such a row and in such a column are frozen. It lasts as long as the module or
    parameter, or until `close()`.
    """
    if isinstance(target, nn.Parameter):
        parts = [_Part.freeze(None, target, "parameter", rows, columns)]
        return FrozenEntries(parts, [])
    if not isinstance(target, nn.Module):
        hint = " Only parameters are changed by an optimizer." if isinstance(target, Tensor) else ""
        raise TypeError(f"freeze needs a torch module or a parameter of one, got {describe_value(target)}.{hint}")
    module = unwrap_model(target)
    limited = [name for name, m in module.named_modules() if getattr(m, "max_norm", None) is not None]
    if limited:
        name = f" {limited[0]!r}" if limited[0] else ""
        raise ValueError(
            f"The embedding{name} has max_norm, so its forward pass changes its rows, which no hook can undo in time. "
            "Set max_norm to None."
        )
    if rows is None and columns is None:
        return _freeze_module(module)
    return _freeze_layer(module, rows, columns)


def _freeze_module(module: nn.Module) -> FrozenEntries:
    parts, norms = [], find_batchnorms(module)
    for prefix, owner in module.named_modules():
        prefix = prefix and f"{prefix}."
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                parts.append(_Part.freeze(owner, parameter, prefix + name))
        if isinstance(owner, _BatchNorm) and owner.running_mean is not None:
            parts += [_Part.freeze(owner, owner._buffers[name], prefix + name) for name in _STATISTICS]
    if not parts:
        raise ValueError(f"{type(module).__name__} has no parameters, so there is nothing to freeze.")
    return FrozenEntries(parts, [StatisticsFreezer(norms)] if norms else [])


def _freeze_layer(layer: nn.Module, rows: Index | None, columns: Index | None) -> FrozenEntries:
    own = [name for name, p in layer._parameters.items() if p is not None]
    kind = type(layer).__name__
    if not isinstance(layer, LAYERS) or not {*own} <= {"weight", "bias"} or hasattr(layer, "parametrizations"):
        inner = [name for name, m in layer.named_modules() if name and isinstance(m, LAYERS)]
        advice = f"Freeze its layers one by one: {', '.join(inner[:5])}." if inner and not own else ""
        if not advice:
            advice = f"Freeze a parameter of it, e.g. {own[0]}, instead." if own else "It has no parameters of its own."
        raise ValueError(f"Which rows and columns of {kind} belong together is not known. {advice}")
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    parts: list[_Part] = []
    norms: list[StatisticsFreezer | ChannelFreezer] = []
    if weight is not None:
        parts.append(_Part.freeze(layer, weight, "weight", rows, columns))
    if columns is None and bias is not None:
        parts.append(_Part.freeze(layer, bias, "bias", rows))
    if columns is None and isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        parts += [_Part.freeze(layer, layer._buffers[name], name, rows) for name in _STATISTICS]
        channels = torch.zeros(layer.num_features, dtype=torch.bool)
        channels[parts[-1].rows] = True
        norms.append(ChannelFreezer(layer, channels))
    if not parts:
        raise ValueError(f"{kind} has no weight, so there is nothing to freeze.")
    return FrozenEntries(parts, norms)


_STATISTICS = ("running_mean", "running_var")


class FrozenEntries:
    """Entries of tensors that are frozen, made by `freeze`. Also a context manager: frozen within, free after it.

    A deep copy of a frozen module is frozen too; a copy of a single parameter is not.
    """

    def __init__(self, parts: list[_Part], norms: list[StatisticsFreezer | ChannelFreezer]) -> None:
        self._parts, self._norms = parts, norms
        self._handles: list[RemovableHandle] = []
        for owner in {id(part.owner): part.owner for part in parts if part.owner is not None}.values():
            self._handles.append(owner.register_load_state_dict_post_hook(self._after_load))
        if norms and "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled does not notice new hooks of a BatchNorm
        self._open()
        self._zero_gradients()

    def _open(self) -> None:
        self._stepped = False  # whether an optimizer that holds a part has stepped
        self.closed = False
        self._number = next(_numbers)
        _live[self._number] = self
        _watch_optimizers()

    def restore(self) -> None:
        """Put the frozen entries back. Runs after every optimizer step; call it where a loop writes weights itself."""
        for part in self._parts:
            part.restore()
        self._zero_gradients()

    def verify(self) -> FreezeReport:
        """Compare all frozen entries, as they are now, with what they were, bit for bit."""
        tensors = {part.name: part.tensor for part in self._parts}
        for part in self._parts:
            part.follow(tensors[part.name])
        report = _make_certificate(self._parts, {name: tensor.dtype for name, tensor in tensors.items()}).check(tensors)
        unused = "no optimizer that holds them has stepped yet"
        return report if self._stepped or self.closed else replace(report, notes=[unused])

    def certificate(self) -> FreezeCertificate:
        """A statement of what is frozen that can be checked later, with the tensors alone."""
        return _make_certificate(self._parts, {part.name: part.values.dtype for part in self._parts})

    def close(self) -> None:
        """Let the frozen entries be trained again; they stay as they are."""
        _live.pop(self._number, None)
        self.closed = True
        for handle in self._handles:
            handle.remove()
        for part in self._parts:
            part.release_gradient()
        for norm in self._norms:
            norm.close()

    def state_dict(self) -> dict[str, dict[str, Tensor | None]]:
        """What is frozen, as tensors: per tensor its rows, columns (None: all) and values."""
        return {part.name: part.state_dict() for part in self._parts}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor | None]]) -> None:
        """Freeze the entries of a saved state at their saved values."""
        names = [part.name for part in self._parts]
        if not isinstance(state, Mapping) or [*state] != names:
            raise ValueError(f"This is not a state of {', '.join(names)}: give what state_dict() returned.")
        for part in self._parts:
            if (problem := part.find_mismatch(state[part.name])) is not None:
                raise ValueError(f"The state of {part.name} does not fit: {problem}.")
        for part in self._parts:
            part.load_state_dict(state[part.name])
        self.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FrozenEntries({', '.join(part.describe(part.length) for part in self._parts)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_number", "_stepped")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if not self.closed:
            self._open()

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepped = self._stepped or self._is_trained_by(optimizer)
        try:
            self.restore()
        except RuntimeError:  # a layer was replaced: no concern of the optimizer of another model
            if self._is_trained_by(optimizer):
                raise

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a tensor of which entries are frozen, or one that took its place."""
        held = set()
        for part in self._parts:
            current = () if part.owner is None else part.owner._parameters.values()
            held |= {id(tensor) for tensor in (part.given, part.hooked, *current)}
        return any(id(p) in held for group in optimizer.param_groups for p in group["params"])

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Torch calls this when the module has loaded a state_dict, perhaps into new parameters."""
        parts = [part for part in self._parts if part.owner is module]
        if changed := [part.name for part in parts if not part.is_unchanged()]:
            warn_user(
                f"The weights just loaded differ from the frozen ones in {', '.join(changed)}; the frozen ones stay. "
                "To freeze the loaded ones, call close() of what is frozen before loading, and freeze after it."
            )
        for part in parts:
            part.restore()
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        """Zero the gradients of the entries from now on; a tensor that replaced another has no hook yet."""
        for part in self._parts:
            tensor = part.tensor
            if tensor is not part.hooked and tensor.requires_grad:
                part.release_gradient()
                hook = unserializable_hook(partial(self._zero_gradient, part))
                part.hooked, part.handle = tensor, tensor.register_hook(hook)

    def _zero_gradient(self, part: _Part, gradient: Tensor) -> Tensor:
        return part.zero_entries(gradient)


def _watch_optimizers() -> None:
    """Hook all optimizers, also those made later, once for all that is frozen."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_restore_all)


_handle: RemovableHandle | None = None


def _restore_all(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for frozen in list(_live.values()):
        frozen._after_step(optimizer)


def _list_frozen_tensors() -> Iterator[Tensor]:
    for frozen in list(_live.values()):
        for part in frozen._parts:
            with suppress(RuntimeError):  # the layer was replaced
                yield part.tensor


frozen_by_hand.append(_list_frozen_tensors)


@dataclass(eq=False)
class _Part:
    """The frozen entries of one tensor: `rows` (r,) and `columns` (c,) of it; None means all."""

    owner: nn.Module | None  # None: `given` is the tensor, else the owner's tensor of this name, which may be replaced
    given: Tensor | None
    name: str
    shape: torch.Size
    rows: Tensor | None
    columns: Tensor | None
    values: Tensor
    hooked: Tensor | None = None  # whose gradient is zeroed
    handle: RemovableHandle | None = None

    @classmethod
    def freeze(
        cls,
        owner: nn.Module | None,
        tensor: Tensor | None,
        name: str,
        rows: Index | None = None,
        columns: Index | None = None,
    ) -> _Part:
        assert tensor is not None
        _check_tensor(tensor, name)
        shape = tensor.shape
        if rows is not None and not shape:
            raise ValueError(f"{name} is a single number: it has no rows.")
        if columns is not None and len(shape) < 2:
            raise ValueError(f"{name} has shape {list(shape)}, so it has no columns. Give rows.")
        row_index = None if rows is None else find_positions(rows, shape[0], "rows", name).to(tensor.device)
        column_index = None if columns is None else find_positions(columns, shape[1], "columns", name).to(tensor.device)
        part = cls(owner, None if owner else tensor, name, shape, row_index, column_index, tensor.detach())
        part.values = tensor.detach()[part.place].clone()
        return part

    @property
    def tensor(self) -> Tensor:
        """The tensor with frozen entries as it is now: a loop may have replaced it."""
        tensor = self.given
        if self.owner is not None:
            name = self.name.rpartition(".")[2]
            tensor = self.owner._parameters.get(name)
            tensor = self.owner._buffers.get(name) if tensor is None else tensor
        if tensor is None:
            raise RuntimeError(
                f"The layer no longer has a tensor {self.name!r}, parts of which are frozen: call close()."
            )
        if tensor.shape != self.shape:
            raise RuntimeError(
                f"{self.name} has shape {list(tensor.shape)} and had {list(self.shape)} when parts of it were frozen. "
                "Call close() before the layer changes its size, and freeze again."
            )
        return tensor

    @property
    def place(self) -> Any:
        """Where the frozen entries are, to index the tensor with."""
        if self.rows is not None and self.columns is not None:
            return self.rows[:, None], self.columns
        if self.columns is not None:
            return slice(None), self.columns
        return ... if self.rows is None else (self.rows,)

    @property
    def length(self) -> int:
        return len(self.by_row(self.values))

    def by_row(self, entries: Tensor) -> Tensor:
        """(rows, …) of frozen entries; (columns, …) where whole columns are frozen."""
        columns = self.columns is not None and self.rows is None
        return entries.movedim(1, 0) if columns else entries.reshape(1) if not entries.dim() else entries

    def follow(self, tensor: Tensor) -> None:
        """Move the frozen values to the device of the tensor."""
        if self.values.device != tensor.device:
            self.values = self.values.to(tensor.device)
            self.rows = None if self.rows is None else self.rows.to(tensor.device)
            self.columns = None if self.columns is None else self.columns.to(tensor.device)

    def restore(self) -> None:
        tensor = self.tensor
        self.follow(tensor)
        # .data: to autograd nothing changes, where another optimizer steps between a forward pass and its backward
        tensor.data[self.place] = self.values.to(tensor.dtype)

    def is_unchanged(self) -> bool:
        tensor = self.tensor
        self.follow(tensor)
        now, then = (read_row_bytes(entries) for entries in (tensor.detach()[self.place], self.values.to(tensor.dtype)))
        return bool(np.array_equal(now, then))

    def zero_entries(self, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:  # of an embedding: it lists rows
            gradient = gradient.coalesce()
            values = gradient.values().clone()
            frozen = torch.ones(self.shape[0], dtype=torch.bool, device=gradient.device)
            if self.rows is not None:
                frozen = frozen.zero_().index_fill_(0, self.rows.to(gradient.device), True)
            listed = frozen[gradient.indices()[0]].nonzero().flatten()
            if self.columns is None:
                values[listed] = 0
            else:
                values[listed[:, None], self.columns.to(gradient.device)] = 0
            return torch.sparse_coo_tensor(
                gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
            )
        self.follow(gradient)
        gradient = gradient.clone()
        gradient[self.place] = 0
        return gradient

    def release_gradient(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.hooked = self.handle = None

    def describe(self, number: int) -> str:
        if self.rows is None and self.columns is None:
            return self.name
        kind = "column" if self.rows is None else "row"
        block = f" in {len(self.columns)} columns" if self.rows is not None and self.columns is not None else ""
        return f"{number} {kind}{'s' * (number != 1)} of {self.name}{block}"

    def state_dict(self) -> dict[str, Tensor | None]:
        state = {"rows": self.rows, "columns": self.columns, "values": self.values}
        return {key: None if value is None else value.clone() for key, value in state.items()}

    def find_mismatch(self, state: Mapping[str, Tensor | None]) -> str | None:
        """Why a saved state of frozen entries is not one of this tensor, if so."""
        values = state.get("values")
        if values is None:
            return "it holds no values"
        expected = list(self.shape)
        for dimension, key in enumerate(("rows", "columns")):
            if (index := state.get(key)) is not None:
                if len(index) and int(index.max()) >= self.shape[dimension]:
                    return f"it freezes {key[:-1]} {int(index.max())} of {self.shape[dimension]}"
                expected[dimension] = len(index)
        if list(values.shape) != expected:
            return f"expected values of shape {expected}, got {list(values.shape)}"
        return None

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        device = self.tensor.device
        self.rows, self.columns, values = (
            None if state.get(key) is None else state[key].to(device, copy=True)  # type: ignore[union-attr]
            for key in ("rows", "columns", "values")
        )
        assert values is not None
        self.values = values

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooked": None, "handle": None}  # the next step hooks the copy


def _check_tensor(tensor: Tensor, name: str) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name} is lazy: it has no values before the first forward pass. Run the model once first.")
    if tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} is quantised or holds integers ({dtype}), which no optimizer of torch trains.")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values yet. Load the weights first.")
    if type(tensor).__name__ == "DTensor":
        raise NotImplementedError(f"{name} is sharded, which is not supported: its rows would lie on several ranks.")


def find_positions(which: Index, size: int, kind: str, name: str) -> Tensor:
    """The rows or columns to freeze, sorted and each once, that an index selects from `size`."""
    if isinstance(which, slice):
        found = torch.tensor(range(size)[which], dtype=torch.int64)
    else:
        if isinstance(which, Iterable) and not isinstance(which, Tensor | np.ndarray | str):
            which = list(which)
        try:
            index = torch.as_tensor(which, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            index = torch.empty(0, 0)
        if index.numel() == 0 and index.dim() == 1:
            index = index.to(torch.int64)
        if index.dim() > 1 or index.is_floating_point() or index.is_complex():
            raise TypeError(
                f"{kind} must be positions, a slice, or a mask of {size} truth values, got {describe_value(which)}."
            )
        if index.dtype == torch.bool:
            if index.shape != (size,):
                raise ValueError(f"{name} has {size} {kind}, but the mask has {index.numel()} truth values.")
            index = index.nonzero()
        index = index.flatten().to(torch.int64)
        outside = index[(index < -size) | (index >= size)]
        if len(outside):
            raise IndexError(f"{name} has {size} {kind}, from 0 to {size - 1}; got {int(outside[0])}.")
        found = torch.where(index < 0, index + size, index)
    if not len(found):
        raise ValueError(f"Nothing to freeze: {kind} selects none of the {size} {kind} of {name}.")
    distinct: Tensor = found.unique()
    return distinct


@dataclass(frozen=True)
class FreezeReport:
    """What a check of frozen entries found."""

    kept: list[str]  # in words, per tensor
    moved: dict[str, list[int]]  # per tensor, the rows with other bits; columns where whole columns are frozen
    notes: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # what moved, in words, per tensor

    @property
    def ok(self) -> bool:
        return not self.moved

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"CHANGED although frozen: {', '.join(self.changed)}"] if self.changed else []
        if self.kept:
            lines.append(f"{', '.join(self.kept)} kept every bit")
        return "; ".join([*lines, *self.notes])


def _describe_changed(part: _Part, positions: Sequence[int]) -> str:
    """Say which rows, or columns, of a tensor changed: "row 4 of weight", "12 rows of weight (0, 1, 2, …)"."""
    kind = "column" if part.rows is None and part.columns is not None else "row"
    shown = ", ".join(map(str, positions[:8])) + (", …" if len(positions) > 8 else "")
    if len(positions) == 1:
        return f"{kind} {shown} of {part.name}"
    return f"{len(positions)} {kind}s of {part.name} ({shown})"


@dataclass(frozen=True, repr=False)
class FreezeCertificate:
    """What `freeze` holds, by name: the entries of each tensor, and a digest of the bits of each row."""

    tensors: dict[str, dict[str, Any]]  # name -> shape, dtype, rows, columns (None: all), digests

    def __str__(self) -> str:
        return f"frozen: {self._describe()}, with a digest of each row"

    def __repr__(self) -> str:
        return f"<FreezeCertificate of {self._describe()}>"

    def _describe(self) -> str:
        words = []
        for name, entry in self.tensors.items():
            part = _read_part(name, entry, torch.empty(entry["shape"], device="meta"))
            words.append(part.describe(len(entry["digests"])))
        more = [f"{len(words) - 4} other tensors"] if len(words) > 5 else words[4:]
        return ", ".join([*words[:4], *more])

    def check(self, tensors: Mapping[str, Tensor], *, prefix: str = "") -> FreezeReport:
        """Compare what is frozen with tensors, e.g. of a `state_dict` with `prefix` before the names known here."""
        kept, moved, described = [], {}, []
        for name, entry in self.tensors.items():
            tensor = tensors.get(prefix + name)
            if tensor is None:
                raise ValueError(f"There is no {prefix + name!r} among the tensors given: {', '.join([*tensors][:5])}.")
            part = _read_part(name, entry, tensor)
            if (dtype := str(tensor.dtype).removeprefix("torch.")) != entry["dtype"]:
                raise ValueError(f"{prefix + name} is {describe_conversion(dtype, entry['dtype'])}")
            found = _digest_rows(part, tensor.detach()[part.place])
            by_columns = part.rows is None and part.columns is not None
            index = part.columns if by_columns else part.rows
            positions = range(len(found)) if index is None else index.tolist()
            pairs = zip(positions, found, entry["digests"], strict=True)
            changed = [position for position, now, then in pairs if now != then]
            if changed:
                moved[name] = changed
                described.append(_describe_changed(part, changed))
            if len(changed) < len(found):
                whole = part.rows is None and part.columns is None
                kept.append(f"the rest of {name}" if whole and changed else part.describe(len(found) - len(changed)))
        return FreezeReport(kept, moved, changed=described)

    def save(self, path: str | Path) -> None:
        """Write the certificate of what is frozen as JSON, whole or not at all."""
        write_atomically(Path(path), json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def load(cls, path: str | Path) -> FreezeCertificate:
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a certificate: it is not JSON ({error}).") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path} is not a certificate of the format {FORMAT}.")
        return cls(data["tensors"])


def _make_certificate(parts: Iterable[_Part], dtypes: Mapping[str, torch.dtype]) -> FreezeCertificate:
    """What the parts hold, in the dtypes that their tensors have."""
    tensors = {}
    for part in parts:
        dtype = dtypes[part.name]
        tensors[part.name] = {
            "shape": list(part.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "rows": None if part.rows is None else part.rows.tolist(),
            "columns": None if part.columns is None else part.columns.tolist(),
            "digests": _digest_rows(part, part.values.to(dtype)),
        }
    return FreezeCertificate(tensors)


def _read_part(name: str, entry: Mapping[str, Any], tensor: Tensor) -> _Part:
    if list(tensor.shape) != entry["shape"]:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, expected {entry['shape']}: these are the weights of another "
            "network, or the layer was replaced."
        )
    index = [
        None if entry[key] is None else torch.tensor(entry[key], device=tensor.device) for key in ("rows", "columns")
    ]
    return _Part(None, tensor, name, tensor.shape, index[0], index[1], tensor)


def _digest_rows(part: _Part, entries: Tensor) -> list[str]:
    return [blake2b(row.tobytes(), digest_size=16).hexdigest() for row in read_row_bytes(part.by_row(entries))]
