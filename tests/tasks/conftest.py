from __future__ import annotations

import pytest

from real_data import REAL_DATA


@pytest.fixture
def real(data, monkeypatch, request):
    """The real data, with a cache of its own."""
    if not (REAL_DATA / request.param).is_dir():
        pytest.skip(f"needs {request.param} in the folder AGSCL_DATA")
    monkeypatch.setenv("AGSCL_DATA", str(REAL_DATA))
