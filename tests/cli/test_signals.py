import signal

import pytest

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
