from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("AGSCL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def real(data, monkeypatch, request):
    """The real data, with a cache of its own."""
    if not (DATA / request.param).is_dir():
        pytest.skip(f"needs {request.param} in the folder AGSCL_DATA")
    monkeypatch.setenv("AGSCL_DATA", str(DATA))
