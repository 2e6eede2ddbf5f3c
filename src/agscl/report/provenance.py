"""Where what a page shows comes from: the command that makes it again, and whether the run's files hold together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agscl.experiments.command_lines import make_compare_command, make_run_command
from agscl.experiments.verify import verify_run
from agscl.report.read import read_tolerantly
from agscl.report.report_data import ReportData, RunData
from agscl.runs.json_files import read_checked_json


def add_provenance(report: ReportData, paths: Sequence[Path]) -> None:
    """Add to a report the command that starts it again, and what checking the run shown in detail finds."""
    if report.kind == "run" and report.detail is not None:
        report.command = make_run_command(report.detail.config)
    elif report.kind == "comparison" and paths[0].is_dir():
        configs = [read_tolerantly(path, [], read_checked_json) for path in sorted(paths[0].glob("*/config.json"))]
        report.command = make_compare_command([config for config in configs if config])
    if report.detail is not None:
        known = len(report.detail.problems)
        check_run(report.detail)
        report.problems += report.detail.problems[known:]


def check_run(run: RunData) -> None:
    """Set `run.verification` to what `agscl verify` finds, or add a sentence why it cannot be checked."""
    if not run.finished or not run.certificates:
        return
    try:
        verdict = verify_run(run.path)
    except Exception as error:  # whatever is wrong with the run, the page says so
        run.problems.append(f"The certificates could not be checked against the stored weights: {error}.")
        return
    run.verification = {"ok": verdict.ok, "line": verdict.lines[-1], "lines": verdict.lines}
