"""Runs that several tests read."""

import shutil

import pytest

from agscl.cli.main import main


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A real run of AGS-CL and fine-tuning on digits."""
    folder = tmp_path_factory.mktemp("digits")
    assert main(["run", "--epochs", "3", "--batch-size", "64", "--runs", str(folder), "--name", "real"]) == 0
    return folder / "real"


@pytest.fixture
def run(digits, tmp_path):
    """A copy of the real run, to be damaged."""
    return shutil.copytree(digits, tmp_path / "runs" / "real")
