import json

import pytest

from agscl.cli.main import main

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
QUICK = ["run", "digits", "--epochs", "2", "--batch-size", "64", "--name", "board"]


def read(folder):
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_the_events_of_a_run_and_of_a_finished_run_too(tmp_path, capsys):
    asked = [*QUICK, "--runs", str(tmp_path), "--tensorboard"]
    assert main(asked) == 0
    shown = read(tmp_path / "board")
    events = [json.loads(line) for line in (tmp_path / "board" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "epoch" and event["method"] == "agscl"]
    assert [step for step, _ in shown["agscl/loss"]] == list(range(10))
    assert [value for _, value in shown["agscl/loss"]] == pytest.approx(losses)
    result = json.loads((tmp_path / "board" / "result.json").read_text())["methods"]["agscl"]
    assert shown["agscl/accuracy"][-1] == (4, pytest.approx(result["average_accuracy"]))
    first = [value for _, value in shown[f"agscl/accuracy/{events[0]['name']}"]]
    assert first == pytest.approx([row[0] for row in result["accuracies"]])

    assert main(asked) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert read(tmp_path / "board") == shown


def test_without_tensorboard_installed_the_command_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "agscl.cli.run.importlib.util.find_spec", lambda name: None if name == "tensorboard" else object()
    )
    assert main([*QUICK, "--runs", str(tmp_path), "--tensorboard"]) == 2
    assert "agscl[tensorboard]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
