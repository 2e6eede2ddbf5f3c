import math

import pytest
import torch

from agscl.runs import Checkpoints, hash_state

STATE = {
    "weights": {"a/b": torch.arange(6.0).view(2, 3), "a~b": torch.tensor(-0.0)},
    "kinds": [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.arange(6).view(2, 3).T,
    ],
    "plain": {"none": None, "true": True, "number": 0.1 + 0.2, "endless": -math.inf, "text": "λ", "list": [1, [2]]},
}


def numbered(folder, count):
    checkpoints = Checkpoints(folder)
    for number in range(1, count + 1):
        checkpoints.save({"number": number, "tensor": torch.full((100,), float(number))})
    return checkpoints


def test_a_checkpoint_gives_back_every_bit_dtype_and_shape(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(STATE)
    loaded = checkpoints.load()
    assert hash_state(loaded) == hash_state(STATE)
    assert loaded["plain"] == STATE["plain"]
    for old, new in zip(STATE["kinds"], loaded["kinds"], strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
    assert math.copysign(1, loaded["weights"]["a~b"]) == -1


def test_tensors_that_share_memory_are_stored_each_on_its_own(tmp_path):
    base = torch.arange(4.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"all": base, "part": base[:2]})
    assert checkpoints.load()["part"].tolist() == [0, 1]


def test_what_json_cannot_hold_is_refused_when_saving(tmp_path):
    with pytest.raises(TypeError, match="cannot hold object"):
        Checkpoints(tmp_path).save({"a": object()})
    with pytest.raises(TypeError, match="must be a string"):
        Checkpoints(tmp_path).save({"a": {1: 2}})
    assert Checkpoints(tmp_path).load() is None


def test_only_the_newest_two_checkpoints_are_kept(tmp_path):
    checkpoints = numbered(tmp_path, 5)
    assert checkpoints.list_numbers() == [4, 5]
    assert len(list(tmp_path.iterdir())) == 4
    assert checkpoints.load()["number"] == 5


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "nested", "gone"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_is_used(tmp_path, kind, damage):
    checkpoints = numbered(tmp_path, 2)
    path = tmp_path / f"000002.{kind}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        nested = b'{"checksum": 1, "state": ' * 10**5
        path.write_bytes({"truncated": content[:-7], "empty": b"", "flipped": content, "nested": nested}[damage])
    assert checkpoints.load()["number"] == 1
    assert set(checkpoints.damaged) == (set() if (damage, kind) == ("gone", "json") else {2})

    checkpoints.save({"number": 3})
    assert checkpoints.load()["number"] == 3
    assert 1 in checkpoints.list_numbers(), "the good one before a damaged one must not be dropped for it"


def test_when_every_checkpoint_is_damaged_there_is_none(tmp_path):
    checkpoints = numbered(tmp_path, 2)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    assert checkpoints.load() is None
    assert set(checkpoints.damaged) == {1, 2}


def save_in_shards(folder, monkeypatch, count=2):
    """Checkpoints with 3 tensors of 400 bytes each, in files of at most 800."""
    monkeypatch.setattr("agscl.runs.checkpoints.SHARD_BYTES", 800)
    checkpoints = Checkpoints(folder)
    for number in range(1, count + 1):
        checkpoints.save({"number": number, "tensors": [torch.full((100,), float(number + k)) for k in range(3)]})
    return checkpoints


def test_large_checkpoints_are_split_into_files_of_limited_size(tmp_path, monkeypatch):
    checkpoints = save_in_shards(tmp_path, monkeypatch, count=3)
    names = [f"00000{number}{end}" for number in (2, 3) for end in ("-01.safetensors", "-02.safetensors", ".json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    state = checkpoints.load()
    assert state["number"] == 3
    assert [tensor[0].item() for tensor in state["tensors"]] == [3, 4, 5]


@pytest.mark.parametrize("damage", ["gone", "flipped", "swapped"])
def test_a_damaged_shard_is_noticed_and_the_checkpoint_before_it_is_used(tmp_path, monkeypatch, damage):
    checkpoints = save_in_shards(tmp_path, monkeypatch)
    first, second = (tmp_path / f"000002-0{number}.safetensors" for number in (1, 2))
    if damage == "gone":
        second.unlink()
    elif damage == "flipped":
        second.write_bytes(second.read_bytes()[:-1] + b"\x01")
    else:
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
    assert checkpoints.load()["number"] == 1
    assert set(checkpoints.damaged) == {2}


def test_large_tensors_take_less_space_and_come_back_with_every_bit(tmp_path):
    weights = torch.randn(1024, 512) * 0.02
    weights[0, :4] = torch.tensor([-0.0, math.inf, math.nan, 1e-42])
    moments = torch.randn(512, 1024).square().where(torch.rand(512, 1024) > 0.3, 0.0).T
    state = {"weights": weights, "moments": moments, "small": weights[:3], "counts": torch.arange(2**18)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    loaded = checkpoints.load()
    assert hash_state(loaded) == hash_state(state)
    assert all(
        loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape for name, tensor in state.items()
    )
    assert torch.equal(loaded["weights"].view(torch.int32), weights.view(torch.int32))
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert stored < 0.9 * sum(tensor.nbytes for tensor in state.values())
    loaded["weights"].add_(1)  # memory of its own


def test_a_large_tensor_that_cannot_be_packed_is_stored_as_it_is(tmp_path):
    noise = torch.randint(-(2**31), 2**31 - 1, (2**19,), dtype=torch.int32).view(torch.float32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"noise": noise})
    assert torch.equal(checkpoints.load()["noise"].view(torch.int32), noise.view(torch.int32))
