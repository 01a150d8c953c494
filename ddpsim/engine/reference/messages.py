"""The plain model of a collective: every message is an event."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from simpy import Environment, Event

from ddpsim.cluster.algorithms.schedule import Message, Schedule
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.result.timeline import MessageSpan

MessageObserver = Callable[[MessageSpan], None]


class RingSteps:
    """Chunks that go round a ring, one at a time from each rank to its right neighbour.

    A rank's next chunk is under way once the link to the rank is free and its left neighbour has
    that many, one of which it now sends on. The link is free again when the chunk has left, which
    arrives a latency later. `ended(rank)` is called when the rank has all.
    """

    def __init__(
        self,
        env: Environment,
        ring: RingTransfer,
        ended: Callable[[int], object],
        observe: MessageObserver | None,
    ) -> None:
        self._env = env
        self._steps = ring.steps
        self._start_ns = ring.start_ns
        repeats = ring.ranks // len(ring.busy_ns)
        self._busy_ns, self._latency_ns = ring.busy_ns * repeats, ring.latency_ns * repeats
        self._ended = ended
        self._observe = observe
        self._sent = [0] * ring.ranks  # chunks under way to a rank or there
        self._received = [-1] * ring.ranks  # chunks; -1: not yet joined
        self._is_busy = [False] * ring.ranks  # the link to a rank
        self._leave = [partial(self._left, rank) for rank in range(ring.ranks)]
        self._arrive = [partial(self._arrived, rank) for rank in range(ring.ranks)]

    def join(self, rank: int) -> None:
        """A rank takes part from now on."""
        self._env.timeout(self._start_ns).callbacks.append(self._arrive[rank])

    def _arrived(self, rank: int, _: Event) -> None:
        """A rank has joined, or has one chunk more, which its right neighbour may get next."""
        self._received[rank] += 1
        chunks = self._received[rank]
        if self._observe and chunks:
            now, taken_ns = int(self._env.now), self._busy_ns[rank] + self._latency_ns[rank]
            self._observe(MessageSpan(rank, now - taken_ns, now))
        if not chunks:
            self._send(rank)
        self._send(rank + 1 - len(self._received))
        if chunks == self._steps:
            self._ended(rank)

    def _send(self, rank: int) -> None:
        """The next chunk to a rank leaves now, if it is there and the link is free."""
        sent = self._sent[rank]
        is_there = self._received[rank - 1] >= sent and self._received[rank] >= 0
        if is_there and not self._is_busy[rank] and sent < self._steps:
            self._sent[rank] += 1
            self._is_busy[rank] = True
            self._env.timeout(self._busy_ns[rank]).callbacks.append(self._leave[rank])

    def _left(self, rank: int, _: Event) -> None:
        """A chunk has left for a rank, and the link is free."""
        self._env.timeout(self._latency_ns[rank]).callbacks.append(self._arrive[rank])
        self._is_busy[rank] = False
        self._send(rank)


class ScheduleSteps:
    """An algorithm's messages, a process for each; its last one ends all."""

    def __init__(
        self,
        env: Environment,
        schedule: Schedule,
        start_ns: int,
        ended: Callable[[], None],
        observe: MessageObserver | None,
    ) -> None:
        self._env = env
        self._start_ns = start_ns
        self._observe = observe
        self._joined = [env.event() for _ in range(schedule.ranks)]
        left: list[Event] = []
        arrived: list[Event] = []
        for message in schedule.messages:
            ends = (message.source, message.target)
            waits = [self._joined[end] for end in ends if end < schedule.ranks]
            waits += [arrived[i] for i in message.after] + [left[i] for i in message.behind]
            left.append(env.event())
            arrived.append(env.event())
            env.process(self._send(message, waits, left[-1], arrived[-1]))
        env.all_of([*self._joined, *arrived]).callbacks.append(lambda _: ended())

    def join(self, rank: int) -> None:
        """A rank takes part from now on."""
        begun = self._env.timeout(self._start_ns)
        begun.callbacks.append(partial(_succeed, self._joined[rank]))

    def _send(
        self, message: Message, waits: Sequence[Event], left: Event, arrived: Event
    ) -> Generator[Event, Any, None]:
        yield self._env.all_of(waits)
        start_ns = int(self._env.now)
        self._env.timeout(message.occupies_ns).callbacks.append(partial(_succeed, left))
        yield self._env.timeout(message.takes_ns)
        arrived.succeed()
        if self._observe:
            self._observe(MessageSpan(message.target, start_ns, int(self._env.now)))


def _succeed(event: Event, _: Event) -> None:
    event.succeed()
