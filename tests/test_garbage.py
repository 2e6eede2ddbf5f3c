import contextlib
import gc
import subprocess
import sys

import pytest

from agscl.garbage import held_off


@pytest.mark.parametrize("on", [True, False])
def test_collection_is_held_off_and_then_as_it_was_whatever_happens(on):
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with contextlib.suppress(KeyError), held_off():
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
        "from agscl.garbage import none_at_exit\n"
        "none_at_exit()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "last words True\n"), ended.stderr
