"""Files of a run that were damaged, edited or exchanged."""

import contextlib
import json
import random
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from agscl.cli.main import main
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run
from agscl.runs.errors import Interrupted
from results import reproducible_part
from run_files import edit_certificate, edit_checkpoint, edit_json, forge_chain

RUN = Path("runs/quick")
pytestmark = pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Finished runs of one epoch: `quick`, and others that differ from it in one setting each."""
    folder = tmp_path_factory.mktemp("stored")
    for name, changes in {
        "quick": {},
        "rate": {"lr": 0.002},
        "seed": {"seed": 1},
        "method": {"method": "l2"},
    }.items():
        config = configure("digits", **{"method": "agscl", "epochs": 1, "reference": False, **changes})
        with Run(folder / "runs" / name) as run:
            execute_run(config, run, checkpoint_every=1e9, threads=1)
    return folder


@pytest.fixture
def runs(stored, tmp_path, monkeypatch):
    """A copy of them, to be tampered with, as the working directory."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def call(capsys, *arguments: str) -> tuple[int, str]:
    """The exit code and all output of a command; an unexpected error is raised."""
    capsys.readouterr()
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def resume(capsys) -> tuple[int, str]:
    (RUN / "result.json").unlink(missing_ok=True)
    return call(capsys, "run", "--resume", "quick")


# Resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "words"), [("rate", "training.lr is 0.002 there"), ("seed", "seed is 1 there")])
def test_resume_refuses_the_checkpoints_of_another_configuration(runs, capsys, other, words):
    shutil.rmtree(RUN / "checkpoints")
    shutil.copytree(runs / other / "checkpoints", RUN / "checkpoints")
    code, output = resume(capsys)
    assert code == 2
    assert "runs/quick/checkpoints are of a run with a different configuration" in output
    assert words in output
    assert not (RUN / "result.json").exists()


def test_resume_refuses_an_edited_config_json(runs, capsys):
    path = RUN / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"batch_size": ', '"batch_size": 1'))
    assert path.read_text() != text
    code, output = resume(capsys)
    assert (code, "config.json is damaged: its content does not match its checksum" in output) == (1, True)
    path.write_text(text)
    edit_json(path, lambda config: config["training"].update(lr=0.002))
    code, output = resume(capsys)
    assert (code, re.search(r"training.lr is [0-9.]+ there, 0.002 here", output) is not None) == (2, True)


def test_resume_refuses_a_damaged_event_log_and_continues_without_one(runs, capsys):
    log = RUN / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b"epoch", b"epoxh", 1))
    code, output = resume(capsys)
    assert (code, "events.jsonl is damaged or was edited. Remove it" in output) == (1, True)
    log.unlink()
    assert resume(capsys)[0] == 0


def test_a_run_of_a_version_without_checksums_is_a_clear_error(runs, capsys):
    path = RUN / "config.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content))
    for command in (["run", "--resume", "quick"], ["verify", "quick"]):
        code, output = call(capsys, *command)
        assert (code, "config.json is damaged: it has no checksum, or an older version" in output) == (1, True)


# Results -------------------------------------------------------------------------------------------------------------


def test_an_edited_result_is_neither_shown_nor_verified(runs, capsys):
    path = RUN / "result.json"
    content = json.loads(path.read_text())
    content["methods"]["agscl"]["average_accuracy"] = 1.0
    path.write_text(json.dumps(content, indent=2) + "\n")
    for command in (["run", "--resume", "quick"], ["verify", "quick"]):
        code, output = call(capsys, *command)
        assert (code, "result.json is damaged: its content does not match its checksum" in output) == (1, True)
        assert "100.0 %" not in output


def test_verify_compares_a_result_with_the_checkpoint(runs, capsys):
    edit_json(RUN / "result.json", lambda result: result["methods"]["agscl"].update(average_accuracy=1.0))
    code, output = call(capsys, "verify", "quick")
    assert (code, "result.json has other methods than the last checkpoint" in output) == (1, True)


@pytest.mark.parametrize("other", ["seed", "method"])
def test_the_result_of_another_run_is_refused(runs, capsys, other):
    shutil.copy(runs / other / "result.json", RUN / "result.json")
    for command in (["run", "--resume", "quick"], ["verify", "quick"], ["inspect", "quick"]):
        code, output = call(capsys, *command)
        assert (code, "result.json is the result of another run" in output) == (1, True)


def test_the_result_of_another_seed_enters_no_comparison(runs, capsys):
    words = ["compare", "digits", "--epochs", "1", "--name", "c", "--jobs", "1", "--methods", "l2", "--seeds", "2"]
    assert main(words) == 0
    shutil.copy("runs/c/l2-seed1/result.json", "runs/c/l2-seed0/result.json")
    code, output = call(capsys, *words)
    assert (code, "l2-seed0/result.json is the result of another run (seed is 1 there, 0 here)" in output) == (1, True)


# Verify --------------------------------------------------------------------------------------------------------------


def change_free_weight(state):
    model = state["trainer"]["model"]
    name = next(name for name in model if name.startswith("trunk.") and name.endswith("weight"))
    free = model[name].abs().sum(1).argmin()  # a free node's weights are 0
    model[name][free, 0] += 1


def overwrite_importances(state):
    knowledge = state["trainer"]["method"]

    def walk(value):
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)
            if hasattr(item, "is_floating_point") and item.is_floating_point() and item.numel():
                item += 1

    walk(knowledge)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_free_weight, "the weights are not those at the end of task"),
        (overwrite_importances, "the method's state (importances, masks, anchors) is not that"),
    ],
)
def test_verify_checks_all_weights_and_the_methods_state(runs, capsys, change, words):
    edit_checkpoint(RUN, change)
    code, output = call(capsys, "verify", "quick")
    assert (code, words in output) == (1, True), output


def copy_certificate(runs):
    shutil.copy(RUN / "certificates" / "02.json", RUN / "certificates" / "03.json")


def delete_certificate(runs):
    (RUN / "certificates" / "02.json").unlink()


def add_certificate(runs):
    shutil.copy(RUN / "certificates" / "05.json", RUN / "certificates" / "06.json")


def take_certificate_of_another_run(runs):
    shutil.copy(runs / "method" / "certificates" / "02.json", RUN / "certificates" / "02.json")


def empty_important_set(runs):
    edit_certificate(RUN, 1, lambda content: content.update(first=[10**9] * len(content["first"])))


def nest_deeply(runs):
    (RUN / "certificates" / "01.json").write_text("[" * 10**5 + "]" * 10**5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (copy_certificate, "03.json is not the certificate that the run wrote after task"),
        (delete_certificate, "02.json is missing"),
        (add_certificate, "the weights after the last 1 of 6 tasks are lost"),
        (take_certificate_of_another_run, "02.json is not the certificate that the run wrote"),
        (empty_important_set, "01.json is not the certificate that the run wrote"),
        (nest_deeply, "01.json is not the certificate that the run wrote"),
    ],
)
def test_verify_notices_certificates_that_are_not_the_runs_own(runs, capsys, change, words):
    change(runs)
    code, output = call(capsys, "verify", "quick")
    assert (code, words in output) == (1, True), output
    assert output.splitlines()[-1].startswith("FAILED: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda runs, record: shutil.copy(runs / "rate" / "nodes" / "02.json", record), "is not the record of nodes"),
        (lambda runs, record: record.unlink(), "02.json is missing"),
    ],
    ids=["another run's", "deleted"],
)
def test_verify_notices_records_of_nodes_that_are_not_the_runs_own(runs, capsys, change, words):
    change(runs, RUN / "nodes" / "02.json")
    code, output = call(capsys, "verify", "quick")
    assert (code, words in output) == (1, True), output


def test_verify_notices_that_the_result_is_missing_and_the_command_it_names_writes_it_again(runs, capsys):
    written = (RUN / "result.json").read_bytes()
    (RUN / "result.json").unlink()
    code, output = call(capsys, "verify", "quick")
    assert (code, "result.json is missing; it is written again by: agscl run --resume quick" in output) == (1, True)
    assert call(capsys, "run", "--resume", "quick")[0] == 0
    assert (RUN / "result.json").read_bytes() == written
    assert call(capsys, "verify", "quick")[0] == 0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("run", "is of a run with another configuration or other data"),
        ("previous", "does not follow the one before it"),
    ],
)
def test_verify_checks_that_each_entry_of_the_chain_names_its_run_and_the_entry_before(runs, capsys, key, words):
    edit_checkpoint(RUN, lambda state: state["chain"][-1].update({key: "0" * 64}))
    (RUN / "result.json").unlink()  # which holds the chain, too
    code, output = call(capsys, "verify", "quick")
    assert (code, words in output) == (1, True), output


def test_verify_refuses_another_runs_config_json(runs, capsys):
    shutil.copy(runs / "rate" / "config.json", RUN / "config.json")
    code, output = call(capsys, "verify", "quick")
    assert (code, "config.json and runs/quick/checkpoints are of different runs" in output) == (1, True)


def test_run_and_verify_print_a_digest_that_verify_compares_with_one_kept_elsewhere(runs, capsys):
    shown = call(capsys, "run", "--resume", "quick")[1]
    digest = json.loads((RUN / "result.json").read_text())["digest"]
    assert f"digest       {digest}" in shown
    code, output = call(capsys, "verify", "quick")
    assert (code, f"digest: {digest}" in output) == (0, True)
    assert "not covered: nothing is signed" in output
    assert call(capsys, "verify", "quick", "--expect", digest)[0] == 0
    edit_certificate(RUN, 1, lambda content: content["notes"].append("forged"))
    forge_chain(RUN)
    assert call(capsys, "verify", "quick")[0] == 0, "who rewrites all files can forge"
    code, output = call(capsys, "verify", "quick", "--expect", digest)
    assert (code, f"FAILED: the digest is not the expected {digest}" in output) == (1, True)
    assert call(capsys, "verify", "quick", "--expect", "12")[0] == 2


def test_the_same_run_has_the_same_digest_and_another_has_another(stored, tmp_path):
    with Run(tmp_path / "again") as run:
        config = configure("digits", method="agscl", epochs=1, reference=False)
        again = execute_run(config, run, checkpoint_every=1e9, threads=1)
    first, other = (json.loads((stored / "runs" / name / "result.json").read_text()) for name in ("quick", "rate"))
    assert again["digest"] == first["digest"] != other["digest"]


def test_a_run_stopped_and_resumed_has_the_chain_of_one_never_stopped(stored, tmp_path):
    config = configure("digits", method="agscl", epochs=1, reference=False)
    for stop_after in (12, 9, 10**9):
        steps = iter(range(10**9))
        with Run(tmp_path / "run") as run, contextlib.suppress(Interrupted):
            stopped = partial(lambda steps, stop_after: next(steps) > stop_after, steps, stop_after)
            result = execute_run(config, run, checkpoint_every=1e9, threads=1, should_stop=stopped)
    expected = json.loads((stored / "runs" / "quick" / "result.json").read_text())
    assert reproducible_part(result)["chain"] == expected["chain"]


# Damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "environment.json", "result.json", "certificates/02.json", "nodes/02.json"]
)
def test_deeply_nested_json_is_a_sentence_with_the_files_name(runs, capsys, name):
    for depth in (10**5, 600):
        (RUN / name).write_text('{"checksum": 1, "nested": ' * depth + "1" + "}" * depth)
        code, output = call(capsys, "verify", "quick")
        assert (code, Path(name).name in output) == (1, True)
        assert call(capsys, "run", "--resume", "quick")[0] in (0, 1)


def flip_bits(capsys, count: int, seed: int) -> None:
    """Flip one bit at a time in a random file of the run: `verify` notices each."""
    draw = random.Random(seed)
    files = sorted(path for path in RUN.rglob("*") if path.is_file() and path.stat().st_size)
    assert RUN / "nodes" / "02.json" in files
    for number in range(count):
        path = files[number % len(files)]
        intact = path.read_bytes()
        place, bit = draw.randrange(len(intact)), draw.randrange(8)
        changed = bytearray(intact)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        code, output = call(capsys, "verify", "quick")
        assert code == 1, f"bit {bit} of byte {place} of {path} passed: {output}"
        assert path.name in output or str(int(path.stem)) in output, output
        code, output = call(capsys, "run", "--resume", "quick")
        assert code in (0, 1, 2), output
        path.write_bytes(intact)
    assert call(capsys, "verify", "quick")[0] == 0


def test_no_flipped_bit_passes_unnoticed_by_verify(runs, capsys):
    flip_bits(capsys, 30, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_none_of_500_flipped_bits_passes_unnoticed_by_verify(runs, capsys):
    flip_bits(capsys, 500, seed=1)


def resume_after_flips(runs, capsys, count: int, seed: int) -> None:
    """Flip a bit of an unfinished run: it continues to the same result, or says what is damaged."""
    expected = json.loads((RUN / "result.json").read_text())
    shutil.copytree(RUN, runs / "whole")
    draw = random.Random(seed)
    for _ in range(count):
        (RUN / "result.json").unlink(missing_ok=True)
        path = draw.choice(sorted(path for path in RUN.rglob("*") if path.is_file() and path.stat().st_size))
        changed = bytearray(path.read_bytes())
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        code, output = resume(capsys)
        if code == 0:
            result = json.loads((RUN / "result.json").read_text())
            assert result["methods"]["agscl"]["weights_sha256"] == expected["methods"]["agscl"]["weights_sha256"]
            assert result["methods"]["agscl"]["accuracies"] == expected["methods"]["agscl"]["accuracies"]
        else:
            assert path.name in output or str(int(path.stem)) in output, output
        shutil.rmtree(RUN)
        shutil.copytree(runs / "whole", RUN)


def test_a_resumed_run_with_a_flipped_bit_ends_with_the_same_result_or_a_sentence(runs, capsys):
    resume_after_flips(runs, capsys, 10, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resumed_runs_with_100_flipped_bits_end_with_the_same_result_or_a_sentence(runs, capsys):
    resume_after_flips(runs, capsys, 100, seed=1)


def test_a_damaged_or_edited_run_is_never_printed_as_it_is_by_the_same_command(runs, capsys):
    path = RUN / "result.json"
    intact = path.read_bytes()
    shown = call(capsys, "run", "--resume", "quick")[1]
    draw = random.Random(2)
    for _ in range(50):
        changed = bytearray(intact)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        code, output = call(capsys, "run", "--resume", "quick")
        assert (code, output == shown) == (1, False)
