"""What `agscl data` does: list, get, check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import rich.progress
from rich.table import Table

from agscl.cli.terminal import console, say
from agscl.data.catalogue import DATASETS, HubSource
from agscl.data.check import check_dataset
from agscl.data.datasets import data_folders, find_dataset
from agscl.data.download import download_dataset
from agscl.data.sources import require_image_libraries
from agscl.tasks import SEQUENCES, DataError

KNOWN = ", ".join(dict.fromkeys([*SEQUENCES, *DATASETS]))
SHOWN = 5
"""So many things that are wrong with a dataset are named, and the others counted."""


def data(action: Literal["list", "get", "check"], names: Sequence[str]) -> bool:
    """Whether all went well. Raises ValueError for a name that is not known."""
    if action == "list":
        if names:
            raise ValueError("agscl data list takes no names")
        return _list()
    if not names and action == "get":
        raise ValueError(f"say what to get: {KNOWN}")
    require_image_libraries()
    wanted = _datasets(names) if names else [name for name in DATASETS if find_dataset(name)]
    if not wanted:
        where = " and ".join(_short(folder) for folder in data_folders())
        say(f"{', '.join(names)}: nothing to download" if names else f"there is no dataset in {where}")
        return bool(names)
    each = [_get(name) if action == "get" else _check(name) for name in wanted]
    return all(each)


def _datasets(names: Sequence[str]) -> list[str]:
    """Those of the sequences and datasets that are named, each once."""
    found: dict[str, None] = {}
    for name in names:
        if name in SEQUENCES:
            found.update(dict.fromkeys(SEQUENCES[name].datasets))
        elif name in DATASETS:
            found[name] = None
        else:
            raise ValueError(f"no task sequence or dataset is called {name!r}; there are: {KNOWN}")
    return list(found)


def _list() -> bool:
    here = {name: find_dataset(name) for name in DATASETS}
    table = _table("Task sequences")
    for name, listed in SEQUENCES.items():
        missing = [dataset for dataset in listed.datasets if here[dataset] is None]
        by_hand = [dataset for dataset in missing if isinstance(DATASETS[dataset].source, str)]
        state = f"lacks {', '.join(by_hand)}: docs/data.md" if by_hand else f"agscl data get {name}"
        table.add_row(name, listed.about, state if missing else "ready")
    console.print(table)
    console.print()
    table = _table("Datasets")
    table.columns[1].justify = "right"
    for name, dataset in DATASETS.items():
        folder = here[name]
        if folder is not None:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
            table.add_row(name, f"{size:.0f} MB", f"in {_short(folder)}")
        elif isinstance(dataset.source, str):
            table.add_row(name, "–", "cannot be downloaded; see docs/data.md")
        else:
            where = dataset.source if isinstance(dataset.source, HubSource) else dataset.source[0].url.split("/")[2]
            table.add_row(name, f"{dataset.megabytes} MB", f"from {where}")
    console.print(table)
    say(f"\nlooked for in {' and '.join(_short(folder) for folder in data_folders())}")
    return True


def _get(name: str) -> bool:
    there = find_dataset(name)
    if there is not None:
        say(f"{name} is there: {there}")
        return True
    try:
        say(f"{name} is now in {download_dataset(name, _Bar)}")
    except KeyboardInterrupt:
        say("Stopped; what has come so far is kept. The same command goes on.")
        raise
    except DataError as error:
        say(f"FAILED: {error}")
        return False
    return True


def _check(name: str) -> bool:
    found = check_dataset(name)
    splits = ", ".join(f"{split} {counts.sum():,}" for split, counts in found.counts.items())
    classes = max((int((counts > 0).sum()) for counts in found.counts.values()), default=0)
    say(
        f"{name}: {'FAILED' if found.problems else 'OK'}" + (f"; {classes} classes; images: {splits}" if splits else "")
    )
    for line in found.problems[:SHOWN]:
        say(f"  {line}")
    if len(found.problems) > SHOWN:
        say(f"  and {len(found.problems) - SHOWN} more")
    return not found.problems


class _Bar:
    """Bytes of a file: a bar on a terminal, otherwise a line when it has come."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._done = what, 0
        self._live = rich.progress.Progress(
            "[bold]{task.description}",
            rich.progress.BarColumn(bar_width=20),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(what, total=total or None)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def advance(self, by: int) -> None:
        self._done += by
        self._live.update(self._task, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()
        if kind is None and not console.is_terminal:
            say(f"{self._what}  {self._done / 1e6:.1f} MB")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    table.show_header = False
    return table


def _short(path: Path) -> str:
    """A path as a person writes it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
