"""`agscl inspect`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from agscl.cli.inspect import write_exclude_as_option
from agscl.cli.main import main
from agscl.experiments.method_entries import METHODS
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run


@pytest.mark.parametrize(
    ("arguments", "nodes"),
    [
        (["own_models:mlp"], 9),
        (["own_models:classifier", "--heads", "2"], 5),
        (["own_models:with_example"], 4),
        (["own_models:convolution", "--input-shape", "3", "8", "8"], 4),
    ],
)
def test_inspect_prints_the_nodes_and_what_each_method_would_store(arguments, nodes, monkeypatch, capsys):
    assert main(["inspect", *arguments]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("AGS-CL"))
    assert str(nodes) in row.split()
    assert "after 10 tasks" in shown
    for each in METHODS.values():
        assert each.is_bound or any(line.startswith(each.title) for line in shown.splitlines())
    assert max(map(len, shown.splitlines())) <= 80


def counted(shown: str) -> dict[str, list[str]]:
    lines = [line.replace("AGS-CL paper", "paper") for line in shown.splitlines()]
    return {line.split()[0]: line.split()[1:] for line in lines if line.rstrip().endswith(("B", "–", "×"))}


def test_inspect_of_a_network_shows_what_each_method_stores_as_the_paper_counts_and_in_full(capsys):
    assert main(["inspect", "eight", "--tasks", "8"]) == 0
    shown = capsys.readouterr().out
    rows = counted(shown)
    assert rows["AGS-CL"] == ["9,344", "≤20.1", "M", "9,344", "–", "–", "≤80.6", "MB"]
    assert rows["EWC"] == ["20.1", "M", "20.1", "M", "–", "–", "–", "160.7", "MB"]
    assert rows["RWALK"][:3] == ["40.2", "M", "20.1"]
    assert rows["HAT"][3] == "74,752"
    assert "20,085,568        9,344   2,150 ×" in shown
    assert "40,171,136        9,344   4,299 ×" in shown
    assert "40,171,136  ≤20,104,256  ≥ 1.99 ×" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_inspect_of_alexnet_shows_9344_importances_against_57_million_in_one_command(capsys):
    assert main(["inspect", "alexnet"]) == 0
    shown = capsys.readouterr().out
    rows = counted(shown)
    assert rows["AGS-CL"] == ["9,344", "≤57.0", "M", "9,344", "–", "–", "≤228.2", "MB"]
    assert rows["EWC"][:4] == ["57.0", "M", "57.0", "M"]
    assert "57,003,840        9,344   6,101 ×" in shown
    assert "114,007,680        9,344  12,201 ×" in shown
    assert "114,007,680  ≤57,022,528  ≥ 1.99 ×" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_inspect_of_a_finished_run_shows_what_it_stored_beside_every_method(finished, capsys):
    assert main(["inspect", "quick"]) == 0
    shown = capsys.readouterr().out
    memory = json.loads((finished / "result.json").read_text())["methods"]["agscl"]["memory"]
    (own,) = [line.split()[2:] for line in shown.splitlines() if line.startswith("this run ")]
    assert own[:3] == [f"{memory[purpose]:,}" for purpose in ("importances", "anchors", "masks")]
    assert "this run: AGS-CL, as it reported itself at its end" in shown
    assert "after 5 tasks" in shown
    rows = counted(shown)
    assert rows["AGS-CL"][:2] == ["150", "≤8,350"]
    assert rows["HAT"][2:4] == ["150", "750"]
    everything = sum(memory[purpose] for purpose in ("importances", "anchors", "masks"))
    assert rows["everything"][-4:] == ["16,700", f"{everything:,}", f"{16_700 / everything - 0.005:.2f}", "×"]
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["inspect", "runs/quick"]) == 0
    assert capsys.readouterr().out == shown


def test_inspect_of_a_run_takes_no_number_of_tasks_and_needs_a_finished_run(finished, tmp_path, monkeypatch, capsys):
    assert main(["inspect", "quick", "--tasks", "3"]) == 2
    assert "has learned 5 tasks, and its memory is counted after them" in capsys.readouterr().err
    shutil.copytree(finished, tmp_path / "runs" / "half")
    (tmp_path / "runs" / "half" / "result.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "half"]) == 2
    assert "Finish it with: agscl run --resume half" in capsys.readouterr().err


def test_inspect_of_a_run_of_a_bound_says_that_its_memory_is_not_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run:
        execute_run(
            configure("digits", method="separate", epochs=1, reference=False), run, checkpoint_every=1e9, threads=1
        )
    assert main(["inspect", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "separate, a bound" in shown
    assert "this run" not in shown


def test_the_help_of_inspect_says_that_the_code_of_an_own_model_runs(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert "their code runs" in " ".join(capsys.readouterr().out.split())


def test_inspect_names_the_option_exclude_and_not_its_python_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refused.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.ReLU())\n"
    )
    assert main(["inspect", "refused:make"]) == 2
    message = capsys.readouterr().err
    assert "--exclude trunk.0" in message
    assert "exclude=" not in message


def test_inspect_names_all_refused_layers_in_one_option_that_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gelus.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()]\n"
        "    layers += [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()]\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), *layers)\n"
    )
    assert main(["inspect", "gelus:make"]) == 2
    option = re.search(r"--exclude( trunk\.\d+)+", capsys.readouterr().err)[0]
    assert option == "--exclude trunk.2 trunk.5 trunk.3"
    assert main(["inspect", "gelus:make", *option.split()]) == 0


def test_messages_about_several_layers_become_one_option():
    message = "Use a ReLU, or exclude=['a.0', \"b\"]. Check heads= and exclude=."
    assert write_exclude_as_option(message) == "Use a ReLU, or --exclude a.0 b. Check --heads and --exclude."


def test_a_shape_on_which_an_own_model_cannot_run_is_named(capsys):
    assert main(["inspect", "own_models:convolution", "--input-shape", "64", "8", "8"]) == 2
    assert "--input-shape 64 8 8: the model cannot run on such a batch: " in capsys.readouterr().err
