"""`Certificate`: what a method froze during a task, as a statement that anyone can check again later.

The proof is portable: digests of the frozen groups and of the old heads, and the pattern of weights that must be
exactly zero. Checking it needs the tensors of a `state_dict`, no model code. Two kinds:

    held         these nodes did not move during this task (they may in a later one)
    guaranteed   these nodes can never move again (λ = ∞), and nothing that is learned later reaches old outputs

Outputs of the old heads on a probe batch are a second witness: where they changed since a task was learned, whatever
the cause, nothing is guaranteed. The same weights give other bits on another device, with other threads, another batch
shape or memory layout; the certificate says which were used, and compares bits only there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from agscl.digests import describe_conversion, digest_groups, digest_tensors
from agscl.probe_outputs import ProbeOutputs
from agscl.system.files import write_atomically

__all__ = [
    "NEVER",
    "Certificate",
    "Finding",
    "Layout",
    "Verdict",
    "verify",
]

FORMAT = "agscl-certificate-1"
NEVER = 2**31 - 1  # the "first important task" of a node that is still free


@dataclass(frozen=True)
class Layout:
    """Where the groups that a certificate speaks of lie in the model's state_dict."""

    size: int
    parameters: dict[str, list[int]]  # tensor -> group of each row
    statistics: dict[str, list[int]]  # BatchNorm statistics -> group of each channel
    readers: dict[str, list[list[int]]]  # weight of a node layer -> (rows or 1, columns) group that each weight reads

    @property
    def rows(self) -> dict[str, list[int]]:
        return {**self.parameters, **self.statistics}

    def find_later_inputs(self, first: Sequence[int], rule: str) -> dict[str, tuple[Any, Any]]:
        """Per reader in the certificate: the group that each weight reads, and whether the weight belongs to it.

        (rows or 1, columns) and (rows, columns). It belongs to the group it reads, not to its row's, where earlier
        tasks do not see it, as the group became important later.
        """
        if rule != "earlier_tasks":
            return {}
        tasks, found = np.array([*first, -1]), {}  # -1: reads no node
        for name, readers in self.readers.items():
            sources = np.array(readers)
            found[name] = sources, tasks[sources] > tasks[np.array(self.parameters[name])][:, None]
        return found


@dataclass(frozen=True)
class Finding:
    """What a check of one certificate against a set of tensors found."""

    moved: list[int]  # important groups whose bits are no longer the certified ones
    nonzero: dict[str, int]  # weights that should be exactly zero and are not, per tensor
    heads: list[str]  # tasks whose head is no longer the certified one
    moved_by_tensor: dict[str, int] = field(default_factory=dict, repr=False)  # how many of the groups lie in each

    @property
    def ok(self) -> bool:
        return not (self.moved or self.nonzero or self.heads)

    def __str__(self) -> str:
        if self.ok:
            return "every certified bit is there"
        changes = []
        if self.moved:
            places = ", ".join(f"{count} in {name}" for name, count in self.moved_by_tensor.items())
            changes.append(f"nodes ({places})")
        if self.nonzero:
            changes.append(f"weights that were exactly 0 (in {', '.join(self.nonzero)})")
        if self.heads:
            changes.append(f"the heads of {', '.join(self.heads)}")
        return f"CHANGED since the certificate was made: {'; '.join(changes)}"

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Certificate:
    """What held at the end of one task. Made by `method.certificate()`; see the module's text."""

    method: str
    task: str
    index: int  # number of the task, from 0
    kind: str  # "held" or "guaranteed"
    zero_rule: str  # "earlier_tasks", "paper", "while_free" or "off"
    layout: Layout
    first: list[int]  # per group, the first task it was important in; NEVER while free
    digests: list[str | None]  # per group, None while free
    held: list[int]  # groups important before this task whose bits it left alone
    moved: list[int]  # groups important before this task whose bits it changed
    heads: dict[str, str]  # task -> digest of its head
    head_tensors: dict[str, list[str]]  # task -> names of its head's tensors
    moved_heads: list[str] = field(default_factory=list)  # tasks whose head changed since they were learned
    notes: list[str] = field(default_factory=list)  # what the digests leave out
    probe: ProbeOutputs | None = None
    changed_outputs: list[str] = field(default_factory=list)  # tasks whose outputs changed since they were learned
    frozen_for_good: bool = False  # whether the method means to freeze important nodes for good (λ = ∞)
    moved_after_task: list[int] = field(default_factory=list)  # important groups whose bits changed after end_task
    uncovered: list[str] = field(default_factory=list)  # why outputs of old tasks may change although no node moves
    dtypes: list[str] = field(default_factory=list)  # of the weights, when the task ended

    @property
    def important(self) -> list[int]:
        return [group for group, task in enumerate(self.first) if task != NEVER]

    @property
    def guarantees_outputs(self) -> bool:
        """Whether it is certified that outputs of the tasks learned so far can never change."""
        covers = self.zero_rule in ("paper", "earlier_tasks") and not self.uncovered
        return self.kind == "guaranteed" and covers and not self.moved

    @property
    def warnings(self) -> list[str]:
        """What was seen, or is known, to break or limit the certificate, a clause each."""
        found = []
        if self.changed_outputs:
            tasks = f"task{'s' * (len(self.changed_outputs) > 1)} {', '.join(self.changed_outputs)}"
            found.append(f"outputs of {tasks} on a random batch have changed")
        if count := len(self.moved_after_task):
            found.append(
                f"the weights of {count} of {len(self.important)} important nodes changed after end_task (a step "
                "outside a task? averaged weights swapped in? another dtype?)"
            )
        if self.uncovered:
            found.append(f"outputs of old tasks are not covered: {'; '.join(self.uncovered)}")
        return found

    def zeros(self) -> int:
        """How many weights are certified to be exactly zero (a filter's k×k entries counted as one)."""
        return sum(int(self._zero_pattern(name).sum()) for name in self.layout.readers)

    def _zero_pattern(self, name: str) -> Any:
        """(rows, columns) of a reader's weight: True where it must be exactly 0."""
        first = np.array([*self.first, -1])  # -1: reads no node
        rows = first[np.array(self.layout.parameters[name])][:, None]
        sources = first[np.array(self.layout.readers[name])]
        if self.zero_rule in ("off", "earlier_tasks"):
            return np.zeros(np.broadcast_shapes(rows.shape, sources.shape), dtype=bool)
        if self.zero_rule == "while_free":
            sources = np.where(sources == NEVER, NEVER, -1)
        return sources > rows

    def check(self, tensors: Mapping[str, Tensor]) -> Finding:
        """Compare the certificate with the tensors of `model.state_dict()`, bit for bit.

        Those of `method.state_dict_for(task)` are of one task: what other tasks learned is not in them, and counts as
        changed.
        """
        needed = [*self.layout.rows, *(name for names in self.head_tensors.values() for name in names)]
        missing = [name for name in needed if name not in tensors]
        if missing:
            raise ValueError(
                f"These tensors of the certificate are not in the weights given: {', '.join(missing[:5])}."
            )
        later = self.layout.find_later_inputs(self.first, self.zero_rule)
        now = digest_groups(tensors, self.layout.rows, self.layout.size, later)
        nonzero = {}
        for name in self.layout.readers:
            pattern = self._zero_pattern(name)
            if tuple(tensors[name].shape[:2]) != pattern.shape:
                raise ValueError(
                    f"{name} has {tensors[name].shape[1]} columns, expected {pattern.shape[1]}: these are the weights "
                    "of another network, or the layer was replaced."
                )
            weight = tensors[name].detach().float().cpu().numpy().reshape(*pattern.shape, -1)
            if count := int(((weight != 0).any(2) & pattern).sum()):
                nonzero[name] = count
        heads = [
            task for task, names in self.head_tensors.items() if digest_tensors(tensors, names) != self.heads[task]
        ]
        moved = [group for group in self.important if now[group] != self.digests[group]]
        counts = {name: len(set(moved).intersection(groups)) for name, groups in self.layout.rows.items()}
        finding = Finding(moved, nonzero, heads, {name: count for name, count in counts.items() if count})
        dtypes = {str(tensors[n].dtype).removeprefix("torch.") for n in needed if tensors[n].is_floating_point()}
        if not finding and self.dtypes and not dtypes <= set(self.dtypes):
            change = describe_conversion(", ".join(sorted(dtypes)), ", ".join(self.dtypes))
            raise ValueError(f"The weights given are {change}")
        return finding

    def __str__(self) -> str:
        before = len(self.held) + len(self.moved)
        nodes = f"{len(self.held)} of {before} important nodes kept every bit"
        if before and not self.held:
            nodes = f"none of {before} important nodes is unchanged"
        if not before:
            nodes = f"{len(self.important)} nodes are important from now on"
        zeros = f"{self.zeros()} weights into important nodes are exactly 0, "
        if self.zero_rule == "earlier_tasks":
            zeros = "no task sees nodes that later ones took, "
        if self.moved_after_task or not self.layout.size:
            zeros = ""
        kind = "guaranteed for good" if self.kind == "guaranteed" else "in this task; a later one may change them"
        if self.kind == "guaranteed" and self.moved:
            kind = "GUARANTEE BROKEN"
        kind = f" ({kind})" if before and (self.held or self.kind == "guaranteed") else ""
        unchanged = max(0, len(self.heads) - 1 - len(self.moved_heads))
        heads = f"{unchanged} earlier head{'s' * (unchanged != 1)} unchanged" if self.index else "no earlier head"
        heads += f", CHANGED: the heads of {', '.join(self.moved_heads)}" if self.moved_heads else ""
        leads = self.frozen_for_good or self.moved_after_task or self.uncovered
        warning = f"NOT GUARANTEED: {'; '.join(self.warnings)}; " if self.warnings and leads else ""
        notes = [*([] if leads else self.warnings), *self.notes]
        ending = f". Note: {'; '.join(notes)}" if notes else ""
        claims = f"{nodes}{kind}, {zeros}{heads}"
        if not self.layout.size:
            claims = f"{heads} (all that {self.method} certifies: what the heads read is not checked)"
        return f"{warning}after task {self.task!r}: {claims}{ending}"

    def save(self, path: str | Path) -> None:
        """Write the certificate as JSON, whole or not at all."""
        write_atomically(Path(path), json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a certificate: it is not JSON ({error}).") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a certificate of the format {FORMAT}.")
        probe = data.pop("probe")
        try:
            return cls(layout=Layout(**data.pop("layout")), probe=ProbeOutputs(**probe) if probe else None, **data)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a whole certificate: {error}.") from None


@dataclass(frozen=True)
class Verdict:
    """What `verify` found: whether the certificates hold, and what each says, a line each."""

    ok: bool
    lines: list[str]


def verify(certificates: Sequence[Certificate], tensors: Mapping[str, Tensor]) -> Verdict:
    """Check certificates, one per task in order, against each other and against the final weights."""
    if not certificates:
        return Verdict(False, ["There is no certificate to check."])
    lines: list[str] = []
    failed: list[str] = []
    for before, after in pairwise(certificates):
        if before.dtypes and after.dtypes and set(before.dtypes).isdisjoint(after.dtypes):
            line = (
                f"the weights were {', '.join(before.dtypes)} when task {before.task!r} ended and "
                f"{', '.join(after.dtypes)} when {after.task!r} did: bits of two dtypes cannot be compared. Convert a "
                "model before its first task; for half precision use torch.autocast."
            )
            return Verdict(False, [f"FAILED: {line}"])
    last = certificates[-1]
    finding = last.check(tensors)
    if finding.moved:
        failed.append(
            f"{len(finding.moved)} important nodes are not what the last certificate says: {finding.moved[:10]}"
        )
    for name, count in finding.nonzero.items():
        failed.append(f"{count} weights of {name} from a later node into an earlier one are not exactly 0")
    for task in finding.heads:
        failed.append(f"the head of task {task!r} is not the certified one")
    for number, certificate in enumerate(certificates):
        if certificate.layout != last.layout:
            failed.append(f"the certificate of task {certificate.task!r} is of another network")
            continue
        drifted: dict[str, int] = {}
        for later, before in zip(certificates[number + 1 :], certificates[number:], strict=False):
            for group in certificate.important:
                if later.first[group] != certificate.first[group]:
                    failed.append(
                        f"node {group} became important in task {certificate.first[group] + 1}, says the certificate "
                        f"of {certificate.task!r}; that of {later.task!r} says otherwise"
                    )
                elif later.digests[group] != before.digests[group]:
                    drifted[later.task] = drifted.get(later.task, 0) + 1
        changed: dict[str, str] = {}  # task -> the first one after which its outputs were others
        for later in certificates[number + 1 :] if certificate.guarantees_outputs else ():
            seen = certificate.probe.find_changed(later.probe) if certificate.probe else []
            for task in (*seen, *later.changed_outputs):
                if task in certificate.heads:
                    changed.setdefault(task, later.task)
        failed += [
            f"outputs of task {task!r}, guaranteed after task {certificate.task!r}, had changed after task {later!r}"
            for task, later in changed.items()
        ]
        for task, head in certificate.heads.items():
            if last.heads.get(task) != head:
                failed.append(f"the head of task {task!r} moved after task {certificate.task!r}")
        words = ", ".join(f"{count} changed in task {task!r}" for task, count in drifted.items())
        if drifted and certificate.kind == "guaranteed":
            failed.append(f"nodes guaranteed after task {certificate.task!r} changed: {words}")
        kind = " (guaranteed)" if certificate.kind == "guaranteed" else ""
        lines.append(
            f"{certificate.task}: {len(certificate.important)} important nodes{kind}, "
            + (words or ("none changed since" if number + 1 < len(certificates) else "the last task"))
        )
        mark = "NOT GUARANTEED: " if certificate.frozen_for_good else "note: "
        known = certificates[number - 1].warnings if number else []  # said already, and still so
        lines += [f"{certificate.task}: {mark}{warning}" for warning in certificate.warnings if warning not in known]
    lines += dict.fromkeys(f"note: {note}" for certificate in certificates for note in certificate.notes)
    lines += [f"FAILED: {line}" for line in failed]
    return Verdict(not failed, lines)
