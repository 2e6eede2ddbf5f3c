import contextlib
import signal

import pytest

from agscl.cli import main as cli_main
from agscl.cli.signals import catch_stop_signals


def test_a_signal_interrupts_at_once_until_training_has_started():
    with catch_stop_signals() as stopped:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)  # while data is downloaded, say
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_closed_terminal_asks_to_stop_but_not_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with catch_stop_signals() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGHUP)
            assert stopped()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with catch_stop_signals() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGHUP)
            assert not stopped()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_that_an_import_swallowed_ends_without_a_traceback(monkeypatch):
    def run_command(arguments):
        with contextlib.suppress(KeyboardInterrupt):  # as torch does where it imports numpy
            signal.raise_signal(signal.SIGINT)
        raise AttributeError("module 'numpy' is imported by half")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(cli_main, "run_command", run_command)
        assert cli_main.main([]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
