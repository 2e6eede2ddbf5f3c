"""Jobs on a real Ray cluster of two nodes: the bits of local processes, also where workers and nodes are lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import finish_command, start_command
from results import reproducible_part

HOME = Path(__file__).parents[2]
COMPARE = [
    *("compare", "digits", "--methods", "ewc", "--seeds", "1", "--epochs", "60", "--name", "some"),
    *("--checkpoint-every", "0.1"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process that finds Ray."""
    paths = [str(HOME / "src"), os.environ.get("PYTHONPATH", "")]
    if find_spec("ray") is None:
        folder = tmp_path_factory.mktemp("site")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        installed = subprocess.run([*pip, "-c", str(HOME / "constraints.txt"), "ray"], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"Ray cannot be installed here: {installed.stderr.strip()[-200:]}")
        paths.append(str(folder))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }


class Cluster:
    def __init__(self, environment: dict[str, str]) -> None:
        script = str(Path(__file__).with_name("ray_cluster.py"))
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.address = self._process.stdout.readline().split()[0]

    def remove_node(self) -> None:
        print("remove", file=self._process.stdin, flush=True)
        assert self._process.stdout.readline().strip() == "removed"

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture
def cluster(environment):
    cluster = Cluster(environment)
    yield cluster
    cluster.close()


def read_results(folder: Path) -> dict[str, dict]:
    root = folder / "runs" / "some"
    return {
        str(path.parent.relative_to(root)): reproducible_part(json.loads(path.read_text()))
        for path in root.rglob("result.json")
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What local processes compute."""
    folder = tmp_path_factory.mktemp("local")
    code, output = finish_command(start_command(folder, *COMPARE, "--jobs", "2"), 400)
    assert code == 0, output
    return read_results(folder)


def wait_for_checkpoints(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until `count` runs that are not finished have stored a checkpoint."""
    while process.poll() is None:
        stored = {path.parent.parent for path in folder.rglob("checkpoints/*.json")}
        if len([run for run in stored if not (run / "result.json").exists()]) >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"ended before: {process.communicate()[0]}")


def find_workers(environment: dict[str, str]) -> list[int]:
    """The processes that run our jobs on this test's cluster."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
            if (
                title.startswith(b"ray::_run_on_node")
                and environment["RAY_AUTH_TOKEN"].encode() in (process / "environ").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("event", ["nothing", "a killed worker", "a lost node"])
def test_jobs_on_two_nodes_end_with_the_bits_of_local_processes_after(event, cluster, environment, expected, tmp_path):
    process = start_command(tmp_path, *COMPARE, "--on", cluster.address, env=environment)
    if event != "nothing":
        wait_for_checkpoints(tmp_path, 2, process)
    if event == "a killed worker":
        workers = find_workers(environment)
        assert workers
        os.kill(workers[0], signal.SIGKILL)
    elif event == "a lost node":
        cluster.remove_node()
    code, output = finish_command(process, 900)
    assert code == 0, output
    assert ("its worker was lost" in output) == (event != "nothing"), output
    assert read_results(tmp_path) == expected
    assert not list(tmp_path.rglob(".shared-*"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_stores_checkpoints_from_which_local_processes_continue(cluster, environment, expected, tmp_path):
    process = start_command(tmp_path, *COMPARE, "--on", cluster.address, env=environment)
    wait_for_checkpoints(tmp_path, 1, process)
    process.send_signal(signal.SIGINT)
    code, output = finish_command(process, 200)
    assert code == 130, output
    assert "checkpoints are stored" in output
    code, output = finish_command(start_command(tmp_path, *COMPARE, "--jobs", "2"), 400)
    assert code == 0, output
    assert read_results(tmp_path) == expected


def try_address(folder: Path, address: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    return finish_command(start_command(folder, *COMPARE, "--on", address, env=environment), 200)


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_an_error_that_says_what_to_start(environment, tmp_path):
    started = time.monotonic()
    code, output = try_address(tmp_path, "127.0.0.1:9", environment)
    assert time.monotonic() - started < 40, "most of it is the import of torch and Ray"
    assert code == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in output
    assert "ray start --head" in output


@pytest.mark.slow
def test_a_port_behind_which_there_is_no_ray_is_an_error_too(environment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, output = try_address(tmp_path, address, environment)
    assert code == 1
    assert address in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_server_that_is_not_ray_is_told_from_one_within_seconds(cluster, environment):
    script = (
        "import socket, sys, time; from agscl.experiments import ray_jobs\n"
        f"host, port = {cluster.address!r}.split(':')\n"
        "with socket.create_connection((host, int(port))) as connection: assert ray_jobs._speaks_grpc(connection)\n"
        "silent = socket.create_server(('127.0.0.1', 0))\n"
        "started = time.monotonic()\n"
        "try: ray_jobs._connect('127.0.0.1:%d' % silent.getsockname()[1], None)\n"
        "except ray_jobs.RunError as error: print(error, time.monotonic() - started, sep='|')"
    )
    tried = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    words, seconds = tried.stdout.strip().split("|")
    assert "is not a Ray cluster, or is busy" in words
    assert 4 < float(seconds) < 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study_on_a_cluster_has_the_results_of_local_processes(cluster, environment, tmp_path):
    study = ["study", "reinit", "digits", "--seeds", "1", "--epochs", "3", "--name", "some"]
    for folder, options in (("here", ["--jobs", "2"]), ("there", ["--on", cluster.address])):
        code, output = finish_command(start_command(tmp_path / folder, *study, *options, env=environment), 500)
        assert code == 0, output
    results = read_results(tmp_path / "here")
    assert results
    assert read_results(tmp_path / "there") == results


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_search_with_optuna_on_a_cluster_has_the_trials_of_local_processes(cluster, environment, tmp_path):
    pytest.importorskip("optuna")
    search = ["search", "digits", "--method", "l2", "--epochs", "2", "--sampler", "optuna", "--trials", "3"]
    search += ["--jobs", "2", "--name", "some"]
    for folder, options in (("here", []), ("there", ["--on", cluster.address])):
        code, output = finish_command(start_command(tmp_path / folder, *search, *options, env=environment), 500)
        assert code == 0, output
    stored = [(tmp_path / folder / "runs/some/search.json").read_text() for folder in ("here", "there")]
    assert stored[0] == stored[1]


@pytest.mark.slow
def test_jobs_on_gpus_need_a_node_that_has_as_many(cluster, environment, tmp_path):
    script = (
        "from dataclasses import replace; from pathlib import Path; from agscl.experiments import ray_jobs\n"
        "from agscl.experiments.run_config import configure; from agscl.experiments.jobs import Job\n"
        f"config, folder = configure('digits', method='ewc'), Path({str(tmp_path)!r})\n"
        "for device, share in (('cuda', 0.25), ('cuda:1', 1.0)):\n"
        "    jobs = [Job(replace(config, device=device), folder / 'one')]\n"
        f"    try: ray_jobs.RayWorkers({cluster.address!r}, jobs, 1, 5.0, share)\n"
        "    except ray_jobs.WrongOptions as error: print(error)"
    )
    tried = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    none, named = tried.stdout.splitlines()
    assert none == "--device cuda: no node of the Ray cluster has 0.25 GPU; the most is 0"
    assert named == "with --on, --device must be cpu or cuda, not cuda:1: Ray chooses the GPU"
    wrong = [*COMPARE, "--on", cluster.address, "--gpus-per-job", "2"]
    code, output = finish_command(start_command(tmp_path, *wrong, env=environment))
    assert code == 2
    assert "--gpus-per-job is a share of a GPU above 0 and up to 1" in " ".join(output.split())


@pytest.mark.slow
def test_a_node_without_agscl_is_an_error_in_one_sentence(environment, tmp_path):
    hidden = tmp_path / "hidden" / "agscl"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    paths = os.pathsep.join([str(hidden.parent), environment["PYTHONPATH"]])
    cluster = Cluster({**environment, "PYTHONPATH": paths})
    try:
        code, output = try_address(tmp_path, cluster.address, environment)
    finally:
        cluster.close()
    assert code == 1
    message = " ".join(output.split())
    assert "of the Ray cluster cannot run jobs: agscl is not installed there, or does not import" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_node_that_does_not_see_the_runs_folder_is_an_error(cluster, environment, tmp_path):
    script = (
        "from pathlib import Path; from agscl.experiments import ray_jobs\n"
        f"ray_jobs._connect({cluster.address!r}, None)\n"
        "ray_jobs._check_nodes({Path('/nowhere'): Path('/nowhere/token')})"
    )
    tried = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "RunError: node " in tried.stderr
    assert "does not see /nowhere. Put --runs on a file system that all nodes share" in tried.stderr


@pytest.mark.slow
def test_an_address_in_another_form_is_an_error_that_names_the_forms(environment, tmp_path):
    code, output = try_address(tmp_path, "ray://somewhere", environment)
    assert code == 2
    assert "HOST:PORT" in output


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install(tmp_path):
    code, output = try_address(tmp_path, "local")
    assert code == 2
    assert "pip install 'agscl[ray]'" in output
