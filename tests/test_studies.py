"""The paper's analyses: `agscl study`, and what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from agscl.analysis.perturbation import Perturbation, perturb
from agscl.cli import main
from agscl.experiments import studies
from agscl.experiments.presets import configure
from agscl.nodes import NodeGraph
from agscl.runs import digest

SHORT = ["digits", "--epochs", "1", "--name", "studied", "--jobs", "2"]


@pytest.fixture
def trunk():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(48, 5), nn.ReLU())
    model(torch.randn(8, 1, 8, 8))  # BatchNorm has seen something
    return model.eval()


def test_nodes_that_are_taken_away_give_nothing_and_all_others_what_they_gave(trunk):
    x = torch.randn(2, 1, 8, 8)
    graph = NodeGraph(trunk, x)
    before, plain = digest(trunk.state_dict()), trunk(x)
    left = []

    def score():
        with torch.no_grad():
            left.append(trunk(x))
        return float(left[-1].abs().sum())

    last = [graph.layers["6"].groups[node].item() for node in (3, 1)]
    others = [group for group in range(graph.size) if group not in last]
    found = perturb(graph, [*last, *others], score, steps=graph.size)
    assert found.pruned == list(range(graph.size + 1))
    assert torch.equal(left[0], plain)
    assert torch.equal(left[2][:, [0, 2, 4]], plain[:, [0, 2, 4]])
    assert not left[2][:, [1, 3]].any()
    assert found.scores[-1] == 0
    assert digest(trunk.state_dict()) == before


def test_all_of_a_channel_goes_with_it_its_batchnorm_too(trunk):
    x = torch.randn(2, 1, 8, 8)
    graph = NodeGraph(trunk, x)
    channel = graph.layers["0"].groups[2].item()
    seen = []
    perturb(graph, [channel, *[g for g in range(graph.size) if g != channel]], lambda: seen.append(trunk[:3](x)) or 0.0)
    assert seen[0][:, 2].any()
    assert not seen[1][:, 2].any()
    assert torch.equal(seen[1][:, [0, 1, 3]], seen[0][:, [0, 1, 3]])


def test_an_error_in_between_leaves_the_model_as_it_was(trunk):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    before, calls = digest(trunk.state_dict()), iter(range(3))
    with pytest.raises(StopIteration):
        perturb(graph, range(graph.size), lambda: float(next(calls)))
    assert digest(trunk.state_dict()) == before


@pytest.mark.parametrize("order", [[0, 1], [0] * 12, list(range(13))])
def test_an_order_must_name_each_node_once(trunk, order):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="each of the 12 nodes once"):
        perturb(graph, order, lambda: 0.0)


def test_the_area_over_a_curve_is_the_mean_of_what_was_lost_so_far():
    found = Perturbation([0, 1, 2, 3], [0.8, 0.8, 0.5, 0.2])
    assert found.aopc == pytest.approx([0, 0, 0.1, 0.225])


def test_all_nodes_are_taken_away_in_at_most_so_many_steps(trunk):
    graph = NodeGraph(trunk, torch.randn(2, 1, 8, 8))
    assert perturb(graph, range(graph.size), lambda: 0.0, steps=5).pruned == [0, 2, 5, 7, 10, 12]
    assert perturb(graph, range(graph.size), lambda: 0.0, steps=1).pruned == [0, 12]
    with pytest.raises(ValueError, match="at least 1"):
        perturb(graph, range(graph.size), lambda: 0.0, steps=0)


def test_a_trade_off_goes_over_strengths_around_the_presets_with_each_part_left_out(tmp_path):
    lines = studies.plan("cifar100", "tradeoff", 1, tmp_path)
    found: dict[str, list[float]] = {}
    for line in lines[1:]:
        found.setdefault(line.label.split(", λ")[0], []).append(line.settings["lam"])
    assert found == {
        **{form: [40.0, 133.0, 400.0, 1200.0, 4000.0] for form in studies.FORMS},
        "MAS": [0.4, 1.33, 4.0, 12.0, 40.0],
        "EWC": [1000.0, 3330.0, 10_000.0, 30_000.0, 100_000.0],
    }
    assert lines[0].method == "finetune"
    config = {line.label: line.jobs[0].config for line in lines}["without both, λ 40"]
    expected = configure("cifar100", method="agscl", reference=False, lam=40.0, zero_init="off", rand_init=False)
    assert config == expected
    assert len({job.folder for line in lines for job in line.jobs}) == 31


def test_studies_share_their_runs_and_keep_the_seeds_they_have(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["study", "reinit", *SHORT]) == 0
    assert "finished already" not in capsys.readouterr().out
    assert main(["study", "prox", *SHORT, "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 6 runs in runs/studied are finished already." in printed
    assert "without proximal steps" in printed
    assert max(map(len, printed[printed.index("Mean ±") :].splitlines())) <= 80
    assert main(["study", "prox", *SHORT]) == 0
    stored = json.loads(Path("runs/studied/prox.json").read_text())
    assert [(line["label"], line["seeds"]) for line in stored["lines"]] == [
        ("fine-tuning", [0, 1]),
        ("AGS-CL", [0, 1]),
        ("without proximal steps", [0, 1]),
    ]
    for line in stored["lines"]:
        curves = line["curves"]
        assert curves["average_accuracy"][-1] == pytest.approx(line["average_accuracy"]["mean"])
        assert line["plasticity"]["mean"] > 0
        nodes = {"sparsity", "used_capacity", "frozen"} if line["method"] == "agscl" else set()
        assert curves.keys() == {"average_accuracy", *nodes}
        assert all(len(curve) == 5 for curve in curves.values())
    reference = stored["lines"][0]
    assert reference["plasticity"]["values"] == [1, 1]


def test_importances_tell_which_nodes_matter_after_the_first_task_and_after_all(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    words = ["study", "aopc", "digits", "--name", "studied"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "highest" in printed
    assert "…" not in printed
    found = json.loads(Path("runs/studied/aopc.json").read_text())["seeds"]["0"]
    result = json.loads(Path("runs/studied/agscl-seed0/result.json").read_text())["methods"]["agscl"]
    assert found.keys() == {"1", "5"}
    for after, curves in found.items():
        row = result["accuracies"][int(after) - 1]
        for scores in curves["scores"].values():  # with all nodes as the run had it, and with none by chance
            assert scores[0] == pytest.approx(sum(row) / len(row))
            assert scores[-1] == pytest.approx(curves["scores"]["highest"][-1])
        aopc = curves["aopc"]
        assert aopc["highest"][-1] > aopc["random"][-1] > aopc["lowest"][-1]
    assert main(words) == 0
    assert "once more" not in capsys.readouterr().out


def test_a_run_whose_last_checkpoint_is_gone_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["study", "aopc", "digits", "--epochs", "1", "--name", "studied"]
    assert main(words) == 0
    for path in [*Path("runs/studied/agscl-seed0/checkpoints").iterdir(), Path("runs/studied/aopc.json")]:
        path.unlink()
    assert main(words) == 1
    assert "remove the folder, to run it again" in capsys.readouterr().err


def test_what_is_no_study_is_said_with_those_there_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "lambda"]) == 2
    assert "There are: reinit, tradeoff, rho, prox, aopc" in capsys.readouterr().err
    assert main(["study", "rho", "--seeds", "0"]) == 2
    assert main(["study", "rho", "digits", "--set", "mu=3"]) == 2
    assert not Path("runs").exists()


def test_the_benchmark_of_studies_says_what_it_ran(tmp_path, monkeypatch):
    import importlib
    import sys

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    words = ["digits", "--studies", "prox", "aopc", "--epochs", "1", "--runs", "runs", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["studies", *words])
    importlib.import_module("studies").main()
    prox, aopc = (json.loads(Path(f"out/digits-{name}.json").read_text()) for name in ("prox", "aopc"))
    assert prox["complete"]
    assert aopc["complete"]
    assert [line["label"] for line in prox["lines"]] == ["fine-tuning", "AGS-CL", "without proximal steps"]
    assert aopc["seeds"].keys() == {"0"}
    assert prox["commits"]
