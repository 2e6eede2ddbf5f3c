"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loop_of_ones_own_learns_five_tasks_and_keeps_them():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_loop.py")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [[float(part) for part in re.findall(r"([\d.]+)%", line)] for line in done.stdout.splitlines()[:5]]
    assert [len(line) for line in lines] == [1, 2, 3, 4, 5]
    assert sum(lines[-1]) / 5 > 90
    assert "kept every bit" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("lightning_loop", "lightning"), ("transformers_loop", "transformers")])
def test_an_example_in_the_loop_of_a_library_prints_fine_tuning_beside_the_untuned_method(name, package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^(fine-tuning|AGS-CL) +([\d.]+)%$", done.stdout, re.MULTILINE))
    assert float(figures["AGS-CL"]) > float(figures["fine-tuning"])
    assert "kept every bit (guaranteed for good)" in done.stdout


@pytest.mark.slow
def test_the_agents_of_stable_baselines_keep_the_first_environment():
    if find_spec("stable_baselines3") is None:
        pytest.skip("stable_baselines3 is not installed")
    command = [sys.executable, str(EXAMPLES / "sb3_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("cartpole")]
    first, both, ours, kept = [[float(score) for score in re.findall(r" ([\d.]+)", line)] for line in lines]
    assert both[0] < first[0], "fine-tuning forgets"
    assert kept[0] > 0.8 * ours[0]
    assert "kept every bit (guaranteed for good)" in done.stdout
