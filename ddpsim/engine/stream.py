"""A device stream: a FIFO of work, with CUDA's three verbs launch, wait and record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from simpy import Environment, Event

from ddpsim.engine.progress import Progress
from ddpsim.result.timeline import Kind, Span

__all__ = ["Observer", "Stream"]

Observer = Callable[[Span], None]


class Stream:
    """Work of one rank, done one after the other in the order it was launched.

    `paced`: the rate of work in progress may change, by `slow_down`. `tell_busy` hears when the
    stream begins to have work and when it has none, or only waits.
    """

    def __init__(
        self,
        env: Environment,
        observe: Observer | None,
        *,
        paced: bool = False,
        tell_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._env = env
        self._observe = observe
        self._queue: deque[Callable[[], bool]] = deque()
        self._busy = False
        self._paced = paced
        self._slowdowns: list[Fraction] = []
        self._work: Progress | None = None
        self._tell_busy = tell_busy
        self._works = False

    def launch(self, kind: Kind, duration_ns: int) -> None:
        """Append work of a known duration."""
        self._submit(lambda: self._begin(kind, self._start(duration_ns)))

    def slow_down(self, factor: Fraction) -> None:
        """Work takes `factor` times as long from now on; of several factors the largest counts."""
        self._slowdowns.append(factor)
        self._set_rate()

    def recover(self, factor: Fraction) -> None:
        """Take one `slow_down` back."""
        self._slowdowns.remove(factor)
        self._set_rate()

    def wait(self, event: Event, kind: Kind) -> None:
        """Let nothing that is launched later begin before `event`."""
        self._submit(lambda: event.callbacks is not None and self._await(kind, event))

    def record(self) -> Event:
        """An event that fires when everything launched so far is done."""
        event = self._env.event()
        self._submit(lambda: self._fire(event))
        return event

    def _set_rate(self) -> None:
        if self._work:
            self._work.set_rate(self._rate)

    @property
    def _rate(self) -> Fraction:
        return 1 / max(self._slowdowns, default=Fraction(1))

    def _start(self, duration_ns: int) -> Event:
        self._tell(works=True)
        if not self._paced:
            return self._env.timeout(duration_ns)
        self._work = Progress(self._env, duration_ns, self._rate)
        return self._work.done

    def _tell(self, *, works: bool) -> None:
        if works != self._works:
            self._works = works
            self._tell_busy(works)

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
        self._tell(works=False)

    def _await(self, kind: Kind, event: Event) -> bool:
        self._tell(works=False)
        return self._begin(kind, event)

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
