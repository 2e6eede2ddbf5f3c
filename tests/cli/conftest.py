"""A finished run, for tests of several commands."""

import time

import pytest

from commands import finish_command, start_training


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A quick run that was never stopped, and how long it trained."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start_training(folder)
    began = time.monotonic()
    code, output = finish_command(process)
    assert code == 0, output
    return folder, time.monotonic() - began


@pytest.fixture
def finished(uninterrupted, monkeypatch):
    monkeypatch.chdir(uninterrupted[0])
    return uninterrupted[0] / "runs" / "quick"
