"""On real drawings: once every important node is frozen, nothing at all is forgotten."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from agscl import tasks
from agscl.experiments.build import build_model
from agscl.experiments.config import configure
from agscl.training import Trainer

DATA = Path(os.environ.get("AGSCL_DATA", Path(__file__).parents[3] / "shared" / "data"))
RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.skipif(not (DATA / "omniglot").is_dir(), reason="needs omniglot/all.parquet in the folder AGSCL_DATA")
def test_two_alphabets_with_everything_frozen_keep_every_bit_of_the_old_logits(monkeypatch, tmp_path):
    monkeypatch.setenv("AGSCL_DATA", str(DATA))
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path))
    config = configure("omniglot5", method="agscl", seed=0, epochs=3, lam=math.inf, mu=170.0)
    sequence = tasks.load("omniglot", seed=0, alphabets=2)
    model, method = build_model(config, "agscl", sequence[0].train_x[:2])
    trainer = Trainer(model, method, sequence, config.training, seed=0)
    old = None
    while trainer.advance():
        if trainer.task_index == 1 and old is None:
            model.eval()
            with torch.no_grad():
                old = model(sequence[0].test_x, sequence[0].name)
            model.train()
    figures = trainer.statistics[1]
    assert figures["frozen"] == figures["important_before"] > 0
    model.eval()
    with torch.no_grad():
        assert torch.equal(old, model(sequence[0].test_x, sequence[0].name))
    assert trainer.accuracies[1][0] == trainer.accuracies[0][0]


@pytest.mark.skipif(not (DATA / "omniglot").is_dir(), reason="needs omniglot/all.parquet in the folder AGSCL_DATA")
def test_drawings_and_split_are_those_of_the_measured_runs(monkeypatch, tmp_path):
    """Computed here from the file itself, as it was when the runs in results/ were made."""
    monkeypatch.setenv("AGSCL_DATA", str(DATA))
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path))
    table = parquet.read_table(DATA / "omniglot" / "all.parquet")
    for _ in ("decoded", "from the cache"):
        for alphabet, task in enumerate(tasks.load("omniglot", seed=3, alphabets=2)):
            rows = np.flatnonzero(np.asarray(table.column("alphabet")) == alphabet)
            drawings = []
            for row in rows:
                with Image.open(io.BytesIO(table.column("image")[row]["bytes"].as_py())) as image:
                    small = image.convert("L").resize((28, 28), Image.Resampling.BOX)
                drawings.append(1 - torch.from_numpy(np.array(small, dtype=np.float32) / 255)[None])
            x = torch.stack(drawings)
            _, y = np.unique(np.asarray(table.column("character"))[rows], return_inverse=True)
            order = np.random.default_rng([3, alphabet]).permutation(len(rows))
            tenth = len(rows) // 10
            parts = np.split(order, [tenth, 2 * tenth])
            for split, part in zip(("test", "valid", "train"), parts, strict=True):
                assert torch.equal(getattr(task, f"{split}_x"), x[part])
                assert getattr(task, f"{split}_y").tolist() == y[part].tolist()


@pytest.mark.parametrize("name", ["omniglot5", "omniglot50"])
def test_in_the_measured_runs_no_accuracy_changes_in_a_task_that_left_every_important_node_alone(name):
    shown = 0
    for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]:
        outcome = run["methods"]["agscl"]
        accuracies = outcome["accuracies"]
        for task, figures in enumerate(outcome["statistics"]):
            if task and figures["frozen"] == figures["important_before"]:
                shown += 1
                assert accuracies[task][:task] == accuracies[task - 1], (run["seed"], task)
    assert shown > 0
