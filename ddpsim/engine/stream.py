"""A device stream: a FIFO of work, with CUDA's three verbs launch, wait and record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from simpy import Environment, Event

from ddpsim.result.timeline import Kind, Span

__all__ = ["Observer", "Stream"]

Observer = Callable[[Span], None]


class Stream:
    """Work of one rank, done one after the other in the order it was launched.

    Every end is an event of its own, so that the rate of work in progress may change.
    """

    def __init__(self, env: Environment, observe: Observer | None) -> None:
        self._env = env
        self._observe = observe
        self._queue: deque[Callable[[], bool]] = deque()
        self._busy = False

    def launch(self, kind: Kind, duration_ns: int) -> None:
        """Append work of a known duration."""
        self._submit(lambda: self._begin(kind, self._env.timeout(duration_ns)))

    def wait(self, event: Event, kind: Kind) -> None:
        """Let nothing that is launched later begin before `event`."""
        self._submit(lambda: event.callbacks is not None and self._begin(kind, event))

    def record(self) -> Event:
        """An event that fires when everything launched so far is done."""
        event = self._env.event()
        self._submit(lambda: self._fire(event))
        return event

    def _submit(self, operation: Callable[[], bool]) -> None:
        self._queue.append(operation)
        if not self._busy:
            self._advance()

    def _advance(self) -> None:
        """Begin operations until one takes time."""
        self._busy = True
        while self._queue:
            if self._queue.popleft()():
                return
        self._busy = False

    def _begin(self, kind: Kind, end: Event) -> bool:
        start_ns = self._env.now

        def finish(_: Any) -> None:
            if self._observe and self._env.now > start_ns:
                self._observe(Span(kind, int(start_ns), int(self._env.now)))
            self._advance()

        if end.callbacks is None:
            raise RuntimeError("an event that has passed cannot end anything")
        end.callbacks.append(finish)
        return True

    def _fire(self, event: Event) -> bool:
        event.succeed(self._env.now)
        return False
