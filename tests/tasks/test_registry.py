"""Task sequences by name."""

from __future__ import annotations

import numpy as np
import pytest

from agscl import tasks


def test_an_unknown_sequence_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"digits, cifar100, .*folder:PATH, hub:NAME"):
        tasks.load("imagenet", seed=0)


def test_numpys_numbers_are_options_too():
    assert len(tasks.load("digits", seed=0, test_share=np.float32(0.3))) == 5
    with pytest.raises(ValueError, match="test_share must be a number, not 'x'"):
        tasks.load("digits", seed=0, test_share="x")
