"""The real datasets, where this machine has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL_DATA = Path(os.environ.get("AGSCL_DATA", Path(__file__).parents[2] / "shared" / "data"))


def needs_dataset(name: str) -> pytest.MarkDecorator:
    """Skip a test where the dataset is not there."""
    return pytest.mark.skipif(not (REAL_DATA / name).is_dir(), reason=f"needs {name} in the folder AGSCL_DATA")
