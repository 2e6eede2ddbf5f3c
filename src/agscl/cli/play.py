"""`agscl play`: what an agent does, as animated pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from agscl.cli.errors import DONE, UsageError, value_errors_as_usage_errors
from agscl.cli.folders import find_run
from agscl.cli.options import Runs, check_at_least_one, describe


def play(
    run: Annotated[str, describe("RUN")],
    /,
    *,
    task: Annotated[str | None, describe("TASK", default="(default: each task learned so far)")] = None,
    out: Annotated[Path | None, describe("FILE.gif", default="(default: play/TASK.gif in the run's folder)")] = None,
    steps: Annotated[int, describe("N")] = 1000,
    runs: Runs = Path("runs"),
) -> int:
    """Record an agent's greedy play as GIFs of at most 1 MB together.

    The agent is that of the run's last checkpoint.

    The episode starts like the first one of each evaluation.

    Args:
        run: The run's name, or the path of its folder.
        task: The task to play.
        out: Where to write, with --task.
        steps: Record at most this many steps of an episode.
    """
    from agscl.cli.console import print_line
    from agscl.experiments.stored_agent import load_agent
    from agscl.reinforcement.recording import MAX_BYTES

    check_at_least_one("--steps", steps)
    if out is not None and (task is None or out.suffix.lower() != ".gif"):
        raise UsageError("--out FILE.gif goes with --task TASK: it is one file")
    folder = find_run(runs, run)
    agent = load_agent(folder)
    known = [learned.name for learned in agent.tasks[: len(agent.model.heads)]]
    if task is not None and task not in known:
        raise UsageError(f"{folder} has not learned a task {task!r}. It has: {', '.join(known)}")
    max_bytes = MAX_BYTES // len(known) if out is None else MAX_BYTES
    for name in known if task is None else [task]:
        with value_errors_as_usage_errors():
            recording = agent.record_play(known.index(name), steps)
        path = out or folder / "play" / f"{name}.gif"
        shown, count = recording.save_gif(path, max_bytes), len(recording.pictures)
        played = f"{count} steps{'' if recording.is_complete else ', not to its end'}"
        played += f"; the first {shown} shown" if shown < count else ""
        print_line(f"{name}: score {recording.score:g} in {played}: {path} ({path.stat().st_size / 1000:.0f} kB)")
    return DONE
