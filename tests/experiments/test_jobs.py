import signal
import time
from concurrent.futures import Future

import pytest

from agscl.experiments import compare, jobs
from agscl.runs import Checkpoints
from agscl.runs.errors import Interrupted


def test_any_exception_stops_the_running_jobs_and_they_store_a_checkpoint(tmp_path):
    plan = compare.plan_comparison("digits", ["l2"], 2, tmp_path, epochs=100_000)

    def watch(running):
        if any(job.progress for job in running):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        jobs.run_jobs(plan, processes=1, checkpoint_every=1e9, on_progress=watch)
    assert not any(job.is_finished for job in plan)
    assert (plan[0].folder / "checkpoints" / "000001.json").exists(), "and it was stored where it stood"


def test_jobs_asked_to_stop_before_they_started_train_nothing(tmp_path):
    plan = compare.plan_comparison("digits", ["l2"], 1, tmp_path)
    with pytest.raises(Interrupted):
        jobs.run_jobs(plan, processes=2, checkpoint_every=1e9, should_stop=lambda: True)
    assert not any(job.is_finished for job in plan)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_workers_start_with_ctrl_c_blocked():
    class Pool:
        def submit(self, *work):
            return frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    workers = jobs.LocalWorkers(1, 1.0)
    workers._pool = Pool()
    blocked = workers.submit("job")
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_stop_request_while_the_last_job_ends_is_not_lost(tmp_path):
    plan = compare.plan_comparison("digits", [], 1, tmp_path, epochs=1)
    done: list[object] = []
    with pytest.raises(Interrupted):
        jobs.run_jobs(
            plan,
            processes=1,
            checkpoint_every=1e9,
            should_stop=lambda: len(done) > 1,
            on_job_end=lambda job, outcome: done.append(job),
            on_progress=lambda running: done.append(None) if done else None,  # the last look, after the last end
        )
    assert plan[0].is_finished


class LosingWorkers:
    """Workers that are lost so many times; with or without a checkpoint before each loss."""

    def __init__(self, losses: int, stores: bool) -> None:
        self.losses, self.stores = losses, stores

    def submit(self, job: jobs.Job) -> Future:
        future = Future()
        if not self.losses:
            future.set_result(jobs.JobOutcome())
            return future
        if self.stores:
            Checkpoints(job.folder / "checkpoints").save({"losses": self.losses})
        self.losses -= 1
        future.set_exception(jobs.WorkerLost("its node was lost"))
        return future

    def is_running(self, job, future):
        return False


@pytest.mark.parametrize(("losses", "stores", "ends"), [(2, False, True), (3, False, False), (7, True, True)])
def test_a_job_is_taken_up_again_unless_its_workers_are_lost_without_progress(tmp_path, losses, stores, ends):
    plan = compare.plan_comparison("digits", [], 1, tmp_path)
    outcomes = []
    jobs._run_on_workers(
        plan, LosingWorkers(losses, stores), None, bool, lambda _: None, lambda _, outcome: outcomes.append(outcome)
    )
    assert [outcome.error is None for outcome in outcomes] == [ends]
    assert "its worker was lost" in outcomes[0].warnings[0]
    assert ends or "its node was lost, 3 times without a checkpoint" in outcomes[0].error


def test_a_second_ctrl_c_does_not_wait_for_a_worker_that_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_run_job", _sleep)
    begun = time.monotonic()

    def stop() -> bool:
        if time.monotonic() - begun > 8:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        jobs.run_jobs(
            compare.plan_comparison("digits", [], 1, tmp_path), processes=1, checkpoint_every=1e9, should_stop=stop
        )
    assert time.monotonic() - begun < 40


def _sleep(job: jobs.Job, checkpoint_every: float) -> None:
    time.sleep(60)
