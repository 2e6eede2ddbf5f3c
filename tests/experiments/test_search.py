import contextlib
import json
import math
from dataclasses import fields

import pytest

from agscl import L2, PaperAGSCL
from agscl.cli.main import main
from agscl.experiments import search as searching
from agscl.experiments.run import execute_run
from agscl.methods import find_methods
from agscl.methods._parts.search_axis import FACTORS, SearchAxis
from agscl.runs import Run, RunError

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def test_an_axis_tries_the_base_value_and_its_multiples():
    assert [one["lam"] for one in SearchAxis("lam", (0.1, 1.0, 3.0)).list_candidates({"lam": 5.0, "mu": 1.0})] == [
        5.0,
        15.0,
        0.5,
    ]
    assert [one["rho"] for one in SearchAxis("rho", values=(0.1, 0.5)).list_candidates({"rho": 0.3})] == [0.3, 0.5, 0.1]


def test_an_axis_is_extended_beyond_its_ends_by_the_ratio_of_its_outermost_factors():
    axis = SearchAxis("lam", (0.1, 0.5, 1.0, 3.0))
    tried = {1.0, 5.0, 10.0, 30.0}
    assert axis.extend({"lam": 1.0, "mu": 7.0}, tried) == [{"lam": 0.2, "mu": 7.0}]
    assert axis.extend({"lam": 30.0}, tried) == [{"lam": 90.0}]
    assert axis.extend({"lam": 5.0}, tried) == []
    assert SearchAxis("rho", values=(0.1, 0.5)).extend({"rho": 0.5}, {0.1, 0.5}) == []


@pytest.mark.parametrize("best", [50.0, 500.0, 1e9])
def test_a_search_ends_where_the_best_value_has_worse_ones_on_both_sides(tmp_path, monkeypatch, best):
    monkeypatch.setattr(L2, "search", (SearchAxis("lam", (0.1, 1.0, 10.0)),))
    monkeypatch.setattr(searching, "score_job", lambda job: 1 / (1 + abs(math.log(job.config.settings["lam"] / best))))
    found = searching.search_settings("digits", "l2", tmp_path, lambda jobs: None, lam=1.0)
    tried = sorted(one.settings["lam"] for one in found)
    assert tried == [0.1, 1, 10, 100, 1000, 10_000][: 5 if best == 50 else 6], "three steps further at the most"
    assert found[0].settings["lam"] == {50.0: 100.0, 500.0: 1000.0, 1e9: 10_000.0}[best]


def test_of_equal_values_the_one_nearest_to_the_start_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", lambda job: 0.5)
    found = searching.search_settings("digits", "l2", tmp_path, lambda jobs: None, lam=1.0)
    assert found[0].settings == {"lam": 1.0}
    assert len(found) == 5, "and nothing beyond"


def test_a_run_that_diverged_is_a_bad_setting_and_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(L2, "search", (SearchAxis("lam", (1.0, 1e30)),))
    monkeypatch.setattr(searching, "MAX_EXTENSIONS", 0)
    asked = []

    def run(jobs):
        asked.append(len(jobs))
        for job in jobs:
            with Run(job.folder) as folder, contextlib.suppress(RunError):
                execute_run(job.config, folder, checkpoint_every=1e9)

    changes = {"lam": 1.0, "epochs": 1, "optimizer": "sgd", "lr": 0.1}
    for _ in range(2):
        found = searching.search_settings("digits", "l2", tmp_path, run, **changes)
        assert [one.valid_accuracy is None for one in found] == [False, True]
    assert asked == [2, 1], "the finished one is left to whoever runs jobs"


def test_a_choice_that_diverged_with_another_configuration_is_tried_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L2, "search", (SearchAxis("lam", values=(1.0,)),))
    asked = ["search", "digits", "--method", "l2", "--epochs", "1", "--runs", str(tmp_path), "--name", "s"]
    asked += ["--checkpoint-every", "1000", "--set"]  # with one it would be kept, however slow the machine
    assert main([*asked, "lr=1e25"]) == 1
    shown = capsys.readouterr().out
    assert "Training diverged with every choice" in shown
    assert "agscl run" not in shown
    assert main([*asked, "lr=0.01"]) == 0
    stored = json.loads((tmp_path / "s" / "search.json").read_text())
    assert [one["valid_accuracy"] is None for one in stored["tried"]] == [False]


def test_a_run_that_did_not_finish_for_another_reason_ends_the_search(tmp_path):
    with pytest.raises(RunError, match=r"did not finish.*The same command tries it again"):
        searching.search_settings("digits", "l2", tmp_path, lambda jobs: None)


def test_a_search_can_be_limited_to_some_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", lambda job: 0.5)
    found = searching.search_settings("digits", "paper-agscl", tmp_path, lambda jobs: None, only=["rho"])
    assert {(one.settings["lam"], one.settings["mu"]) for one in found} == {(5000.0, 10.0)}
    assert sorted(one.settings["rho"] for one in found) == [0.1, 0.2, 0.3, 0.4, 0.5]
    with pytest.raises(ValueError, match=r"paper-agscl has no setting 'eta' to search\. It has: lam, mu, rho"):
        searching.search_settings("digits", "paper-agscl", tmp_path, lambda jobs: None, only=["eta"])


def test_a_search_can_be_given_the_values_of_its_first_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", lambda job: job.config.settings["lam"])
    found = searching.search_settings("digits", "paper-agscl", tmp_path, lambda jobs: None, values=[7.0, 70.0])
    assert [one.settings["lam"] for one in found] == [70.0, 7.0]
    assert len({(one.settings["mu"], one.settings["rho"]) for one in found}) == 1


def test_a_search_scores_by_validation_accuracy_and_continues_where_it_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(PaperAGSCL, "search", (SearchAxis("lam", (0.0001, 1.0)), SearchAxis("mu", (0.5, 1.0))))
    monkeypatch.setattr(searching, "MAX_EXTENSIONS", 0)
    asked = ["search", "digits", "--method", "paper-agscl", "--epochs", "2", "--runs", str(tmp_path), "--name", "s"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    stored = json.loads((tmp_path / "s" / "search.json").read_text())
    assert len(stored["tried"]) == 3, "two of λ, then two of μ, one of them known by then"
    marks = [one["valid_accuracy"] for one in stored["tried"]]
    assert marks == sorted(marks, reverse=True)
    best = stored["tried"][0]["settings"]
    command = f"agscl run digits --method paper-agscl --set lam={best['lam']:g} mu={best['mu']:g} --epochs 2"
    assert command in " ".join(shown.split())
    folders = sorted(folder for folder in (tmp_path / "s").iterdir() if folder.is_dir())
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        assert config["seed"] == searching.SEED
        assert config["hold_out"] == 0.1
    times = [(folder / "result.json").stat().st_mtime_ns for folder in folders]
    assert main(asked) == 0
    assert [(folder / "result.json").stat().st_mtime_ns for folder in folders] == times


def test_on_several_seeds_the_mean_decides_and_one_that_diverged_rules_a_choice_out(tmp_path, monkeypatch):
    marks = {
        (1.0, 1000): 0.5,
        (1.0, 1001): 0.7,
        (2.0, 1000): 0.9,
        (2.0, 1001): 0.1,
        (3.0, 1000): 1.0,
        (3.0, 1001): None,
    }
    monkeypatch.setattr(searching, "score_job", lambda job: marks[job.config.settings["lam"], job.config.seed])
    found = searching.search_settings("digits", "l2", tmp_path, lambda jobs: None, seeds=2, values=[1.0, 2.0, 3.0])
    assert [(one.settings["lam"], one.by_seed) for one in found] == [
        (1.0, [0.5, 0.7]),
        (2.0, [0.9, 0.1]),
        (3.0, [1.0, None]),
    ]
    assert [one.valid_accuracy for one in found] == [pytest.approx(0.6), pytest.approx(0.5), None]
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        searching.search_settings("digits", "l2", tmp_path, lambda jobs: None, seeds=0)


def test_a_search_with_more_seeds_reuses_the_runs_of_the_first_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L2, "search", (SearchAxis("lam", (0.1, 1.0)),))
    monkeypatch.setattr(searching, "MAX_EXTENSIONS", 0)
    asked = ["search", "digits", "--method", "l2", "--epochs", "1", "--runs", str(tmp_path), "--name", "s"]
    assert main(asked) == 0
    alone = json.loads((tmp_path / "s" / "search.json").read_text())["tried"]
    results = list((tmp_path / "s").glob("*/result.json"))
    times = [path.stat().st_mtime_ns for path in results]
    capsys.readouterr()
    assert main([*asked, "--seeds", "2"]) == 0
    assert [path.stat().st_mtime_ns for path in results] == times
    both = json.loads((tmp_path / "s" / "search.json").read_text())["tried"]
    for one in both:
        first = next(each for each in alone if each["settings"] == one["settings"])
        assert one["by_seed"][0] == first["valid_accuracy"]
        assert one["valid_accuracy"] == pytest.approx(sum(one["by_seed"]) / 2)
    assert "±" in capsys.readouterr().out
    stopped = searching.load_trials(tmp_path / "s", "l2", seeds=2)
    assert [(one.settings, one.valid_accuracy) for one in stopped] == [
        (one["settings"], pytest.approx(one["valid_accuracy"])) for one in both
    ]
    assert searching.load_trials(tmp_path / "s", "l2", seeds=3) == []
    first = {one.valid_accuracy for one in searching.load_trials(tmp_path / "s", "l2")}
    assert first == {one["valid_accuracy"] for one in alone}, "the other seeds' runs play no part"


def test_a_method_without_settings_to_search_is_refused(tmp_path, capsys):
    assert main(["search", "digits", "--method", "frozen", "--runs", str(tmp_path)]) == 2
    assert "frozen has no settings to search" in capsys.readouterr().err


def test_every_axis_is_a_setting_of_its_method_and_the_factors_include_1():
    for method in find_methods().values():
        assert {axis.setting for axis in method.search} <= {field.name for field in fields(method.Config)}
    assert 1.0 in FACTORS
