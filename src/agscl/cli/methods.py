"""`agscl methods`: the list of methods."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from agscl.cli.errors import DONE


def methods() -> int:
    """List the methods: what each does, and how much it stores between tasks."""
    import torch

    from agscl.experiments.method_entries import METHODS

    torch.set_num_threads(1)  # a network this small is faster on one core
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one epoch is too short for most methods, which does not matter here
        memory = {name: measure_memory("digits", name) for name, listed in METHODS.items() if not listed.is_bound}
    print_methods(memory, "measured after the 5 tasks of digits, one epoch each")
    return DONE


def measure_memory(preset: str, method_name: str) -> dict[str, int]:
    """What `agscl methods` says that a method stores: after all tasks of a preset, each trained for one epoch."""
    from agscl.experiments.build import build_trainer, load_tasks
    from agscl.experiments.run_config import configure

    config = configure(preset, method=method_name, epochs=1)
    trainer = build_trainer(config, method_name, load_tasks(config))
    while trainer.advance():
        pass
    return trainer.method.memory()


def print_methods(memory: Mapping[str, Mapping[str, int]], caption: str) -> None:
    """Print what `agscl methods` lists: a line for each method, and what it stores."""
    from agscl.cli.console import console, print_line
    from agscl.cli.memory_table import list_memory_notes, make_memory_table
    from agscl.cli.tables import TITLES, make_table
    from agscl.experiments.method_entries import METHODS
    from agscl.methods._parts.memory_forecast import Memory

    table = make_table("Methods", "--method", "")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for name, listed in METHODS.items():
        table.add_row(name, listed.about)
    console.print(table)
    console.print()
    by_title = {TITLES[name]: Memory(counts) for name, counts in memory.items()}
    console.print(make_memory_table("Numbers stored between tasks", by_title))
    for line in (caption, *list_memory_notes(by_title)):
        print_line(line)
