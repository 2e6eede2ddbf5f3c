"""The paper's analyses: `agscl study`, and what it measures."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from agscl.cli.main import main
from agscl.experiments import aopc as aopc_module
from agscl.experiments import studies
from agscl.experiments.presets import PRESETS
from agscl.experiments.run_config import configure
from agscl.experiments.studies import RHOS
from agscl.training import TrainingConfig
from run_files import edit_json

SHORT = ["digits", "--epochs", "1", "--name", "studied", "--jobs", "2"]


def test_the_trade_off_varies_lambda_around_the_presets_for_every_form(tmp_path):
    lines = studies.plan_study("cifar100", "tradeoff", 1, tmp_path)
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
    expected = configure("cifar100", method="paper-agscl", reference=False, lam=40.0, zero_init="off", rand_init=False)
    assert config == expected
    assert len({job.folder for line in lines for job in line.jobs}) == 31


@pytest.mark.parametrize("preset", [name for name in PRESETS if isinstance(PRESETS[name].training, TrainingConfig)])
@pytest.mark.parametrize("settings", [{}, {"mas": {"lam": 2.0}, "paper-agscl": {"rho": 0.25, "lam": 7.0}}])
def test_runs_of_the_same_configuration_have_one_folder_in_all_studies(tmp_path, preset, settings):
    jobs = [
        job
        for study in studies.STUDIES
        for line in studies.plan_study(preset, study, 2, tmp_path, settings=settings)
        for job in line.jobs
    ]
    configs = [json.dumps(job.config.as_dict(), sort_keys=True) for job in jobs]
    pairs = {(job.folder, config) for job, config in zip(jobs, configs, strict=True)}
    assert len(pairs) == len({job.folder for job in jobs}) == len(set(configs))
    assert len(pairs) == 2 * (
        37 if settings else 36 if configure(preset, method="paper-agscl").settings["rho"] in RHOS else 37
    )


@pytest.mark.parametrize("lam", [0.0, math.inf])
def test_the_trade_off_needs_a_lambda_above_0_and_below_infinity(tmp_path, lam):
    with pytest.raises(ValueError, match="varies λ around paper-agscl's value, which is"):
        studies.plan_study("cifar100", "tradeoff", 1, tmp_path, settings={"paper-agscl": {"lam": lam}})
    studies.plan_study("cifar100", "reinit", 1, tmp_path, settings={"paper-agscl": {"lam": lam}})


def test_the_study_rho_goes_from_a_tenth_to_a_half_and_includes_mas(tmp_path):
    lines = studies.plan_study("cifar100", "rho", 1, tmp_path, settings={"paper-agscl": {"mu": 3.0}})
    settings = [(line.method, line.jobs[0].config.settings) for line in lines[1:]]
    assert [(method, one.get("rho"), one.get("mu")) for method, one in settings] == [
        *[("paper-agscl", rho, 3.0) for rho in (0.1, 0.2, 0.3, 0.4, 0.5)],
        ("mas", None, None),
    ]


def test_studies_share_their_runs_and_keep_the_seeds_they_have(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["study", "reinit", *SHORT]) == 0
    assert "finished already" not in capsys.readouterr().out
    assert main(["study", "prox", *SHORT, "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 6 runs in runs/studied are finished already." in printed
    assert "without proximal steps" in printed
    assert "±" in printed
    assert "…" not in printed
    assert main(["study", "prox", *SHORT]) == 0
    stored = json.loads(Path("runs/studied/prox.json").read_text())
    assert [(line["label"], line["seeds"]) for line in stored["lines"]] == [
        ("fine-tuning", [0, 1]),
        ("AGS-CL paper", [0, 1]),
        ("without proximal steps", [0, 1]),
    ]
    for line in stored["lines"]:
        curves = line["curves"]
        assert curves["average_accuracy"][-1] == pytest.approx(line["average_accuracy"]["mean"])
        assert line["plasticity"]["mean"] > 0
        nodes = {"sparsity", "used_capacity", "frozen"} if line["method"] == "paper-agscl" else set()
        assert curves.keys() == {"average_accuracy", *nodes}
        assert all(len(curve) == 5 for curve in curves.values())
    reference = stored["lines"][0]
    assert reference["plasticity"]["values"] == [1, 1]


def test_importances_show_which_nodes_matter_after_the_first_task_and_after_the_last(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    words = ["study", "aopc", "digits", "--name", "studied"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "highest" in printed
    assert "…" not in printed
    found = json.loads(Path("runs/studied/aopc.json").read_text())["seeds"]["0"]["after"]
    result = json.loads(Path("runs/studied/paper-agscl-seed0/result.json").read_text())["methods"]["paper-agscl"]
    assert found.keys() == {"1", "5"}
    for after, curves in found.items():
        row = result["accuracies"][int(after) - 1]
        for scores in curves["scores"].values():  # with all nodes as the run had it, and with none by chance
            assert scores[0] == pytest.approx(sum(row) / len(row))
            assert scores[-1] == pytest.approx(curves["scores"]["highest"][-1])
        aopc = curves["aopc"]
        assert tuple(aopc) == aopc_module.ORDERS
        assert len(curves["importances"]) == 3
        assert all(mean > 0 for mean in curves["importances"].values())
        for where in ("", " of each layer"):
            assert aopc[f"highest{where}"][-1] > aopc["random"][-1] > aopc[f"lowest{where}"][-1]
    assert main(words) == 0
    assert "once more" not in capsys.readouterr().out
    assert "differ in bits" not in printed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The runs of two studies, each made once."""
    folder = tmp_path_factory.mktemp("finished")
    for study in ("prox", "aopc"):
        assert main(["study", study, "digits", "--epochs", "1", "--name", "studied", "--runs", str(folder)]) == 0
    return folder


@pytest.fixture
def studied(finished, tmp_path, capsys, monkeypatch):
    """Goes on with `agscl study` in a copy of these; returns the exit code and all that was said."""
    shutil.copytree(finished, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    def study(name, *words):
        code = main(["study", name, "digits", "--epochs", "1", "--name", "studied", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return study


def test_measured_seeds_are_stored_one_by_one_and_measured_again_when_the_weights_changed(studied, monkeypatch):
    once = aopc_module._measure_run

    def interrupted(job, note):
        if job.config.seed == 1:
            raise KeyboardInterrupt
        return once(job, note)

    path = Path("runs/studied/aopc.json")
    path.unlink()
    monkeypatch.setattr(aopc_module, "_measure_run", interrupted)
    code, said = studied("aopc", "--seeds", "2")
    assert code == 130
    assert "what was measured is stored" in said
    assert json.loads(path.read_text())["seeds"].keys() == {"0"}
    monkeypatch.setattr(aopc_module, "_measure_run", once)
    assert studied("aopc", "--seeds", "2")[1].count("once more") == 1
    stored = json.loads(path.read_text())
    stored["seeds"]["0"]["weights_sha256"] = "of others"
    path.write_text(json.dumps(stored))
    assert studied("aopc")[1].count("once more") == 1
    stored = json.loads(path.read_text())
    del stored["seeds"]["0"]["after"]["5"]["aopc"]["random"]  # as another version may have left it
    path.write_text(json.dumps(stored))
    assert studied("aopc")[1].count("once more") == 1
    assert json.loads(path.read_text())["seeds"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    "content", ["{}", '{"seeds": {"0": 3}}', '{"seeds": {"0": {}}}', '{"seeds": {"0": {"after": 3}}}', "{"]
)
def test_a_damaged_file_of_measurements_is_an_error(studied, content):
    Path("runs/studied/aopc.json").write_text(content)
    code, said = studied("aopc")
    assert code == 1
    assert "Remove it" in said


def test_the_first_task_is_trained_again_with_the_threads_of_the_run(studied, monkeypatch):
    Path("runs/studied/aopc.json").unlink()
    seen, before = [], torch.get_num_threads()
    once = aopc_module.build_supervised
    monkeypatch.setattr(
        aopc_module, "build_supervised", lambda *given: seen.append(torch.get_num_threads()) or once(*given)
    )
    torch.set_num_threads(2)
    try:
        assert studied("aopc")[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


def test_changed_data_is_refused(studied, monkeypatch):
    Path("runs/studied/aopc.json").unlink()
    path = Path("runs/studied/paper-agscl-seed0/data.json")
    edit_json(path, lambda content: content["tasks"].update(dict.fromkeys(content["tasks"], 1)))
    code, said = studied("aopc")
    assert code == 2
    assert "changed since it was started" in said


def test_a_studys_folder_is_not_a_run_and_a_comparison_there_ignores_its_forms(studied, capsys):
    assert main(["run", "digits", "--epochs", "1", "--name", "studied"]) == 2
    assert "a search or a study, not a run" in capsys.readouterr().err
    assert (
        main(["compare", "digits", "--epochs", "1", "--name", "studied", "--methods", "paper-agscl", "--seeds", "1"])
        == 0
    )
    compared = json.loads(Path("runs/studied/comparison.json").read_text())["methods"]
    assert "prox" not in compared["paper-agscl"]["settings"]


def test_settings_of_single_methods_need_the_methods_name(studied):
    assert studied("prox", "--set", "paper-agscl.mu=3", "--name", "other")[0] == 0
    config = json.loads(Path("runs/other/paper-agscl-prox=False-seed0/config.json").read_text())
    assert config["settings"]["mu"] == 3
    code, said = studied("prox", "--set", "mu=3")
    assert code == 2
    assert "name the method, e.g. --set paper-agscl.mu=3" in said


def test_where_every_run_fails_there_is_no_empty_table(studied):
    code, said = studied("prox", "--set", "lr=1e30", "--name", "other")
    assert code == 1
    assert "FAILED" in said
    assert "acc., %" not in said


def test_a_run_whose_last_checkpoint_is_missing_is_an_error(studied):
    for path in [*Path("runs/studied/paper-agscl-seed0/checkpoints").iterdir(), Path("runs/studied/aopc.json")]:
        path.unlink()
    code, said = studied("aopc")
    assert code == 1
    assert "remove the folder to run it again" in said
    assert "once more" not in said


def test_an_unknown_study_is_refused_with_the_known_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "lambda"]) == 2
    assert "Available: reinit, tradeoff, rho, prox, aopc" in capsys.readouterr().err
    assert main(["study", "rho", "--seeds", "0"]) == 2
    assert main(["study", "rho", "digits", "--set", "mu=3"]) == 2
    assert not Path("runs").exists()


def test_the_benchmark_of_studies_records_what_it_ran(tmp_path, monkeypatch):
    import importlib
    import sys

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    words = ["digits", "--studies", "prox", "aopc", "--epochs", "1", "--runs", "runs", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["studies", *words])
    importlib.import_module("studies").main()
    prox, aopc = (json.loads(Path(f"out/digits-{name}.json").read_text()) for name in ("prox", "aopc"))
    assert prox["complete"]
    assert aopc["complete"]
    assert [line["label"] for line in prox["lines"]] == ["fine-tuning", "AGS-CL paper", "without proximal steps"]
    assert aopc["seeds"].keys() == {"0"}
    assert prox["commits"]
