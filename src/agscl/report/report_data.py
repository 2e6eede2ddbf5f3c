"""What a page shows, as plain data that JSON can hold: runs, their outcomes, lines over seeds, the whole report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.certificate import Certificate
from agscl.experiments.method_entries import METHODS
from agscl.report.node_history import NodeHistory


@dataclass
class Outcome:
    """What one method did in one run, as a report shows it."""

    method: str
    accuracies: list[list[float]]
    """[i][j]: on task j after learning task i, 0 to 1; of agents, scores relative to the task's range."""
    scores: list[list[float]] = field(default_factory=list)
    """Of agents, in place of accuracies: the environment's own scores."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    """[task][epoch]."""
    valid_losses: list[list[float]] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    weights: int = 0
    seconds: float | None = None
    plasticity: float | None = None
    accumulated_reward: float | None = None
    certificate: str | None = None


@dataclass
class RunData:
    """One run, as its folder holds it and a report shows it."""

    path: Path
    config: dict[str, Any]
    tasks: list[str]
    finished: bool
    progress: float
    """The share of the training that is done, of the method being trained."""
    outcomes: dict[str, Outcome]
    environment: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None
    certificates: list[Certificate] = field(default_factory=list)
    nodes: NodeHistory | None = None
    play: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verification: dict[str, Any] | None = None
    """What `agscl verify` says: ok, and the last line."""

    @property
    def method(self) -> str:
        return str(self.config.get("method") or (list(self.outcomes) or [""])[-1])

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def outcome(self) -> Outcome | None:
        return self.outcomes.get(self.method)


@dataclass
class Line:
    """One method with one setting, over its seeds, in a report: a line of its charts and tables."""

    label: str
    method: str
    settings: dict[str, Any]
    seeds: list[Any]
    outcomes: list[Outcome]

    @property
    def tasks_learned(self) -> int:
        """How many tasks the line's seed that is furthest has learned."""
        return max((len(outcome.accuracies) for outcome in self.outcomes), default=0)

    @property
    def complete_outcomes(self) -> list[Outcome]:
        """The line's outcomes with as many tasks learned as any: only these can be averaged."""
        return [
            outcome for outcome in self.outcomes if self.tasks_learned and len(outcome.accuracies) == self.tasks_learned
        ]

    def summarize(self, metric: str) -> dict[str, float | None]:
        """Of a line of the report, mean and deviation over seeds of a metric such as average_accuracy or forgetting."""
        values = [
            value for outcome in self.complete_outcomes if (value := measure_outcome(outcome, metric)) is not None
        ]
        return {
            "mean": statistics.mean(values) if values else None,
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
        }


def measure_outcome(outcome: Outcome, metric: str) -> float | None:
    """A metric of one outcome in a report; None where it is not known."""
    if metric in ("plasticity", "accumulated_reward"):
        value: float | None = getattr(outcome, metric)
        return value
    if not outcome.accuracies:
        return None
    compute: Callable[[metrics.Matrix], float] = getattr(metrics, metric)
    value = compute(outcome.accuracies)
    return value if math.isfinite(value) else None


@dataclass
class ReportData:
    """All data that a page shows."""

    title: str
    kind: str
    """run, runs, comparison or study."""
    preset: str
    tasks: list[str]
    lines: list[Line]
    detail: RunData | None
    """The run whose nodes, certificates and curves are shown."""
    studies: list[dict[str, Any]]
    problems: list[str]
    command: str | None = None
    source: dict[str, Any] = field(default_factory=dict)
    """Of a comparison read from one file: its command, commit and machine."""
    own_tasks: bool = False
    """Whether runs that are compared have different tasks, or another order."""

    @property
    def finished(self) -> bool:
        """Whether the report's figures at the end are those of all tasks."""
        if self.kind == "run":
            return self.detail is None or self.detail.finished
        return self.own_tasks or self.tasks_learned == len(self.tasks)

    @property
    def tasks_learned(self) -> int:
        """How many tasks the report's method that is furthest has learned."""
        return max((line.tasks_learned for line in self.lines if not is_bound(line.method)), default=0)

    @property
    def is_score(self) -> bool:
        return any(outcome.scores for line in self.lines for outcome in line.outcomes)

    @property
    def main_line(self) -> Line | None:
        """The report's line that the page is about: the run's method, or the best of a comparison."""
        if self.kind == "run" and self.detail is not None:
            return next((line for line in self.lines if line.method == self.detail.method), None)
        ranked = self.ranked
        return ranked[0] if ranked else None

    @property
    def ranked(self) -> list[Line]:
        """The report's lines by average accuracy, the highest first; bounds are no methods that one could use.

        Averages over fewer tasks cannot be compared: of several runs, those that are `unranked` are left out.
        """
        unranked = self.unranked
        methods = [line for line in self.lines if not is_bound(line.method) and line not in unranked]
        found = [(mean, line) for line in methods if (mean := line.summarize("average_accuracy")["mean"]) is not None]
        return [line for _, line in sorted(found, key=lambda pair: -pair[0])]

    @property
    def unranked(self) -> list[Line]:
        """The report's methods, of a comparison, that have learned fewer tasks than others."""
        if self.kind == "run" or self.own_tasks:
            return []
        return [line for line in self.lines if not is_bound(line.method) and line.tasks_learned < self.tasks_learned]


def get_title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method


def is_bound(method: str) -> bool:
    return method in METHODS and METHODS[method].is_bound
