import contextlib
from dataclasses import replace

import pytest
import torch

from agscl.experiments import run as run_module
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.experiments.run_environment import record_environment
from agscl.runs import DifferentConfig, Run
from agscl.runs.errors import Interrupted
from agscl.runs.events import read_events


@pytest.mark.parametrize("how", ["another label", "another task"])
def test_a_run_does_not_continue_with_changed_data(tmp_path, monkeypatch, how):
    config = configure("digits", method="finetune", epochs=1)
    steps = iter(range(10**6))
    with Run(tmp_path / "quick") as run, pytest.raises(Interrupted):
        execute_run(config, run, checkpoint_every=1e9, threads=1, should_stop=lambda: next(steps) > 8)
    sequence = run_module.load_tasks(config)
    labels = sequence[3].test_y.clone()
    labels[0] = 1 - labels[0]
    changed = {"test_y": labels} if how == "another label" else {"name": "more"}
    other = (*sequence[:3], replace(sequence[3], **changed), sequence[4])
    with monkeypatch.context() as patch, Run(tmp_path / "quick") as run:
        patch.setattr(run_module, "load_tasks", lambda config: other)
        with pytest.raises(
            DifferentConfig, match=f"changed since it was started .tasks: {sequence[3].name}.*Restore the data"
        ):
            execute_run(config, run, checkpoint_every=1e9, threads=1)
    with Run(tmp_path / "quick") as run:
        assert execute_run(config, run, checkpoint_every=1e9, threads=1)["methods"]["finetune"]


def test_changed_data_is_noticed_without_data_json_too(tmp_path):
    config = configure("digits", method="finetune", epochs=1)
    with Run(tmp_path / "run") as run, pytest.raises(Interrupted):
        execute_run(config, run, checkpoint_every=0.0, should_stop=iter([False] * 40 + [True] * 9).__next__)
    (tmp_path / "run" / "data.json").unlink()
    whole = run_module.load_tasks
    with Run(tmp_path / "run") as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "load_tasks", lambda config: whole(replace(config, seed=1)))
        with pytest.raises(DifferentConfig, match=r"the data of .* changed since it was started"):
            execute_run(config, run, checkpoint_every=1e9)
    with Run(tmp_path / "run") as run:
        execute_run(config, run, checkpoint_every=1e9)
    assert (tmp_path / "run" / "data.json").exists()


def test_a_new_run_takes_the_threads_given_and_a_resumed_one_reports_another_torch(tmp_path):
    config = configure("digits", method="finetune", epochs=1)
    before = torch.get_num_threads()
    try:
        with Run(tmp_path / "run") as run:
            run.store_config(config.as_dict())
            run.write_json("environment.json", {"torch": "1.0", "threads": 7})
            result = execute_run(config, run, checkpoint_every=1e9, threads=1)
            assert result["environment"]["threads"] == 1
            assert result["environment"]["torch"] == torch.__version__
            run.write_json("environment.json", {"torch": "1.0", "threads": 1})
            notes: list[str] = []
            execute_run(config, run, checkpoint_every=1e9, on_message=notes.append)
            assert notes == [f"This run was started with torch 1.0 and continues with {torch.__version__}."]
    finally:
        torch.set_num_threads(before)


def test_a_run_stopped_several_times_has_the_event_log_of_one_never_stopped(tmp_path):
    def logged(name: str, stops: list[int]) -> list[dict]:
        config = configure("digits", method="finetune", epochs=2)
        for steps in [*stops, 10**9]:
            left = iter(range(steps))
            with Run(tmp_path / name) as run, contextlib.suppress(Interrupted):
                execute_run(config, run, checkpoint_every=0.0, should_stop=lambda left=left: next(left, None) is None)
        return [
            {key: value for key, value in event.items() if key != "time"}
            for event in read_events(tmp_path / name / "events.jsonl")
        ]

    assert logged("stopped", [20, 15, 30, 11]) == logged("whole", [])


def test_progress_within_an_epoch_is_reported_and_not_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "PROGRESS_INTERVAL", 0.0)
    seen: list[dict] = []
    with Run(tmp_path / "run") as run:
        execute_run(configure("digits", method="finetune", epochs=1), run, checkpoint_every=1e9, on_event=seen.append)
    steps = [event["progress"] for event in seen if event["event"] == "step"]
    assert steps == sorted(steps)
    assert len(set(steps)) > 10, "more than the ends of five epochs"
    logged = {event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")}
    assert logged == {"task started", "epoch", "task ended"}


def test_a_run_on_a_gpu_records_which_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU called {device}")
    with Run(tmp_path / "gpu") as run:
        assert record_environment(run, "cuda:1", 1)["gpu"] == "the GPU called cuda:1"
    with Run(tmp_path / "cpu") as run:
        assert "gpu" not in record_environment(run, "cpu", 1)
