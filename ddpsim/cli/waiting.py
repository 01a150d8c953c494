"""What a user sees who waits: a bar on a terminal, and what is known when Ctrl-C ends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from ddpsim.progress import Stage, heard

_AFTER_S = 1.0  # what is answered sooner shows no bar
_EVERY_S = 0.2
_ROUNDED = 1e-6  # of a part: sums of thirds are no whole numbers


@contextmanager
def waiting(unfinished: str = "") -> Iterator[None]:
    """Show how far the questions asked within have come; `unfinished`: what Ctrl-C leaves undone.

    Ctrl-C ends the process with what is known on stderr, and exit code 130.
    """
    with heard() as told, bar(told):
        told.say = lambda text: print(f"ddpsim: {text}", file=sys.stderr)
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
def bar(told: Stage) -> Iterator[None]:
    """How far a stage has come, on a terminal's stderr once it takes a while; nothing elsewhere."""
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
    if done.wait(_AFTER_S):
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(file=sys.stderr)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        while not done.wait(_EVERY_S):
            total = told.total or None
            shown.update(task, description=told.what, completed=_ended(told), total=total)


def _ended(told: Stage) -> int:
    return min(told.total, int(told.ended + _ROUNDED))


def _stopped(told: Stage, unfinished: str) -> Iterator[str]:
    count = f" after {_ended(told)} of {told.total} {told.what}" if told.total else ""
    yield f"\nstopped{count}{unfinished and '; '}{unfinished}"
    yield from told.known
