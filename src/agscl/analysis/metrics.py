"""The paper's metrics of a task sequence.

All take `accuracies`, the lower triangle of the accuracy matrix: `accuracies[i][j]` is the accuracy on task j after
learning task i, for j ≤ i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Matrix = Sequence[Sequence[float]]


def average_accuracy(accuracies: Matrix) -> float:
    """Mean accuracy over all tasks learned so far, after the last of them."""
    _check_matrix(accuracies)
    return _mean(accuracies[-1])


def plasticity(accuracies: Matrix, reference: Matrix) -> float | None:
    """Mean over tasks of the just-learned accuracy, relative to plain fine-tuning's on the same sequence and seed.

    A task that fine-tuning did not learn (0, or a score below that) is left out: there is nothing to be relative to.
    None if that leaves no task.
    """
    _check_matrix(accuracies)
    _check_matrix(reference)
    if len(accuracies) != len(reference):
        raise ValueError(f"{len(accuracies)} tasks against {len(reference)} in the reference: expected the same number")
    ratios = [row[-1] / other[-1] for row, other in zip(accuracies, reference, strict=True) if other[-1] > 0]
    return _mean(ratios) if ratios else None


def stability(accuracies: Matrix) -> float:
    """Mean over tasks of the final accuracy, relative to the best this task ever had.

    A task that never got above 0 counts as 1: it lost nothing.
    """
    _check_matrix(accuracies)
    pairs = zip(accuracies[-1], _best_accuracies(accuracies), strict=True)
    return _mean([last / best if best > 0 else 1.0 for last, best in pairs])


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
    learned so far of the score, divided by the highest that fine-tuning (`reference`) ever had on that task.

    Tasks that fine-tuning did not learn (`find_unlearned`) add nothing, for no method: 0/0 says nothing, and a score
    divided by a negative one is the higher the worse it is.
    """
    best = _best_scores(reference)
    return [
        sum(score / highest for score, highest in zip(evaluation["relative"], best, strict=False) if highest > 0)
        for evaluation in evaluations
    ]


def forward_transfer(evaluations: Sequence[Mapping[str, Any]], single: Sequence[Mapping[str, Any]]) -> float | None:
    """How much better a task is learned after the ones before it than alone, in reinforcement learning.

    Mean, over all tasks but the first, of the mean score while the task is learned (the area under its curve), less
    that of an agent of its own (`single`). None if there is only one task.
    """
    learned_after, learned_alone = _mean_scores_while_learned(evaluations), _mean_scores_while_learned(single)
    gains = [after - alone for after, alone in zip(learned_after, learned_alone, strict=True)]
    return _mean(gains[1:]) if len(gains) > 1 else None


def _mean_scores_while_learned(evaluations: Sequence[Mapping[str, Any]]) -> list[float]:
    tasks = range(1 + max(evaluation["task"] for evaluation in evaluations))
    return [_mean([one["relative"][task] for one in evaluations if one["task"] == task]) for task in tasks]


def find_unlearned(reference: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the tasks on which no evaluation of `reference` is above 0."""
    return [task for task, highest in enumerate(_best_scores(reference)) if highest <= 0]


def _best_scores(evaluations: Sequence[Mapping[str, Any]]) -> list[float]:
    """The highest score, relative to the task's range, that each task ever had."""
    rows = [evaluation["relative"] for evaluation in evaluations]
    return [max(row[task] for row in rows if len(row) > task) for task in range(max(map(len, rows)))]


def _best_accuracies(accuracies: Matrix) -> list[float]:
    return [max(row[task] for row in accuracies[task:]) for task in range(len(accuracies))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check_matrix(accuracies: Matrix) -> None:
    if not accuracies:
        raise ValueError("no task has been learned yet: the accuracy matrix is empty")
    for task, row in enumerate(accuracies):
        if len(row) != task + 1:
            raise ValueError(f"row {task} of the accuracy matrix must hold {task + 1} accuracies, not {len(row)}")
