import errno
import math
import os
from pathlib import Path

import pytest
import torch

from agscl.runs import DifferentConfig, Run, RunError, checkpoints, is_finished, read_result
from agscl.runs.events import read_events
from agscl.runs.json_files import read_checked_json
from agscl.runs.run_folder import RESULT_KEYS


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_temporary_file(tmp_path, monkeypatch, call):
    with Run(tmp_path / "run") as run:
        run.save_checkpoint({"number": 1})

        def no_space(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, no_space)
            with pytest.raises(RunError, match=r"No space left on device. Checkpoint 1 is intact"):
                run.save_checkpoint({"number": 2})
        assert run.resume()["number"] == 1
        assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


def test_two_processes_cannot_write_one_run(tmp_path):
    with Run(tmp_path / "run"), pytest.raises(RunError, match="another process is writing"), Run(tmp_path / "run"):
        pass
    with Run(tmp_path / "run"):
        pass


def test_a_different_configuration_under_the_same_name_is_refused_and_the_difference_named(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"seed": 1, "training": {"lr": 0.1}})
        run.store_config({"seed": 1, "training": {"lr": 0.1}})
        run.save_checkpoint({})
        with pytest.raises(DifferentConfig, match=r"training.lr is 0.1 there, 0.2 here"):
            run.store_config({"seed": 1, "training": {"lr": 0.2}})


def test_before_the_first_checkpoint_a_different_configuration_replaces_the_stored_one(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 1e30})
        run.write_json("diverged.json", {})
        run.store_config({"lr": 0.1})
    assert [path.name for path in (tmp_path / "run").glob("*.json")] == ["config.json"]
    assert read_checked_json(tmp_path / "run" / "config.json") == {"lr": 0.1}


def test_a_missing_config_json_is_written_again_and_nothing_else_changes(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 0.1})
        run.write_json("environment.json", {"threads": 3})
        run.save_checkpoint({})
        (tmp_path / "run" / "config.json").unlink()
        run.store_config({"lr": 0.1})
    assert sorted(path.name for path in (tmp_path / "run").glob("*.json")) == ["config.json", "environment.json"]


def test_a_started_run_without_config_json_continues_only_with_its_own_configuration(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 0.1, "lam": math.inf})
        run.save_checkpoint({})
    (tmp_path / "run" / "config.json").unlink()
    with Run(tmp_path / "run") as run:
        with pytest.raises(DifferentConfig, match=r"lr is 0.1 there, 0.2 here"):
            run.store_config({"lr": 0.2, "lam": math.inf})
        assert not (tmp_path / "run" / "config.json").exists()
        run.store_config({"lr": 0.1, "lam": math.inf})
        run.write_json("result.json", {key: {"lr": 0.1} for key in RESULT_KEYS})
        (tmp_path / "run" / "config.json").unlink()
        with pytest.raises(DifferentConfig):
            run.store_config({"lr": 0.2})


def test_an_infinite_setting_is_stored_as_strict_json_and_recognised(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lam": math.inf})
        run.store_config({"lam": math.inf})
    assert read_checked_json(tmp_path / "run" / "config.json") == {"lam": "inf"}


def test_resuming_drops_the_events_logged_after_the_checkpoint(tmp_path):
    with Run(tmp_path / "run") as run:
        run.log_event({"n": 1})
        run.save_checkpoint({})
        run.log_event({"n": 2})
    path = tmp_path / "run" / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"n": 3, "cut sho')
    with Run(tmp_path / "run") as run:
        run.resume()
        run.log_event({"n": "again"})
    assert [event["n"] for event in read_events(path)] == [1, "again"]


def test_without_a_checkpoint_the_event_log_starts_from_the_beginning(tmp_path):
    with Run(tmp_path / "run") as run:
        run.log_event({"n": 1})
    with Run(tmp_path / "run") as run:
        assert run.resume() is None
        run.log_event({"n": 2})
    assert [event["n"] for event in read_events(tmp_path / "run" / "events.jsonl")] == [2]


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(RunError, match=r"could not write to .*Nothing was stored yet"),
        Run(tmp_path / "file" / "run"),
    ):
        pass


def test_a_run_is_finished_once_its_result_is_stored(tmp_path):
    with Run(tmp_path / "run") as run:
        assert not is_finished(run.folder)
        run.write_json("result.json", {"a": 1})
        assert is_finished(run.folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_too_full_for_the_event_log_is_a_clear_error_and_the_lock_is_released(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    run = Run(tmp_path / "run")
    with pytest.raises(RunError, match=r"could not write to .*: No space left"), run:
        run.log_event({"event": "epoch"})
    (tmp_path / "run" / "events.jsonl").unlink()
    with Run(tmp_path / "run") as again:  # the lock was given back
        again.log_event({"event": "epoch"})


def test_other_files_in_a_runs_folder_are_not_removed(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "old").mkdir(parents=True)
    mine = [folder / "notes.json", folder / "checkpoints" / "best.pt", folder / "checkpoints" / "000001-mine.json"]
    for path in mine:
        path.write_text("{}")
    with Run(folder) as run:
        run.store_config({"lr": 0.1})
        run.store_config({"lr": 0.2})  # nothing was trained yet
        for _ in range(4):
            run.save_checkpoint({})
    assert all(path.exists() for path in mine)
    assert run.checkpoints.list_numbers() == [3, 4]


@pytest.mark.parametrize("why", ["no permission", "a later format"])
def test_an_unreadable_checkpoint_is_not_removed(tmp_path, monkeypatch, why):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 0.1})
        run.save_checkpoint({"step": torch.tensor(1)})
        run.save_checkpoint({"step": torch.tensor(2)})
    if why == "a later format":
        monkeypatch.setattr(checkpoints, "FORMAT", 0)
    else:
        read = Path.read_bytes

        def refuse(path):
            if path.suffix == ".safetensors":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with (
        Run(tmp_path / "run") as run,
        pytest.raises(RunError, match=r"left unchanged.*(denied|another version)"),
    ):
        run.resume()
    monkeypatch.undo()
    with Run(tmp_path / "run") as run:
        assert run.resume()["step"] == 2
        assert run.checkpoints.list_numbers() == [1, 2]


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"config": {}}'])
def test_a_damaged_result_is_an_error_that_says_how_to_repair_it(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RunError, match=r"result.json is damaged: .*\. Remove it: the same command writes it again"):
        read_result(tmp_path)
