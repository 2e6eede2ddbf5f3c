"""Runs `test_transformers.py` and its example where Transformers is missing: it is put into a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HOME = Path(__file__).parents[2]
PACKAGES = """
transformers accelerate annotated-doc annotated-types psutil pydantic pydantic_core regex shellingham tokenizers typer
typing-inspection
""".split()  # noqa: SIM905


def test_transformers_installed_into_a_folder_passes_its_tests(tmp_path):
    if find_spec("transformers") is not None:
        pytest.skip("Transformers is installed: test_transformers.py runs by itself")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    constraints = ["-c", str(HOME / "constraints.txt")]
    installed = subprocess.run([*pip, *constraints, *PACKAGES], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"Transformers cannot be installed here: {installed.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    files = ["tests/integrations/test_transformers.py", "tests/project/test_examples.py::" + EXAMPLE, BLOCK]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HOME, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


EXAMPLE = (
    "test_an_example_in_the_loop_of_a_library_prints_fine_tuning_beside_the_untuned_method"
    "[transformers_loop-transformers]"
)
BLOCK = "tests/project/test_code_blocks.py::test_the_code_of_a_page_runs[docs/integrations.md#Transformers]"
