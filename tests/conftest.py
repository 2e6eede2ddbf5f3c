"""One thread in every test: bits are compared, and tests run side by side. Nobody's data, and nobody's hub account."""

import os
import tempfile

import pytest
import torch

torch.set_num_threads(1)

os.environ["AGSCL_REPORT"] = "0"  # a page takes a second to write: only tests of pages want one

# Before anything imports huggingface_hub, which reads these once.
os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), "agscl-tests-without-a-hub-account")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder for data, and a cache of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AGSCL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def small_hub(monkeypatch):
    """A hub on this machine; failed requests are repeated at once."""
    from agscl.data import hub_files, limited_http
    from small_hub import SmallHub

    monkeypatch.setattr(limited_http, "RETRY_DELAY", 0.001)
    monkeypatch.setattr(hub_files, "RETRY_DELAY", 0.001)
    with SmallHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running
