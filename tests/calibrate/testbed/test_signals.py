"""Signals that are postponed, or become exceptions."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from calibrate import signals


def test_postponed_signals_come_after_the_block() -> None:
    done = []

    def interrupted() -> None:
        with signals.postponed():
            signal.raise_signal(signal.SIGINT)
            done.append("all of the block")

    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_process_become_exceptions(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, signals.as_exceptions():
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signals_outside_the_main_thread_are_left_alone() -> None:
    seen: list[object] = []

    def enter() -> None:
        with signals.as_exceptions(), signals.postponed():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
