import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agscl.analysis import metrics
from agscl.cli import main
from agscl.experiments.compare import spread
from agscl.experiments.execute import comparable, execute
from agscl.experiments.presets import configure
from agscl.runs import Run

SMALL = ["compare", "digits", "--methods", "l2,si", "--seeds", "2", "--jobs", "2", "--name", "small"]
SMALL += ["--epochs", "1", "--batch-size", "64", "--checkpoint-every", "0.1"]
ALONE = ["compare", "--methods", "finetune", "--seeds", "1", "--epochs", "1"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "agscl.cli", *(arguments or SMALL)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def results(folder: Path) -> dict[str, dict]:
    paths = (folder / "runs" / "small").glob("*/result.json")
    return {path.parent.name: comparable(json.loads(path.read_text())) for path in paths}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A small comparison that was never stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("compared")
    code, output = finish(start(folder))
    assert code == 0, output
    return folder, output


def test_every_method_and_seed_is_a_run_of_its_own_and_fine_tuning_is_trained_once_per_seed(compared):
    folder, _ = compared
    found = results(folder)
    assert sorted(found) == sorted(f"{name}-seed{seed}" for name in ("si", "l2", "finetune") for seed in (0, 1))
    assert all(list(result["methods"]) == [name.split("-")[0]] for name, result in found.items())


def test_the_table_has_the_papers_order_mean_and_deviation_and_fits_80_columns(compared):
    folder, output = compared
    table = output[output.index("Mean ± standard deviation over 2 seeds") :].splitlines()
    assert [line.split("  ")[0] for line in table[2:5]] == ["SI", "L2", "fine-tuning"]
    values = [100 * results(folder)[f"l2-seed{seed}"]["methods"]["l2"]["average_accuracy"] for seed in (0, 1)]
    assert f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" in table[3]
    assert max(map(len, table)) <= 80


def test_the_comparison_is_stored_with_plasticity_against_the_fine_tuning_of_the_same_seed(compared):
    folder, _ = compared
    stored = json.loads((folder / "runs/small/comparison.json").read_text())["methods"]
    assert list(stored) == ["si", "l2", "finetune"]
    found = results(folder)
    for seed in (0, 1):
        accuracies = found[f"l2-seed{seed}"]["methods"]["l2"]["accuracies"]
        reference = found[f"finetune-seed{seed}"]["methods"]["finetune"]["accuracies"]
        assert stored["l2"]["plasticity"]["values"][seed] == metrics.plasticity(accuracies, reference)
    assert stored["finetune"]["plasticity"]["values"] == [1.0, 1.0]


def test_a_run_of_a_comparison_has_the_same_bits_as_the_run_command_gives(compared, tmp_path):
    folder, _ = compared
    config = configure("digits", method="l2", seed=1, epochs=1, batch_size=64)
    with Run(tmp_path / "run") as run:
        alone = execute(config, run, checkpoint_every=1e9, threads=1)
    mine = json.loads(json.dumps(alone["methods"]["l2"]))
    theirs = results(folder)["l2-seed1"]["methods"]["l2"]
    assert mine["weights_sha256"] == theirs["weights_sha256"]
    assert mine["accuracies"] == theirs["accuracies"]


def test_the_same_command_repeats_no_finished_run_and_one_more_seed_runs_only_that(compared, monkeypatch, capsys):
    folder, _ = compared
    monkeypatch.chdir(folder)
    logs = sorted(Path("runs/small").glob("*/events.jsonl"))
    before = [(path, path.stat().st_mtime_ns) for path in logs]
    assert main(SMALL) == 0
    assert "6 of 6 runs in runs/small are finished already" in capsys.readouterr().out
    assert [(path, path.stat().st_mtime_ns) for path in logs] == before


def test_another_configuration_under_the_same_name_is_refused(compared, monkeypatch, capsys):
    monkeypatch.chdir(compared[0])
    assert main([*SMALL, "--lr", "0.5"]) == 2
    assert "training.lr is" in capsys.readouterr().err


def start_training(folder: Path) -> subprocess.Popen[str]:
    """Start or continue the comparison and wait until a run of it stores a checkpoint."""

    def checkpoints() -> set[Path]:
        return set((folder / "runs/small").glob("*/checkpoints/*.json"))

    before = checkpoints()
    process = start(folder)
    while checkpoints() <= before and process.poll() is None:
        time.sleep(0.005)
    return process


def test_killed_then_interrupted_then_started_again_every_run_ends_with_the_same_bits(compared, tmp_path):
    process = start_training(tmp_path)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL

    process = start_training(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "The same command continues" in output
    assert "Traceback" not in output
    assert len(results(tmp_path)) < 6

    code, output = finish(start(tmp_path))
    assert code == 0, output
    assert results(tmp_path) == results(compared[0])


def test_a_run_that_fails_is_named_at_the_end_and_the_exit_code_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*ALONE, "--lr", "1e30"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED fine-tuning, seed 0: finetune: the loss or a weight became infinite or NaN in task 1" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "agscl,nosuch"], "no method is called 'nosuch'. There are: agscl"),
        (["--seeds", "0"], "must be at least 1"),
        (["--jobs", "0"], "must be at least 1"),
        (["--name", "../elsewhere"], "plain folder name"),
        (["--epochs", "0"], "epochs must be at least 1"),
    ],
)
def test_a_users_mistake_in_a_comparison_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_deviation_needs_two_values():
    assert spread([0.5, 0.7]) == {
        "mean": pytest.approx(0.6),
        "deviation": pytest.approx(statistics.stdev([0.5, 0.7])),
        "values": [0.5, 0.7],
    }
    assert spread([0.5])["deviation"] is None
