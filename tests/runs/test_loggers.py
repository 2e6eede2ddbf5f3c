"""TensorBoard, MLflow and W&B show the figures of the event log: their files are read back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from agscl.cli.main import main
from agscl.runs import loggers, read_result
from agscl.runs.events import read_events
from agscl.runs.loggers import FigureReader, Loggers
from commands import finish_command, start_command

HOME = Path(__file__).parents[2]
Shown = dict[str, list[tuple[int, float]]]
"""For each figure its steps and values, as they were written."""


# Reading back --------------------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Shown:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def open_mlflow(folder: Path) -> tuple:
    """A client of the store beside the run, and the run in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder.parent / "mlflow").as_uri())
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = [run for run in client.search_runs(experiments) if run.info.run_name == folder.name]
    return client, run


def read_mlflow(folder: Path) -> Shown:
    client, run = open_mlflow(folder)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(metric.step, metric.value) for metric in found] for name, found in histories.items()}


def read_wandb_records(path: Path) -> list:
    """The records of a W&B file: a header of 7 bytes, then blocks of 32 KiB with pieces of records (as in LevelDB)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, pieces, records = path.read_bytes(), 7, b"", []
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:  # too little for a piece: padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        pieces += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            records.append(Record.FromString(pieces))
            pieces = b""
    return records


def read_wandb(folder: Path) -> Shown:
    [path] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    records = read_wandb_records(path)
    axes = {record.metric.name: record.metric.step_metric for record in records if record.HasField("metric")}
    shown: Shown = {}
    for record in records:
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name in row.keys() & axes.keys():
            if axes[name]:
                shown.setdefault(name, []).append((row[axes[name]], row[name]))
    return shown


READERS: dict[str, Callable[[Path], Shown]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}


@pytest.fixture(params=READERS)
def logger(request, monkeypatch):
    """Each logger that is installed: its name, and how to read what it wrote."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed: pip install 'agscl[{request.param}]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return SimpleNamespace(name=request.param, read=READERS[request.param])


def approximate(shown: Shown) -> dict:
    """Figures to compare with: TensorBoard has 32 bits."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in points] for name, points in shown.items()}


# Runs ----------------------------------------------------------------------------------------------------------------

QUICK = ["run", "digits", "--epochs", "2", "--batch-size", "64"]
AGENTS = ["run", "control", "--set", "steps=128", "environments=4", "rollout=16", "epochs=1", "minibatches=4"]
AGENTS += ["evaluations=2", "evaluation_episodes=2", "evaluation_limit=20"]


@pytest.fixture(autouse=True, scope="module")
def _without_page():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGSCL_REPORT", "0")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with finished runs: `quick`, and `agents`."""
    runs = tmp_path_factory.mktemp("trained")
    assert main([*QUICK, "--name", "quick", "--runs", str(runs)]) == 0
    assert main([*AGENTS, "--name", "agents", "--runs", str(runs)]) == 0
    return runs


def read_log(folder: Path) -> list[dict]:
    return list(read_events(folder / "events.jsonl"))


def list_figures(folder: Path) -> Shown:
    """The figures of a run's log, by the one function that all loggers are fed from."""
    reader = FigureReader(json.loads((folder / "config.json").read_text())["training"]["epochs"])
    shown: Shown = {}
    for event in read_log(folder):
        for figure in reader.read(event):
            shown.setdefault(figure.name, []).append((figure.step, figure.value))
    return shown


def test_a_run_has_its_losses_rates_and_accuracies_as_figures(trained):
    shown, events = list_figures(trained / "quick"), read_log(trained / "quick")
    losses = [event["loss"] for event in events if event["event"] == "epoch" and event["method"] == "agscl"]
    assert shown["agscl/loss"] == list(enumerate(losses))
    assert len(losses) == 10
    result = read_result(trained / "quick")["methods"]["agscl"]
    assert shown["agscl/average_accuracy"][-1] == (4, pytest.approx(result["average_accuracy"]))
    first = [value for _, value in shown[f"agscl/accuracy/{events[0]['name']}"]]
    assert first == [row[0] for row in result["accuracies"]]


def test_agents_have_scores_losses_and_steps_per_second_as_figures(trained):
    shown, events = list_figures(trained / "agents"), read_log(trained / "agents")
    first = [event for event in events if event["method"] == "agscl" and event.get("task") == 0]
    losses = [(event["steps"], event["loss"]) for event in first if event["event"] == "iteration"]
    assert shown["agscl/task 1/loss"] == losses
    assert shown["agscl/task 1/steps_per_second"]
    scores = [event["scores"][0] for event in events if event["event"] == "evaluation" and event["method"] == "agscl"]
    assert shown[f"agscl/score/{events[0]['name']}"] == list(enumerate(scores))


@pytest.mark.parametrize("run", ["quick", "agents"])
def test_every_logger_has_the_figures_of_a_finished_run_under_the_same_names(logger, trained, tmp_path, run):
    folder = tmp_path / "with space" / run
    shutil.copytree(trained / run, folder)
    words = ["run", "--resume", run, "--runs", str(folder.parent), "--log", logger.name]
    assert main(words) == 0
    assert logger.read(folder) == approximate(list_figures(folder))
    assert main(words) == 0
    assert logger.read(folder) == approximate(list_figures(folder)), "nothing is written twice"


def test_a_run_that_was_stopped_and_resumed_has_no_figure_twice(logger, trained, tmp_path):
    folder = tmp_path / "quick"
    shutil.copytree(trained / "quick", folder)
    log, config = folder / "events.jsonl", json.loads((folder / "config.json").read_text())
    lines, warned = log.read_text().splitlines(keepends=True), []
    (folder / "result.json").rename(tmp_path / "result.json")

    def follow(kept: int, end: int) -> None:
        """A run that resumes after `kept` events and logs up to `end`, with half a line after it."""
        log.write_text("".join(lines[:kept]))
        followed = Loggers([logger.name], folder, config, warned.append)
        for line in lines[kept:end]:
            with open(log, "a") as file:
                file.write(line[:20])
                file.flush()
                followed.update()
                file.write(line[20:])
        followed.update()
        followed.close()

    follow(0, 15)
    first_id = open_mlflow(folder)[1].info.run_id if logger.name == "mlflow" else None
    first_folder = next((folder / "wandb").glob("offline-*")).name if logger.name == "wandb" else ""
    follow(12, 20)
    follow(18, len(lines))
    assert logger.read(folder) == approximate(list_figures(trained / "quick"))
    assert not warned
    if logger.name == "mlflow":
        _, run = open_mlflow(folder)
        assert run.info.run_id == first_id
        assert run.info.status == "KILLED", "it has no result"
        assert run.data.params == {"preset": "digits", "method": "agscl", "seed": "0", "device": "cpu"}
    if logger.name == "wandb":
        [now] = (folder / "wandb").glob("offline-*")
        assert now.name.rpartition("-")[2] == first_folder.rpartition("-")[2], "the run keeps its id"


@pytest.mark.slow
def test_a_run_with_a_logger_interrupted_by_ctrl_c_continues_to_the_same_digest(logger, trained, tmp_path):
    words = [*QUICK, "--name", "quick", "--log", logger.name]
    folder = tmp_path / "runs" / "quick"
    process = start_command(tmp_path, *words, start_new_session=True)
    while process.poll() is None and (not (folder / "events.jsonl").exists() or len(read_log(folder)) < 2):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the processes that a logger started, too
    code, output = finish_command(process)
    assert code == 130, output
    assert "Warning" not in output
    code, output = finish_command(start_command(tmp_path, *words))
    assert code == 0, output
    assert "Warning" not in output
    assert read_result(folder)["digest"] == read_result(trained / "quick")["digest"]
    assert logger.read(folder) == approximate(list_figures(folder))
    assert list_figures(folder) == list_figures(trained / "quick")
    if logger.name == "mlflow":
        assert open_mlflow(folder)[1].info.status == "FINISHED"


def test_a_comparison_logs_every_run(logger, tmp_path):
    words = ["compare", "digits", "--methods", "l2", "--seeds", "1", "--jobs", "1", "--epochs", "1", "--name", "both"]
    words += ["--batch-size", "64", "--runs", str(tmp_path), "--log", logger.name]
    assert main(words) == 0
    folders = [path.parent for path in (tmp_path / "both").glob("*/result.json")]
    assert len(folders) == 2
    for folder in folders:
        assert logger.read(folder) == approximate(list_figures(folder))
    assert main(words) == 0
    for folder in folders:
        assert logger.read(folder) == approximate(list_figures(folder)), "nothing is written twice"


# What goes wrong -----------------------------------------------------------------------------------------------------


class Failing:
    """A logger that fails: when it is opened, at its second write, or when it is closed."""

    def __init__(self, moment: str) -> None:
        self.moment, self.writes = moment, 0

    def __call__(self, folder, config):
        self.fail("open")
        return self

    def fail(self, moment: str) -> None:
        if moment == self.moment:
            raise ConnectionError("no answer\nfrom the server")

    def write(self, figures) -> None:
        self.writes += 1
        if self.writes > 1:
            self.fail("write")

    def close(self) -> None:
        self.fail("close")


@pytest.mark.parametrize("moment", ["open", "write", "close"])
def test_a_logger_that_fails_warns_once_and_neither_the_run_nor_another_logger_notices(
    moment, trained, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(loggers.WRITERS, "mlflow", Failing(moment))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = [*QUICK, "--name", "quick", "--runs", str(tmp_path), "--log", "mlflow", "--log", "tensorboard"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("Warning: --log mlflow failed (no answer) and was stopped; the run is not affected.") == 1
    assert read_result(tmp_path / "quick")["digest"] == read_result(trained / "quick")["digest"]
    assert read_tensorboard(tmp_path / "quick") == approximate(list_figures(tmp_path / "quick"))


def test_a_comparison_tries_a_logger_that_failed_only_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(loggers.WRITERS, "wandb", Failing("open"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = ["compare", "digits", "--methods", "l2", "--seeds", "1", "--jobs", "1", "--epochs", "1", "--name", "both"]
    assert main([*words, "--batch-size", "64", "--runs", str(tmp_path), "--log", "wandb"]) == 0
    assert capsys.readouterr().out.count("Warning: --log wandb failed") == 1


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("name", READERS)
def test_without_its_package_the_command_says_how_to_install_it(tmp_path, capsys, monkeypatch, command, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == name else object())
    assert main([command, "digits", "--runs", str(tmp_path), "--log", name]) == 2
    assert f"is not installed: pip install 'agscl[{name}]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_option_tensorboard_is_log_tensorboard(trained, tmp_path):
    pytest.importorskip("tensorboard")
    shutil.copytree(trained / "quick", tmp_path / "quick")
    assert main(["run", "--resume", "quick", "--runs", str(tmp_path), "--tensorboard"]) == 0
    assert read_tensorboard(tmp_path / "quick") == approximate(list_figures(tmp_path / "quick"))


def test_an_unknown_logger_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "digits", "--log", "neptune"])
    assert "mlflow" in capsys.readouterr().err


def test_a_run_without_its_event_log_is_still_shown(trained, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    shutil.copytree(trained / "quick", tmp_path / "quick")
    (tmp_path / "quick" / "events.jsonl").unlink()
    assert main(["run", "--resume", "quick", "--runs", str(tmp_path), "--log", "tensorboard"]) == 0
    said = capsys.readouterr().out
    assert "Warning: --log tensorboard was stopped: cannot read the event log" in said
    assert "nothing to do" in said


def end_task(task: int, name: str) -> dict:
    return {
        "event": "task ended",
        "method": "m",
        "task": task,
        "name": name,
        "accuracies": [0.5] * (task + 1),
        "time": 1,
    }


def test_names_of_tasks_become_names_that_every_logger_takes(logger, tmp_path):
    names = ["<script>", "a/b", "a_b", "../..", "", "é: ü", "x" * 400, "100 %"]
    events = [end_task(task, name) for task, name in enumerate(names)]
    reader = FigureReader(epochs=1)
    found = [figure for event in events for figure in reader.read(event)]
    assert len({(figure.name, figure.step) for figure in found}) == len(found) == 8 * 9 // 2 + 8

    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    warned: list[str] = []
    config = {"preset": "digits", "method": "m", "seed": 0, "device": "cpu", "training": {"epochs": 1}}
    followed = Loggers([logger.name], folder, config, warned.append)
    followed.update()
    followed.close()
    assert not warned
    shown = logger.read(folder)
    assert shown.keys() == {figure.name for figure in found}
    assert shown["m/accuracy/_script_"] == [(step, 0.5) for step in range(8)]


@pytest.mark.parametrize(
    "damage", [{"accuracies": []}, {"accuracies": None}, {"time": None}, {"name": 3}, {"method": ..., "event": "epoch"}]
)
def test_a_damaged_event_gives_no_figures_and_no_error(damage):
    reader = FigureReader(epochs=1)
    assert reader.read(end_task(0, "first") | damage) == []
    assert len(reader.read(end_task(1, "second"))) in (2, 3)


# With the packages that `dev` does not install -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mlflow_and_wandb_pass_these_tests_when_they_are_installed(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "-c", "constraints.txt"]
    installed = subprocess.run([*pip, "mlflow-skinny", "wandb"], cwd=HOME, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"MLflow and W&B cannot be installed here: {installed.stderr.strip()[-200:]}")
    this_test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    again = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
os.environ["PYTHONPATH"] = os.pathsep.join([{str(tmp_path)!r}, *filter(None, [os.environ.get("PYTHONPATH")])])
import pytest
sys.exit(pytest.main(["--deselect", {this_test!r}, "-rs", "-p", "no:cacheprovider", {__file__!r}]))
"""
    tried = subprocess.run([sys.executable, "-c", again], cwd=HOME, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "SKIPPED" not in tried.stdout
