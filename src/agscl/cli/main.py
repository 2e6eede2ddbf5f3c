"""The command `agscl`: run, compare, search, study, report, watch, verify, inspect, play, methods, data.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by a signal.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import sys
import warnings

from agscl.cli.errors import DONE, FAILED, STOPPED, WRONG_USE, UsageError, report_error
from agscl.cli.signals import record_interrupts
from agscl.system.process import exit_at_once
from agscl.system.torchrun import find_torchrun_rank

NEEDED = ("tyro", "rich", "safetensors", "sklearn")


def start() -> int:
    """The entry point of the command in a process of its own: `main`, and the way out of that process."""
    code = FAILED
    if find_torchrun_rank() is not None:  # registered first, this is called last
        atexit.register(lambda: exit_at_once(code))
    try:
        code = main()
    except SystemExit as done:  # of tyro: --help, or wrong arguments
        code = int(done.code or 0)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments, or with those of the process."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        print(f"agscl: the command needs {', '.join(missing)}: pip install 'agscl[cli]'", file=sys.stderr)
        return WRONG_USE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know λ
    with record_interrupts() as interrupts:
        try:
            return run_command(sys.argv[1:] if arguments is None else arguments)
        except KeyboardInterrupt:
            return STOPPED
        except Exception as error:
            if interrupts:  # while imported, torch swallows a Ctrl-C and then fails with half-imported modules
                return STOPPED
            return report_error(error)


def run_command(arguments: list[str]) -> int:
    """Parse the arguments and run the command they name. Torch is imported by the command, not for --help."""
    import tyro

    from agscl import __version__
    from agscl.cli.compare import compare
    from agscl.cli.console import print_line
    from agscl.cli.data import data
    from agscl.cli.inspect import inspect
    from agscl.cli.methods import methods
    from agscl.cli.play import play
    from agscl.cli.report import report, watch
    from agscl.cli.run import fill_in_bare_resume, run
    from agscl.cli.search import search
    from agscl.cli.study import study
    from agscl.cli.verify import verify
    from agscl.system.process import skip_gc_at_exit, tune_malloc

    skip_gc_at_exit()
    tune_malloc()
    if arguments == ["--version"]:
        print_line(f"agscl {__version__}")
        return DONE
    if (rank := find_torchrun_rank()) is not None and arguments[:1] != ["run"]:
        if rank:
            return WRONG_USE  # the first process says why
        raise UsageError(
            "torchrun is for agscl run alone: start this without it; for many runs on many machines use --on"
        )
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_line(f"Note: {message}")
        return int(
            tyro.extras.subcommand_cli_from_dict(
                {
                    "run": run,
                    "compare": compare,
                    "search": search,
                    "study": study,
                    "report": report,
                    "watch": watch,
                    "verify": verify,
                    "inspect": inspect,
                    "play": play,
                    "methods": methods,
                    "data": data,
                },
                prog="agscl",
                description="Continual learning you can verify. Start with: agscl run",
                args=fill_in_bare_resume(arguments),
            )
        )
