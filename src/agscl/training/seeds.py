"""Seeds for every place of a run, derived from the run's own."""

from __future__ import annotations

import numpy as np


def derive_seed(*parts: int) -> int:
    """One seed from several numbers, so that neighbouring seeds and positions share no random stream."""
    entropy = [len(parts), *parts]  # SeedSequence ignores trailing zeros: (3,) and (3, 0) would give the same seed
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
