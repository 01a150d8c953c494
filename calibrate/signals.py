"""Signals around what must be undone: none lost, none in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # Windows has the first alone


def name_of(number: int) -> str:
    """A signal's name as a person knows it; a real-time signal has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Ended(SystemExit):
    """A signal ended the program; code of its own that calls sys.exit raises no such thing."""


@contextmanager
def as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block with SystemExit, as Ctrl-C does with KeyboardInterrupt.

    A program's own handlers stay, and outside the main thread, which alone can have handlers,
    nothing changes.
    """
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    with _handled(numbers, _end):
        yield


def _end(number: int, _: FrameType | None) -> None:
    raise Ended(128 + number)


@contextmanager
def postponed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait until the end of the block."""
    came: list[int] = []
    with _handled([signal.SIGINT, *_ENDING], lambda number, _: came.append(number)):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def _handled(
    numbers: list[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
