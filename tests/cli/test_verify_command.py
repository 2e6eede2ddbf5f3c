"""`agscl verify`."""

import base64
import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agscl.cli.main import main
from agscl.experiments.certificate_chain import list_certificates
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.experiments.verify import _compute_probe_outputs
from agscl.probe_outputs import ProbeOutputs
from agscl.runs import Run, RunError
from agscl.runs.errors import Interrupted
from commands import QUICK, finish_command, start_command
from run_files import edit_certificate, edit_checkpoint, forge_chain


@pytest.fixture(scope="module")
def frozen_for_good(tmp_path_factory):
    """A finished run whose certificates are all guaranteed."""
    folder = tmp_path_factory.mktemp("guaranteed")
    code, output = finish_command(start_command(folder, *QUICK, "--set", "lam=inf", "mu=20"))
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


def test_verify_ends_with_ok_on_an_untouched_run_and_finds_the_same_bits_on_the_probe(guaranteed, capsys):
    code, lines = verdict(capsys)
    assert code == 0
    assert lines[-1].startswith("OK: everything guaranteed after each of 5 tasks is unchanged")
    assert sum("have not changed by a bit since it was learned" in line for line in lines) == 5


def test_verify_of_a_foreign_run_contacts_no_one(guaranteed, small_hub, capsys):
    """Not even for the weights that its config.json names."""
    config = json.loads((guaranteed / "config.json").read_text())
    config |= {"network": "alexnet", "network_options": {"weights": "hf://some/models/x.pth"}}
    (guaranteed / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(Exception):  # the stored weights are those of another network
        verdict(capsys)
    assert small_hub.requests == []


def test_verify_builds_a_network_without_the_weights_it_started_from(monkeypatch):
    options = []

    def build(config, *args):
        options.append(dict(config.network_options))
        raise RunError("seen enough")

    monkeypatch.setattr("agscl.experiments.verify.build_model", build)
    config = replace(
        configure("digits", method="agscl"), network_options={"weights": "hf://some/models/x.pth", "other": 1}
    )
    probe = ProbeOutputs([2, 3], 0, "", {}, {})
    with pytest.raises(RunError, match="seen enough"):
        _compute_probe_outputs(config, probe, 0, {})
    assert options == [{"other": 1}]


def test_verify_fails_when_a_guaranteed_weight_moved(guaranteed, capsys):
    task = json.loads((guaranteed / "result.json").read_text())["tasks"][0]
    edit_checkpoint(guaranteed, lambda state: state["trainer"]["model"][f"heads.{task}.bias"].add_(1))
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
    forge_chain(guaranteed)
    code, lines = verdict(capsys)
    assert code == 1
    assert any(line.startswith("FAILED: outputs of task") and "on the probe differ by up to" in line for line in lines)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "suffix", "words"),
    [
        (damage, "safetensors", "checkpoint NUMBER is damaged (checksum mismatch in FILE)"),
        (damage, "json", "checkpoint NUMBER is damaged ("),
        (remove, "safetensors", "checkpoint NUMBER is damaged (FILE is missing)"),
        (remove, "json", "the last checkpoint is missing"),
    ],
)
def test_a_last_checkpoint_that_is_lost_is_one_line_whose_advice_brings_the_same_run_back(
    guaranteed, capsys, harm, suffix, words
):
    digest = json.loads((guaranteed / "result.json").read_text())["digest"]
    newest = max((guaranteed / "checkpoints").glob(f"*.{suffix}"))
    harm(newest)
    code, (line,) = verdict(capsys)
    assert code == 1
    assert line.startswith("FAILED: " + words.replace("NUMBER", str(int(newest.stem))).replace("FILE", newest.name))
    assert line.endswith("remove runs/quick/result.json, then agscl run --resume quick")
    (guaranteed / "result.json").unlink()
    assert main(["run", "--resume", "quick"]) == 0
    assert json.loads((guaranteed / "result.json").read_text())["digest"] == digest
    assert verdict(capsys)[0] == 0


def test_a_damaged_checkpoint_before_the_last_is_named_beside_all_that_holds(guaranteed, capsys):
    damage(min((guaranteed / "checkpoints").glob("*.safetensors")))
    code, lines = verdict(capsys)
    assert code == 1
    assert [line.split(" is ")[0][:19] for line in lines if line.startswith("FAILED")] == [
        "FAILED: checkpoint ",
        "FAILED: 1 check of ",
    ]


@pytest.mark.parametrize("lost", ["config.json", "result.json", "data.json", "events.jsonl", "certificates/03.json"])
@pytest.mark.parametrize("harm", [damage, remove, lambda path: path.write_text("[]")], ids=["flip", "remove", "other"])
def test_the_last_line_of_verify_is_the_verdict_whichever_file_is_damaged_or_missing(guaranteed, capsys, lost, harm):
    harm(guaranteed / lost)
    code, lines = verdict(capsys)
    assert code == 1
    assert lines[-1].startswith("FAILED: ")


def test_the_last_line_of_verify_is_the_verdict_on_a_run_without_a_checkpoint_and_on_an_empty_one(guaranteed, capsys):
    shutil.rmtree(guaranteed / "checkpoints")
    assert verdict(capsys)[1][-1].startswith("FAILED: the last checkpoint is missing")
    (guaranteed / "result.json").unlink()
    assert verdict(capsys) == (1, ["FAILED: runs/quick has no checkpoint yet, so there are no weights to check"])


def test_the_last_line_of_verify_is_the_verdict_on_a_file_that_may_not_be_read(guaranteed, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("agscl.experiments.verify.hash_file", refuse)
    cannot_read = "FAILED: cannot read runs/quick/certificates/01.json: Permission denied"
    assert verdict(capsys) == (1, [cannot_read])


def test_verify_of_a_damaged_certificate_says_so(guaranteed, capsys):
    path = guaranteed / "certificates" / "03.json"
    path.write_text(path.read_text()[:100])
    code, lines = verdict(capsys)
    assert code == 1
    assert any("03.json is not the certificate that the run wrote" in line for line in lines)
    forge_chain(guaranteed)
    code, lines = verdict(capsys)
    assert code == 1
    assert lines[-1].startswith("FAILED: runs/quick/certificates/03.json is not a certificate: it is not JSON")


@pytest.mark.parametrize(
    "content", ["[" * 10**5, "[]", "null", '{"format": "agscl-certificate-1"}', '{"format": [], "probe": 1}']
)
def test_a_certificate_that_is_none_is_a_sentence_even_where_the_chain_names_it(guaranteed, capsys, content):
    (guaranteed / "certificates" / "03.json").write_text(content)
    forge_chain(guaranteed)
    code, lines = verdict(capsys)
    assert code == 1
    assert re.search(r"^FAILED: .*03\.json is not a (whole )?certificate", lines[-1])


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
def test_a_channels_last_run_is_verified_in_channels_last(tmp_path, monkeypatch, capsys):
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
    assert any("have not changed by a bit since it was learned" in line for line in lines)


def test_in_a_different_environment_verify_does_not_require_equal_bits(guaranteed, capsys):
    def elsewhere(content):
        content["probe"]["environment"]["torch"] = "0.1"

    for number in range(1, 6):
        edit_certificate(guaranteed, number, elsewhere)
    forge_chain(guaranteed)
    code, lines = verdict(capsys)
    assert code == 0
    assert any("computed in a different environment (torch 0.1 then" in line for line in lines)


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
def test_verify_of_a_run_stopped_within_a_task_says_to_finish_it_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = configure("digits", method="agscl", epochs=1, reference=False)
    steps = iter(range(10**6))
    with Run(Path("runs/quick")) as run, pytest.raises(Interrupted):
        execute_run(config, run, checkpoint_every=1e9, threads=1, should_stop=lambda: next(steps) > 25)
    code, lines = verdict(capsys)
    assert code == 1
    assert lines[-1].startswith("FAILED: runs/quick is in the middle of task 3")


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
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
    assert lines[0].startswith("5 heads unchanged: all that ")
    assert not any("important nodes" in line for line in lines)
    assert sum("have not changed by a bit since it was learned" in line for line in lines) == kept


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
def test_a_network_per_task_is_certified_under_its_own_name_and_so_are_runs_that_called_it_fine_tuning(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/quick")
    with Run(folder) as run:
        config = configure("digits", method="separate", epochs=1, reference=False)
        result = execute_run(config, run, checkpoint_every=1e9, threads=1)
    assert (
        "(all that separate certifies: what the heads read is not checked)"
        in result["methods"]["separate"]["certificate"]
    )
    assert "FineTune" not in verdict(capsys)[1][0]
    for number in range(1, 6):
        edit_certificate(folder, number, lambda content: content.update(method="FineTune"))
    forge_chain(folder)
    code, lines = verdict(capsys)
    assert (code, lines[0]) == (0, "5 heads unchanged: all that separate certifies")


def test_joint_certifies_nothing_and_verify_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Run(Path("runs/quick")) as run:
        execute_run(
            configure("digits", method="joint", epochs=1, reference=False), run, checkpoint_every=1e9, threads=1
        )
    code, lines = verdict(capsys)
    assert code == 1
    assert lines[-1].startswith("FAILED: runs/quick is a run of joint")
    assert lines[-1].endswith("nothing is certified")


def test_certificates_of_more_than_a_hundred_tasks_are_listed_in_the_order_of_the_tasks(tmp_path):
    (tmp_path / "certificates").mkdir()
    for number in (1, 9, 10, 11, 99, 100, 101):
        (tmp_path / "certificates" / f"{number:02d}.json").touch()
    assert [int(path.stem) for path in list_certificates(tmp_path)] == [1, 9, 10, 11, 99, 100, 101]


@pytest.mark.filterwarnings("ignore::agscl.methods._parts.warnings.SelfCheckWarning")
def test_words_of_run_and_verify_are_those_of_the_table_and_fit_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for method, words in (
        ("agscl", "important nodes kept every bit (guaranteed for good)"),
        ("paper-agscl", "important nodes kept every bit (in this task; a later one may change them)"),
        ("ewc", "4 earlier heads unchanged (all that EWC certifies: what the heads read is not checked)"),
    ):
        config = configure("digits", method=method, epochs=1, reference=False)
        with Run(Path("runs") / method) as run:
            execute_run(config, run, checkpoint_every=1e9, threads=1)
        assert main(["run", "--resume", method]) == 0
        shown = capsys.readouterr().out
        assert main(["verify", method]) == 0
        shown += capsys.readouterr().out
        assert words in " ".join(shown.split())
        assert [line for line in shown.splitlines() if len(line.rstrip()) > 80] == []
        assert not re.search(r"\bheld\b|used capacity|unmoved|bit-identical", shown)
