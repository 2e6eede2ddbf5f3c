import itertools
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

import pytest

from agscl.analysis import metrics
from agscl.cli import jobs as cli_jobs
from agscl.cli.main import main
from agscl.experiments import compare, jobs
from agscl.experiments.compare import summarize_values
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run
from commands import finish_command, start_command
from results import reproducible_part

SMALL = ["compare", "digits", "--methods", "l2,si", "--seeds", "2", "--name", "small"]
SMALL += ["--epochs", "1", "--batch-size", "64", "--checkpoint-every", "0.1", "--jobs"]
SMALL, ONE_AT_A_TIME = [*SMALL, "2"], [*SMALL, "1"]


def results(folder: Path) -> dict[str, dict]:
    paths = (folder / "runs" / "small").glob("*/result.json")
    return {path.parent.name: reproducible_part(json.loads(path.read_text())) for path in paths}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A small comparison that was never stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("compared")
    code, output = finish_command(start_command(folder, *SMALL))
    assert code == 0, output
    return folder, output


def test_every_method_and_seed_is_a_separate_run_and_fine_tuning_is_trained_once_per_seed(compared):
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
        alone = execute_run(config, run, checkpoint_every=1e9, threads=1)
    mine = json.loads(json.dumps(alone["methods"]["l2"]))
    theirs = results(folder)["l2-seed1"]["methods"]["l2"]
    assert mine["weights_sha256"] == theirs["weights_sha256"]
    assert mine["accuracies"] == theirs["accuracies"]


def test_the_same_command_repeats_no_finished_run(compared, monkeypatch, capsys):
    folder, _ = compared
    monkeypatch.chdir(folder)
    logs = sorted(Path("runs/small").glob("*/events.jsonl"))
    before = [(path, path.stat().st_mtime_ns) for path in logs]
    assert main(SMALL) == 0
    assert "6 of 6 runs in runs/small are finished already" in capsys.readouterr().out
    assert [(path, path.stat().st_mtime_ns) for path in logs] == before


def test_a_different_configuration_under_the_same_name_is_refused(compared, monkeypatch, capsys):
    monkeypatch.chdir(compared[0])
    assert main([*SMALL, "--lr", "0.5"]) == 2
    assert "training.lr is" in capsys.readouterr().err


def start_training(folder: Path) -> subprocess.Popen[str]:
    """Start or continue the comparison and wait until a run of it stores a checkpoint."""

    def checkpoints() -> set[Path]:
        return set((folder / "runs/small").glob("*/checkpoints/*.json"))

    before = checkpoints()
    process = start_command(folder, *ONE_AT_A_TIME)
    while checkpoints() <= before and process.poll() is None:
        time.sleep(0.005)
    return process


def test_killed_then_interrupted_then_started_again_every_run_ends_with_the_same_bits(compared, tmp_path):
    process = start_training(tmp_path)
    process.send_signal(signal.SIGKILL)
    assert finish_command(process)[0] == -signal.SIGKILL

    process = start_training(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish_command(process)
    assert code == 130, output
    assert "The same command continues" in output
    assert "Traceback" not in output
    assert len(results(tmp_path)) < 6

    code, output = finish_command(start_command(tmp_path, *ONE_AT_A_TIME))
    assert code == 0, output
    assert results(tmp_path) == results(compared[0])


def test_a_second_command_on_the_same_comparison_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = compare.plan_comparison("digits", ["l2"], 1, Path("runs/small"))
    with cli_jobs._lock_folders(plan):
        assert main(["compare", "digits", "--methods", "l2", "--seeds", "1", "--name", "small"]) == 2
    assert "another command is using runs/small" in capsys.readouterr().err


def test_a_failed_run_does_not_stop_the_others_and_is_named_at_the_end(compared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(compared[0])
    monkeypatch.setattr(jobs, "_stop_event", threading.Event(), raising=False)
    broken = jobs.Job(configure("digits", method="l2", epochs=1, lr=1e30, reference=False), tmp_path / "broken")
    ended = jobs._run_job(broken, 1e9)
    assert "l2: the loss or a weight became infinite or NaN in task 1" in ended.error

    monkeypatch.setattr(jobs, "run_jobs", lambda plan, **options: options["on_job_end"](broken, ended))
    assert main(SMALL) == 1
    shown = capsys.readouterr().out
    assert "FAILED L2, seed 0: l2: the loss" in shown
    assert "fine-tuning" in shown


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
    assert summarize_values([0.5, 0.7]) == {
        "mean": pytest.approx(0.6),
        "deviation": pytest.approx(statistics.stdev([0.5, 0.7])),
        "values": [0.5, 0.7],
    }
    assert summarize_values([0.5])["deviation"] is None


@pytest.mark.parametrize(
    ("words", "methods", "seeds"),
    [
        (["cifar100"], ["agscl", "paper-agscl", "ewc", "mas", "si", "rwalk", "hat"], 5),
        (["cub200"], ["agscl", "paper-agscl", "ewc", "mas", "si", "rwalk"], 5),
        (["eight", "--seeds", "2"], ["agscl", "paper-agscl", "ewc", "mas"], 2),
        (["digits"], list(METHODS), 3),
        (["cifar100", "--methods", "all"], list(METHODS), 5),
        (["cifar100", "--methods", "gpm,si"], ["gpm", "si"], 5),
    ],
)
def test_by_default_a_comparison_takes_the_methods_and_seeds_of_its_preset(words, methods, seeds, monkeypatch):
    asked = []

    def plan(preset, names, count, *_, **__):
        asked.extend([preset, sorted(names), count])
        raise ValueError("enough")

    monkeypatch.setattr(compare, "plan_comparison", plan)
    assert main(["compare", *words]) == 2
    assert asked == [words[0], sorted(methods), seeds]


def test_a_smaller_comparison_removes_nothing_from_the_stored_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["compare", "digits", "--epochs", "1", "--name", "c", "--jobs", "1", "--methods"]
    assert main([*asked, "l2,frozen", "--seeds", "2"]) == 0
    stored = Path("runs/c/comparison.json")
    before = json.loads(stored.read_text())
    assert {name: row["seeds"] for name, row in before["methods"].items()} == {
        "l2": [0, 1],
        "frozen": [0, 1],
        "finetune": [0, 1],
    }
    Path("runs/c/older").mkdir()
    Path("runs/c/older/result.json").write_text("{}")
    assert main([*asked, "l2", "--seeds", "1"]) == 0
    assert json.loads(stored.read_text()) == before
    assert main(["run", "digits", "--epochs", "1", "--name", "c"]) == 2
    assert json.loads(stored.read_text()) == before


def test_runs_on_changed_images_are_not_compared(tmp_path, monkeypatch, capsys):
    def draw(seed):
        for label, number in itertools.product(range(4), range(6)):
            path = tmp_path / "own" / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(small_images.encode_image(small_images.make_pixels(10 * seed + label, number)))

    small_images = pytest.importorskip("small_images")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path / "cache"))
    draw(0)
    words = ["compare", "cifar100", "--methods", "finetune", "--epochs", "1", "--name", "mix", "--tasks", "folder:own"]
    words += ["--task-options", "classes_per_task=2", "size=32", "--jobs", "1", "--seeds"]
    assert main([*words, "1"]) == 0
    draw(1)
    assert main([*words, "1"]) == 0, "nothing is left to run"
    capsys.readouterr()
    assert main([*words, "2"]) == 2
    assert "changed since it was started" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*words, "1", "--runs", str(tmp_path / "runs")]) == 2
    assert "a different configuration" in capsys.readouterr().err
