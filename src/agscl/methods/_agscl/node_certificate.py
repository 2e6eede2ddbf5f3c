"""What AGS-CL certifies of its nodes, and why outputs of old tasks may change although no important node moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agscl.certificate import NEVER
from agscl.graph.probing import LAYERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from agscl.methods._agscl.group_digests import GroupDigests
    from agscl.methods.agscl import AGSCL

__all__ = ["certify_nodes"]


def certify_nodes(method: AGSCL) -> dict[str, Any]:
    """What AGS-CL certifies of nodes: guaranteed where they freeze for good and nothing else reaches old outputs."""
    config, knowledge, graph = method.config, method.knowledge, method.graph
    assert knowledge.digests is not None
    claims = _describe_groups(knowledge.digests, knowledge.first_task)
    frozen_for_good = config.freezes
    uncovered = _find_uncovered(method)
    notes = [] if frozen_for_good else uncovered
    notes += [f"the weights of {name} (excluded) are outside the digests" for name in graph.exclude]
    known = {*claims["layout"].parameters, *method.heads.parameters(method.tasks)}
    if frozen := [n for n, p in method.model.named_parameters() if n not in known and not p.requires_grad]:
        notes.append(f"{len(frozen)} frozen tensors ({frozen[0]}, …) are outside the digests")
    guaranteed = frozen_for_good and not uncovered and not claims["moved_after_task"]
    return {
        "kind": "guaranteed" if guaranteed else "held",
        "frozen_for_good": frozen_for_good,
        "zero_rule": method.zero_rule,
        "notes": notes,
        "uncovered": uncovered if frozen_for_good else [],
        **claims,
    }


def _describe_groups(digests: GroupDigests, first_task: Tensor) -> dict[str, Any]:
    """The fields of a certificate on the groups; `first_task` (groups,) is the task each became important in.

    The live weights are compared with those that the last task ended with.
    """
    first, changed = first_task.tolist(), digests.find_changed(first_task)
    return {
        "layout": digests.layout,
        "first": first,
        "digests": [None if task == NEVER else digest for digest, task in zip(digests.rows, first, strict=True)],
        "held": [group for group in digests.unmoved if group not in set(changed)],
        "moved": sorted({*digests.moved, *set(digests.unmoved).intersection(changed)}),
        "moved_after_task": changed,
    }


def _find_uncovered(method: AGSCL) -> list[str]:
    """The ways in which later tasks may reach outputs of old ones, a clause each."""
    graph, rule = method.graph, method.zero_rule
    uncovered = []
    if method.is_closed and method.hides_weights:
        uncovered.append("the method was closed, and without it old tasks see what later ones learned")
    if rule == "off":
        uncovered.append("with zero_init='off' free nodes reach important ones and old heads")
    elif rule == "while_free":
        uncovered.append("with zero_init='while_free' nodes that become important later reach earlier ones")
    for name in graph.exclude:
        if graph.excluded == "train":
            uncovered.append(f"{name} is excluded, and every task trains it")
        elif name in graph.excluded_readers:
            uncovered.append(f"{name} is excluded and reads nodes that later tasks train")
    for reader in graph.readers.values():
        if reader.is_head and _has_own_forward(reader.module):
            uncovered.append(
                f"the head {reader.name} ({type(reader.module).__name__}) has a forward of its own, so weights of 0 "
                "need not keep later nodes out"
            )
    if unfrozen := graph.find_unfrozen():
        uncovered.append(f"{unfrozen[0]} was frozen, or missing, when the method was made, and can be trained now")
    return uncovered


def _has_own_forward(module: nn.Module) -> bool:
    kind = next((kind for kind in LAYERS if isinstance(module, kind)), None)
    return kind is None or any(
        getattr(type(module), key, None) is not getattr(kind, key, None) for key in ("forward", "_conv_forward")
    )
