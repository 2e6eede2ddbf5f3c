"""What a page shows, read from the folders of runs as they are.

Nothing here raises because a file is missing, damaged, cut short or of an older version: a sentence in `problems` says
what is not shown and why. Only where there is nothing at all to show, `NothingToShow` says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agscl.analysis import metrics
from agscl.certificate import Certificate
from agscl.experiments.certificate_chain import certificate_path
from agscl.experiments.method_entries import METHODS, REFERENCE
from agscl.report.node_history import read_node_history
from agscl.report.report_data import Line, Outcome, ReportData, RunData, get_title
from agscl.runs import RunError
from agscl.runs.events import read_events
from agscl.runs.json_files import read_checked_json, read_json
from agscl.runs.run_folder import DIVERGED, read_result
from agscl.system.files import read_limited

FILE_LIMIT = 200 * 2**20
"""The most bytes of one JSON file that are read."""
STUDIES = ("aopc", "prox", "reinit", "rho", "tradeoff")
PLAY = ("*.gif", "*.mp4", "*.webm", "*.png")
"""Recorded play in the folder `play` of a run."""


class NothingToShow(Exception):
    """There is no run, comparison or study at a path; the message says what was expected."""


def read_report(paths: Sequence[Path]) -> ReportData:
    """Read the report of a run, of several runs, of the folder of a comparison or study, or of a comparison's file."""
    if not paths:
        raise NothingToShow("give at least one run, or the folder of a comparison")
    for path in paths:
        if not path.exists():
            raise NothingToShow(f"there is no run or comparison at {path}")
    if len(paths) == 1 and paths[0].is_file():
        return _read_comparison_file(paths[0])
    if len(paths) == 1 and not is_run(paths[0]):
        return _read_group(paths[0])
    if wrong := [path for path in paths if not is_run(path)]:
        raise NothingToShow(f"{wrong[0]} is not the folder of a run (several can be given, but only runs)")
    runs = [read_run(path) for path in paths]
    problems = [f"{run.path.name}: {problem}" if len(runs) > 1 else problem for run in runs for problem in run.problems]
    if len(runs) == 1:
        run = runs[0]
        lines = [
            Line(get_title(name), name, run.config.get("settings", {}) if name == run.method else {}, [run.seed], [one])
            for name, one in run.outcomes.items()
        ]
        studies = _read_studies(run.path.parent) if run.path.parent.name.startswith("study-") else []
        title, kind = run.path.resolve().name, "run"
        return ReportData(title, kind, _text(run.config.get("preset")), run.tasks, lines, run, studies, problems)
    return _compare_runs(" · ".join(dict.fromkeys(run.path.resolve().name for run in runs[:3])), "runs", runs, problems)


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "result.json", "events.jsonl", "checkpoints"))


# One run -------------------------------------------------------------------------------------------------------------


def read_run(folder: Path, *, nodes: bool = True) -> RunData:
    """Read all that a run's folder holds; without `nodes` neither certificates nor what is known of nodes."""
    problems: list[str] = []
    result = read_tolerantly(folder / "result.json", problems, lambda _: read_result(folder)) or {}
    config = read_tolerantly(folder / "config.json", problems, read_checked_json)
    if config is None:
        config = result.get("config")
    if not isinstance(config, dict):
        problems.append("config.json is missing, so the settings of this run are not shown.")
        config = {}
    events = _read_event_log(folder, problems)
    data = read_tolerantly(folder / "data.json", [], read_checked_json) or {}
    tasks = [_text(task) for task in result.get("tasks") or data.get("tasks") or ()] or _find_tasks(events)
    outcomes = _collect_outcomes(result, events, problems)
    diverged = read_tolerantly(folder / DIVERGED, [], read_checked_json)
    current = events[-1].get("method") if events else None
    progress = max((_number(one.get("progress")) or 0.0 for one in events if one.get("method") == current), default=0.0)
    finished = bool(result)
    run = RunData(folder, config, tasks, finished, 1.0 if finished else progress, outcomes, problems=problems)
    if diverged:
        problems.append(f"Training stopped: {_text(diverged.get('reason'))}.")
    elif not finished:
        problems.append(_describe_position(run, events))
    environment = read_tolerantly(folder / "environment.json", [], read_checked_json) or result.get("environment")
    run.environment = environment if isinstance(environment, dict) else {}
    run.digest = result.get("digest") if isinstance(result.get("digest"), str) else None
    run.play = sorted(path for pattern in PLAY for path in (folder / "play").rglob(pattern) if path.is_file())
    if nodes:
        run.certificates = _read_certificates(folder, len(tasks), problems)
        run.nodes = read_node_history(folder, run.certificates, problems)
    return run


def read_tolerantly(path: Path, problems: list[str], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """Read a JSON file of a run; where its checksum does not match, as it is, with a sentence that says so."""
    if not path.exists():
        return None
    try:
        if path.stat().st_size > FILE_LIMIT:
            raise RunError(f"{path} is larger than {FILE_LIMIT // 2**20} MB")
        return read(path)
    except RunError as error:
        reason = str(error).split(". Remove it")[0]
    try:
        content = read_json(path)
    except RunError:
        problems.append(f"{reason}. It is left out here.")
        return None
    problems.append(f"{reason}. What it says is shown unchecked.")
    return content


def _read_event_log(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    try:
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        events = list(read_events(path)) if path.exists() else []
    except OSError as error:
        problems.append(f"events.jsonl cannot be read ({error.strerror}): curves of training are missing.")
        return []
    if not path.exists():
        problems.append("events.jsonl is missing: curves of training come from the result alone, or are missing.")
    elif lost := lines - len(events):
        problems.append(f"{lost} of {lines} lines of events.jsonl are damaged and left out.")
    elif not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        problems.append("The last line of events.jsonl is cut short and left out.")
    return events


def _find_tasks(events: Sequence[Mapping[str, Any]]) -> list[str]:
    names: dict[int, str] = {}
    for event in events:
        if event.get("event") in ("task started", "task ended") and isinstance(event.get("task"), int):
            names[event["task"]] = _text(event.get("name"))
    return [names.get(index, f"task {index + 1}") for index in range(max(names, default=-1) + 1)]


def _collect_outcomes(
    result: Mapping[str, Any], events: Sequence[Mapping[str, Any]], problems: list[str]
) -> dict[str, Outcome]:
    """The outcome of each method: from the result, and where there is none yet from the events."""
    outcomes: dict[str, Outcome] = {}
    methods = result.get("methods")
    for name, stored in methods.items() if isinstance(methods, dict) else ():
        if not isinstance(stored, dict) or (accuracies := _read_matrix(stored.get("accuracies"))) is None:
            problems.append(f"The result of {name} has no readable accuracies.")
            continue
        try:
            outcomes[name] = read_outcome(name, stored, accuracies)
            outcomes[name].seconds = _number((result.get("seconds") or {}).get(name))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            problems.append(f"The result of {name} is not as expected, and shown in part: {error}.")
            outcomes.setdefault(name, Outcome(name, accuracies))
    for event in events:
        name = _text(event.get("method"))
        of_method = outcomes.setdefault(name, Outcome(name, []))
        kind, task = event.get("event"), event.get("task")
        if not isinstance(task, int) or not 0 <= task < 10_000:
            continue
        if kind in ("epoch", "iteration"):
            _append_at(of_method.losses, task, event.get("loss"), unless=name in (methods or {}))
            _append_at(of_method.valid_losses, task, event.get("valid_loss"))
        elif name in (methods or {}):
            continue
        elif kind == "evaluation" and isinstance(event.get("scores"), list):
            of_method.evaluations.append({key: event.get(key) for key in ("task", "steps", "scores", "relative")})
        elif kind == "task ended":
            row, scores = _read_row(event.get("accuracies")), _read_row(event.get("scores"))
            if row is not None and len(row) == len(of_method.accuracies) + 1:
                of_method.accuracies.append(row)
                if scores is not None:
                    of_method.scores.append(scores)
                of_method.statistics.append(_read_statistics(event.get("statistics")))
    return {name: outcome for name, outcome in outcomes.items() if name}


def read_outcome(name: str, stored: Mapping[str, Any], accuracies: list[list[float]]) -> Outcome:
    rewards = stored.get("accumulated_rewards")
    return Outcome(
        name,
        accuracies,
        scores=_read_matrix(stored.get("scores")) or [],
        evaluations=[one for one in stored.get("evaluations") or () if isinstance(one, dict)],
        losses=[_read_row(row) or [] for row in stored.get("losses") or ()],
        statistics=[_read_statistics(one) for one in stored.get("statistics") or ()],
        memory={key: int(value) for key, value in (stored.get("memory") or {}).items() if _number(value) is not None},
        weights=int(_number(stored.get("weights")) or 0),
        plasticity=_number(stored.get("plasticity")),
        accumulated_reward=_number(rewards[-1]) if isinstance(rewards, list) and rewards else None,
        certificate=stored.get("certificate") if isinstance(stored.get("certificate"), str) else None,
    )


def _read_statistics(stored: Any) -> dict[str, Any]:
    """What a method counted of its nodes after a task, without counts that are none."""
    found = dict(stored) if isinstance(stored, dict) else {}
    capacity = found.pop("capacity", None)
    counts = ("nodes", "free", "frozen", "important_before")
    found = {key: value for key, value in found.items() if key not in counts or _is_count(value)}
    if isinstance(capacity, dict) and (capacity.get("tasks_left") is None or _is_count(capacity["tasks_left"])):
        layers = capacity.get("layers")
        if isinstance(layers, list) and layers and all(_is_layer(layer) for layer in layers):
            found["capacity"] = capacity
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_layer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("nodes") != 0
        and all(_is_count(value.get(key)) for key in ("nodes", "taken", "free"))
        and "layer" in value
    )


def _append_at(rows: list[list[float]], index: int, value: Any, unless: bool = False) -> None:
    number = _number(value)
    if number is None or unless:
        return
    while len(rows) <= index:
        rows.append([])
    rows[index].append(number)


def _describe_position(run: RunData, events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "This run has not logged anything yet."
    last = events[-1]
    title, task = get_title(_text(last.get("method"))), last.get("task")
    total = f" of {len(run.tasks)}" if run.tasks else ""
    place = f"task {task + 1}{total} of {title}" if isinstance(task, int) else title
    verb = "has ended" if last.get("event") == "task ended" else "is under way"
    return f"This run is not finished: {place} {verb}, {100 * run.progress:.0f} % of that method's training is done."


def _read_certificates(folder: Path, tasks: int, problems: list[str]) -> list[Certificate]:
    """The certificates of the first tasks, up to the first that is missing or damaged."""
    found: list[Certificate] = []
    for number in range(1, tasks + 1):
        path = certificate_path(folder, number)
        if not path.exists():
            later = [other for other in range(number + 1, tasks + 1) if certificate_path(folder, other).exists()]
            if later:
                problems.append(f"{path.name} of the certificates is missing: those after it are not shown.")
            break
        try:
            read_limited(path, FILE_LIMIT)
            certificate = Certificate.load(path)
            if len(certificate.first) != certificate.layout.size:
                raise ValueError(f"{path} names {len(certificate.first)} groups, expected {certificate.layout.size}.")
            found.append(certificate)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            problems.append(f"A certificate cannot be read, so it and those after it are not shown: {error}")
            break
    return found


# Several runs --------------------------------------------------------------------------------------------------------


def _read_group(folder: Path) -> ReportData:
    """The folder of a comparison or a study: its runs, and the studies stored beside them."""
    paths = sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path))
    studies = _read_studies(folder)
    if not paths and not studies:
        known = list(folder.rglob("config.json"))[:1]
        hint = f" (the first run found below it: {known[0].parent})" if known else ""
        raise NothingToShow(f"{folder} holds no run, no comparison and no study{hint}")
    runs = [read_run(path, nodes=False) for path in paths]
    problems = [f"{run.path.name}: {problem}" for run in runs for problem in run.problems]
    if errors := read_tolerantly(folder / "comparison.json", [], read_json):
        missing = errors.get("missing")
        for name, reason in missing.items() if isinstance(missing, dict) else ():
            problems.append(f"{name} failed: {_text(reason)}")
    kind = "study" if studies and not (folder / "comparison.json").exists() else "comparison"
    report = _compare_runs(folder.resolve().name, kind, runs, problems)
    report.studies = studies
    return report


def _compare_runs(title: str, kind: str, runs: Sequence[RunData], problems: list[str]) -> ReportData:
    lines: dict[str, Line] = {}
    presets = list(dict.fromkeys(_text(run.config.get("preset")) for run in runs))
    if len(presets) > 1:
        problems.append(f"These runs are of different presets ({', '.join(presets)}): compare with care.")
    tasks = max((run.tasks for run in runs), key=len, default=[])
    own_tasks = any(run.tasks != tasks for run in runs if run.tasks)
    if own_tasks:
        tasks = [f"task {index + 1}" for index in range(len(tasks))]
    for run in runs:
        for name, outcome in run.outcomes.items():
            settings = run.config.get("settings", {}) if name == run.method else {}
            settings = {key: value for key, value in settings.items() if key != "seed"}
            key = f"{name} {json.dumps(settings, sort_keys=True, default=str)}"
            line = lines.setdefault(key, Line(get_title(name), name, settings, [], []))
            if run.seed not in line.seeds:  # fine-tuning is the same in every run of a seed
                line.seeds.append(run.seed)
                line.outcomes.append(outcome)
    _name_apart(list(lines.values()))
    _measure_plasticity(list(lines.values()))
    order = {name: number for number, name in enumerate(METHODS)}
    ordered = sorted(lines.values(), key=lambda line: order.get(line.method, len(order)))
    report = ReportData(title, kind, presets[0] if presets else "", list(tasks), ordered, None, [], problems)
    report.own_tasks = own_tasks
    detail = _choose_detail(runs, report)
    if detail is not None:
        report.detail = read_run(detail.path)
        problems += [
            f"{detail.path.name}: {problem}"
            for problem in report.detail.problems
            if problem not in {sentence.partition(": ")[2] for sentence in problems}
        ]
    return report


def _choose_detail(runs: Sequence[RunData], report: ReportData) -> RunData | None:
    """The run whose nodes are shown: of the best method that knows nodes, the first seed."""
    with_nodes = [run for run in runs if run.outcome and any("nodes" in one for one in run.outcome.statistics[-1:])]
    rank = {line.method: number for number, line in enumerate(report.ranked)}
    return min(with_nodes, key=lambda run: (rank.get(run.method, 999), run.seed or 0), default=None)


def _name_apart(lines: Sequence[Line]) -> None:
    """Add to the labels of lines of the same method the settings in which they differ."""
    for line in lines:
        same = [other for other in lines if other.method == line.method]
        if len(same) > 1:
            differing = [
                key
                for key in dict.fromkeys(key for other in same for key in other.settings)
                if len({json.dumps(other.settings.get(key), default=str) for other in same}) > 1
            ]
            words = ", ".join(f"{key} {line.settings.get(key, 'default')}" for key in differing)
            line.label = f"{line.label} ({words})"


def _measure_plasticity(lines: Sequence[Line]) -> None:
    """Of each outcome, against fine-tuning on the same seed, where that is there."""
    reference = next((line for line in lines if line.method == REFERENCE), None)
    if reference is None:
        return
    by_seed = dict(zip(reference.seeds, reference.outcomes, strict=True))
    for line in lines:
        for seed, outcome in zip(line.seeds, line.outcomes, strict=True):
            other = by_seed.get(seed)
            if other and other.accuracies and len(other.accuracies) == len(outcome.accuracies):
                outcome.plasticity = metrics.plasticity(outcome.accuracies, other.accuracies)


def _read_comparison_file(path: Path) -> ReportData:
    """A comparison that is stored as one file: comparison.json, or one in results/."""
    try:
        content = read_json(path)
    except RunError as error:
        raise NothingToShow(str(error)) from error
    if "study" in content:
        problems: list[str] = []
        study = _name_papers_form(content)
        return ReportData(path.stem, "study", _text(content.get("preset")), [], [], None, [study], problems)
    methods = content.get("methods")
    if not isinstance(methods, dict) or not methods:
        raise NothingToShow(f"{path} is not a comparison: expected comparison.json, or a file of results/ with methods")
    lines, problems = [], []
    for name, row in methods.items():
        try:
            settings = dict(row.get("settings") or {})
            if name == "agscl" and {"mu", "lam"} & set(settings):  # from before AGS-CL had a budget
                name = "paper-agscl"
            rewards = (row.get("accumulated_reward") or {}).get("values") or []
            seconds, outcomes = row.get("seconds") or [], []
            for index, accuracies in enumerate(row["accuracies"]):
                matrix = _read_matrix(accuracies)
                if matrix is None:
                    raise ValueError("its accuracies are not a matrix")
                stored = {
                    "memory": row.get("memory"),
                    **{key: row[key][index] for key in ("scores", "evaluations") if key in row},
                }
                outcome = read_outcome(name, stored, matrix)
                outcome.plasticity = _number(row.get("plasticity", {}).get("values", [None] * 99)[index])
                outcome.accumulated_reward = _number(rewards[index]) if index < len(rewards) else None
                outcome.seconds = _number(seconds[index]) if index < len(seconds) else None
                outcomes.append(outcome)
            lines.append(Line(get_title(name), name, settings, list(row["seeds"]), outcomes))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            problems.append(f"{name} cannot be shown: {error}")
    count = max((len(outcome.accuracies) for line in lines for outcome in line.outcomes), default=0)
    tasks = [f"task {index + 1}" for index in range(count)]
    missing = content.get("missing")
    for name, reason in missing.items() if isinstance(missing, dict) else ():
        problems.append(f"{name} failed: {_text(reason)}")
    title = path.parent.resolve().name if path.stem == "comparison" else path.stem
    source: dict[str, Any] = {key: content[key] for key in ("command", "commit", "machine") if key in content}
    return ReportData(
        title, "comparison", _text(content.get("preset")), tasks, lines, None, [], problems, source=source
    )


def _read_studies(folder: Path) -> list[dict[str, Any]]:
    found = [read_tolerantly(folder / f"{name}.json", [], read_json) for name in STUDIES]
    return [_name_papers_form(study) for study in found if study]


def _name_papers_form(study: dict[str, Any]) -> dict[str, Any]:
    """Studies are of the paper's form; those of older versions call it AGS-CL: give it its name of today."""
    for line in study["lines"] if isinstance(study.get("lines"), list) else ():
        if isinstance(line, dict) and _text(line.get("label")).partition(",")[0] == get_title("agscl"):
            line["label"] = line["label"].replace(get_title("agscl"), get_title("paper-agscl"), 1)
    return study


# Values that somebody else wrote -------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _read_row(value: Any) -> list[float] | None:
    if not isinstance(value, list):
        return None
    numbers = [_number(one) for one in value]
    return None if any(number is None for number in numbers) else [number for number in numbers if number is not None]


def _read_matrix(value: Any) -> list[list[float]] | None:
    """A lower triangle of numbers, or None."""
    if not isinstance(value, list) or not value:
        return None
    rows: Iterable[list[float] | None] = [_read_row(row) for row in value]
    found = [row for row in rows if row is not None]
    return found if [len(row) for row in found] == list(range(1, len(value) + 1)) else None
