import contextlib
import ctypes
import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agscl.system.process import gc_paused, tune_malloc


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_is_paused_and_then_as_it_was_whatever_happens(on):
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with contextlib.suppress(KeyError), gc_paused():
            within = gc.isenabled()
            raise KeyError
        assert not within
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_a_process_ends_without_a_collection_and_with_its_other_last_words():
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print('last words', gc.get_freeze_count() > 0))\n"
        "from agscl.system.process import skip_gc_at_exit\n"
        "skip_gc_at_exit()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "last words True\n"), ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_that_was_freed_is_not_asked_for_again():
    """Each new page is a page fault. The heap takes about ten rounds to settle; then a round should have no faults."""
    code = (
        "import resource, sys\n"
        "import torch\n"
        "from agscl.system.process import tune_malloc\n"
        "if sys.argv[1] == 'kept':\n"
        "    tune_malloc()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "counts = []\n"
        "for _ in range(31):\n"
        "    before = faults()\n"
        "    torch.ones(2**24)\n"
        "    counts.append(faults() - before)\n"
        "print(sorted(counts[-11:])[5])\n"  # the median of the last rounds
    )
    kept, usual = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "usual")
    )
    if usual < 100:
        pytest.skip("another allocator keeps memory here anyway")
    assert kept < usual / 10


def test_where_there_is_no_glibc_memory_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or SimpleNamespace())
    tune_malloc()
    assert asked == [None] * (sys.platform == "linux")  # and it has no such function
    monkeypatch.setattr(sys, "platform", "win32")
    asked.clear()
    tune_malloc()
    assert asked == []
