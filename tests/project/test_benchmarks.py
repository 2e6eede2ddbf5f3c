"""The benchmarks run, and write what the docs read."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agscl.experiments.method_entries import METHODS
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Interrupted, Run

HOME = Path(__file__).parents[2]


def test_every_method_is_timed_against_plain_training(tmp_path):
    out = tmp_path / "methods.json"
    words = ["--rounds", "2", "--measurements", "1", "--batch", "4", "--images", "8", "--out", str(out)]
    subprocess.run([sys.executable, "benchmarks/methods.py", *words], cwd=HOME, check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert found["steps_per_epoch"] == 2
    assert found["step"].keys() == {name for name, one in METHODS.items() if not one.is_bound}
    for limits in found["limits"].values():
        assert limits.keys() <= found["step"].keys()
    for one in found["step"].values():
        low, high = one["ratio"]["quartiles"]
        assert 0 < low <= one["ratio"]["median"] <= high
    measured = found["importance"]["methods"]
    assert {"ewc", "ewc fisher=exact", "ewc fisher=batched batch=256", "mas", "agscl"} <= measured.keys()
    assert measured["ewc fisher=exact"]["epochs"]["median"] > measured["l2"]["epochs"]["median"]


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Runs the main function of a benchmark, on digits for an epoch, and returns what it wrote."""
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        module = importlib.import_module(name)
        if hasattr(module, "PRESET"):
            monkeypatch.setattr(module, "PRESET", "digits")
        common = ["--epochs", "1", "--jobs", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", [name, *words, *common])
        module.main()
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_a_comparison_takes_what_a_search_found_and_says_at_which_commits_its_runs_were_made(benchmark, tmp_path):
    searched = tmp_path / "searched.json"
    searched.write_text(
        json.dumps({"methods": {"l2": [{"settings": {"lam": 7.0}}], "mas": [{"settings": {"lam": 3.0}}]}})
    )
    words = ["digits", "--methods", "l2,mas", "--seeds", "1", "--settings", str(searched)]
    found = benchmark("supervised", *words, "--set", '{"mas": {"lam": 2.0}}')
    assert found["complete"]
    assert [found["methods"][name]["settings"]["lam"] for name in ("l2", "mas")] == [7.0, 2.0]
    assert len(found["commits"]) == 1
    assert "finetune" in found["methods"]


def test_variants_are_held_against_the_papers_form_on_the_same_seeds(benchmark, monkeypatch):
    # digits has no validation split
    monkeypatch.setattr(importlib.import_module("beyond"), "valid", lambda outcome: outcome["average_accuracy"])
    names = ["the paper's form", "η 0.5"]
    words = ["--preset", "digits", "--lam", "100", "1000", "--seeds", "1"]
    found = benchmark("beyond", "--variants", *names, *words)
    rows = {(row["variant"], row["settings"]["lam"]): row for row in found["rows"]}
    assert len(rows) == 4
    best = max((100.0, 1000.0), key=lambda lam: rows[names[0], lam]["valid_accuracy"]["mean"])
    for row in rows.values():
        gain = row["average_accuracy"]["mean"] - rows[names[0], best]["average_accuracy"]["mean"]
        assert row["gain"]["mean"] == pytest.approx(gain)


def test_each_piece_of_the_fast_path_is_timed_with_and_without(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    fast_pieces = importlib.import_module("fast_pieces")
    monkeypatch.setattr(importlib.import_module("agscl.fast.fast_engine"), "PIECES", None)  # which a run sets
    caches = []

    def run_here(name, device, epochs, tiny, cache):  # a process each would take a minute
        caches.append(cache)
        if name == "no channels last":
            return {"failed": "out of memory"}
        return {"process_seconds": 1.0 + len(caches), **fast_pieces.run_once(name, device, epochs, tiny)}

    monkeypatch.setattr(fast_pieces, "run_process", run_here)
    out = tmp_path / "pieces.json"
    names = ["no CUDA graphs", "plain engine", "no channels last"]
    words = ["--tiny", "--device", "cpu", "--repeats", "2", "--only", *names, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fast_pieces", *words])
    fast_pieces.main()
    found = json.loads(out.read_text())
    assert list(found["variants"]) == list(found["first_start"]) == ["all pieces", *names]
    assert len(set(caches)) == 4, "each variant has a cache of its own"
    whole, uncaptured, plain, failed = found["variants"].values()
    assert whole["times_as_long"]["median"] == 1
    assert len(plain["runs"]) == 2
    assert uncaptured["variant"]["pieces"] == {"cuda_graphs": False}
    assert failed["failed"] == ["out of memory"] * 2
    assert "times_as_long" not in failed
    accuracies = {run["average_accuracy"] for name in names[:2] for run in found["variants"][name]["runs"]}
    assert len(accuracies) == 1, "on a CPU all of them compute the same"


@pytest.mark.slow
def test_a_piece_is_timed_in_a_process_of_its_own(tmp_path):
    words = ["--tiny", "--device", "cpu", "--repeats", "1", "--only", "all pieces", "--out", str(tmp_path / "out.json")]
    subprocess.run([sys.executable, "benchmarks/fast_pieces.py", *words], cwd=HOME, check=True, capture_output=True)
    assert json.loads((tmp_path / "out.json").read_text())["first_start"]["all pieces"]["process_seconds"] > 0


def test_agents_that_are_not_finished_are_described_as_far_as_they_are(monkeypatch, tmp_path):
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    tasks = {"environments": ["Acrobot-v1", "CartPole-v1"]}
    quick = {"steps": 256, "environments": 4, "rollout": 16, "epochs": 1, "minibatches": 2, "evaluation_limit": 20}
    stops = {"finetune": 10**6, "agscl": 9}  # units of work: AGS-CL is stopped within its second task
    for method, last in stops.items():
        config = configure("control", method=method, reference=False, task_options=tasks, evaluations=2, **quick)
        units = iter(range(10**7))
        with Run(tmp_path / "compare" / f"{method}-seed0") as run, contextlib.suppress(Interrupted):
            execute_run(config, run, checkpoint_every=1e9, threads=1, should_stop=lambda: next(units) > last)  # noqa: B023
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["agents", str(tmp_path / "compare"), "--note", "Stopped.", "--out", str(out)])
    importlib.import_module("agents_so_far").main()
    found = json.loads(out.read_text())
    whole, stopped = found["methods"]["finetune"], found["methods"]["agscl"]
    assert (whole["tasks_learned"], stopped["tasks_learned"]) == (2, 1)
    assert [len(one["scores"]) for one in whole["evaluations"]] == [1, 1, 2, 2]
    assert [len(one["scores"]) for one in stopped["evaluations"]][:2] == [1, 1]
    best = max(one["scores"][0] for one in whole["evaluations"])
    assert stopped["evaluations"][1]["accumulated_reward"] == pytest.approx(
        stopped["evaluations"][1]["scores"][0] / best
    )
    assert [layers[0]["taken_by_last"] for layers in stopped["capacity"]] == [stopped["capacity"][0][0]["taken"]]
    assert whole["training"][1]["curve"][-1][0] == 256
    assert found["command"].startswith("agscl compare control")
    assert found["note"] == "Stopped."
