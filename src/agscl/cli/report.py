"""`agscl report`: the page of a run or a comparison; `agscl watch`: the same while it is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import tyro

from agscl.cli.errors import DONE, UsageError
from agscl.cli.options import Runs, describe

SWITCH = "AGSCL_REPORT"
"""Set to 0, this environment variable leaves out the page at the end of runs and comparisons."""


def report(
    runs_to_show: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            name="run",
            metavar="RUN ...",
            help="The name or folder of a run, of several runs, of a comparison or a study; or a comparison's file.",
            help_behavior_hint="",
        ),
    ],
    /,
    *,
    out: Annotated[Path | None, describe("FILE", default="(default: report.html in the folder of the run)")] = None,
    figures: Annotated[Path | None, describe("FOLDER", default="")] = None,
    csv: Annotated[Path | None, describe("FOLDER", default="")] = None,
    runs: Runs = Path("runs"),
) -> int:
    """Write one HTML page of a run or a comparison.

    It shows what was learned, forgotten, frozen, free and proven; no network.

    Args:
        out: Where to write the page.
        figures: Also write every chart and the node map to this folder, as SVG and PNG.
        csv: Also write all numbers to this folder, as CSV files.
    """
    from agscl.cli.console import print_line
    from agscl.report import NothingToShow, vega, write_page
    from agscl.report.csv_tables import write_tables
    from agscl.report.page import PAGE, write_figures
    from agscl.report.provenance import add_provenance
    from agscl.report.read import read_report

    if not vega.is_available():
        raise UsageError(vega.ADVICE)
    if not runs_to_show:
        raise UsageError("which run? Give its name, as in: agscl report digits-agscl-seed0")
    paths = [find_shown(runs, name) for name in runs_to_show]
    try:
        made = read_report(paths)
    except NothingToShow as error:
        raise UsageError(str(error)) from error
    add_provenance(made, paths)
    target = out or (paths[0] / PAGE if len(paths) == 1 and paths[0].is_dir() else Path(f"{paths[0].stem}-{PAGE}"))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_page(made, target)
    print_line(f"page         {target} ({target.stat().st_size / 1e6:.1f} MB)")
    if figures is not None:
        print_line(f"figures      {len(write_figures(made, figures))} files in {figures}/")
    if csv is not None:
        print_line(f"numbers      {len(write_tables(made, csv))} files in {csv}/")
    for problem in made.problems[:5]:
        print_line(f"Note: {problem}")
    return DONE


def watch(
    run: Annotated[str, describe("RUN")],
    /,
    *,
    port: Annotated[int, describe("N")] = 8765,
    runs: Runs = Path("runs"),
) -> int:
    """Show the page of a run in the browser while it is trained.

    It is served to this machine alone, and reloads; Ctrl-C ends it.

    Args:
        run: The name or folder of a run or a comparison.
        port: The port on 127.0.0.1; 0 takes a free one.
    """
    from agscl.cli.console import print_line
    from agscl.report import vega
    from agscl.report.watch import PageServer

    if not vega.is_available():
        raise UsageError(vega.ADVICE)
    folder = find_shown(runs, run)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: only a run or a comparison under way can be watched")
    if not 0 <= port < 2**16:
        raise UsageError(f"--port must be from 0 to 65535, not {port}")
    try:
        server = PageServer(folder, port)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error.strerror}): choose another --port, or 0") from error
    print_line(f"{server.address} shows {folder}; Ctrl-C ends it")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return DONE


def find_shown(runs: Path, name: str) -> Path:
    """What `agscl report` is to show: the run, comparison or file of this name, or at this path."""
    for path in (runs / name, Path(name)):
        if path.exists():
            return path
    known = sorted(path.name for path in runs.glob("*") if path.is_dir())
    available = f"Available: {', '.join(known[:12])}" if known else "There are none yet; start one with: agscl run"
    raise UsageError(f"no run or comparison {name!r} in {runs}/. {available}")


def write_page_at_end(folder: Path) -> None:
    """Write the page of a run or comparison that has just ended, and print where; nothing here fails the command."""
    from agscl.cli.console import print_line

    if os.environ.get(SWITCH) == "0":
        return
    try:
        from agscl.report import vega

        if not vega.is_available():
            print_line(f"page         not written: {vega.ADVICE}")
            return
        from agscl.report.page import PAGE, write_page
        from agscl.report.provenance import add_provenance
        from agscl.report.read import read_report

        made = read_report([folder])
        add_provenance(made, [folder])
        print_line(f"page         {write_page(made, folder / PAGE)}")
    except Exception as error:  # the run is stored: whatever happened to its page is no failure of the run
        print_line(f"page         not written: {error}")
