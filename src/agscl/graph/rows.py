"""The incoming weights of some groups of nodes, wherever they lie, gathered as rows and scattered back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from agscl.graph.nodes import NodeGraph

__all__ = ["FlatRows", "Rows", "make_rows"]


class Rows:
    """The incoming weights of the `chosen` (groups,) groups: rows of several parameters, for the proximal operators.

    `groups` (chosen groups,) are their numbers; `members` (chosen groups, m) lists each group's rows, counted through
    all gathered tensors, and is padded with the total number of rows.
    """

    def __init__(self, graph: NodeGraph, chosen: Tensor) -> None:
        chosen = chosen.cpu()
        self.groups = chosen.nonzero().flatten()
        position = torch.full((graph.size,), -1).masked_scatter_(chosen, torch.arange(len(self.groups)))
        self.parameters: list[nn.Parameter] = []
        self.index: list[Tensor] = []
        owners = []
        for _, parameter, groups in graph.incoming_parameters():
            rows = chosen[groups].nonzero().flatten()
            if len(rows):
                self.parameters.append(parameter)
                self.index.append(rows.to(parameter.device))
                owners.append(position[groups[rows]])
        owner = torch.cat(owners) if owners else torch.empty(0, dtype=torch.int64)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=len(self.groups))
        rank = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]]
        members = torch.full((len(self.groups), int(counts.max()) if len(counts) else 0), len(owner))
        members[owner[order], rank] = order
        device = self.parameters[0].device if self.parameters else None
        self.members, self.groups = members.to(device), self.groups.to(device)
        self._skipped: list[Tensor | None] = [None] * len(self.parameters)

    def skip_inputs_from(self, graph: NodeGraph, sources: Tensor) -> None:
        """From now on let `scatter_` leave the weights in the rows alone that read the `sources` (groups,)."""
        weights = {id(layer.weight): name for name, layer in graph.layers.items() if name in graph.readers}
        for number, (parameter, index) in enumerate(zip(self.parameters, self.index, strict=True)):
            if (name := weights.get(id(parameter))) is not None:
                left = graph.readers[name].reads(sources).to(parameter.device).expand_as(parameter)[index]
                self._skipped[number] = left if bool(left.any()) else None

    def __len__(self) -> int:
        return len(self.groups)

    def flatten_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Convert rows of the same groups, gathered by a `Rows`, to the form that `scatter_` takes.

        They take the parameters' dtype and device, which may have changed since.
        """
        return [row.to(parameter) for row, parameter in zip(rows, self.parameters, strict=True)]

    def sum_by_group(self, values: Sequence[Tensor]) -> Tensor:
        """(chosen groups,) float32 sums of each group's rows in `values`, which are shaped as the parameters are."""
        sums = [_sum_rows(value).index_select(0, index) for value, index in zip(values, self.index, strict=True)]
        return torch.cat([*sums, sums[0].new_zeros(1)])[self.members].sum(1)

    def gather(self) -> list[Tensor]:
        """Copies of the rows of these groups, one tensor per parameter."""
        return [p.detach().index_select(0, index) for p, index in zip(self.parameters, self.index, strict=True)]

    @torch.no_grad()
    def scatter_(self, rows: Sequence[Tensor]) -> None:
        """Write rows back, except into parameters that the user has frozen."""
        for parameter, index, new, left in zip(self.parameters, self.index, rows, self._skipped, strict=True):
            if parameter.requires_grad:
                new = new if left is None else torch.where(left, parameter.index_select(0, index), new)
                parameter.index_copy_(0, index, new.to(parameter))  # which the loop may have converted

    @torch.no_grad()
    def zero_(self) -> None:
        """Set the rows to exactly 0, except in parameters that the user has frozen."""
        for parameter, index in zip(self.parameters, self.index, strict=True):
            if parameter.requires_grad:
                parameter.index_fill_(0, index, 0.0)


class FlatRows(Rows):
    """The same rows flattened into one tensor, which takes fewer GPU kernels.

    `gather` returns that tensor alone, (numbers,); `members` (groups, m) lists numbers, not rows.
    """

    MAX_NUMBERS = 2**23
    """Most numbers in `members`, which take eight bytes each."""

    def __init__(self, rows: Rows) -> None:
        self.groups, self.parameters, self.index = rows.groups, rows.parameters, rows.index
        self._numels = [parameter.numel() for parameter in self.parameters]
        self._channels_last = [_is_channels_last(p) for p in self.parameters]  # as they are now, even if that changes
        positions, widths, offset = [], [], 0
        for parameter, index in zip(self.parameters, self.index, strict=True):
            width = parameter[0].numel()
            widths.append(torch.full((len(index),), width))
            positions.append(((offset + index * width)[:, None] + torch.arange(width, device=index.device)).flatten())
            offset += parameter.numel()
        self._positions = torch.cat(positions)
        self._skipped = rows._skipped
        self._written: Tensor | None = None  # which numbers `scatter_` writes, if not all
        row_widths = torch.cat([*widths, torch.zeros(1, dtype=torch.long)])  # 0: padding
        row_starts = row_widths.cumsum(0) - row_widths
        blocks = []
        for row in rows.members.unbind(1):
            counts, starts = (table.to(row.device)[row][:, None] for table in (row_widths, row_starts))
            offsets = torch.arange(int(counts.max()), device=row.device)
            blocks.append(torch.where(offsets < counts, starts + offsets, len(self._positions)))
        self.members = torch.cat(blocks, 1)

    @classmethod
    def supports(cls, rows: Rows) -> bool:
        """Whether there are rows, not too many, of one dtype on one device, in dense parameters."""
        parameters = rows.parameters
        total_width = sum(parameter[0].numel() for parameter in parameters)
        alike = len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
        dense = all(parameter.is_contiguous() or _is_channels_last(parameter) for parameter in parameters)
        return alike and dense and len(rows) * total_width <= cls.MAX_NUMBERS

    def skip_inputs_from(self, graph: NodeGraph, sources: Tensor) -> None:
        super().skip_inputs_from(graph, sources)
        pairs = zip(self.parameters, self.index, self._skipped, strict=True)
        left = [torch.zeros_like(p, dtype=torch.bool)[index] if left is None else left for p, index, left in pairs]
        self._written = (~self._concat(left)).nonzero().flatten()

    def flatten_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [self._concat(super().flatten_rows(rows))] if rows else []

    def sum_by_group(self, values: Sequence[Tensor]) -> Tensor:
        numbers = self._concat(values).float()
        return torch.cat([numbers[self._positions], numbers.new_zeros(1)])[self.members].sum(1)

    def gather(self) -> list[Tensor]:
        return [self._concat(self.parameters)[self._positions]]

    @torch.no_grad()
    def scatter_(self, rows: Sequence[Tensor]) -> None:
        positions, new = self._positions, rows[0]
        if self._written is not None:
            positions, new = positions[self._written], new[self._written]
        flat = self._concat(self.parameters)
        self._write_(flat.index_copy_(0, positions, new.to(flat)))  # the loop may have converted the parameters

    def _write_(self, flat: Tensor) -> None:
        """Write whole parameters, concatenated, back into those that are trained."""
        trained = [parameter.requires_grad for parameter in self.parameters]
        targets = list(itertools.compress(self._in_memory_order(self.parameters), trained))
        if targets:
            pairs = zip(itertools.compress(flat.split(self._numels), trained), targets, strict=True)
            torch._foreach_copy_(targets, [new.view(target.shape) for new, target in pairs])

    def _concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of whole parameters, or of rows of each."""
        return torch.cat([tensor.reshape(-1) for tensor in self._in_memory_order(tensors)])

    def _in_memory_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views with their dimensions in the parameters' memory order."""
        pairs = zip(tensors, self._channels_last, strict=True)
        return [tensor.detach().permute(0, 2, 3, 1) if last else tensor.detach() for tensor, last in pairs]


def make_rows(graph: NodeGraph, chosen: Tensor) -> Rows:
    """The rows of the `chosen` (groups,) groups: flat on a GPU, where fewer kernels are worth more memory."""
    rows = Rows(graph, chosen)
    on_gpu = bool(rows.parameters) and rows.parameters[0].is_cuda
    return FlatRows(rows) if on_gpu and FlatRows.supports(rows) else rows


def _sum_rows(value: Tensor) -> Tensor:
    value = value.float()
    for dim in range(value.dim() - 1, 0, -1):
        value = value.sum(dim)
    return value


def _is_channels_last(tensor: Tensor) -> bool:
    dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return dense and not tensor.is_contiguous()
