"""What `torchrun` says of this process, known before torch is imported."""

from __future__ import annotations

import os


def find_torchrun_rank() -> int | None:
    """The rank of this process, its number from 0, if `torchrun` started it as one of several."""
    several = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ["RANK"]) if several else None
