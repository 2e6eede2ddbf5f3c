"""Omniglot's tasks; and on real drawings: once every important node is frozen, nothing at all is forgotten."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import small_images
from agscl import tasks
from agscl.experiments.build import build_model
from agscl.experiments.run_config import configure
from agscl.training import Trainer
from real_data import REAL_DATA, needs_dataset

RESULTS = Path(__file__).parents[2] / "results"


@needs_dataset("omniglot")
def test_two_alphabets_with_everything_frozen_keep_every_bit_of_the_old_logits(monkeypatch, tmp_path):
    monkeypatch.setenv("AGSCL_DATA", str(REAL_DATA))
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


@needs_dataset("omniglot")
def test_drawings_and_split_are_those_of_the_measured_runs(monkeypatch, tmp_path):
    """Computed here from the file itself, as it was when the runs in results/ were made."""
    monkeypatch.setenv("AGSCL_DATA", str(REAL_DATA))
    monkeypatch.setenv("AGSCL_CACHE", str(tmp_path))
    table = parquet.read_table(REAL_DATA / "omniglot" / "all.parquet")
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


class TestOmniglot:
    @pytest.fixture
    def omniglot(self, data):
        """Two alphabets of three and two characters, in the form of the real file."""

        def drawing(number):
            pixels = np.full((105, 105), 255, dtype=np.uint8)
            pixels[30 + 2 * number : 45 + 2 * number, 30:60] = 0
            file = io.BytesIO()
            small_images.Image.fromarray(pixels).convert("1").save(file, format="PNG")
            return {"bytes": file.getvalue(), "path": None}

        rows = [
            (alphabet, 10 * alphabet + c, n)
            for alphabet, count in ((0, 3), (1, 2))
            for c in range(count)
            for n in range(20)
        ]
        names = ["images_background/Greek", "images_background/St._Old"]
        table = small_images.pyarrow.table(
            {
                "image": [drawing(n) for _, _, n in rows],
                "alphabet": [alphabet for alphabet, _, _ in rows],
                "character": [character for _, character, _ in rows],
            }
        ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"alphabet": {"names": names}}}})})
        small_images.write_parquet(table, data / "omniglot" / "all.parquet")

    @pytest.mark.usefixtures("omniglot")
    def test_every_alphabet_is_a_task_split_80_10_10(self):
        greek, old = tasks.load("omniglot", seed=0, alphabets=2)
        assert (greek.name, greek.classes, old.name, old.classes) == ("Greek", 3, "St__Old", 2)
        assert [len(y) for y in (greek.train_y, greek.valid_y, greek.test_y)] == [48, 6, 6]
        assert greek.train_x.shape[1:] == (1, 28, 28)
        everything = torch.cat([greek.train_y, greek.valid_y, greek.test_y])
        assert torch.bincount(everything).tolist() == [20, 20, 20]

    @pytest.mark.usefixtures("omniglot")
    @pytest.mark.parametrize("copies", [1, 5])
    def test_strokes_are_one_on_zero(self, copies):
        (task,) = tasks.load("omniglot", seed=0, alphabets=1, copies=copies)
        x = task.prepare_inputs(task.train_x)
        assert x.max() == 1
        assert x.min() == 0
        assert x.mean() < 0.1

    @pytest.mark.usefixtures("omniglot")
    def test_all_copies_of_a_drawing_are_on_one_side(self):
        (plain,) = tasks.load("omniglot", seed=2, alphabets=1)
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        assert task.train_x.dtype == torch.uint8
        assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [240, 30, 30]
        for split in ("train", "valid", "test"):
            x, y = getattr(task, f"{split}_x"), getattr(task, f"{split}_y")
            torch.testing.assert_close(task.prepare_inputs(x[::5]), getattr(plain, f"{split}_x"))
            assert torch.equal(y, getattr(plain, f"{split}_y").repeat_interleave(5))

    @pytest.mark.usefixtures("omniglot")
    def test_copies_differ_but_keep_their_strokes(self):
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        first, *others = task.prepare_inputs(task.train_x).view(-1, 5, 28, 28).unbind(1)
        for other in others:
            assert (other - first).abs().amax((1, 2)).min() > 0.3
            assert ((other.sum((1, 2)) / first.sum((1, 2)) - 1).abs() < 0.05).all()

    @pytest.mark.usefixtures("omniglot")
    def test_the_paper_s_split_goes_over_all_images(self):
        (task,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5, split="paper")
        assert [len(y) for y in (task.train_y, task.valid_y, task.test_y)] == [240, 30, 30]
        (leakless,) = tasks.load("omniglot", seed=2, alphabets=1, copies=5)
        assert not torch.equal(task.test_x, leakless.test_x)
        (plain,) = tasks.load("omniglot", seed=2, alphabets=1)
        (same,) = tasks.load("omniglot", seed=2, alphabets=1, split="paper")
        assert torch.equal(plain.test_x, same.test_x)

    @pytest.mark.usefixtures("omniglot")
    def test_wrong_options_are_refused(self):
        for options in ({"alphabets": 51}, {"copies": 0}, {"split": "random"}):
            with pytest.raises(ValueError, match=next(iter(options))):
                tasks.load("omniglot", seed=0, **options)

    def test_missing_data_says_where_it_was_looked_for_and_how_to_get_it(self, data, monkeypatch):
        with pytest.raises(tasks.DataError) as missing:
            tasks.load("omniglot", seed=0)
        assert str(data / "omniglot") in str(missing.value)
        assert str(Path("~/.cache/agscl/data/omniglot").expanduser()) in str(missing.value)
        assert "agscl data get omniglot" in str(missing.value)
        monkeypatch.delenv("AGSCL_DATA")
        with pytest.raises(tasks.DataError, match=r"AGSCL_DATA.* is not set"):
            tasks.load("omniglot", seed=0)
