import io
import json

import numpy as np
import pytest
import torch

from agscl import tasks
from agscl.networks import NETWORKS


def test_digits_are_five_tasks_that_hold_every_digit_once():
    sequence = tasks.load("digits", seed=0)
    assert [task.classes for task in sequence] == [2] * 5
    assert sorted(digit for task in sequence for digit in task.name.split("-")) == sorted("0123456789")
    assert sum(len(task.train_y) + len(task.test_y) for task in sequence) == 1797


def test_digits_are_split_class_by_class_and_scaled_to_one():
    for task in tasks.load("digits", seed=3):
        assert task.train_x.min() >= 0
        assert task.train_x.max() <= 1
        assert task.valid_x is None
        for label in (0, 1):
            held_out = (task.test_y == label).sum() / ((task.test_y == label).sum() + (task.train_y == label).sum())
            assert abs(held_out - 0.25) < 0.01


def test_digits_keep_training_and_test_examples_apart():
    for task in tasks.load("digits", seed=1):
        train = {x.numpy().tobytes() for x in task.train_x}
        assert not any(x.numpy().tobytes() in train for x in task.test_x)


def test_the_seed_decides_pairs_and_split():
    first, again, other = (tasks.load("digits", seed=seed) for seed in (5, 5, 6))
    assert [task.name for task in first] == [task.name for task in again] != [task.name for task in other]
    assert all(torch.equal(a.train_x, b.train_x) for a, b in zip(first, again, strict=True))
    assert tasks.load("digits", seed=6, shuffle_classes=False)[0].name == "0-1"


def test_an_unknown_sequence_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="digits, omniglot"):
        tasks.load("imagenet", seed=0)


@pytest.fixture
def omniglot(tmp_path, monkeypatch):
    """Two alphabets of three and two characters, in the form of the real file."""
    pa = pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    parquet = pytest.importorskip("pyarrow.parquet")

    def drawing(number):
        pixels = np.full((105, 105), 255, dtype=np.uint8)
        pixels[number : number + 15, 30:60] = 0
        file = io.BytesIO()
        image.fromarray(pixels).convert("1").save(file, format="PNG")
        return {"bytes": file.getvalue(), "path": None}

    rows = [
        (alphabet, 10 * alphabet + c, n)
        for alphabet, count in ((0, 3), (1, 2))
        for c in range(count)
        for n in range(20)
    ]
    names = ["images_background/Greek", "images_background/St._Old"]
    table = pa.table(
        {
            "image": [drawing(n) for _, _, n in rows],
            "alphabet": [alphabet for alphabet, _, _ in rows],
            "character": [character for _, character, _ in rows],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"alphabet": {"names": names}}}})})
    (tmp_path / "omniglot").mkdir()
    parquet.write_table(table, tmp_path / "omniglot" / "all.parquet")
    monkeypatch.setenv("AGSCL_DATA", str(tmp_path))


@pytest.mark.usefixtures("omniglot")
def test_every_omniglot_alphabet_is_a_task_split_80_10_10():
    greek, old = tasks.load("omniglot", seed=0, alphabets=2)
    assert (greek.name, greek.classes, old.name, old.classes) == ("Greek", 3, "St__Old", 2)
    assert [len(y) for y in (greek.train_y, greek.valid_y, greek.test_y)] == [48, 6, 6]
    assert greek.train_x.shape[1:] == (1, 28, 28)
    everything = torch.cat([greek.train_y, greek.valid_y, greek.test_y])
    assert torch.bincount(everything).tolist() == [20, 20, 20]


@pytest.mark.usefixtures("omniglot")
def test_omniglot_strokes_are_one_on_zero():
    (task,) = tasks.load("omniglot", seed=0, alphabets=1)
    assert task.train_x.max() == 1
    assert task.train_x.min() == 0
    assert task.train_x.mean() < 0.1


def test_missing_omniglot_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("AGSCL_DATA", raising=False)
    with pytest.raises(tasks.DataMissing, match="Set AGSCL_DATA"):
        tasks.load("omniglot", seed=0)
    monkeypatch.setenv("AGSCL_DATA", str(tmp_path))
    with pytest.raises(tasks.DataMissing, match=str(tmp_path / "omniglot" / "all.parquet")):
        tasks.load("omniglot", seed=0)


@pytest.mark.parametrize(("name", "shape"), [("mlp", (64,)), ("cifar", (3, 32, 32)), ("omniglot", (1, 28, 28))])
def test_each_network_yields_as_many_features_as_it_says(name, shape):
    trunk = NETWORKS[name]()
    assert trunk(torch.zeros(2, *shape)).shape == (2, trunk.features)
