"""Two real processes under torch.distributed (gloo) end with the same bits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agscl import AGSCL, EWC, FineTune, MultiHead, PaperAGSCL
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.warnings import SelfCheckWarning
from loops import blobs, leave_process_group, make, mlp


def _rank(rank: int, port: int, folder: str, late_heads: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    for task in () if late_heads else ("t0", "t1"):
        model.add_head(task, 3)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    # Other seeds: draws must be broadcast.
    method = PaperAGSCL(parallel, torch.zeros(2, 16), mu=8, lam=1000, rho=0.3, seed=rank)
    for number in range(2):
        mine = blobs(number)[rank::2]  # other data on each rank
        if late_heads:  # as in the README's loop; each rank draws another head
            torch.manual_seed(rank)
            model.add_head(f"t{number}", 3)
        method.begin_task(f"t{number}", optimizer)
        for _ in range(10):
            for x, y in mine:
                optimizer.zero_grad()
                F.cross_entropy(parallel(x, f"t{number}"), y).backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(mine)
    found = {"model": model.state_dict(), "omega": method.knowledge.omega, "first": method.knowledge.first_task}
    if late_heads:
        found |= {cls.__name__: _learn_with_batchnorm(rank, cls) for cls in (EWC, AGSCL)}
        with pytest.warns(SelfCheckWarning, match="'t0' differs between ranks.*Give the method the Distributed"):
            _learn_with_batchnorm(rank, FineTune, knows_ranks=False)
    torch.save(found, Path(folder) / f"{rank}.pt")
    leave_process_group()


def _learn_with_batchnorm(rank: int, cls: type[Method], *, knows_ranks: bool = True) -> dict[str, torch.Tensor]:
    """Weights and statistics of two tasks; the first head may not know its number of inputs when its task begins."""
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()))
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    settings = {"batchnorm": "per_task"} if cls is EWC else {}
    method = make(cls, parallel if knows_ranks else model, **settings)
    for number in range(2):
        task, mine = f"t{number}", blobs(number)[rank::2]
        torch.manual_seed(rank)
        model.add_head(task, 3)
        method.begin_task(task, optimizer, epochs=1)
        for x, y in mine:
            optimizer.zero_grad()
            F.cross_entropy(parallel(x, task), y).backward()
            optimizer.step()
        method.end_epoch()
        method.end_task(mine)
    kept = getattr(method.knowledge, "norm_statistics", {}).items()
    return model.state_dict() | {f"{task} {name}": t for task, table in kept for name, t in table.items()}


@pytest.mark.parametrize("late_heads", [False, True])
def test_two_ranks_with_other_data_and_other_seeds_agree_to_the_bit(tmp_path, late_heads):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path), late_heads), nprocs=2)
    a, b = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(a["omega"], b["omega"])
    assert torch.equal(a["first"], b["first"])
    assert 0 < int((a["omega"] == 0).sum()) < 64
    for key in ("model", "EWC", "AGSCL") if late_heads else ("model",):
        for name, tensor in a[key].items():
            assert torch.equal(tensor, b[key][name]), name
