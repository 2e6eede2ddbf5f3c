"""What is done in threads while a run starts."""

import subprocess
import sys
import time

from agscl.fast import warm_up

WARM_UP = """
import sys
from contextlib import nullcontext
import torch
from agscl.fast import warm_up

warm_up.suppress = lambda *_: nullcontext()  # or nothing would be seen to fail
before, known = torch.get_rng_state(), set(sys.modules)
warm_up.warm_up_device("cpu")
assert torch.equal(torch.get_rng_state(), before)
print(sorted(set(sys.modules) - known), "torch._dynamo" in known)
"""


def test_warming_up_a_device_draws_no_random_numbers_and_imports_nothing():
    """Two threads that import the same module may see it half made."""
    done = subprocess.run([sys.executable, "-c", WARM_UP], capture_output=True, text=True)
    assert done.stdout.strip() == "[] False", done.stderr


def test_a_warm_up_is_waited_for_and_skipped_where_triton_is_loaded(monkeypatch):
    done = []
    monkeypatch.setattr(warm_up, "warm_up_device", lambda device: time.sleep(0.05) or done.append(device))
    monkeypatch.setattr(warm_up, "precompute_triton_cache_key", lambda: done.append("triton"))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    warm_up.WarmUp("cpu").wait()
    assert sorted(done) == ["cpu", "triton"]
    monkeypatch.setitem(sys.modules, "triton", warm_up)
    warm_up.WarmUp("cpu").wait()
    assert len(done) == 2
