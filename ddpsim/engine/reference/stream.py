"""A device stream: a FIFO of work, with CUDA's three verbs launch, wait and record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from simpy import Environment, Event

from ddpsim.cluster.transfers import Slowing
from ddpsim.engine.reference.shared_link import Progress
from ddpsim.engine.sharing import FULL
from ddpsim.result.timeline import Kind, Span

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
        self._slowings: list[Slowing] = []
        self._rate = FULL
        self._work: Progress | None = None
        self._tell_busy = tell_busy
        self._works = False

    def launch(self, kind: Kind, duration_ns: int, names: tuple[str, ...] = ()) -> None:
        """Append work of a known duration; `names`: of its Span."""
        self._submit(lambda: self._start(kind, duration_ns, names))

    def slow_down(self, slowing: Slowing) -> None:
        """Work takes longer from now on; of several the largest that is of several counts."""
        self._slowings.append(slowing)
        self._set_rate()

    def recover(self, slowing: Slowing) -> None:
        """Take one `slow_down` back."""
        self._slowings.remove(slowing)
        self._set_rate()

    def wait(self, event: Event, kind: Kind) -> None:
        """Let nothing that is launched later begin before `event`."""
        self._submit(lambda: self._await(kind, event))

    def record(self) -> Event:
        """An event that fires when everything launched so far is done."""
        event = self._env.event()
        self._submit(lambda: self._fire(event))
        return event

    def _set_rate(self) -> None:
        match self._slowings:
            case []:
                self._rate = FULL
            case [one]:
                self._rate = 1 / one.alone
            case several:
                self._rate = 1 / max(slowing.crowded for slowing in several)
        if self._work:
            self._work.set_rate(self._rate)

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

    def _start(self, kind: Kind, duration_ns: int, names: tuple[str, ...]) -> bool:
        self._tell(works=True)
        finish = partial(self._finish, kind, int(self._env.now), names)
        if self._paced:
            self._work = Progress(self._env, duration_ns, finish, self._rate)
        else:
            self._env.timeout(duration_ns).callbacks.append(finish)
        return True

    def _await(self, kind: Kind, event: Event) -> bool:
        if event.processed:
            return False
        self._tell(works=False)
        event.callbacks.append(partial(self._finish, kind, int(self._env.now), ()))
        return True

    def _finish(self, kind: Kind, start_ns: int, names: tuple[str, ...], _: Any = None) -> None:
        if self._observe and self._env.now > start_ns:
            self._observe(Span(kind, start_ns, int(self._env.now), names))
        self._advance()

    def _fire(self, event: Event) -> bool:
        event.succeed(self._env.now)
        return False
