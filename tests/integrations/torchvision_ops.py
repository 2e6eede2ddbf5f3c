"""Imports torchvision, which Avalanche needs, where its compiled operators do not fit this build of torch."""

import re
import sys

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def import_torchvision() -> None:
    """Declare the operators that torchvision misses; none of them is run."""
    for _ in range(50):
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            OPERATORS.define(f"{missing[1]}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
        else:
            return
