"""Whether a run's files hold what its certificates say, checked when its page is written."""

from __future__ import annotations

from agscl.experiments.verify import verify_run
from agscl.report.read import RunData


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
