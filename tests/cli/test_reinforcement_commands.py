"""Agents through the same commands as supervised runs: run, resume, verify, inspect, compare, study."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed")

from agscl.analysis.metrics import accumulated_rewards
from agscl.cli.main import main
from agscl.experiments.build import build_trainer, load_tasks
from agscl.experiments.presets import PRESETS
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import RunConfig, configure
from agscl.experiments.search import load_trials, search_settings
from agscl.experiments.studies import collect_study, plan_study
from agscl.reinforcement import PPOConfig
from agscl.runs import Run, WrongOptions, read_result
from agscl.runs.errors import Interrupted
from agscl.runs.events import read_events
from commands import start_training
from run_files import edit_json

QUICK = {"steps": 512, "environments": 4, "rollout": 16, "epochs": 1, "minibatches": 4, "evaluations": 2}
QUICK |= {"evaluation_episodes": 2, "evaluation_limit": 20}
PAIRS = [f"{key}={value}" for key, value in QUICK.items()]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_is_printed_verified_and_inspected(capsys):
    assert main(["run", "control", "--name", "quick", "--set", *PAIRS]) == 0
    shown = capsys.readouterr().out
    assert "score on each task" in shown
    assert "dormant nodes, %" in shown
    assert "accumulated reward" in shown
    result = read_result(Path("runs/quick"))
    outcome = result["methods"]["agscl"]
    assert [len(row) for row in outcome["scores"]] == [1, 2, 3]
    assert len(outcome["evaluations"]) == len(outcome["accumulated_rewards"]) == 6
    assert outcome["forgetting"] == 0.0, "all that it needs is frozen, and the episodes are the same"
    assert main(["verify", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "OK: everything guaranteed after each of 3 tasks is unchanged" in shown
    assert shown.count("important nodes (guaranteed)") == 3
    assert main(["inspect", "quick"]) == 0
    assert "128 nodes in 2 layers" in capsys.readouterr().out


def test_a_run_stopped_between_any_two_units_ends_with_the_same_digest(tmp_path):
    config = configure("control", method="agscl", reference=False, **QUICK)
    with Run(tmp_path / "whole") as run:
        expected = execute_run(config, run, checkpoint_every=1e9)["digest"]
    calls, stops = 0, 0

    def should_stop():
        nonlocal calls
        calls += 1
        return calls % 5 == 0

    while True:
        with Run(tmp_path / "stopped") as run:
            try:
                digest = execute_run(config, run, checkpoint_every=1e9, should_stop=should_stop)["digest"]
                break
            except Interrupted:
                stops += 1
    assert stops > 3
    assert digest == expected


@pytest.mark.slow
def test_a_run_of_atari_that_was_killed_goes_on_and_its_certificates_hold(tmp_path):
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    pairs = ["steps=256", "environments=4", "rollout=16", "epochs=1", "minibatches=2", "evaluations=1"]
    pairs += ["evaluation_limit=30", "evaluation_episodes=2"]
    command = ["run", "atari-smoke", "--name", "quick", "--checkpoint-every", "0.01", "--set", *pairs]

    def count(event):
        return sum(one["event"] == event for one in read_events(tmp_path / "runs/quick/events.jsonl"))

    process = start_training(tmp_path, *command)
    while count("iteration") < 8 + 4 + 1 and process.poll() is None:  # AGS-CL is learning its second game
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "runs/quick/result.json").exists()
    assert main(command) == 0
    assert count("environments restarted") == 1
    assert count("iteration") == 2 * 2 * 4, "no iteration is missing, and none is logged twice"
    outcome = read_result(Path("runs/quick"))["methods"]["agscl"]
    assert [len(row) for row in outcome["scores"]] == [1, 2]
    assert outcome["scores"][1][0] == outcome["scores"][0][0]
    assert main(["verify", "quick"]) == 0
    assert main(["inspect", "quick"]) == 0


def test_methods_are_compared_by_their_scores(capsys):
    words = ["--seeds", "1", "--jobs", "1", "--name", "c", "--methods", "agscl,separate"]
    assert main(["compare", "control", *words, "--set", *PAIRS]) == 0
    shown = capsys.readouterr().out
    assert "average score, %" in shown
    assert "forward transfer, %" in shown
    with open("runs/c/comparison.json") as file:
        methods = json.load(file)["methods"]
    assert set(methods) == {"finetune", "agscl", "separate"}
    for row in methods.values():
        assert len(row["scores"][0]) == 3
        assert row["accumulated_reward"]["mean"] is not None
        assert row["forward_transfer"]["mean"] is not None
    assert methods["separate"]["forward_transfer"]["mean"] == methods["separate"]["forgetting"]["mean"] == 0
    assert main(["verify", "c/separate-seed0"]) == 0


TINY = [*(pair for pair in PAIRS if not pair.startswith("steps=")), "steps=128"]


def run_here(jobs):
    for job in jobs:
        with Run(job.folder) as run:
            execute_run(job.config, run, checkpoint_every=1e9)


def test_a_search_ranks_settings_of_agents_by_their_scores(tmp_path):
    trials = search_settings("control", "ewc", tmp_path, run_here, values=[10.0, 1000.0], **QUICK | {"steps": 128})
    assert [trial.settings["lam"] for trial in sorted(trials, key=lambda trial: trial.settings["lam"])] == [10, 1000]
    assert trials[0].valid_accuracy >= trials[1].valid_accuracy
    assert load_trials(tmp_path, "ewc") == trials


@pytest.mark.parametrize(("study", "lines"), [("reinit", 5), ("prox", 3)])
def test_a_study_of_agents_has_a_line_for_each_form(study, lines, tmp_path):
    planned = plan_study("control", study, 1, tmp_path, **QUICK | {"steps": 128})
    run_here([job for line in planned for job in line.jobs])
    collected = collect_study(planned)
    assert len(collected) == lines
    assert all(len(line["curves"]["sparsity"]) == 3 for line in collected if line["method"] == "paper-agscl")


@pytest.mark.slow
def test_settings_are_searched_by_score(capsys):
    words = ["--method", "ewc", "--jobs", "1", "--name", "s", "--set", *TINY]
    assert main(["search", "control", *words]) == 0
    shown = capsys.readouterr().out
    assert "average score, %" in shown
    assert "run the best: agscl run control --method ewc --set lam=" in shown
    with open("runs/s/search.json") as file:
        found = json.load(file)
    assert found["seed"] == 1000
    assert len(found["tried"]) >= 5
    assert found["tried"][0]["valid_accuracy"] == max(trial["valid_accuracy"] for trial in found["tried"])


@pytest.mark.slow
@pytest.mark.parametrize(("study", "lines"), [("reinit", 5), ("prox", 3)])
def test_studies_of_agents_compare_scores(study, lines, capsys):
    assert main(["study", study, "control", "--jobs", "1", "--name", "s", "--set", *TINY]) == 0
    assert "Average score and nodes" in capsys.readouterr().out
    with open(f"runs/s/{study}.json") as file:
        assert len(json.load(file)["lines"]) == lines


def test_what_makes_no_sense_for_agents_is_refused_with_the_reason(capsys):
    assert main(["study", "aopc", "control"]) == 2
    assert "which control does not have" in capsys.readouterr().err
    assert main(["run", "control", "--method", "joint", "--set", *TINY]) == 2
    assert "choose another method" in capsys.readouterr().err
    assert main(["run", "control", "--tasks", "cifar100"]) == 2
    assert "no sequence of environments is called 'cifar100'" in capsys.readouterr().err
    assert main(["run", "digits", "--tasks", "atari"]) == 2
    assert main(["run", "control", "--batch-size", "64"]) == 2


def test_play_is_recorded_for_every_task_or_for_one(capsys):
    pytest.importorskip("pygame", reason="pygame is not installed")
    order = "environments=CartPole-v1,Acrobot-v1"
    words = ["--name", "quick", "--method", "finetune", "--task-options", order, "--set", *PAIRS]
    assert main(["run", "control", *words]) == 0
    capsys.readouterr()
    assert main(["play", "quick", "--steps", "120"]) == 0
    cart, acrobot = capsys.readouterr().out.splitlines()
    assert cart.startswith("CartPole-v1: score")
    assert "not to its end" not in cart
    assert acrobot.startswith("Acrobot-v1: score -120 in 120 steps, not to its end"), "however short the first was"
    assert {path.name for path in Path("runs/quick/play").iterdir()} == {"Acrobot-v1.gif", "CartPole-v1.gif"}
    assert main(["verify", "quick"]) == 0, "recordings do not touch the run"
    assert main(["play", "quick", "--task", "CartPole-v1", "--out", "cart.gif"]) == 0
    assert Path("cart.gif").read_bytes().startswith(b"GIF89a")
    assert main(["play", "quick", "--out", "cart.gif"]) == 2
    assert main(["play", "quick", "--task", "Pong"]) == 2
    assert "It has: CartPole-v1, Acrobot-v1" in capsys.readouterr().err
    edit_json(Path("runs/quick/config.json"), lambda config: config.update(device="cuda:77"))
    assert main(["play", "quick", "--task", "CartPole-v1"]) == 0, "an agent trained on a GPU plays on any machine"


def test_a_run_on_data_has_nothing_to_play(capsys):
    with Run(Path("runs/data")) as run:
        run.store_config(configure("digits", method="finetune").as_dict())
    assert main(["play", "data"]) == 2
    assert "nothing to play" in capsys.readouterr().err


def test_settings_of_the_other_kind_of_training_are_refused(capsys):
    assert main(["run", "control", "--set", "patience=3"]) == 2
    assert "has no setting 'patience'" in capsys.readouterr().err
    assert main(["run", "digits", "--set", "gamma=0.9"]) == 2
    assert main(["study", "aopc", "control"]) == 2


def test_environments_of_ones_own_are_tasks_and_the_network_reads_them():
    options = {"environments": "MountainCar-v0,CartPole-v1"}
    config = configure("control", method="agscl", task_options=options, **QUICK)
    assert config.network_options["inputs"] == 4
    trainer = build_trainer(config, "agscl", load_tasks(config))
    assert [task.name for task in trainer.tasks] == ["MountainCar-v0", "CartPole-v1"]
    with pytest.raises(ValueError, match="unexpected keyword"):
        configure("control", method="agscl", task_options={"games": "x"})


def test_bounds_that_need_data_are_refused():
    config = configure("control", method="joint", **QUICK)
    with pytest.raises(WrongOptions, match="choose another method"):
        build_trainer(config, "joint", load_tasks(config))


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if isinstance(preset.training, PPOConfig)])
def test_every_preset_survives_its_json(name):
    config = configure(name, method="agscl")
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_fast_is_what_an_agent_has_of_it():
    assert main(["run", "control", "--name", "fast", "--fast", "--method", "finetune", "--set", *PAIRS]) == 0
    config = read_result(Path("runs/fast"))["config"]
    assert config["training"]["channels_last"]


def test_accumulated_rewards_are_relative_to_the_best_of_fine_tuning():
    reference = [{"relative": [2.0]}, {"relative": [4.0]}, {"relative": [1.0, 5.0]}]
    evaluations = [{"relative": [1.0]}, {"relative": [4.0]}, {"relative": [2.0, 10.0]}]
    assert accumulated_rewards(evaluations, reference) == [0.25, 1.0, 2.5]
