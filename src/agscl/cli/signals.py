"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) as requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Within the block, SIGINT, SIGTERM and SIGHUP ask training to stop; the function yielded tells if one came.

    A second signal raises KeyboardInterrupt. So does the first one until the function is called for the first time:
    before training, e.g. while data is loaded, nothing has to be stored. SIGHUP stays ignored under nohup.
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

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle_signal) for number in numbers}
    try:
        yield should_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def record_interrupts() -> Iterator[list[int]]:
    """Within the block, each Ctrl-C that raises KeyboardInterrupt is also added to the list yielded."""
    interrupts: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or the caller's own
        yield interrupts
        return

    def handle_interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, handle_interrupt)
    except ValueError:  # not in the main thread, which alone gets signals
        yield interrupts
        return
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
