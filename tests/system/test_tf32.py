import subprocess
import sys

import pytest
import torch

from agscl.system.tf32 import tf32_allowed, tf32_for


@pytest.mark.parametrize(("precision", "expected"), [("float32", False), ("tf32", True), ("bf16", True)])
def test_tf32_is_allowed_or_not_within_and_as_it_was_afterwards(precision, expected):
    before = tf32_allowed()

    def broken():
        with tf32_for(precision):
            assert tf32_allowed() == {"matmul": expected, "cudnn": expected}
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert tf32_allowed() == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older settings alone")
def test_what_was_set_through_torchs_newer_settings_is_left_so():
    code = """
import torch
from agscl.system.tf32 import tf32_allowed, tf32_for
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
assert tf32_allowed() == {"matmul": True, "cudnn": False}, tf32_allowed()
with tf32_for("float32"):
    assert tf32_allowed() == {"matmul": False, "cudnn": False}, tf32_allowed()
    torch.backends.cuda.matmul.allow_tf32  # what torch itself asks for
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert torch.backends.cudnn.conv.fp32_precision == "ieee"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
