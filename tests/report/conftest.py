"""Runs that several tests read, and a cache of their own for Vega's scripts."""

import shutil

import pytest

import agscl.report.vega as vega
from agscl.cli.main import main

if not vega.is_available():
    collect_ignore_glob = ["test_*.py"]


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
