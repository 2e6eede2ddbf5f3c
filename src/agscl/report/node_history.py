"""What is known of every node after every task: from a run's certificates, and from its folder `nodes`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agscl.analysis.node_record import Array, read_node_record
from agscl.certificate import NEVER, Certificate
from agscl.experiments.certificate_chain import node_record_path
from agscl.runs import RunError
from agscl.runs.json_files import read_checked_json


@dataclass
class NodeLayerData:
    """The groups of one layer in the history of nodes; one of several layers is counted in the first of them."""

    name: str
    groups: Array
    reads: list[int]
    """The numbers of the layers that it reads."""


@dataclass
class NodeHistory:
    """The history of every group of nodes: what it was after every task."""

    layers: list[NodeLayerData]
    tasks: list[str]
    first: Array
    """(groups,) the number of the task in which each became important; NEVER while free."""
    moved: list[Array]
    """For each task, the groups important before it whose bits it changed."""
    zero_rule: str
    importance: Array | None
    """(tasks, groups), or None where the run did not record it."""
    fresh: list[Array | None]
    """For each task, the groups that got fresh weights when it ended; None where that was not recorded."""

    @property
    def size(self) -> int:
        return len(self.first)


def read_node_history(folder: Path, certificates: Sequence[Certificate], problems: list[str]) -> NodeHistory | None:
    """Read the history of a run's nodes from certificates and records; None for a method that certifies no nodes."""
    if not certificates or not certificates[-1].layout.size:
        return None
    last = certificates[-1]
    if any(certificate.layout.size != last.layout.size for certificate in certificates):
        problems.append("The certificates are of different networks: the nodes are not shown.")
        return None
    layers = find_layers(last)
    recorded = [_read_record(folder, number, last.layout.size, problems) for number in range(1, len(certificates) + 1)]
    known = [importance for importance, _ in recorded if importance is not None]
    if len(known) < len(recorded):
        missing = len(recorded) - len(known)
        problems.append(
            f"The importance of nodes was not recorded for {missing} of {len(recorded)} tasks (runs of older versions "
            "did not): the node map shows when each node became important, not how important it was."
        )
    return NodeHistory(
        layers,
        [certificate.task for certificate in certificates],
        np.array(last.first, dtype=np.int64),
        [np.array(certificate.moved, dtype=np.int64) for certificate in certificates],
        last.zero_rule,
        np.stack(known) if known and len(known) == len(recorded) else None,
        [fresh for _, fresh in recorded],
    )


def _read_record(folder: Path, number: int, size: int, problems: list[str]) -> tuple[Array | None, Array | None]:
    path = node_record_path(folder, number)
    if not path.exists():
        return None, None
    try:
        importance, fresh = read_node_record(read_checked_json(path), size)
    except (RunError, ValueError) as error:
        problems.append(f"What was recorded of nodes after task {number} is left out: {error}.")
        return None, None
    return importance, None if fresh is None else np.flatnonzero(fresh)


def find_layers(certificate: Certificate) -> list[NodeLayerData]:
    """The layers of nodes that a certificate speaks of, in their order, and which of them each reads."""
    layout = certificate.layout
    of_group = np.full(layout.size, -1)
    layers: list[NodeLayerData] = []
    names: dict[str, int] = {}
    for tensor, rows in layout.parameters.items():
        name = tensor.rpartition(".")[0]
        groups = np.unique([group for group in rows if group >= 0])
        own = groups[of_group[groups] < 0]
        if len(own):  # otherwise counted with an earlier layer, or the norm of one
            of_group[own] = len(layers)
            names[name] = len(layers)
            layers.append(NodeLayerData(name, own, []))
    for tensor, sources in layout.readers.items():
        rows = [group for group in layout.parameters.get(tensor, []) if group >= 0]
        read = np.unique(np.concatenate([np.array(row) for row in sources]))
        from_layers = {int(layer) for layer in of_group[read[read >= 0]]}
        for reader in {int(of_group[group]) for group in rows[:1]}:
            layers[reader].reads = sorted({*layers[reader].reads, *from_layers} - {-1})
    return layers


# For the page --------------------------------------------------------------------------------------------------------


def pack_nodes(history: NodeHistory, *, with_importance: bool = True) -> dict[str, Any]:
    """The history as the page's script reads it: bytes in base64, importances in 255 steps of each layer's highest."""
    tasks, size = len(history.tasks), history.size
    order = np.concatenate([layer.groups for layer in history.layers]).astype(np.int64)  # as they are drawn
    place = np.full(size, -1)
    place[order] = np.arange(len(order))
    first = np.where(history.first == NEVER, 0xFFFF, history.first).astype("<u2")[order]
    packed: dict[str, Any] = {
        "tasks": history.tasks,
        "layers": [{"name": layer.name, "size": len(layer.groups), "reads": layer.reads} for layer in history.layers],
        "zero_rule": history.zero_rule,
        "first": _encode(first),
        "moved": [_encode_list(place[moved]) for moved in history.moved],
        "fresh": [None if fresh is None else _pack_bits(place[fresh], len(order)) for fresh in history.fresh],
        "importance": None,
    }
    if history.importance is not None and with_importance:
        steps = np.zeros((tasks, len(order)), dtype=np.uint8)
        highest = []
        start = 0
        for layer in history.layers:
            values = history.importance[:, layer.groups]
            top = values.max(axis=1)
            scaled = np.ceil(255 * values / np.where(top > 0, top, 1)[:, None])
            steps[:, start : start + len(layer.groups)] = np.clip(scaled, 0, 255)
            highest.append([float(f"{value:.4g}") for value in top])
            start += len(layer.groups)
        packed["importance"] = {"highest": highest, "steps": _encode(steps)}
    return packed


def _encode(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _encode_list(places: Array) -> list[int] | str:
    return [int(place) for place in places] if len(places) < 500 else _encode(np.sort(places).astype("<u4"))


def _pack_bits(places: Array, size: int) -> str:
    bits = np.zeros(size, dtype=np.uint8)
    bits[places] = 1
    return _encode(np.packbits(bits))


def count_moved(history: NodeHistory) -> list[list[tuple[int, int]]]:
    """[j][i]: of the groups important since task i, how many task j > i changed, and how many there are."""
    counts = []
    for later in range(len(history.tasks)):
        moved = np.zeros(history.size, dtype=bool)
        moved[history.moved[later]] = True
        row = []
        for since in range(later):
            own = history.first == since
            row.append((int((own & moved).sum()), int(own.sum())))
        counts.append(row)
    return counts


def count_taken(history: NodeHistory) -> list[list[int]]:
    """[layer][task]: how many nodes each task made important; the last entry of a layer counts the free ones."""
    return [
        [
            *(int((history.first[layer.groups] == task).sum()) for task in range(len(history.tasks))),
            int((history.first[layer.groups] == NEVER).sum()),
        ]
        for layer in history.layers
    ]
