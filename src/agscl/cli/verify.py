"""`agscl verify`: a run's certificates against its stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from agscl.cli.errors import DONE, FAILED
from agscl.cli.folders import find_run
from agscl.cli.options import Runs, describe


def verify(run: Annotated[str, describe("RUN")], /, *, runs: Runs = Path("runs")) -> int:
    """Check a run's certificates against its stored weights: did anything change?

    The outputs on a random batch (the probe) are a second check.

    The last line says OK (exit code 0) or FAILED (exit code 1).

    Args:
        run: The run's name, or the path of its folder.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.verify import verify_run

    verdict = verify_run(find_run(runs, run))
    for line in verdict.lines:
        print_line(line)
    return DONE if verdict.ok else FAILED
