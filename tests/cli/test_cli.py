import base64
import contextlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import agscl
from agscl.cli import run as run_command
from agscl.cli.main import main
from agscl.cli.signals import catch_stop_signals
from agscl.experiments import run as run_module
from agscl.experiments.config import choose_threads, configure
from agscl.experiments.methods import METHODS
from agscl.experiments.run import Interrupted, execute_run
from agscl.experiments.verify import list_certificates
from agscl.runs import Checkpoints, DifferentConfig, Run, is_finished
from agscl.runs.events import read_events
from results import reproducible_part

QUICK = ["run", "digits", "--epochs", "2", "--batch-size", "64", "--name", "quick", "--checkpoint-every", "0.1"]


def start(folder: Path, *arguments: str, **options) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "agscl.cli", *(arguments or QUICK)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def result(folder: Path) -> dict:
    return json.loads((folder / "runs" / "quick" / "result.json").read_text())


def changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() and path.stat().st_size else 0


def start_training(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start or continue a run and wait until it writes its first event (or has ended)."""
    log = folder / "runs" / "quick" / "events.jsonl"
    before = changed(log)
    process = start(folder, *arguments)
    while changed(log) == before and process.poll() is None:
        time.sleep(0.001)
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A quick run that was never stopped, and how long it trained."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start_training(folder)
    began = time.monotonic()
    code, output = finish(process)
    assert code == 0, output
    return folder, time.monotonic() - began


def events_without_time(folder: Path) -> list[dict]:
    events = read_events(folder / "runs" / "quick" / "events.jsonl")
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


def killed(folder: Path, delay: float) -> bool:
    """Start or continue a run and kill it so long after its first event; False if it had ended by then."""
    process = start_training(folder)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return finish(process)[0] == -signal.SIGKILL and not is_finished(folder / "runs" / "quick")


def ends_like(folder: Path, uninterrupted: Path) -> None:
    code, output = finish(start(folder))
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stores_a_checkpoint_says_how_to_resume_and_exits_130(tmp_path, uninterrupted, number):
    process = start_training(tmp_path, *QUICK[:-1], "1000")
    process.send_signal(number)
    code, output = finish(process)
    assert code == 130, output
    assert "agscl run --resume quick" in output
    assert "Traceback" not in output
    assert Checkpoints(tmp_path / "runs" / "quick" / "checkpoints").load() is not None

    code, output = finish(start(tmp_path, "run", "--resume"))
    assert code == 0, output
    assert "Continuing" in output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


def test_the_line_that_says_how_to_go_on_can_be_pasted(tmp_path, monkeypatch, capsys):
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


def test_a_finished_run_is_shown_also_where_nothing_can_be_written(uninterrupted, monkeypatch, capsys):
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
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, **content} if content else {}))
    assert main(["run", "--resume", "quick"]) == 1
    assert words in capsys.readouterr().err


def test_certificates_of_more_than_a_hundred_tasks_come_in_their_order(tmp_path):
    (tmp_path / "certificates").mkdir()
    for number in (1, 9, 10, 11, 99, 100, 101):
        (tmp_path / "certificates" / f"{number:02d}.json").touch()
    assert [int(path.stem) for path in list_certificates(tmp_path)] == [1, 9, 10, 11, 99, 100, 101]


def test_a_preset_without_validation_examples_sets_some_apart_where_epochs_are_chosen(tmp_path, monkeypatch, capsys):
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


def test_what_a_terminal_cannot_show_does_not_end_a_run(tmp_path):
    process = start(
        tmp_path, "run", "--method", "finetune", "--epochs", "1", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    code, output = finish(process)
    assert code == 0, output


def test_a_signal_stops_at_once_until_training_asks_for_it():
    with catch_stop_signals() as stopped:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)  # while data is downloaded, say
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", ["another label", "another task"])
def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch, how):
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


def test_a_loss_that_is_not_a_number_fails_with_the_place_and_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--epochs", "1", "--lr", "1e30", "--checkpoint-every", "1000"]) == 1
    message = capsys.readouterr().err
    assert "finetune: the loss or a weight became infinite or NaN in task 1" in message
    assert "No checkpoint was written yet" in message


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_continues_to_the_same_bits(tmp_path, uninterrupted):
    process = start_training(tmp_path)
    folder = tmp_path / "runs" / "quick" / "checkpoints"
    while len(Checkpoints(folder).list_numbers()) < 2:
        time.sleep(0.001)
    process.kill()
    finish(process)
    newest = folder / f"{Checkpoints(folder).list_numbers()[-1]:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    code, output = finish(start(tmp_path))
    assert code == 0, output
    assert f"Checkpoint {int(newest.stem)} is damaged" in output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


def test_a_full_disk_is_one_clear_line_and_the_same_command_continues_later(tmp_path, uninterrupted):
    # A limit on the size of a file makes the system itself refuse the write, as a full disk does.
    limit = max(path.stat().st_size for path in (uninterrupted[0] / "runs/quick/checkpoints").iterdir()) // 2
    process = start(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    code, output = finish(process)
    assert code == 1, output
    assert "agscl: could not write to runs/quick" in output
    assert "Traceback" not in output

    code, output = finish(start(tmp_path))
    assert code == 0, output
    assert reproducible_part(result(tmp_path)) == reproducible_part(result(uninterrupted[0]))


@pytest.fixture
def finished(uninterrupted, monkeypatch):
    monkeypatch.chdir(uninterrupted[0])
    return uninterrupted[0] / "runs" / "quick"


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


def test_the_summary_shows_both_matrices_the_measures_and_where_the_run_is(finished, capsys):
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


def test_a_run_of_another_configuration_needs_a_name_of_its_own(finished, capsys):
    assert main([*QUICK, "--lr", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "training.lr is" in message
    assert "--name" in message


@pytest.fixture(scope="module")
def frozen_for_good(tmp_path_factory):
    """A finished run whose certificates are all guaranteed."""
    folder = tmp_path_factory.mktemp("guaranteed")
    code, output = finish(start(folder, *QUICK, "--set", "lam=inf", "mu=20"))
    assert code == 0, output
    return folder


@pytest.fixture
def guaranteed(frozen_for_good, tmp_path, monkeypatch):
    """A copy of it, to be tampered with."""
    shutil.copytree(frozen_for_good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "quick"


def verdict(capsys, run: str = "quick") -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["verify", run])
    return code, capsys.readouterr().out.splitlines()


def edit_certificate(run: Path, number: int, change) -> None:
    path = run / "certificates" / f"{number:02d}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_verify_ends_with_ok_on_an_untouched_run_and_finds_the_same_bits_on_the_probe(guaranteed, capsys):
    code, lines = verdict(capsys)
    assert code == 0
    assert lines[-1].startswith("OK: everything guaranteed after each of 5 tasks is unchanged")
    assert sum("outputs on the probe are bit-identical to those right after learning it" in line for line in lines) == 5


def test_verify_fails_when_a_guaranteed_weight_moved(guaranteed, capsys):
    checkpoints = Checkpoints(guaranteed / "checkpoints")
    state = checkpoints.load()
    task = json.loads((guaranteed / "result.json").read_text())["tasks"][0]
    state["trainer"]["model"][f"heads.{task}.bias"] += 1
    checkpoints.save(state)
    code, lines = verdict(capsys)
    assert code == 1
    assert f"FAILED: the head of task {task!r} is not the certified one" in lines
    assert lines[-1].startswith("FAILED: ")
    assert any("outputs of task" in line for line in lines), "the second witness saw it too"


def test_verify_fails_when_the_outputs_on_the_probe_are_not_those_of_a_guaranteed_certificate(guaranteed, capsys):
    def forge(content):
        (output,) = content["probe"]["outputs"].values()
        output["data"] = base64.b64encode(bytes(len(base64.b64decode(output["data"])))).decode()

    edit_certificate(guaranteed, 1, forge)
    code, lines = verdict(capsys)
    assert code == 1
    assert any(line.startswith("FAILED: outputs of task") and "on the probe differ by up to" in line for line in lines)


def test_verify_fails_when_the_last_weights_are_damaged_though_the_ones_before_are_sound(guaranteed, capsys):
    newest = max((guaranteed / "checkpoints").glob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    code, lines = verdict(capsys)
    assert code == 1
    assert any(line.startswith(f"FAILED: checkpoint {int(newest.stem)} is damaged") for line in lines)
    assert lines[-1].startswith("FAILED: ")


def test_verify_of_a_damaged_certificate_says_so(guaranteed, capsys):
    path = guaranteed / "certificates" / "03.json"
    path.write_text(path.read_text()[:100])
    assert main(["verify", "quick"]) == 1
    message = capsys.readouterr().err
    assert "03.json is not a certificate: it is not JSON" in message
    assert "Traceback" not in message


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.lifecycle.SelfCheckWarning")
def test_a_run_that_was_laid_out_channels_last_is_verified_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for label in "abcd":
        for number in range(6):
            (tmp_path / "own" / label).mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "own" / label / f"{number}.png")
    words = ["--tasks", "folder:own", "--task-options", "classes_per_task=2", "size=32", "validation=0.2"]
    assert main(["run", "cifar100", *words, "--epochs", "1", "--fast", "--name", "quick"]) == 0
    code, lines = verdict(capsys)
    assert (code, [line for line in lines if "FAILED" in line]) == (0, [])
    assert any("bit-identical to those right after learning it" in line for line in lines)


def test_elsewhere_verify_reports_the_largest_difference_and_does_not_ask_for_bits(guaranteed, capsys):
    def elsewhere(content):
        content["probe"]["environment"]["torch"] = "0.1"

    for number in range(1, 6):
        edit_certificate(guaranteed, number, elsewhere)
    code, lines = verdict(capsys)
    assert code == 0
    assert any("computed in a different environment (torch 0.1 then" in line for line in lines)


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.lifecycle.SelfCheckWarning")
def test_verify_of_a_run_stopped_within_a_task_says_to_finish_it_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = configure("digits", method="agscl", epochs=1, reference=False)
    steps = iter(range(10**6))
    with Run(Path("runs/quick")) as run, pytest.raises(Interrupted):
        execute_run(config, run, checkpoint_every=1e9, threads=1, should_stop=lambda: next(steps) > 25)
    assert main(["verify", "quick"]) == 1
    assert "is in the middle of task 3" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.lifecycle.SelfCheckWarning")
@pytest.mark.parametrize(("method", "kept"), [("ewc", 1), ("packnet", 5), ("frozen", 5), ("separate", 5)])
def test_methods_that_certify_no_node_are_verified_by_their_heads_and_the_probe(
    method, kept, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run:
        execute_run(configure("digits", method=method, epochs=1, reference=False), run, checkpoint_every=1e9, threads=1)
    code, lines = verdict(capsys)
    assert code == 0
    assert lines[-1].startswith("OK: ")
    assert sum("bit-identical to those right after learning it" in line for line in lines) == kept


def test_joint_certifies_nothing_and_verify_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run:
        execute_run(
            configure("digits", method="joint", epochs=1, reference=False), run, checkpoint_every=1e9, threads=1
        )
    assert main(["verify", "quick"]) == 1
    assert "nothing is certified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nosuch"], "unknown preset 'nosuch'. Available:\n  digits"),
        (["run", "--epochs", "0"], "epochs must be at least 1"),
        (["run", "--method", "nosuch"], "no method is called 'nosuch'. There are: agscl, ewc"),
        (["run", "--set", "rho=2"], "rho must be above 0 and at most 1"),
        (["run", "--set", "rho"], "--set takes KEY=VALUE"),
        (["run", "--set", "weight_decay=-1"], "weight_decay must be at least 0, not -1.0"),
        (["run", "--set", "momentum=1", "optimizer=sgd"], "momentum must be at least 0 and below 1"),
        (["run", "--threads", "0"], "--threads must be at least 1"),
        (["run", "--checkpoint-every", "-1"], "--checkpoint-every must be above 0 seconds, not -1"),
        (["compare", "digits", "--methods", "agscl,ewc", "--set", "lam=4"], "e.g. --set agscl.lam=4"),
        (["run", "--set", "rho=much"], "rho is a number, not 'much'"),
        (["run", "--epochs", "2", "--set", "epochs=1"], "--epochs and --set epochs=… set the same thing: use only one"),
        (
            ["compare", "--batch-size", "2", "--set", "batch_size=1"],
            "--batch-size and --set batch_size=… set the same thing",
        ),
        (["compare", "--methods", "ewc", "--set", "finetune.rho=1"], "finetune has no setting 'rho'"),
        (["search", "digits", "--method", "ewc", "--set", "lam=0"], "start above 0, e.g. --set lam=1"),
        (["run", "--set", "prox_every=day"], "prox_every is epoch or step or a whole number, not 'day'"),
        (["run", "--seed", "-1"], "seed must be at least 0"),
        (["run", "--name", "../elsewhere"], "plain folder name"),
        (["run", "--method", "finetune", "--set", "mu=3"], "finetune has no setting 'mu'. Its settings: epochs"),
        (
            ["run", "--method", "ewc", "--set", "mu=3"],
            "ewc has no setting 'mu'. Its settings: batchnorm, steady, lam",
        ),
        (["run", "--device", "abacus"], "device 'abacus' is not available on this machine"),
        (["run", "--resume", "nosuch"], "no run 'nosuch' in runs/. There are none yet"),
        (["run", "--resume"], "no unfinished run"),
        (["run", "omniglot5"], "AGSCL_DATA"),
        (["verify", "nosuch"], "no run 'nosuch' in runs/"),
        (
            ["inspect", "nocolon"],
            "'nocolon' is neither a network (mlp, cifar, omniglot, alexnet, eight, atari) nor",
        ),
        (["inspect", "mlp", "--tasks", "0"], "--tasks must be at least 1"),
        (["inspect", "mlp", "--heads", "out"], "--input-shape and --heads are only for your own models"),
        (["inspect", "nosuchmodule:make"], "no module 'nosuchmodule' in this folder"),
        (["inspect", "json:nosuch"], "json has no 'nosuch'"),
        (["inspect", "json:__name__"], "not a function"),
        (["inspect", "test_cli:raises"], "failed: ImportError: no flux capacitor"),
        (["inspect", "test_cli:number"], "returned int; expected a model"),
        (["inspect", "test_cli:convolution"], "--input-shape"),
        (["inspect", "test_cli:classifier"], "agscl inspect test_cli:classifier --heads 2"),
        (["inspect", "test_cli:two_linear"], "trunk.0: no ReLU reads its outputs"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.delenv("AGSCL_DATA", raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("agscl: ")
    assert words in captured.err
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize("arguments", [["nosuch"], ["run", "--nosuch"], ["run", "--epochs", "many"], []])
def test_arguments_that_cannot_be_read_exit_with_2(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


@pytest.mark.parametrize(
    "command", [[], ["run"], ["compare"], ["search"], ["study"], ["verify"], ["inspect"], ["methods"], ["data"]]
)
def test_every_command_explains_itself_on_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: agscl" in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_without_the_cli_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["run"]) == 2
    assert "pip install 'agscl[cli]'" in capsys.readouterr().err


def test_the_bare_library_imports_nothing_but_torch_and_numpy():
    code = (
        "import sys\n"
        "for name in ('tyro', 'rich', 'safetensors', 'sklearn', 'scipy', 'pyarrow', 'PIL'): sys.modules[name] = None\n"
        "import agscl, agscl.cli.main\n"
        "sys.exit(agscl.cli.main.main(['run']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("agscl: the command needs")


def test_methods_lists_every_method_with_its_line_and_what_it_holds(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, each in METHODS.items():
        line = next(line for line in lines if line.split()[:1] == [name])
        assert each.about.startswith(line.removeprefix(name).strip()[:30])
    held = {line.split()[0]: line.split()[1:] for line in lines if line.endswith(("B", "–"))}
    assert held["EWC"] == ["8,350", "8,350", "–", "–", "–", "66.8", "kB"]
    assert held["HAT"] == ["–", "–", "150", "750", "–", "3.6", "kB"]
    assert held["fine-tuning"] == ["–"] * 6
    assert held["AGS-CL"][0] == "150"
    assert max(map(len, lines)) <= 80


def raises() -> nn.Module:
    raise ImportError("no flux capacitor")


def number() -> int:
    return 3


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def two_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU())


def with_example() -> tuple[nn.Module, torch.Tensor]:
    return convolution(), torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "nodes"),
    [
        (["test_cli:mlp"], 9),
        (["test_cli:classifier", "--heads", "2"], 5),
        (["test_cli:with_example"], 4),
        (["test_cli:convolution", "--input-shape", "3", "8", "8"], 4),
    ],
)
def test_inspect_prints_the_nodes_and_what_each_method_would_store(arguments, nodes, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    assert main(["inspect", *arguments]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("AGS-CL"))
    assert str(nodes) in row.split()
    assert "after 10 tasks" in shown
    for each in METHODS.values():
        assert each.bound or any(line.startswith(each.title) for line in shown.splitlines())
    assert max(map(len, shown.splitlines())) <= 80


def counted(shown: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.rstrip().endswith(("B", "–", "×"))}


def test_inspect_of_a_network_says_what_each_method_holds_as_the_paper_counts_and_in_full(capsys):
    assert main(["inspect", "eight", "--tasks", "8"]) == 0
    shown = capsys.readouterr().out
    rows = counted(shown)
    assert rows["AGS-CL"] == ["9,344", "≤20,085,568", "9,344", "–", "–", "≤80.6", "MB"]
    assert rows["EWC"] == ["20,085,568", "20,085,568", "–", "–", "–", "160.7", "MB"]
    assert rows["RWALK"][:2] == ["40,171,136", "20,085,568"]
    assert rows["HAT"][3] == "74,752"
    assert "20,085,568        9,344   2,150 ×" in shown
    assert "40,171,136        9,344   4,299 ×" in shown
    assert "40,171,136  ≤20,104,256  ≥ 1.99 ×" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_inspect_of_alexnet_shows_9344_importances_against_57_million_in_one_command(capsys):
    assert main(["inspect", "alexnet"]) == 0
    shown = capsys.readouterr().out
    rows = counted(shown)
    assert rows["AGS-CL"][:3] == ["9,344", "≤57,003,840", "9,344"]
    assert rows["EWC"][:2] == ["57,003,840", "57,003,840"]
    assert "57,003,840        9,344   6,101 ×" in shown
    assert "114,007,680        9,344  12,201 ×" in shown
    assert "114,007,680  ≤57,022,528  ≥ 1.99 ×" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_numbers_too_long_for_the_terminal_are_shortened():
    from agscl.analysis.memory import FORECASTS, Amount, LayerInputs, Outline, forecast_memory
    from agscl.cli.console import console
    from agscl.cli.tables import _make_memory_table

    many, layers = Amount(4 * 10**9, 16 * 10**9), (LayerInputs(1, 10**5, (100,), 4),)
    outline = Outline(weights=many, packed=many.numbers, groups=10**5, incoming=many, layers=layers)
    kept = {name: forecast_memory(name, outline, 3) for name in FORECASTS}
    with console.capture() as captured:
        console.print(_make_memory_table("", kept))
    assert "8,000.0 M" in captured.get()
    assert "48.0 GB" in captured.get()
    assert max(map(len, captured.get().splitlines())) <= 80


def test_inspect_of_a_finished_run_shows_what_it_really_held_beside_every_method(finished, capsys):
    assert main(["inspect", "quick"]) == 0
    shown = capsys.readouterr().out
    memory = json.loads((finished / "result.json").read_text())["methods"]["agscl"]["memory"]
    (own,) = [line.split()[2:] for line in shown.splitlines() if line.startswith("this run ")]
    assert own[:3] == [f"{memory[purpose]:,}" for purpose in ("importances", "anchors", "masks")]
    assert "this run: AGS-CL, as it reported itself at its end" in shown
    assert "after 5 tasks" in shown
    rows = counted(shown)
    assert rows["AGS-CL"][:2] == ["150", "≤8,350"]
    assert rows["HAT"][2:4] == ["150", "750"]
    everything = sum(memory[purpose] for purpose in ("importances", "anchors", "masks"))
    assert rows["everything"][-4:] == ["16,700", f"{everything:,}", f"{16_700 / everything - 0.005:.2f}", "×"]
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["inspect", "runs/quick"]) == 0
    assert capsys.readouterr().out == shown


def test_inspect_of_a_run_has_its_own_number_of_tasks_and_must_be_finished(finished, tmp_path, monkeypatch, capsys):
    assert main(["inspect", "quick", "--tasks", "3"]) == 2
    assert "has learned 5 tasks, and its memory is counted after them" in capsys.readouterr().err
    shutil.copytree(finished, tmp_path / "runs" / "half")
    (tmp_path / "runs" / "half" / "result.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "half"]) == 2
    assert "Finish it with: agscl run --resume half" in capsys.readouterr().err


def test_inspect_of_a_run_of_a_bound_says_that_its_memory_is_not_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run:
        execute_run(
            configure("digits", method="separate", epochs=1, reference=False), run, checkpoint_every=1e9, threads=1
        )
    assert main(["inspect", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "separate, a bound" in shown
    assert "this run" not in shown


# Data of one's own ----------------------------------------------------------------------------------------------------


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
def test_what_cannot_be_learned_of_it_is_said_with_a_way_out(tmp_path, capsys, options, said):
    pictures = four_classes_of_pictures(tmp_path / "pictures")
    asked = ["run", "cifar100", "--tasks", f"folder:{pictures}", "--task-options", *options]
    assert main([*asked, "--epochs", "1", "--runs", str(tmp_path / "runs")]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*")), "of what cannot be, nothing stays"


def test_a_folder_that_cannot_be_made_is_one_line_for_comparisons_too(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words in (["compare", "digits", "--methods", "l2", "--seeds", "1"], ["search", "digits", "--method", "l2"]):
        assert main([*words, "--runs", str(tmp_path / "file" / "runs")]) == 1
        message = capsys.readouterr().err
        assert message.startswith("agscl: ")
        assert "Not a directory" in message


def test_options_of_tasks_that_there_are_not_are_named_with_those_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--task-options", "foo=1"]) == 2
    assert "digits: unknown option 'foo'; the options are: shuffle_classes, test_share" in capsys.readouterr().err
    assert main(["run", "--resume"]) == 2, "a run that never began is nothing to go on with"
    assert "no unfinished run" in capsys.readouterr().err


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agscl {agscl.__version__}\n"


def test_what_cannot_be_captured_is_refused_before_anything_is_trained_and_the_name_stays_free(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path), "--set", "prox_every=5"]
    assert main([*asked, "engine=captured"]) == 2
    assert "use engine='plain'" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*asked, "engine=plain"]) == 0


def test_a_run_begun_on_a_device_that_is_not_here_is_not_resumed(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path)]
    assert main(asked) == 0
    (tmp_path / "a" / "result.json").unlink()
    path = tmp_path / "a" / "config.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda:77"'))
    assert main(["run", "--resume", "a", "--runs", str(tmp_path)]) == 2
    assert "device 'cuda:77' is not available on this machine" in capsys.readouterr().err


def test_a_device_that_computes_nothing_is_wrong_use(tmp_path, capsys):
    assert main(["run", "digits", "--device", "meta", "--runs", str(tmp_path)]) == 2
    assert "use cpu or cuda" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_data_that_changed_is_noticed_where_its_checksums_were_lost_too(tmp_path):
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


def test_a_run_that_had_not_begun_takes_the_threads_it_is_given_and_a_begun_one_tells_of_another_torch(tmp_path):
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


def test_the_log_of_a_run_stopped_several_times_is_that_of_one_never_stopped(tmp_path):
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


@pytest.mark.parametrize("command", ["run", "compare", "search", "study prox"])
@pytest.mark.parametrize("option", ["foo=3", "classes_per_task=x", "classes_per_task=2.5", "classes_per_task=true"])
def test_an_option_that_tasks_do_not_have_is_wrong_use_and_nothing_is_started(tmp_path, capsys, command, option):
    pictures, runs = tmp_path / "pictures", tmp_path / "runs"
    pictures.mkdir()
    words = [*command.split(), "digits", "--tasks", f"folder:{pictures}", "--task-options", option, "--runs", str(runs)]
    assert main(words) == 2
    said = capsys.readouterr()
    assert ("unknown option 'foo'" if option == "foo=3" else "classes_per_task must be a whole number") in said.err
    assert "FAILED" not in said.out
    assert not [path for path in runs.rglob("*.json") if path.name in ("comparison.json", "search.json", "data.json")]


def test_how_far_an_epoch_is_can_be_watched_and_is_not_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "PROGRESS_INTERVAL", 0.0)
    seen: list[dict] = []
    with Run(tmp_path / "run") as run:
        execute_run(configure("digits", method="finetune", epochs=1), run, checkpoint_every=1e9, on_event=seen.append)
    steps = [event["progress"] for event in seen if event["event"] == "step"]
    assert steps == sorted(steps)
    assert len(set(steps)) > 10, "more than the ends of five epochs"
    logged = {event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")}
    assert logged == {"task started", "epoch", "task ended"}


def test_a_run_whose_configuration_was_lost_is_resumed_and_verified_by_its_checkpoint(tmp_path, capsys):
    asked = ["run", "digits", "--epochs", "1", "--name", "a", "--runs", str(tmp_path)]
    assert main(asked) == 0
    for lost in ("result.json", "config.json"):
        (tmp_path / "a" / lost).unlink()
    assert main(["verify", "a", "--runs", str(tmp_path)]) == 0
    assert main(["run", "--resume", "a", "--runs", str(tmp_path)]) == 0
    assert (tmp_path / "a" / "config.json").exists()
    assert "Continuing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "device", "threads"),
    [("digits", "cpu", 1), ("tinyimagenet32", "cpu", None), ("tinyimagenet32", "cuda:1", 1)],
)
def test_a_run_beside_a_gpu_takes_one_cpu_thread_and_others_what_suits_the_preset(preset, device, threads):
    config = replace(configure(preset, method="agscl"), device=device)  # which need not be there
    assert choose_threads(config) == threads
