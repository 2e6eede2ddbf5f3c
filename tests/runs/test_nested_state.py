import torch

from agscl.runs.nested_state import hash_state


def test_the_hash_of_a_state_depends_on_signs_of_zero_dtypes_and_names():
    base = hash_state({"a": torch.tensor([0.0, 1.0])})
    assert hash_state({"a": torch.tensor([-0.0, 1.0])}) != base
    assert hash_state({"a": torch.tensor([0.0, 1.0], dtype=torch.float64)}) != base
    assert hash_state({"b": torch.tensor([0.0, 1.0])}) != base
