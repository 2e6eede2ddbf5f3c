"""Jobs on a Ray cluster: each a task of one CPU, which is taken up again elsewhere if its worker or node is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agscl import __version__
from agscl.experiments.jobs import Job, JobOutcome, WorkerLost, run_job
from agscl.runs import RunError, WrongOptions
from agscl.system.process import tune_malloc

ANSWER_SECONDS = 5.0
"""How long a machine has to answer at an address, and what answers has to show that it may be Ray."""
CONNECT_SECONDS = 10.0
"""How long it may take to join a cluster that answers."""
NODE_SECONDS = 180.0
"""How long the nodes have to start a process, import torch and look for the runs folder."""
STOP_SECONDS = 60.0
"""How long stopped jobs have to store a checkpoint."""
LOCK_SECONDS = 120.0
"""How long a job waits for its folder: the process of a lost node may still be ending, a file server notices late."""

try:
    import ray
    from ray import exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise WrongOptions("--on needs Ray: pip install 'agscl[ray]', here and on all nodes of the cluster") from error


class RayWorkers:
    """Workers on a Ray cluster. The runs folder must be one that all nodes see under the same path."""

    def __init__(
        self, address: str, jobs: Sequence[Job], limit: int | None, checkpoint_every: float, gpus_per_job: float
    ) -> None:
        _connect(address, limit)
        uses_gpu = any(job.config.device != "cpu" for job in jobs)
        _check_devices(jobs, gpus_per_job)
        self._checkpoint_every = checkpoint_every
        self._tokens = _write_tokens(jobs)
        self._refs: dict[Future[JobOutcome | None], Any] = {}
        self._logs: dict[Path, tuple[int, int]] = {}  # size and time of the event logs when their jobs were submitted
        self._stopped = False
        self._task = ray.remote(
            num_cpus=1, num_gpus=gpus_per_job if uses_gpu else 0, max_retries=0, max_calls=int(uses_gpu)
        )(_run_on_node)
        try:
            _check_nodes(self._tokens)
        except BaseException:
            self._remove_tokens()
            raise

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        wait_for_futures(self._refs, timeout=STOP_SECONDS)
        self._remove_tokens()

    def submit(self, job: Job) -> Future[JobOutcome | None]:
        folder = job.folder.absolute()
        self._logs[job.folder] = _stat_log(job)
        ref = self._task.remote(
            replace(job, folder=folder),
            self._checkpoint_every,
            self._tokens[folder.parent],
            os.getcwd(),
            {name: value for name, value in os.environ.items() if name.startswith(("AGSCL_", "HF_"))},
        )
        future: Future[JobOutcome | None] = Future()
        self._refs[future] = ref
        ref.future().add_done_callback(lambda done: self._pass_on(done, future))
        return future

    def _pass_on(self, done: Future[Any], future: Future[JobOutcome | None]) -> None:
        """Give `future` the result of a task, with Ray's errors as ours."""
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif self._stopped or isinstance(error, exceptions.TaskCancelledError):
            future.set_result(None)
        elif isinstance(error, exceptions.WorkerCrashedError | exceptions.NodeDiedError):
            future.set_exception(WorkerLost("its worker process was killed, or its node was lost"))
        elif isinstance(error, exceptions.OutOfMemoryError):
            future.set_exception(WorkerLost("its node ran out of memory"))
        elif isinstance(error, exceptions.RayTaskError):
            future.set_exception(error.cause)
        else:
            future.set_exception(RunError(f"Ray could not run a job: {str(error).splitlines()[0]}"))

    def is_running(self, job: Job, future: Future[JobOutcome | None]) -> bool:
        return _stat_log(job) != self._logs[job.folder]

    def stop(self) -> None:
        self._stopped = True
        self._cancel(force=False)

    def kill(self) -> None:
        self._stopped = True
        self._cancel(force=True)

    def _cancel(self, force: bool) -> None:
        for future, ref in self._refs.items():
            if not future.done():
                ray.cancel(ref, force=force)

    def _remove_tokens(self) -> None:
        for path in self._tokens.values():
            path.unlink(missing_ok=True)


def _stat_log(job: Job) -> tuple[int, int]:
    try:
        status = (job.folder / "events.jsonl").stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


# The cluster ---------------------------------------------------------------------------------------------------------


def _connect(address: str, limit: int | None) -> None:
    """Connect this process to the cluster, until it ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": None}
    if address == "local":
        os.environ.setdefault("RAY_worker_niceness", "0")  # as other processes of this machine; Ray's default is 15
        before = signal.getsignal(signal.SIGTERM)
        ray.init("local", num_cpus=limit, **(options | {"include_dashboard": False}))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray exits at once on SIGTERM
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        raise WrongOptions(f"--on takes local or the HOST:PORT of a Ray cluster, e.g. 10.0.0.1:6379, not {address!r}")
    advice = f"Is it running? On its first machine: ray start --head --port {port}; here: ray start --address {address}"
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            is_grpc = _speaks_grpc(connection)
    except (OSError, OverflowError) as error:
        raise RunError(f"no Ray cluster answers at {address} ({error}). {advice}") from error
    if not is_grpc:
        raise RunError(f"what answers at {address} is not a Ray cluster, or is busy. {advice}")
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address, **options)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # it may wait for minutes; and outside the main thread
    thread.start()  # Ray leaves SIGTERM alone
    thread.join(CONNECT_SECONDS)
    if thread.is_alive():
        raise RunError(f"what answers at {address} is not a Ray cluster, or is busy. {advice}")
    if failure:
        reason = (str(failure[0]).splitlines() or [type(failure[0]).__name__])[0]
        raise RunError(f"could not join the Ray cluster at {address}: {reason}. {advice}") from failure[0]


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a server answers as those of Ray do: with a SETTINGS frame of HTTP/2. Ray itself would wait long."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return True
    empty_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
        return connection.recv(9)[3:4] == b"\x04"
    except OSError:
        return False


def _check_devices(jobs: Sequence[Job], gpus_per_job: float) -> None:
    devices = {job.config.device for job in jobs} - {"cpu"}
    if not devices:
        return
    if devices != {"cuda"}:
        raise WrongOptions(f"with --on, --device must be cpu or cuda, not {min(devices)}: Ray chooses the GPU")
    most = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    if most < gpus_per_job:
        raise WrongOptions(f"--device cuda: no node of the Ray cluster has {gpus_per_job:g} GPU; the most is {most:g}")


def _write_tokens(jobs: Sequence[Job]) -> dict[Path, Path]:
    """Write a file of a new name into each folder of runs: where a node finds it, it sees the same folder."""
    tokens = {}
    for folder in dict.fromkeys(job.folder.absolute().parent for job in jobs):
        folder.mkdir(parents=True, exist_ok=True)
        tokens[folder] = folder / f".shared-{uuid.uuid4().hex}"
        tokens[folder].touch()
    return tokens


def _check_nodes(tokens: dict[Path, Path]) -> None:
    """Raise `RunError` unless every node sees the runs folder and has the versions that this process has."""
    versions = {"agscl": __version__, "torch": str(torch.__version__)}
    paths = [str(path) for path in tokens.values()]

    def look() -> str | None:  # within a function Ray sends it as code, so it says what is missing where agscl is
        import importlib.metadata
        import os
        import time

        for name, version in versions.items():
            try:
                found = importlib.import_module(name).__version__
            except ImportError:
                return f"{name} is not installed there, or does not import"
            if found != version:
                return f"it has {name} {found}, and this machine {version}: results would differ"
        for path in paths:
            deadline = time.monotonic() + 5
            while not os.path.exists(path):
                if time.monotonic() > deadline:
                    return (
                        f"it does not see {os.path.dirname(path)}. Put --runs on a file system that all nodes share, "
                        "under the same path"
                    )
                time.sleep(0.1)
        return None

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    refs = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    }
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=NODE_SECONDS)
    for node, ref in refs.items():
        try:
            problem = ray.get(ref) if ref in ready else f"it did not start a process within {NODE_SECONDS:g} s"
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.TaskUnschedulableError):
            continue  # lost since: its jobs go elsewhere
        except exceptions.RayError as error:
            problem = str(error).splitlines()[-1]
        if problem:
            raise RunError(f"node {nodes[node]} of the Ray cluster cannot run jobs: {problem}")


# On a node -----------------------------------------------------------------------------------------------------------


def _run_on_node(
    job: Job, checkpoint_every: float, token: Path, folder: str, variables: dict[str, str]
) -> JobOutcome | None:
    """Start or continue a job in a worker process of Ray; None if it was stopped."""
    if not _appears(token):  # of a node that joined later
        return JobOutcome(error=f"node {socket.gethostname()} does not see {token.parent}, which all nodes must share")
    os.environ.update(variables)
    with contextlib.suppress(OSError):
        os.chdir(folder)  # paths of one's own data may be relative
    tune_malloc()
    with _cancel_as_request() as should_stop:
        return run_job(job, checkpoint_every, should_stop, LOCK_SECONDS)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + 5  # a file server may be late
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _cancel_as_request() -> Iterator[Callable[[], bool]]:
    """Within the block `ray.cancel`, which interrupts the main thread, asks to stop; the function tells if it did."""
    asked = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
