"""`agscl run`."""

import contextlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agscl.cli import run as run_command
from agscl.cli.main import main
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Checkpoints, Run, is_finished
from agscl.runs.errors import Interrupted
from agscl.runs.events import read_events
from commands import QUICK, finish_command, start_command, start_training
from results import reproducible_part
from run_files import edit_json


def result(folder: Path) -> dict:
    return json.loads((folder / "runs" / "quick" / "result.json").read_text())


def events_without_time(folder: Path) -> list[dict]:
    events = read_events(folder / "runs" / "quick" / "events.jsonl")
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


def killed(folder: Path, delay: float) -> bool:
    """Start or continue a run and kill it so long after its first event; False if it had ended by then."""
    process = start_training(folder)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return finish_command(process)[0] == -signal.SIGKILL and not is_finished(folder / "runs" / "quick")


def ends_like(folder: Path, uninterrupted: Path) -> None:
    code, output = finish_command(start_command(folder))
    assert code == 0, output
    assert reproducible_part(result(folder)) == reproducible_part(result(uninterrupted))
    assert events_without_time(folder) == events_without_time(uninterrupted)


def test_killed_three_times_at_random_moments_it_ends_with_the_same_bits(tmp_path, uninterrupted):
    expected, length = uninterrupted
    delays = [random.uniform(0, share) * length for share in (0.4, 0.3, 0.2)]  # each time less is ahead
    attempt = 0
    while not all(killed(tmp_path / str(attempt), delay) for delay in delays):  # one came too late
        delays, attempt = [delay / 2 for delay in delays], attempt + 1
    ends_like(tmp_path / str(attempt), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", range(20))
def test_killed_at_any_of_twenty_random_moments_it_ends_with_the_same_bits(tmp_path, uninterrupted, point):
    expected, length = uninterrupted
    delay, attempt = random.uniform(0, length), 0
    while not killed(tmp_path / str(attempt), delay):
        delay, attempt = 0.8 * delay, attempt + 1
    ends_like(tmp_path / str(attempt), expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stores_a_checkpoint_says_how_to_resume_and_exits_130(tmp_path, uninterrupted, number):
    process = start_training(tmp_path, *QUICK[:-1], "1000")
    process.send_signal(number)
    code, output = finish_command(process)
    assert code == 130, output
    assert "agscl run --resume quick" in output
    assert "Traceback" not in output
    assert Checkpoints(tmp_path / "runs" / "quick" / "checkpoints").load() is not None

    code, output = finish_command(start_command(tmp_path, "run", "--resume"))
    assert code == 0, output
    assert "Continuing" in output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


def test_the_command_that_continues_a_stopped_run_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "catch_stop_signals", lambda: contextlib.nullcontext(lambda: True))
    words = ["run", "--runs", "some runs", "--method", "finetune", "--name", "quick one"]
    assert main(words) == 130
    line = capsys.readouterr().out.splitlines()[-1].split("Continue with: ")[1]
    assert line == "agscl run --resume 'quick one' --runs 'some runs'"
    assert main(shlex.split(line)[1:]) == 130
    shutil.move("some runs/quick one", "some runs/group/quick")
    assert main(["run", "--resume", "group/quick", "--runs", "some runs"]) == 130
    assert "--resume group/quick --runs" in capsys.readouterr().out


def test_a_finished_run_is_shown_while_another_process_locks_it(uninterrupted, monkeypatch, capsys):
    monkeypatch.chdir(uninterrupted[0])
    with Run(Path("runs/quick")):  # as if another process held it
        assert main(QUICK) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {}, "the run's config.json is damaged, or was written by another version of agscl: KeyError"),
        ("config.json", {"preset": "older"}, "unknown preset 'older'"),
        ("config.json", {"unheard": 1}, "damaged, or was written by another version of agscl: TypeError"),
        ("environment.json", {}, "environment.json does not say how many threads"),
    ],
)
def test_a_damaged_file_of_a_run_is_one_clear_line(file, content, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run, pytest.raises(Interrupted):
        execute_run(
            configure("digits", method="finetune"), run, checkpoint_every=1e9, threads=1, should_stop=lambda: True
        )
    path = Path("runs/quick") / file
    edit_json(path, lambda stored: stored.update(content) if content else stored.clear())
    assert main(["run", "--resume", "quick"]) == 1
    assert words in capsys.readouterr().err


def test_tasks_without_a_validation_split_get_one_where_training_needs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "--method",
        "finetune",
        "--set",
        "patience=5",
        "restore_best=true",
        "--epochs",
        "1",
        "--name",
        "quick",
    ]
    assert main(words) == 0
    assert len(result(tmp_path)["methods"]["finetune"]["valid_accuracies"]) == 5


def test_characters_the_terminal_cannot_show_do_not_end_a_run(tmp_path):
    process = start_command(
        tmp_path, "run", "--method", "finetune", "--epochs", "1", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    code, output = finish_command(process)
    assert code == 0, output


def test_a_nan_loss_fails_and_names_the_task_and_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--epochs", "1", "--lr", "1e30", "--checkpoint-every", "1000"]) == 1
    message = capsys.readouterr().err
    assert "finetune: the loss or a weight became infinite or NaN in task 1" in message
    assert "No checkpoint was written yet" in message


def test_a_setting_without_effect_is_noted_once_and_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--epochs", "1", "--name", "quick", "--set", "eta=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Note: AGSCL: eta=0.5 changes nothing in what is learned")
    assert sum("eta" in line for line in lines) == 1
    assert main(["verify", "quick"]) == 0
    assert "eta" not in capsys.readouterr().out


def test_a_training_that_diverged_to_a_huge_finite_loss_is_noted_with_the_learning_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--method", "finetune", "--epochs", "1", "--lr", "1e6"]) == 0
    shown = capsys.readouterr().out
    assert "Note: Training diverged in task 1" in shown
    assert "lower learning rate than 1e+06" in shown
    assert shown.count("Training diverged") == 1
    assert main(["run", "--method", "finetune", "--epochs", "1"]) == 0
    assert "diverged" not in capsys.readouterr().out


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_continues_to_the_same_bits(tmp_path, uninterrupted):
    process = start_training(tmp_path)
    folder = tmp_path / "runs" / "quick" / "checkpoints"
    while len(Checkpoints(folder).list_numbers()) < 2:
        time.sleep(0.001)
    process.kill()
    finish_command(process)
    newest = folder / f"{Checkpoints(folder).list_numbers()[-1]:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    code, output = finish_command(start_command(tmp_path))
    assert code == 0, output
    assert f"Checkpoint {int(newest.stem)} is damaged" in output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


def test_a_full_disk_is_one_clear_line_and_the_same_command_continues_later(tmp_path, uninterrupted):
    # A limit on the size of a file makes the system itself refuse the write, as a full disk does.
    limit = max(path.stat().st_size for path in (uninterrupted[0] / "runs/quick/checkpoints").iterdir()) // 2
    process = start_command(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    code, output = finish_command(process)
    assert code == 1, output
    assert "agscl: could not write to runs/quick" in output
    assert "Traceback" not in output

    code, output = finish_command(start_command(tmp_path))
    assert code == 0, output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


def test_the_same_command_on_a_finished_run_says_so_and_trains_nothing(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.suffix}
    assert main(QUICK) == 0
    assert "runs/quick is finished already; nothing to do" in capsys.readouterr().out
    assert main(["run", "--resume", "quick"]) == 0
    assert main(["run", "--resume", "quick", "--device", "cuda"]) == 2
    assert "--resume takes all settings from runs/quick/config.json: leave out device" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.suffix} == {
        **before,
        finished / "events.jsonl": (finished / "events.jsonl").stat().st_mtime_ns,
    }


def test_the_summary_shows_both_matrices_the_metrics_and_the_folder_of_the_run(finished, capsys):
    main(QUICK)
    shown = capsys.readouterr().out
    for words in (
        "fine-tuning: accuracy on each task",
        "AGS-CL: accuracy on each task",
        "average accuracy",
        "plasticity",
        "stability",
        "free",
        "unchanged",
        "EWC",
        "certificate",
        "stored in    runs/quick/",
    ):
        assert words in shown
    tables = [line for line in shown.splitlines() if not line.startswith("certificate")]
    assert max(map(len, tables)) <= 80


def test_a_run_holds_its_config_log_checkpoints_certificates_and_result(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "events.jsonl", "checkpoints", "certificates", "result.json"} <= names
    assert len(list((finished / "certificates").iterdir())) == 5
    assert not list(finished.rglob("*.pkl")) + list(finished.rglob("*.pt"))
    ended = [event for event in read_events(finished / "events.jsonl") if event["event"] == "task ended"]
    assert [event["method"] for event in ended] == ["finetune"] * 5 + ["agscl"] * 5


def test_a_different_configuration_needs_another_name(finished, capsys):
    assert main([*QUICK, "--lr", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "training.lr is" in message
    assert "--name" in message


def four_classes_of_pictures(folder):
    for number, colour in enumerate(("red", "green", "blue", "grey")):
        (folder / colour).mkdir(parents=True)
        random = np.random.default_rng(number)
        for place in range(24):
            picture = random.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            picture[..., number % 3] += 120 if number < 3 else 0
            Image.fromarray(picture).save(folder / colour / f"{place}.png")
    return folder


def test_a_folder_of_pictures_is_learned_with_one_line(tmp_path, capsys):
    pictures = four_classes_of_pictures(tmp_path / "pictures")
    asked = ["run", "cifar100", "--tasks", f"folder:{pictures}", "--task-options", "classes_per_task=2", "size=32"]
    given = ["--method", "l2", "--epochs", "1", "--batch-size", "16", "--runs", str(tmp_path / "runs"), "--name", "own"]
    assert main([*asked, "validation=0.2", *given]) == 0
    result = json.loads((tmp_path / "runs" / "own" / "result.json").read_text())
    assert len(result["tasks"]) == 2
    assert [len(row) for row in result["methods"]["l2"]["valid_accuracies"]] == [1, 2]
    capsys.readouterr()
    assert main([*asked, "validation=0.2", *given, "--seed", "0"]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["classes_per_task=2", "size=16", "validation=0.2"], "--task-options size=32"),
        (["classes_per_task=2", "size=32", "validation=0"], "--task-options validation=0.1"),
        (["classes_per_task=1", "size=32"], "classes_per_task must be at least 2"),
        (["colour=red"], "colour"),
        (["size"], "KEY=VALUE"),
    ],
)
def test_a_folder_that_cannot_be_learned_is_refused_with_a_way_out(tmp_path, capsys, options, said):
    pictures = four_classes_of_pictures(tmp_path / "pictures")
    asked = ["run", "cifar100", "--tasks", f"folder:{pictures}", "--task-options", *options]
    assert main([*asked, "--epochs", "1", "--runs", str(tmp_path / "runs")]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*")), "of what cannot be, nothing stays"


def test_an_unknown_task_option_is_named_with_the_known_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--task-options", "foo=1"]) == 2
    assert "digits: unknown option 'foo'; the options are: shuffle_classes, test_share" in capsys.readouterr().err
    assert main(["run", "--resume"]) == 2, "a run that never began is nothing to go on with"
    assert "no unfinished run" in capsys.readouterr().err


def test_a_method_that_cannot_be_captured_is_refused_before_training_and_leaves_no_folder(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path), "--set", "prox_every=5"]
    assert main([*asked, "engine=captured"]) == 2
    assert "use engine='plain'" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*asked, "engine=plain"]) == 0


def test_a_run_started_on_a_device_this_machine_lacks_is_not_resumed(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path)]
    assert main(asked) == 0
    (tmp_path / "a" / "result.json").unlink()
    edit_json(tmp_path / "a" / "config.json", lambda config: config.update(device="cuda:77"))
    assert main(["run", "--resume", "a", "--runs", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "device 'cuda:77' is not available on this machine" in message
    assert "This run was started on that device: resume it on a machine that has one" in message


def test_the_meta_device_is_wrong_use(tmp_path, capsys):
    assert main(["run", "digits", "--device", "meta", "--runs", str(tmp_path)]) == 2
    assert "use cpu or cuda" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_without_config_json_is_resumed_and_verified_from_its_checkpoint(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path)]
    assert main(asked) == 0
    for lost in ("result.json", "config.json"):
        (tmp_path / "a" / lost).unlink()
    capsys.readouterr()
    assert main(["verify", "a", "--runs", str(tmp_path)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED: ")]
    assert len(failed) == 2, "the missing result, and the sum"
    assert "result.json is missing" in failed[0]
    assert main(["run", "--resume", "a", "--runs", str(tmp_path)]) == 0
    assert (tmp_path / "a" / "config.json").exists()
    assert "Continuing" in capsys.readouterr().out
    assert main(["verify", "a", "--runs", str(tmp_path)]) == 0
