"""The paper's metrics of a task sequence.

All take `accuracies`, the lower triangle of the accuracy matrix: `accuracies[i][j]` is the accuracy on task j after
learning task i, for j ≤ i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Matrix = Sequence[Sequence[float]]


def average_accuracy(accuracies: Matrix) -> float:
    """Mean accuracy over all tasks learned so far, after the last of them."""
    _check_matrix(accuracies)
    return _mean(accuracies[-1])


def plasticity(accuracies: Matrix, reference: Matrix) -> float:
    """Mean over tasks of the just-learned accuracy, relative to plain fine-tuning's on the same sequence and seed.

    A task is left out if fine-tuning has accuracy 0 on it and this has more: the ratio would be infinite.
    """
    _check_matrix(accuracies)
    _check_matrix(reference)
    if len(accuracies) != len(reference):
        raise ValueError(f"{len(accuracies)} tasks against {len(reference)} in the reference: expected the same number")
    ratios = [_ratio(row[-1], other[-1]) for row, other in zip(accuracies, reference, strict=True)]
    return _mean([ratio for ratio in ratios if math.isfinite(ratio)] or ratios)


def stability(accuracies: Matrix) -> float:
    """Mean over tasks of the final accuracy, relative to the best this task ever had."""
    _check_matrix(accuracies)
    return _mean([_ratio(last, best) for last, best in zip(accuracies[-1], _best_accuracies(accuracies), strict=True)])


def forgetting(accuracies: Matrix) -> float:
    """Mean over all tasks but the last of the accuracy lost since its best."""
    _check_matrix(accuracies)
    if len(accuracies) == 1:
        return 0.0
    best_accuracies = _best_accuracies(accuracies)[:-1]
    return _mean([best - last for last, best in zip(accuracies[-1][:-1], best_accuracies, strict=True)])


def accumulated_rewards(
    evaluations: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The paper's normalised accumulated reward of each evaluation in reinforcement learning: the sum over the tasks
    learned so far of the score, divided by the highest that fine-tuning (`reference`) ever had on that task."""
    rows = [evaluation["relative"] for evaluation in reference]
    best = [max(row[task] for row in rows if len(row) > task) for task in range(max(map(len, rows)))]
    return [
        sum(_ratio(score, highest) for score, highest in zip(evaluation["relative"], best, strict=False))
        for evaluation in evaluations
    ]


def _best_accuracies(accuracies: Matrix) -> list[float]:
    return [max(row[task] for row in accuracies[task:]) for task in range(len(accuracies))]


def _ratio(value: float, reference: float) -> float:
    # 0 / 0 counts as 1: an accuracy of 0 that stays 0 lost nothing.
    if reference == 0:
        return 1.0 if value == 0 else float("inf")
    return value / reference


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check_matrix(accuracies: Matrix) -> None:
    if not accuracies:
        raise ValueError("no task has been learned yet: the accuracy matrix is empty")
    for task, row in enumerate(accuracies):
        if len(row) != task + 1:
            raise ValueError(f"row {task} of the accuracy matrix must hold {task + 1} accuracies, not {len(row)}")
