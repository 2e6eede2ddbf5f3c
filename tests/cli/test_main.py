"""Every command: help, mistakes, exit codes, what is imported."""

import subprocess
import sys

import pytest

import agscl
from agscl.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nosuch"], "unknown preset 'nosuch'. Available:\n  digits"),
        (["run", "--epochs", "0"], "epochs must be at least 1"),
        (["run", "--method", "nosuch"], "no method is called 'nosuch'. There are: agscl, paper-agscl"),
        (["run", "--set", "rho=2"], "rho must be above 0 and at most 1"),
        (["run", "--set", "rho"], "--set takes KEY=VALUE"),
        (["run", "--set", "weight_decay=-1"], "weight_decay must be at least 0 and finite, not -1.0"),
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
            "ewc has no setting 'mu'. Its settings: batchnorm, clip_penalty_step, lam",
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
        (["inspect", "own_models:raises"], "failed: ImportError: no flux capacitor"),
        (["inspect", "own_models:number"], "returned int; expected a model"),
        (["inspect", "own_models:convolution"], "--input-shape"),
        (["inspect", "own_models:classifier"], "agscl inspect own_models:classifier --heads 2"),
        (["inspect", "own_models:two_linear"], "trunk.0: no ReLU or ReLU6 reads its outputs"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
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
    "command",
    [
        [],
        ["run"],
        ["compare"],
        ["search"],
        ["study"],
        ["report"],
        ["watch"],
        ["verify"],
        ["inspect"],
        ["methods"],
        ["data"],
    ],
)
def test_every_command_explains_itself_on_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: agscl" in shown
    explained = shown.partition("\n")[2]  # tyro never wraps the line of the usage
    assert [line for line in explained.splitlines() if len(line) > 80] == []


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


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agscl {agscl.__version__}\n"


def test_a_folder_that_cannot_be_created_is_a_one_line_error_for_comparisons_and_searches(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words in (["compare", "digits", "--methods", "l2", "--seeds", "1"], ["search", "digits", "--method", "l2"]):
        assert main([*words, "--runs", str(tmp_path / "file" / "runs")]) == 1
        message = capsys.readouterr().err
        assert message.startswith("agscl: ")
        assert "Not a directory" in message


@pytest.mark.parametrize("command", ["run", "compare", "search", "study prox"])
@pytest.mark.parametrize("option", ["foo=3", "classes_per_task=x", "classes_per_task=2.5", "classes_per_task=true"])
def test_an_invalid_task_option_is_wrong_use_and_nothing_is_started(tmp_path, capsys, command, option):
    pictures, runs = tmp_path / "pictures", tmp_path / "runs"
    pictures.mkdir()
    words = [*command.split(), "digits", "--tasks", f"folder:{pictures}", "--task-options", option, "--runs", str(runs)]
    assert main(words) == 2
    said = capsys.readouterr()
    assert ("unknown option 'foo'" if option == "foo=3" else "classes_per_task must be a whole number") in said.err
    assert "FAILED" not in said.out
    assert not [path for path in runs.rglob("*.json") if path.name in ("comparison.json", "search.json", "data.json")]


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from agscl.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_ctrl_c_while_a_command_is_imported_exits_130_without_a_traceback(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("agscl.cli.main.run_command", interrupt)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == ""
