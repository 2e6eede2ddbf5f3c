"""`agscl verify`: the files of a run against each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from agscl.cli.errors import DONE, FAILED, UsageError
from agscl.cli.folders import find_run
from agscl.cli.options import Runs, describe


def verify(
    run: Annotated[str, describe("RUN")],
    /,
    *,
    expect: Annotated[str | None, describe("DIGEST", default="")] = None,
    runs: Runs = Path("runs"),
) -> int:
    """Check a run's weights, certificates and results: did anything change?

    The outputs on a random batch (the probe) are a second check.

    Nothing is signed: who rewrites all files can forge a run; --expect reveals it.

    The last line says OK (exit code 0) or FAILED (exit code 1).

    Args:
        run: The run's name, or the path of its folder.
        expect: The digest that `agscl run` printed and that you kept elsewhere; the run must still have it.
    """
    from agscl.certificate import Verdict
    from agscl.cli.console import print_line
    from agscl.experiments.verify import verify_run
    from agscl.runs import RunError

    if expect is not None and not re.fullmatch("[0-9a-fA-F]{64}", expect):
        raise UsageError(f"--expect needs the 64 hexadecimal digits that agscl run or verify printed, not {expect!r}")
    folder = find_run(runs, run)
    try:
        verdict = verify_run(folder, expect and expect.lower())
    except RunError as error:
        verdict = Verdict(False, [f"FAILED: {error}"])
    except OSError as error:
        verdict = Verdict(False, [f"FAILED: cannot read {error.filename or folder}: {error.strerror or error}"])
    for line in verdict.lines:
        print_line(line)
    return DONE if verdict.ok else FAILED
