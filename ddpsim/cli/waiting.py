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

    Ctrl-C ends the process with the findings so far on stderr, and exit code 130.
    """
    with heard() as progress, bar(progress):
        progress.say = lambda text: print(f"ddpsim: {text}", file=sys.stderr)
        try:
            yield
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
    if interrupted:
        print(*_stopped(progress, unfinished), sep="\n", file=sys.stderr)
        sys.exit(130)


@contextmanager
def bar(progress: Stage) -> Iterator[None]:
    """Show how far a stage has come, on a terminal's stderr, once it takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    done = Event()
    drawn = Thread(target=_draw, args=(progress, done), daemon=True)
    drawn.start()
    try:
        yield
    finally:
        done.set()
        drawn.join()


def _draw(progress: Stage, done: Event) -> None:
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
            total = progress.total or None
            shown.update(task, description=progress.what, completed=_ended(progress), total=total)


def _ended(progress: Stage) -> int:
    return min(progress.total, int(progress.ended + _ROUNDED))


def _stopped(progress: Stage, unfinished: str) -> Iterator[str]:
    count = (
        f" after {_ended(progress)} of {progress.total} {progress.what}" if progress.total else ""
    )
    yield f"\nstopped{count}{unfinished and '; '}{unfinished}"
    yield from progress.findings
