"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) as requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Within the block, SIGINT, SIGTERM and SIGHUP ask training to stop; the function yielded tells if one came.

    A second signal raises KeyboardInterrupt. So does the first one until the function is called for the first time:
    before training, e.g. while data is loaded, nothing has to be stored. A signal that is ignored, as SIGHUP is under
    nohup, stays ignored.
    """
    received: list[int] = []
    training = False

    def handle_signal(number: int, frame: object) -> None:
        if received or not training:
            raise KeyboardInterrupt
        received.append(number)

    def should_stop() -> bool:
        nonlocal training
        training = True
        return bool(received)

    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle_signal) for number in numbers}
    try:
        yield should_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
