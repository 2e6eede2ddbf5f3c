"""Ctrl-C and SIGTERM as requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Within the block, SIGINT and SIGTERM ask training to stop; the function yielded tells whether one came.

    A second signal raises KeyboardInterrupt. So does the first one until the function is called for the first time:
    before training, e.g. while data is loaded, nothing has to be stored.
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

    before = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield should_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
