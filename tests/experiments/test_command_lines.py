"""The command lines that start a run again and continue it: that on a page gives the run's own configuration."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from agscl.cli.options import parse_settings, parse_settings_of_methods, parse_task_options
from agscl.experiments.command_lines import make_compare_command, make_resume_command, make_run_command
from agscl.experiments.compare import plan_comparison
from agscl.experiments.run_config import configure


def read_options(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            options[word] = []
        elif options:
            options[list(options)[-1]].append(word)
    return options


@pytest.mark.parametrize(
    ("preset", "method", "changes"),
    [
        ("digits", "agscl", {}),
        ("digits", "paper-agscl", {"mu": 20.0, "lam": float("inf"), "epochs": 3}),
        ("digits", "finetune", {"lr": 1e-5, "patience": 5, "channels_last": True}),
        ("digits", "agscl", {"budget": None, "mu": 3.0, "task_options": {"classes_per_task": 5}}),
        ("cifar100", "hat", {"tasks": "digits"}),
        ("control", "agscl", {"budget": 3}),
    ],
)
def test_the_command_of_a_run_gives_its_configuration(preset, method, changes):
    wanted = configure(preset, method=method, seed=3, **changes)
    command = make_run_command(wanted.as_dict())
    assert command is not None
    words = shlex.split(command)
    assert words[:3] == ["agscl", "run", preset]
    options = read_options(words)
    given = parse_settings(method, options.get("--set", []), preset)
    if "--tasks" in options:
        given["tasks"] = options["--tasks"][0]
    if "--task-options" in options:
        given["task_options"] = parse_task_options(options["--task-options"])
    seed = int(options["--seed"][0])
    assert configure(preset, method=options["--method"][0], seed=seed, **given).as_dict() == wanted.as_dict()


def test_the_command_of_a_comparison_gives_its_runs(tmp_path):
    settings = {"ewc": {"lam": 400.0}}
    jobs = plan_comparison("digits", ["agscl", "ewc"], 2, tmp_path, settings=settings, epochs=3)
    command = make_compare_command([job.config.as_dict() for job in jobs])
    assert command is not None
    options = read_options(shlex.split(command))
    methods = options["--methods"][0].split(",")
    training, of_methods = parse_settings_of_methods(methods, options["--set"], "digits")
    again = plan_comparison("digits", methods, int(options["--seeds"][0]), tmp_path, settings=of_methods, **training)
    assert {job.folder: job.config for job in again} == {job.folder: job.config for job in jobs}


def test_there_is_no_command_for_what_no_command_gives():
    config = configure("digits", method="agscl").as_dict()
    assert make_run_command({**config, "preset": "unknown"}) is None
    assert make_run_command({**config, "network": "alexnet"}) is None
    assert make_run_command({}) is None
    assert make_compare_command([]) is None


def test_the_command_that_continues_a_run_names_a_folder_other_than_runs():
    assert make_resume_command(Path("runs/quick")) == "agscl run --resume quick"
    assert make_resume_command(Path("my runs/quick")) == "agscl run --resume quick --runs 'my runs'"
