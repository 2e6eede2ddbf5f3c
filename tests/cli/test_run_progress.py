import io
import itertools
import re

import pytest
from rich.console import Console

from agscl.cli import progress as cli_progress
from agscl.experiments import run as run_module
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run


def test_the_bars_show_the_epoch_and_loss_within_an_epoch_and_the_time_left_for_both_methods(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(cli_progress, "console", Console(file=written, force_terminal=True, width=100))
    started = {"event": "task started", "task": 0, "name": "a", "progress": 0.0}
    with cli_progress.RunProgress(configure("digits", method="agscl", epochs=7)) as progress:
        progress.show_event({**started, "method": "finetune"})
        step = {"event": "step", "task": 0, "epoch": 2, "loss": 1.25}
        progress.show_event({**step, "method": "finetune", "progress": 0.5})
        progress._bars.refresh()
        progress.show_event({**started, "method": "agscl"})
        progress.show_event({**step, "method": "agscl", "progress": 0.5})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert any(line.startswith("fine-tuning") and "task 1, epoch 3/7, loss 1.250" in line for line in lines)
    shares = [re.search(r"(\d+) %", line)[1] for line in lines if line.startswith("all")]
    assert all(re.search(r"\d:\d\d:\d\d|-:--:--", line) for line in lines if line.startswith("all")), "the time left"
    assert shares[-1] == "75"
    assert "25" in shares


@pytest.mark.parametrize("epochs", [1, 2])
def test_steps_report_the_mean_loss_of_the_epoch_so_far(tmp_path, monkeypatch, epochs):
    monkeypatch.setattr(run_module, "PROGRESS_INTERVAL", 0.0)
    events: list[dict] = []
    config = configure("digits", method="finetune", epochs=epochs)
    with Run(tmp_path / "run") as run:
        execute_run(config, run, checkpoint_every=1e9, on_event=events.append)
    steps = [event for event in events if event["event"] == "step"]
    assert {event["epoch"] for event in steps} == set(range(epochs))
    for step, after in itertools.pairwise(events):
        if after["event"] == "epoch" and step["event"] == "step":
            assert step["loss"] == pytest.approx(after["loss"])
