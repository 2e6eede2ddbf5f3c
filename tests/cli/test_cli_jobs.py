import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from agscl.cli import jobs as cli_jobs
from agscl.cli import progress as cli_progress
from agscl.experiments import compare, jobs


def test_on_a_terminal_there_is_a_bar_for_all_runs_and_one_for_each_running(tmp_path, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(cli_progress, "console", Console(file=written, force_terminal=True, width=80))
    plan = compare.plan_comparison("digits", ["l2"], 1, tmp_path)
    (tmp_path / "l2-seed0").mkdir()
    (tmp_path / "l2-seed0" / "events.jsonl").write_text('{"progress": 0.5}\n{"progress": 0.7')
    with cli_progress.JobsProgress(plan) as progress:
        progress.show_running(plan)
        progress.show_end(plan[1], "average accuracy 90.0 %")
        progress.show_running(plan[:1])
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    lines = shown.replace("\r", "\n").splitlines()
    bars = [line for line in lines if line.startswith(("all", "L2"))]
    assert any("75 %" in line and "1 of 2 runs" in line for line in bars)
    assert any(line.startswith("L2, seed 0") and "50 %" in line for line in bars)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("on", [False, True])
def test_several_runs_on_a_gpu_print_how_to_start_mps(on, tmp_path, monkeypatch, capsys):
    service = tmp_path / "nvidia-cuda-mps-control"
    service.write_text("#!/bin/sh\n")
    service.chmod(0o755)
    if on:
        (tmp_path / "control").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(jobs, "run_jobs", lambda plan, **more: None)
    for device, seeds in (("cuda", 2), ("cpu", 2), ("cuda", 1)):
        plan = compare.plan_comparison("digits", ["finetune"], seeds, tmp_path / f"{device}{seeds}")
        plan = [replace(job, config=replace(job.config, device=device)) for job in plan]
        cli_jobs.run_jobs_with_progress(plan, processes=2, checkpoint_every=60.0)
        told = "nvidia-cuda-mps-control -d" in " ".join(capsys.readouterr().out.split())
        assert told == (not on and device == "cuda" and seeds == 2)
