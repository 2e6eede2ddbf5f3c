"""The headline of a page: its verdict in a sentence, and the figures beside it."""

from __future__ import annotations

from dataclasses import dataclass

from agscl.experiments.method_entries import REFERENCE
from agscl.report.report_data import Line, ReportData, RunData, get_title, measure_outcome
from agscl.report.words import count, format_bytes, format_seconds, percent, spread


@dataclass(frozen=True)
class PageVerdict:
    tone: str
    """good, plain, wait or bad: a word and a colour on the page."""
    badge: str
    sentence: str
    details: list[str]


@dataclass(frozen=True)
class HeadlineFigure:
    label: str
    value: str
    note: str


def make_verdict(report: ReportData) -> PageVerdict:
    """The headline's verdict: what the page says first."""
    if report.kind == "run" and report.detail is not None:
        return _judge_run(report, report.detail)
    return _judge_comparison(report)


def _judge_run(report: ReportData, run: RunData) -> PageVerdict:
    title, outcome = get_title(run.method), run.outcome
    learned = len(outcome.accuracies) if outcome else 0
    if outcome is None or not learned:
        state = "nothing has been measured yet" if not run.outcomes else f"{title} has not ended a task yet"
        return PageVerdict("wait", "not finished", f"This run is under way: {state}.", [])
    average = measure_outcome(outcome, "average_accuracy")
    forgetting = measure_outcome(outcome, "forgetting") or 0.0
    tasks = count(learned, "task")
    start = (
        f"{title} learned {tasks}"
        if run.finished
        else f"So far, {title} has learned {learned} of {len(run.tasks)} tasks"
    )
    if report.is_score:
        start += f" to an average relative score of {percent(average)}"
    else:
        start += f" to an average accuracy of {percent(average)}"
    if learned == 1:
        sentence = f"{start}."
    elif forgetting <= 0:
        sentence = f"{start}, and forgot nothing."
    elif forgetting < 0.0005:
        sentence = f"{start}, and forgot almost nothing ({100 * forgetting:.2g} %)."
    else:
        sentence = f"{start}, and forgot {percent(forgetting)}."
    details, proven = _describe_proof(run)
    reference = run.outcomes.get(REFERENCE)
    if reference is not outcome and reference and len(reference.accuracies) == learned > 1:
        ended, forgot = (percent(measure_outcome(reference, metric)) for metric in ("average_accuracy", "forgetting"))
        details.append(f"Fine-tuning, trained in the same way, ended at {ended} and forgot {forgot}.")
    if run.verification is not None and not run.verification["ok"]:
        return PageVerdict("bad", "check failed", f"According to its files, {sentence}", details)
    if not run.finished:
        return PageVerdict("wait", "not finished", sentence, details)
    if proven:
        checked = run.verification is not None
        return PageVerdict("good" if checked else "plain", "proven" if checked else "not checked", sentence, details)
    return PageVerdict("plain", "measured", sentence, details)


def _describe_proof(run: RunData) -> tuple[list[str], bool]:
    """What the certificates say, in sentences, and whether it is a guarantee."""
    if not run.certificates:
        return ["There is no certificate, so nothing is proven: these are measurements."], False
    if run.verification is not None and not run.verification["ok"]:
        failed = [line.removeprefix("FAILED: ") for line in run.verification["lines"] if line.startswith("FAILED: ")]
        return [
            f"But its files do not fit together, so nothing here is proven: {'; '.join(failed[:-1] or failed)}."
        ], False
    last, sentences = run.certificates[-1], []
    before = len(last.held) + len(last.moved)
    guaranteed = last.kind == "guaranteed" and not last.moved and not last.warnings
    if not last.layout.size:
        sentences.append(
            f"{get_title(run.method)} certifies the heads of old tasks only; what they read is not checked."
        )
    elif guaranteed:
        sentences.append(
            f"All {before:,} nodes that were important before the last task kept every bit, and no later task can "
            "change what old heads compute: this is guaranteed, not measured."
            if before
            else "Every important node is frozen for good from here on."
        )
    else:
        moved = len(dict.fromkeys(node for certificate in run.certificates for node in certificate.moved))
        sentences.append(
            f"In the last task {len(last.held):,} of {before:,} important nodes kept every bit; over all tasks "
            f"{moved:,} moved at least once. Later tasks may change old outputs."
        )
    sentences += [f"Not guaranteed: {warning}." for warning in last.warnings]
    if run.verification is not None:
        line = run.verification["line"].removeprefix("OK: ")
        sentences.append(f"The stored weights were checked when this page was written: {line.rstrip('.')}.")
    elif run.finished:
        sentences.append("But the stored weights were not checked against the certificates.")
    never_moved = not any(certificate.moved for certificate in run.certificates)
    return sentences, guaranteed and never_moved


def _judge_comparison(report: ReportData) -> PageVerdict:
    ranked = report.ranked
    if not ranked:
        words = (
            "These are studies of the parts of AGS-CL in its paper's form."
            if report.studies
            else "No run here has ended a task yet."
        )
        return PageVerdict(
            "plain" if report.studies else "wait", "study" if report.studies else "not finished", words, []
        )
    best = ranked[0]
    seeds = max(len(line.complete_outcomes) for line in ranked)
    quantity = "relative score" if report.is_score else "accuracy"
    over = f" over {count(seeds, 'seed')}" if seeds > 1 else ""
    lost = best.summarize("forgetting")
    forgot = "forgot nothing" if lost["mean"] == 0 else f"forgot {spread(lost)}"
    state = "" if report.finished else f"So far, after {report.tasks_learned} of {len(report.tasks)} tasks: "
    average = spread(best.summarize("average_accuracy"))
    sentence = (
        f"of {count(len(ranked), 'method')}, {best.label} has the highest average {quantity}{over}: {average}, "
        f"and {forgot}."
        if len(ranked) > 1
        else f"{best.label} reached an average {quantity} of {average}{over}, and {forgot}."
    )
    sentence = f"{state}{sentence}" if state else sentence[:1].upper() + sentence[1:]
    details = []
    if len(ranked) > 1:
        second = ranked[1]
        ours, theirs = best.summarize("average_accuracy"), second.summarize("average_accuracy")
        wide = max(ours["deviation"] or 0.0, theirs["deviation"] or 0.0)
        close = wide and (ours["mean"] or 0) - (theirs["mean"] or 0) < wide
        details.append(
            f"{second.label[:1].upper()}{second.label[1:]} follows with {spread(theirs)}"
            + (": within one standard deviation, so the order of these two may be chance." if close else ".")
        )
    without = [line.label for line in ranked if (line.summarize("forgetting")["mean"] or 0.0) <= 0]
    if without:
        details.append(f"Without any forgetting: {', '.join(without)}.")
    reference = next((line for line in ranked if line.method == REFERENCE), None)
    if reference and reference not in ranked[:2]:
        details.append(
            f"Fine-tuning ended at {spread(reference.summarize('average_accuracy'))} and forgot "
            f"{spread(reference.summarize('forgetting'))}."
        )
    if report.unranked:
        unranked = ", ".join(f"{line.label} (after {count(line.tasks_learned, 'task')})" for line in report.unranked)
        details.append(f"Not compared yet, having learned fewer tasks: {unranked}.")
    tone, badge = ("plain", "measured") if report.finished else ("wait", "not finished")
    return PageVerdict(tone, badge, sentence, details)


def list_figures(report: ReportData) -> list[HeadlineFigure]:
    """The headline figures of the line that the page is about."""
    line = report.main_line
    if line is None or not line.complete_outcomes:
        return []
    outcome = line.complete_outcomes[0]
    figures = [
        HeadlineFigure(
            "average score" if report.is_score else "average accuracy",
            spread(line.summarize("average_accuracy")),
            f"over {count(len(outcome.accuracies), 'task')} {'at the end' if report.finished else 'so far'}",
        ),
        HeadlineFigure("forgotten", spread(line.summarize("forgetting")), "lost since each task's best"),
        HeadlineFigure("stability", spread(line.summarize("stability"), 1, 3, ""), "at the end ÷ best; 1 is no loss"),
    ]
    plasticity = line.summarize("plasticity")
    if plasticity["mean"] is not None and line.method != REFERENCE:
        figures.append(HeadlineFigure("plasticity", spread(plasticity, 1, 3, ""), "just learned ÷ fine-tuning's"))
    reward = line.summarize("accumulated_reward")
    if reward["mean"] is not None:
        figures.append(
            HeadlineFigure("accumulated reward", spread(reward, 1, 2, ""), "sum over tasks ÷ fine-tuning's best")
        )
    figures += _list_node_figures(line) if report.kind == "run" else []
    if memory := outcome.memory.get("bytes"):
        figures.append(HeadlineFigure("memory", format_bytes(memory), "kept between tasks"))
    seconds = [one.seconds for one in line.outcomes if one.seconds is not None]
    if seconds:
        mean = sum(seconds) / len(seconds)
        figures.append(
            HeadlineFigure("time", format_seconds(mean), "of training" + ("" if len(seconds) == 1 else " for a seed"))
        )
    return figures


def _list_node_figures(line: Line) -> list[HeadlineFigure]:
    last = (line.outcomes[0].statistics or [{}])[-1]
    figures = []
    if "free" in last and last.get("nodes"):
        figures.append(
            HeadlineFigure(
                "free nodes", f"{last['free']:,}", f"of {last['nodes']:,} ({percent(last['free'] / last['nodes'], 0)})"
            )
        )
        if last.get("important_before"):
            figures.append(
                HeadlineFigure(
                    "frozen", f"{last.get('frozen', 0):,}", f"of {last['important_before']:,} important before"
                )
            )
    left = (last.get("capacity") or {}).get("tasks_left")
    if left is not None:
        figures.append(HeadlineFigure("more tasks that fit", f"{left:,}", "with free nodes in every layer"))
    return figures
