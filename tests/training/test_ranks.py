"""Two real processes (gloo) that train one network together, as under `torchrun`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from agscl.cli.main import main
from agscl.heads import MultiHead
from agscl.methods import find_methods
from agscl.methods._parts.node_method import NodeMethod
from agscl.methods.finetune import FineTune
from agscl.methods.paper_agscl import PaperAGSCL
from agscl.training import Trainer, TrainingConfig
from agscl.training.ranks import Ranks
from loops import leave_process_group
from results import reproducible_part
from trainers import QUICK, TASKS, finish, make_trainer

UNEVEN = replace(QUICK, batch_size=15, epochs=2)  # batches of 15, 15 and 10: shares of 8 and 7, then 5 and 5
ODD = replace(QUICK, batch_size=13, epochs=2, lr=1e-3)  # the last batch is one example


def make_any_trainer(method: type) -> Trainer:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.ReLU())
    model = MultiHead(trunk, features=12)
    settings = {"example_input": TASKS[0].train_x[:2]} if issubclass(method, NodeMethod) else {}
    return Trainer(model, method(model, **settings), TASKS[:2], UNEVEN, seed=0)


def train_without_chance() -> Trainer:
    """No dropout and no BatchNorm: what two processes compute differs by rounding alone."""
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()), features=12)
    trainer = Trainer(model, FineTune(model), TASKS, ODD, seed=0)
    finish(trainer)
    return trainer


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    hashes = {name: finish(make_any_trainer(method)) for name, method in find_methods().items()}
    hashes["BatchNorm"] = finish(make_trainer(PaperAGSCL, UNEVEN))
    stopped = make_trainer(PaperAGSCL, UNEVEN)
    for _ in range(12):  # in the second task
        stopped.advance()
    state = Ranks.current().broadcast(stopped.state_dict())  # a checkpoint is of the first rank
    torch.manual_seed(rank)
    continued = make_trainer(PaperAGSCL, UNEVEN)
    continued.load_state_dict(state)
    hashes["continued"] = finish(continued)
    plain = train_without_chance()
    torch.save({"hashes": hashes, "model": plain.model.state_dict(), "losses": plain.losses}, f"{folder}/{rank}.pt")
    leave_process_group()


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of two processes ended with."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, args=(find_port(), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", [*find_methods(), "BatchNorm"])
def test_both_processes_end_with_the_same_bits(trained, name):
    assert trained[0]["hashes"][name] == trained[1]["hashes"][name]


def test_continued_from_the_first_ranks_checkpoint_both_end_with_the_same_bits(trained):
    assert {each["hashes"]["continued"] for each in trained} == {trained[0]["hashes"]["BatchNorm"]}


def test_a_batch_split_over_two_processes_has_the_loss_and_gradient_of_the_whole(trained):
    alone = train_without_chance()
    for of_two, of_one in zip(trained[0]["losses"], alone.losses, strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-4)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(trained[0]["model"][name], tensor, rtol=1e-3, atol=1e-4)


def test_a_share_of_a_batch_smaller_than_the_ranks_has_no_weight():
    rows = torch.arange(3)
    shares = [Ranks(rank, 4).take_share(rows) for rank in range(4)]
    assert [share.tolist() for share, _ in shares] == [[0], [1], [2], [0]]
    assert [weight for _, weight in shares] == [pytest.approx(4 / 3)] * 3 + [0.0]


def test_compiled_steps_are_refused_where_several_processes_train(monkeypatch):
    monkeypatch.setattr(Ranks, "current", classmethod(lambda cls: cls(0, 2)))
    for changes in ({"compile": True}, {"engine": "captured"}):
        with pytest.raises(ValueError, match="with torchrun leave them and --fast out"):
            make_trainer(FineTune, TrainingConfig(**changes))


@pytest.mark.parametrize("torchrun", [True, False])
def test_under_torchrun_a_process_exits_with_its_code_and_without_pythons_clean_up(torchrun):
    """In the clean-up a thread of gloo that is still busy aborts the process, though its run is complete."""
    code = (
        "import atexit, os, sys\n"
        "from agscl.cli.main import start\n"
        "leave = os._exit\n"
        "os._exit = lambda code: (print('exits at once', flush=True), leave(code))\n"
        "sys.argv = ['agscl', 'run', '--wrong']\n"
        "code = start()\n"
        "atexit.register(print, 'last words')\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, **({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"} if torchrun else {})}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.splitlines() == ["last words", *(["exits at once"] if torchrun else [])]


@pytest.mark.parametrize("rank", [0, 1])
def test_commands_other_than_run_are_refused_under_torchrun(monkeypatch, capsys, rank):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", "digits"]) == 2
    assert ("start this without it; for many runs on many machines use --on" in capsys.readouterr().err) == (rank == 0)


# The command ---------------------------------------------------------------------------------------------------------

RUN = ["run", "digits", "--epochs", "6", "--batch-size", "32", "--name", "one", "--checkpoint-every", "0.2"]


def start_torchrun(folder: Path, *arguments: str, processes: int = 2) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(find_port())]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "agscl", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_result(folder: Path) -> dict:
    return json.loads((folder / "runs" / "one" / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_by_two_processes_is_close_to_one_and_continues_after_a_kill(tmp_path):
    for name in ("whole", "killed"):
        process = start_torchrun(tmp_path / name, *RUN)
        if name == "killed":
            while not list((tmp_path / "killed/runs/one/checkpoints").glob("*.json")):
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(1.0)
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
            process.communicate()
            assert not (tmp_path / "killed/runs/one/result.json").exists()
            process = start_torchrun(tmp_path / name, *RUN)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert output.count("average accuracy") == 1, "one process prints"
    whole = read_result(tmp_path / "whole")
    assert reproducible_part(whole) == reproducible_part(read_result(tmp_path / "killed"))
    assert whole["environment"]["processes"] == 2
    process = start_torchrun(tmp_path / "whole", *RUN)
    assert "is finished already" in process.communicate(timeout=600)[0]
    assert process.returncode == 0

    alone = subprocess.run(
        [sys.executable, "-m", "agscl", *RUN], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "AGS-CL" in alone.stdout
    for of_two, of_one in zip(
        *(read_result(each)["methods"]["finetune"]["losses"][0] for each in (tmp_path / "whole", tmp_path)), strict=True
    ):
        assert of_two == pytest.approx(of_one, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_run_continues_only_with_as_many_processes(tmp_path):
    process = start_torchrun(tmp_path, *RUN)
    while not list((tmp_path / "runs/one/checkpoints").glob("*.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert not (tmp_path / "runs/one/result.json").exists(), output
    alone = subprocess.run([sys.executable, "-m", "agscl", *RUN], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 2
    assert "was started with 2 processes and has 1 now" in alone.stderr
    assert "torchrun --nproc-per-node 2" in alone.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", [["run", "control"], ["run", "digits", "--method", "joint"]])
def test_what_one_process_trains_is_refused_under_torchrun(tmp_path, arguments):
    output, _ = start_torchrun(tmp_path, *arguments).communicate(timeout=600)
    assert "is trained by one process: start it without torchrun" in output
