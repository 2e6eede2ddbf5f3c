"""`agscl data`: list, download and check datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from agscl.cli.errors import DONE, FAILED, UsageError
from agscl.cli.options import describe

MAX_PROBLEMS = 5
"""How many problems of a dataset are shown; the others are counted."""

ACTIONS = (
    "list: what there is. get: download what is missing; continues an interrupted download. check: read every file."
)


def data(
    action: Annotated[Literal["list", "get", "check"], describe("list|get|check", ACTIONS)] = "list",
    names: Annotated[tuple[str, ...], describe("NAME ...", default="")] = (),
    /,
) -> int:
    """List task sequences and their datasets, download them, or check them.

    Datasets are looked up in the folder AGSCL_DATA, then in ~/.cache/agscl/data.

    Args:
        names: Task sequences or datasets, e.g. cifar100 mnist. check without names takes all on this machine.
    """
    from agscl.cli.console import print_line
    from agscl.data.catalogue import DATASETS
    from agscl.data.datasets import data_folders, find_dataset
    from agscl.data.image_libraries import require_image_libraries

    if action == "list":
        if names:
            raise UsageError("agscl data list takes no names")
        _list_datasets()
        return DONE
    if action == "get" and not names:
        raise UsageError(f"agscl data get needs names. Available: {_list_names()}")
    require_image_libraries()
    datasets = _find_datasets(names) if names else [name for name in DATASETS if find_dataset(name)]
    if not datasets and names:
        print_line(f"{', '.join(names)}: nothing to download")
        return DONE
    if not datasets:
        print_line(f"no dataset in {' or '.join(map(_shorten_path, data_folders()))}")
        return FAILED
    succeeded = [_download(name) if action == "get" else _check(name) for name in datasets]
    return DONE if all(succeeded) else FAILED


def _list_names() -> str:
    from agscl.data.catalogue import DATASETS
    from agscl.tasks import SEQUENCES

    return ", ".join(dict.fromkeys([*SEQUENCES, *DATASETS, *_list_other_presets()]))


def _list_other_presets() -> dict[str, str]:
    """The task sequence of each preset that is called otherwise than its task sequence."""
    from agscl.experiments.presets import PRESETS

    return {name: preset.tasks for name, preset in PRESETS.items() if name != preset.tasks}


def _find_datasets(names: Sequence[str]) -> list[str]:
    """The datasets with these names or of these task sequences, each once."""
    from agscl.data.catalogue import DATASETS
    from agscl.tasks import SEQUENCES

    datasets: dict[str, None] = {}
    other_presets = _list_other_presets()
    for name in names:
        name = name if name in SEQUENCES else other_presets.get(name, name)
        if name in SEQUENCES:
            datasets.update(dict.fromkeys(SEQUENCES[name].datasets))
        elif name in DATASETS:
            datasets[name] = None
        else:
            raise UsageError(f"unknown task sequence or dataset {name!r}. Available: {_list_names()}")
    return list(datasets)


def _list_datasets() -> None:
    from agscl.cli.console import console, print_line
    from agscl.cli.tables import make_plain_table
    from agscl.data.catalogue import DATASETS, HubSource
    from agscl.data.datasets import data_folders, find_dataset
    from agscl.tasks import SEQUENCES

    found = {name: find_dataset(name) for name in DATASETS}
    table = make_plain_table("Task sequences", columns=3)
    for name, listed in SEQUENCES.items():
        missing = [dataset for dataset in listed.datasets if found[dataset] is None]
        by_hand = [dataset for dataset in missing if isinstance(DATASETS[dataset].source, str)]
        how_to_get = f"needs {', '.join(by_hand)}: docs/data.md" if by_hand else f"agscl data get {name}"
        table.add_row(name, listed.about, how_to_get if missing else "ready")
    for name, sequence in _list_other_presets().items():
        if name not in SEQUENCES:
            table.add_row(name, f"a preset that learns {sequence}", f"see {sequence}")
    console.print(table)
    console.print()
    table = make_plain_table("Datasets", columns=3)
    table.columns[1].justify = "right"
    for name, dataset in DATASETS.items():
        folder = found[name]
        if folder is not None:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
            table.add_row(name, f"{size:.0f} MB", f"in {_shorten_path(folder)}")
        elif isinstance(dataset.source, str):
            table.add_row(name, "–", "cannot be downloaded; see docs/data.md")
        else:
            origin = dataset.source if isinstance(dataset.source, HubSource) else dataset.source[0].url.split("/")[2]
            table.add_row(name, f"{dataset.megabytes} MB", f"from {origin}")
    console.print(table)
    print_line(f"\nlooked in {' and '.join(map(_shorten_path, data_folders()))}")


def _download(name: str) -> bool:
    """Whether the dataset is there now."""
    from agscl.cli.console import print_line
    from agscl.cli.progress import DownloadProgress
    from agscl.data.datasets import find_dataset
    from agscl.data.download import download_dataset
    from agscl.tasks import DataError

    folder = find_dataset(name)
    if folder is not None:
        print_line(f"{name} is already in {folder}")
        return True
    try:
        print_line(f"{name} is now in {download_dataset(name, DownloadProgress)}")
    except KeyboardInterrupt:
        print_line("Stopped; what was downloaded is kept. The same command continues.")
        raise
    except DataError as error:
        print_line(f"FAILED: {error}")
        return False
    return True


def _check(name: str) -> bool:
    """Whether the dataset is complete and readable."""
    from agscl.cli.console import print_line
    from agscl.data.check import check_dataset

    checked = check_dataset(name)
    splits = ", ".join(f"{split} {counts.sum():,}" for split, counts in checked.counts.items())
    classes = max((int((counts > 0).sum()) for counts in checked.counts.values()), default=0)
    counted = f"; {classes} classes; images: {splits}" if splits else ""
    print_line(f"{name}: {'FAILED' if checked.problems else 'OK'}{counted}")
    for line in checked.problems[:MAX_PROBLEMS]:
        print_line(f"  {line}")
    if len(checked.problems) > MAX_PROBLEMS:
        print_line(f"  and {len(checked.problems) - MAX_PROBLEMS} more")
    return not checked.problems


def _shorten_path(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
