"""The benchmarks run, and write what the docs read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from agscl.experiments.methods import METHODS

HOME = Path(__file__).parents[1]


def test_every_method_is_timed_against_plain_training(tmp_path):
    out = tmp_path / "methods.json"
    words = ["--rounds", "2", "--measurements", "1", "--batch", "4", "--images", "8", "--out", str(out)]
    subprocess.run([sys.executable, "benchmarks/methods.py", *words], cwd=HOME, check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert found["steps_per_epoch"] == 2
    assert found["step"].keys() == {name for name, one in METHODS.items() if not one.bound}
    for limits in found["limits"].values():
        assert limits.keys() <= found["step"].keys()
    for one in found["step"].values():
        low, high = one["ratio"]["quartiles"]
        assert 0 < low <= one["ratio"]["median"] <= high
    measured = found["importance"]["methods"]
    assert {"ewc", "ewc fisher=exact", "ewc fisher=batched batch=256", "mas", "agscl"} <= measured.keys()
    assert measured["ewc fisher=exact"]["epochs"]["median"] > measured["l2"]["epochs"]["median"]
