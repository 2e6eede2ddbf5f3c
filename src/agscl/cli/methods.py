"""`agscl methods`: the list of methods."""

from __future__ import annotations

import warnings

from agscl.cli.errors import DONE


def methods() -> int:
    """List the methods: what each does, and how much it stores between tasks."""
    import torch

    from agscl.cli.tables import print_methods
    from agscl.experiments.build import measure_memory
    from agscl.experiments.methods import METHODS

    torch.set_num_threads(1)  # a network this small is faster on one core
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one epoch is too short for most methods, which does not matter here
        memory = {name: measure_memory("digits", name) for name, listed in METHODS.items() if not listed.is_bound}
    print_methods(memory, "measured after the 5 tasks of digits, one epoch each")
    return DONE
