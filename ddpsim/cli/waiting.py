"""What a user sees who waits: a bar on a terminal, and what is known when Ctrl-C ends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

from ddpsim.progress import Stage, heard

__all__ = ["waiting"]

_AFTER_S = 1.0  # what is answered sooner shows no bar
_EVERY_S = 0.2
_WIDTH = 24
_ROUNDED = 1e-6  # of a part: sums of thirds are no whole numbers
_CLEAR = "\r\x1b[K"


@contextmanager
def waiting(unfinished: str = "") -> Iterator[None]:
    """Show how far the questions asked within have come; `unfinished`: what Ctrl-C leaves undone.

    Ctrl-C ends the process with what is known on stderr, and exit code 130.
    """
    with heard() as told, _bar(told):
        try:
            yield
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
    if interrupted:
        print(*_stopped(told, unfinished), sep="\n", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _bar(told: Stage) -> Iterator[None]:
    """On a terminal's stderr, once there is something to wait for; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    done = Event()
    drawn = Thread(target=_draw, args=(told, done), daemon=True)
    drawn.start()
    try:
        yield
    finally:
        done.set()
        drawn.join()


def _draw(told: Stage, done: Event) -> None:
    begun_s, is_shown = monotonic(), False
    while not done.wait(_EVERY_S if is_shown else _AFTER_S):
        if told.total:
            sys.stderr.write(_CLEAR + _line(told, monotonic() - begun_s))
            sys.stderr.flush()
        is_shown = True
    if is_shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


def _line(told: Stage, passed_s: float) -> str:
    """A bar, the parts that have ended, and the time left if the others take as long."""
    share = min(1.0, told.ended / told.total)
    filled = int(_WIDTH * share)
    left = f"  {_time(passed_s * (1 / share - 1))} left" if share else ""
    bar = "#" * filled + "." * (_WIDTH - filled)
    return f"[{bar}] {_ended(told)} of {told.total} {told.what}{left}"


def _ended(told: Stage) -> int:
    return min(told.total, int(told.ended + _ROUNDED))


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _stopped(told: Stage, unfinished: str) -> Iterator[str]:
    count = f" after {_ended(told)} of {told.total} {told.what}" if told.total else ""
    yield f"\nstopped{count}{unfinished and '; '}{unfinished}"
    yield from told.known
