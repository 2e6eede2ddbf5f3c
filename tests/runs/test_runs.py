import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch

from agscl.runs import Checkpoints, DifferentConfig, Run, RunError, checkpoints, hash_state, is_finished, read_result
from agscl.runs.events import read_events
from agscl.system.files import write_atomically

STATE = {
    "weights": {"a/b": torch.arange(6.0).view(2, 3), "a~b": torch.tensor(-0.0)},
    "kinds": [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.arange(6).view(2, 3).T,
    ],
    "plain": {"none": None, "true": True, "number": 0.1 + 0.2, "endless": -math.inf, "text": "λ", "list": [1, [2]]},
}


def numbered(folder, count):
    checkpoints = Checkpoints(folder)
    for number in range(1, count + 1):
        checkpoints.save({"number": number, "tensor": torch.full((100,), float(number))})
    return checkpoints


def test_a_checkpoint_gives_back_every_bit_dtype_and_shape(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(STATE)
    loaded = checkpoints.load()
    assert hash_state(loaded) == hash_state(STATE)
    assert loaded["plain"] == STATE["plain"]
    for old, new in zip(STATE["kinds"], loaded["kinds"], strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
    assert math.copysign(1, loaded["weights"]["a~b"]) == -1


def test_tensors_that_share_memory_are_stored_each_on_its_own(tmp_path):
    base = torch.arange(4.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"all": base, "part": base[:2]})
    assert checkpoints.load()["part"].tolist() == [0, 1]


def test_the_digest_sees_one_flipped_sign_a_dtype_and_a_name():
    base = hash_state({"a": torch.tensor([0.0, 1.0])})
    assert hash_state({"a": torch.tensor([-0.0, 1.0])}) != base
    assert hash_state({"a": torch.tensor([0.0, 1.0], dtype=torch.float64)}) != base
    assert hash_state({"b": torch.tensor([0.0, 1.0])}) != base


def test_what_json_cannot_hold_is_refused_when_saving(tmp_path):
    with pytest.raises(TypeError, match="cannot hold object"):
        Checkpoints(tmp_path).save({"a": object()})
    with pytest.raises(TypeError, match="must be a string"):
        Checkpoints(tmp_path).save({"a": {1: 2}})
    assert Checkpoints(tmp_path).load() is None


def test_only_the_newest_two_checkpoints_are_kept(tmp_path):
    checkpoints = numbered(tmp_path, 5)
    assert checkpoints.list_numbers() == [4, 5]
    assert len(list(tmp_path.iterdir())) == 4
    assert checkpoints.load()["number"] == 5


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "gone"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_is_used(tmp_path, kind, damage):
    checkpoints = numbered(tmp_path, 2)
    path = tmp_path / f"000002.{kind}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[:-7], "empty": b"", "flipped": content}[damage])
    assert checkpoints.load()["number"] == 1
    assert set(checkpoints.damaged) == (set() if (damage, kind) == ("gone", "json") else {2})

    checkpoints.save({"number": 3})
    assert checkpoints.load()["number"] == 3
    assert 1 in checkpoints.list_numbers(), "the good one before a damaged one must not be dropped for it"


def test_when_every_checkpoint_is_damaged_there_is_none(tmp_path):
    checkpoints = numbered(tmp_path, 2)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    assert checkpoints.load() is None
    assert set(checkpoints.damaged) == {1, 2}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_litter(tmp_path, monkeypatch, call):
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


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def no_space(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_two_processes_cannot_write_one_run(tmp_path):
    with Run(tmp_path / "run"), pytest.raises(RunError, match="another process is writing"), Run(tmp_path / "run"):
        pass
    with Run(tmp_path / "run"):
        pass


def test_another_configuration_under_the_same_name_is_refused_and_the_difference_named(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"seed": 1, "training": {"lr": 0.1}})
        run.store_config({"seed": 1, "training": {"lr": 0.1}})
        run.save_checkpoint({})
        with pytest.raises(DifferentConfig, match=r"training.lr is 0.1 there, 0.2 here"):
            run.store_config({"seed": 1, "training": {"lr": 0.2}})


def test_where_nothing_was_trained_yet_a_configuration_gives_way_to_another(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 1e30})
        run.write_json("diverged.json", {})
        run.store_config({"lr": 0.1})
    assert [path.name for path in (tmp_path / "run").glob("*.json")] == ["config.json"]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}


def test_a_lost_configuration_is_written_again_and_nothing_else_is_touched(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 0.1})
        run.write_json("environment.json", {"threads": 3})
        run.save_checkpoint({})
        (tmp_path / "run" / "config.json").unlink()
        run.store_config({"lr": 0.1})
    assert sorted(path.name for path in (tmp_path / "run").glob("*.json")) == ["config.json", "environment.json"]


def test_where_the_configuration_was_lost_a_begun_run_still_goes_on_with_its_own_alone(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lr": 0.1, "lam": math.inf})
        run.save_checkpoint({})
    (tmp_path / "run" / "config.json").unlink()
    with Run(tmp_path / "run") as run:
        with pytest.raises(DifferentConfig, match=r"lr is 0.1 there, 0.2 here"):
            run.store_config({"lr": 0.2, "lam": math.inf})
        assert not (tmp_path / "run" / "config.json").exists()
        run.store_config({"lr": 0.1, "lam": math.inf})
        run.write_json("result.json", {"config": {"lr": 0.1}})
        (tmp_path / "run" / "config.json").unlink()
        with pytest.raises(DifferentConfig):
            run.store_config({"lr": 0.2})


def test_an_infinite_setting_is_stored_as_strict_json_and_recognised(tmp_path):
    with Run(tmp_path / "run") as run:
        run.store_config({"lam": math.inf})
        run.store_config({"lam": math.inf})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lam": "inf"}


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


def test_without_a_checkpoint_the_log_starts_anew(tmp_path):
    with Run(tmp_path / "run") as run:
        run.log_event({"n": 1})
    with Run(tmp_path / "run") as run:
        assert run.resume() is None
        run.log_event({"n": 2})
    assert [event["n"] for event in read_events(tmp_path / "run" / "events.jsonl")] == [2]


def test_a_last_line_cut_short_is_left_out_when_reading(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    assert list(read_events(path)) == [{"n": 1}]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
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
def test_a_disk_too_full_for_the_log_is_a_clear_error_and_the_run_is_let_go(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    run = Run(tmp_path / "run")
    with pytest.raises(RunError, match=r"could not write to .*: No space left"), run:
        run.log_event({"event": "epoch"})
    (tmp_path / "run" / "events.jsonl").unlink()
    with Run(tmp_path / "run") as again:  # the lock was given back
        again.log_event({"event": "epoch"})


def test_files_of_others_in_a_runs_folder_are_left_alone(tmp_path):
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
def test_a_checkpoint_that_cannot_be_read_here_is_not_thrown_away(tmp_path, monkeypatch, why):
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
def test_a_damaged_result_says_how_it_is_made_again(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RunError, match=r"result.json is damaged: .*\. Remove it: the same command writes it again"):
        read_result(tmp_path)


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 1}\n{"n": \n[3]\n{"n": 4}\n{"n": 5}')
    assert [event["n"] for event in read_events(path)] == [1, 4]
