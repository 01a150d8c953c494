"""The plain model of a collective: every message is an event."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from simpy import Environment, Event

from ddpsim.cluster.algorithms.schedule import Message, Schedule
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.result.timeline import MessageSpan

__all__ = ["MessageObserver", "RingSteps", "ScheduleSteps"]

MessageObserver = Callable[[MessageSpan], None]


class RingSteps:
    """Chunks that go round a ring, one at a time from each rank to its right neighbour.

    A rank's next chunk is under way once the rank has the last one and its left neighbour has
    that many too, one of which it now sends on. `ended(rank)` is called when it has all.
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
        self._step_ns = ring.step_ns * (ring.ranks // len(ring.step_ns))
        self._ended = ended
        self._observe = observe
        self._received = [-1] * ring.ranks  # chunks; -1: not yet joined
        self._waits = [False] * ring.ranks  # for its left neighbour
        self._arrive = [partial(self._arrived, rank) for rank in range(ring.ranks)]

    def join(self, rank: int) -> None:
        """A rank takes part from now on."""
        self._env.timeout(self._start_ns).callbacks.append(self._arrive[rank])

    def _arrived(self, rank: int, _: Event) -> None:
        """A rank has one chunk more: it, its right neighbour, or both may go on."""
        env, received, step_ns = self._env, self._received, self._step_ns
        chunks = received[rank] + 1
        received[rank] = chunks
        if self._observe and chunks:
            now = int(env.now)
            self._observe(MessageSpan(rank, now - step_ns[rank], now))
        if chunks == self._steps:
            self._ended(rank)
        elif received[rank - 1] >= chunks:
            env.timeout(step_ns[rank]).callbacks.append(self._arrive[rank])
        else:
            self._waits[rank] = True
        right = rank + 1 - len(received)
        if self._waits[right] and received[right] <= chunks:
            self._waits[right] = False
            env.timeout(step_ns[right]).callbacks.append(self._arrive[right])


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
        yield self._env.timeout(message.occupies_ns)
        left.succeed()
        yield self._env.timeout(message.takes_ns - message.occupies_ns)
        arrived.succeed()
        if self._observe:
            self._observe(MessageSpan(message.target, start_ns, int(self._env.now)))


def _succeed(event: Event, _: Event) -> None:
    event.succeed()
