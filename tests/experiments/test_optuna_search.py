"""`agscl search --sampler optuna`, with the real Optuna."""

import json
import math
import signal
import sys
import time

import pytest

from agscl import PaperAGSCL
from agscl.cli.main import main
from agscl.experiments import jobs as running
from agscl.methods._parts.search_axis import SearchAxis
from agscl.runs import RunError, WrongOptions
from commands import finish_command, start_command

pytest.importorskip("optuna", reason="Optuna is not installed: pip install -c constraints.txt -e '.[optuna]'")

import optuna

from agscl.experiments import optuna_search as searching

pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


def score_near(best, name="lam"):
    """A score that is highest at `best`; one that no training is needed for."""
    return lambda job: 1 / (1 + abs(math.log(job.config.settings[name] / best)))


def read_study(folder):
    backend = searching.JournalFileBackend(str(folder / searching.JOURNAL))
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


def run_nothing(jobs, watch):
    watch()


def test_trials_begin_with_the_start_values_and_stay_within_what_the_method_declares(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", score_near(40.0))
    monkeypatch.setattr(
        PaperAGSCL, "search", (SearchAxis("lam", (0.1, 1.0, 10.0)), SearchAxis("rho", values=(0.1, 0.5)))
    )
    found = searching.search_with_optuna("digits", "paper-agscl", tmp_path, run_nothing, trials=30, lam=1.0, rho=0.3)
    assert len(found) == 30
    first = read_study(tmp_path).trials[0].params
    assert first == {"lam": 1.0, "rho": 0.3}
    assert all(1e-4 <= one.settings["lam"] <= 1e4 for one in found), "as far as the search along axes may go"
    assert all(0.1 <= one.settings["rho"] <= 0.5 for one in found)
    assert 20 < found[0].settings["lam"] < 80
    stored = json.loads((tmp_path / "search.json").read_text())
    assert stored["tried"] == [one.as_dict() for one in found]
    assert stored["tried"][0].keys() == {"settings", "valid_accuracy", "by_seed"}


def test_an_interrupted_search_goes_on_with_the_trials_of_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", score_near(40.0))
    whole = searching.search_with_optuna(
        "digits", "l2", tmp_path / "whole", run_nothing, trials=11, at_once=2, seed=5, lam=1.0
    )
    for stop_at in range(1, 7):
        calls = 0

        def run_jobs(jobs, watch, stop_at=stop_at):
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise KeyboardInterrupt

        folder = tmp_path / str(stop_at)
        options = {"trials": 11, "at_once": 2, "seed": 5, "lam": 1.0}
        with pytest.raises(KeyboardInterrupt):
            searching.search_with_optuna("digits", "l2", folder, run_jobs, **options)
        with open(folder / searching.JOURNAL, "ab") as journal:
            journal.write(b'{"op_code":4,"worker')  # as a killed process leaves it
        assert searching.search_with_optuna("digits", "l2", folder, run_nothing, **options) == whole
        states = [one.state for one in read_study(folder).trials]
        assert states == [optuna.trial.TrialState.COMPLETE] * 11


def test_a_search_killed_before_a_trial_has_its_settings_draws_those_of_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", score_near(40.0))
    options = {"trials": 6, "lam": 1234.5}
    whole = searching.search_with_optuna("digits", "l2", tmp_path / "whole", run_nothing, **options)
    assert any(one.settings["lam"] == 1234.5 for one in whole), "the start value, not a rounded one"
    suggest, calls = optuna.trial.Trial.suggest_float, []

    def suggest_twice(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return suggest(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "suggest_float", suggest_twice)
        with pytest.raises(KeyboardInterrupt):
            searching.search_with_optuna("digits", "l2", tmp_path / "killed", run_nothing, **options)
    assert searching.search_with_optuna("digits", "l2", tmp_path / "killed", run_nothing, **options) == whole


def test_more_trials_are_added_to_those_of_a_finished_search(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", score_near(40.0))
    few = searching.search_with_optuna("digits", "l2", tmp_path, run_nothing, trials=4)
    more = searching.search_with_optuna("digits", "l2", tmp_path, run_nothing, trials=7)
    assert len(more) == 7
    assert all(one in more for one in few)


def test_a_trial_that_is_worse_than_the_median_after_a_task_is_stopped_there(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "POLL_SECONDS", 0.0)

    def write_logs(jobs, watch):
        """Logs of runs that are better than any real one."""
        for job in jobs:
            job.folder.mkdir(parents=True)
            events = [{"event": "task ended", "task": task, "valid_accuracies": [1.1]} for task in range(5)]
            (job.folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    with monkeypatch.context() as patch:
        patch.setattr(searching, "score_job", lambda job: 1.1)
        searching.search_with_optuna("digits", "l2", tmp_path, write_logs, trials=5, epochs=1)
    assert all(sorted(one.intermediate_values) == [1, 2, 3, 4, 5] for one in read_study(tmp_path).trials)
    tried = []

    def train(jobs, watch):
        for job in jobs:
            tried.append(job.folder)

            def watch_log(log=job.folder / "events.jsonl", seen=[]):  # noqa: B006
                if seen[-1:] != [log.stat().st_size]:
                    seen.append(log.stat().st_size)
                    watch()
                return False

            job.folder.mkdir()
            (job.folder / "events.jsonl").touch()
            assert running.run_job(job, 1e9, watch_log) is None

    monkeypatch.setattr(searching, "score_job", lambda job: 1.1)
    found = searching.search_with_optuna("digits", "l2", tmp_path, train, trials=6, epochs=1)
    assert (found[-1].valid_accuracy, found[-1].stopped_after) == (None, 1)
    assert len(tried) == 1
    assert not (tried[0] / "result.json").exists()
    assert list((tried[0] / "checkpoints").iterdir()), "from which a later search may continue"
    assert searching.search_with_optuna("digits", "l2", tmp_path, train, trials=6, epochs=1) == found
    assert len(tried) == 1, "it is not run again"


def test_a_trial_that_diverges_counts_as_the_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "score_job", lambda job: None if job.config.settings["lam"] > 1 else 0.5)
    found = searching.search_with_optuna("digits", "l2", tmp_path, run_nothing, trials=8, seeds=2)
    scores = [one.valid_accuracy for one in found]
    assert None in scores
    assert scores == sorted(scores, key=lambda score: score is None)
    assert all(one.stopped_after is None and len(one.by_seed) == 2 for one in found)


def test_a_failed_run_ends_the_search_and_its_trial_is_tried_again(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="did not finish"):
        searching.search_with_optuna("digits", "l2", tmp_path, run_nothing, trials=2)
    monkeypatch.setattr(searching, "score_job", lambda job: 0.5)
    assert len(searching.search_with_optuna("digits", "l2", tmp_path, run_nothing, trials=2)) == 2
    assert len(read_study(tmp_path).trials) == 2


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(searching, "score_job", lambda job: 0.5)

    def search(**options):
        return searching.search_with_optuna("digits", "l2", tmp_path / "s", run_nothing, trials=1, **options)

    search()
    with pytest.raises(
        WrongOptions, match=r"holds a search with other options \(start, changes\): choose another --name"
    ):
        search(lam=7.0)
    with pytest.raises(ValueError, match="starts at inf, around which there is no range"):
        searching.search_with_optuna("digits", "paper-agscl", tmp_path / "p", run_nothing, trials=1, lam=math.inf)
    (tmp_path / "s" / searching.JOURNAL).write_bytes(b"no journal\n")
    with pytest.raises(RunError, match=r"optuna\.log is damaged.*Remove it"):
        search()
    asked = ["search", "digits", "--method", "l2", "--runs", str(tmp_path)]
    assert main([*asked, "--sampler", "optuna", "--on", "local"]) == 2
    assert "with --on say how many, --jobs N" in capsys.readouterr().err
    assert main([*asked, "--trials", "3"]) == 2
    assert "--trials is for --sampler optuna" in capsys.readouterr().err
    assert main([*asked, "--sampler", "optuna", "--trials", "0"]) == 2
    assert "trials must be at least 1" in capsys.readouterr().err


def test_without_optuna_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "agscl.experiments.optuna_search")
    assert main(["search", "digits", "--sampler", "optuna", "--runs", str(tmp_path)]) == 2
    assert "--sampler optuna needs Optuna: pip install 'agscl[optuna]'" in capsys.readouterr().err


def test_the_command_prints_and_stores_what_it_found(tmp_path, capsys):
    asked = ["search", "digits", "--method", "l2", "--epochs", "1", "--runs", str(tmp_path), "--name", "s"]
    asked += ["--sampler", "optuna", "--trials", "2", "--jobs", "2"]
    assert main(asked) == 0
    stored = json.loads((tmp_path / "s" / "search.json").read_text())
    assert len(stored["tried"]) == 2
    best = stored["tried"][0]["settings"]["lam"]
    assert f"agscl run digits --method l2 --set lam={best:.12g} --epochs 1" in " ".join(capsys.readouterr().out.split())
    assert main(asked) == 0
    assert json.loads((tmp_path / "s" / "search.json").read_text()) == stored


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 6.0, 10.0])
def test_a_killed_search_ends_with_the_trials_of_one_that_was_not(tmp_path, seconds):
    asked = ["search", "digits", "--method", "l2", "--epochs", "10", "--sampler", "optuna", "--trials", "4"]
    asked += ["--jobs", "1", "--checkpoint-every", "0.1", "--name", "s"]
    assert finish_command(start_command(tmp_path / "whole", *asked))[0] == 0
    process = start_command(tmp_path / "killed", *asked)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert finish_command(start_command(tmp_path / "killed", *asked))[0] == 0
    contents = [json.loads((tmp_path / name / "runs/s/search.json").read_text()) for name in ("whole", "killed")]
    assert contents[0] == contents[1]
