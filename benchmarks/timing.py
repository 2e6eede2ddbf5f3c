"""Timing contenders side by side: they take turns with a plain one, so that a busy machine slows all alike."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Act = Callable[[], object]
Pairs = list[tuple[float, float]]


def clocked(act: Act, device: str, times: int = 1) -> float:
    """Seconds of one call, of `times` in a row: by CUDA events there, else processor time, in which other programs do
    not count."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            act()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times
    start_time = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - start_time) / times


def take_turns(
    plain: Act,
    acts: Mapping[str, Act],
    rounds: int,
    device: str,
    times: int = 1,
    clock: Callable[[Act, str, int], float] = clocked,
) -> dict[str, Pairs]:
    """Seconds of each act and of the plain one, in every round. Each act stands between two plain ones, of which the
    mean is taken; the order is drawn anew every time, and a first round warms up."""
    draw = random.Random(0)
    order = list(acts)
    taken: dict[str, Pairs] = {name: [] for name in acts}
    for number in range(rounds + 1):
        draw.shuffle(order)
        before = clock(plain, device, times)
        for name in order:
            seconds = clock(acts[name], device, times)
            after = clock(plain, device, times)
            if number:
                taken[name].append((seconds, (before + after) / 2))
            before = after
    return taken


def summary(values: list[float], scale: float = 1.0) -> dict[str, Any]:
    """Median, quartiles, and where the median lies with 95 % certainty, whatever the distribution."""
    ordered = sorted(scale * value for value in values)
    count = len(ordered)
    cuts = statistics.quantiles(ordered, n=4, method="inclusive") if count > 1 else ordered * 3
    off = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return {"median": cuts[1], "quartiles": [cuts[0], cuts[2]], "certain": [ordered[off], ordered[count - 1 - off]]}


def in_epochs(taken: Mapping[str, list[float]], epochs: list[float]) -> dict[str, Any]:
    """Seconds of each name, and what they are in epochs of plain training, round by round."""
    return {
        "plain_epoch_seconds": summary(epochs),
        "methods": {
            name: {
                "seconds": summary(seconds),
                "epochs": summary([mine / plain for mine, plain in zip(seconds, epochs, strict=True)]),
            }
            for name, seconds in taken.items()
        },
    }


def compared(pairs: Pairs, extra: float = 0.0) -> dict[str, Any]:
    """Milliseconds of an act and of the plain one, and their ratio; `extra` seconds are added to each act."""
    whole = [(mine + extra, plain) for mine, plain in pairs]
    return {
        "milliseconds": summary([mine for mine, _ in whole], 1e3),
        "plain_milliseconds": summary([plain for _, plain in whole], 1e3),
        "ratio": summary([mine / plain for mine, plain in whole]),
    }
