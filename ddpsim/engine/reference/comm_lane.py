"""A rank's communication lane: collectives in launch order, one or a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event, Store

from ddpsim.cluster.transfers import MOST_SLOWED, Slowing
from ddpsim.engine.reference.network import Meeting, Network
from ddpsim.engine.reference.stream import Stream
from ddpsim.result.timeline import CommSpan
from ddpsim.strategies.instructions import Communicate

CommObserver = Callable[[CommSpan], None]


@dataclass(slots=True)
class Collective:
    """One launched collective: `ready` fires when its data is there, `done` when it has ended.

    `kept_deviations`: how much more of its speed compute keeps beside it on this rank than on
    ranks on average (`Interference.compute_on`).
    """

    key: Hashable
    launched: Communicate
    ready: Event
    done: Event
    kept_deviations: float = 0.0


class CommLane:
    """NCCL's stream (one worker) or gloo's threads (two), fed first in, first out.

    `spins`: a collective occupies the device from its launch on, as NCCL's kernels wait for peers
    on their multiprocessors; gloo's threads sleep. `blocking`: the host computes itself, and a
    hook's work after a collective holds the backend's thread.
    """

    def __init__(
        self,
        env: Environment,
        rank: int,
        network: Network,
        compute: Stream,
        observe: CommObserver | None,
        *,
        workers: int,
        spins: bool,
        blocking: bool,
    ) -> None:
        self._env = env
        self._rank = rank
        self._network = network
        self._compute = compute
        self._spins = spins
        self._blocking = blocking
        self._observe = observe
        self._queue = Store(env)
        for _ in range(workers):
            env.process(self._work())

    def launch(self, collective: Collective) -> None:
        """Append a collective to the lane."""
        self._queue.put(collective)

    def _work(self) -> Generator[Event, Any, None]:
        while True:
            collective: Collective = yield self._queue.get()
            yield collective.ready
            joined_ns = int(self._env.now)
            launched = collective.launched
            sent = launched.operation, launched.size_bytes
            meeting = self._network.join(collective.key, *sent, self._rank, launched.group)
            yield from self._take_part(meeting, collective.kept_deviations)
            if self._observe:
                ready_ns, now = int(collective.ready.value or 0), int(self._env.now)
                self._observe(launched.span(ready_ns, joined_ns, int(meeting.met_ns), now))
            if not launched.after_ns:
                collective.done.succeed()
            elif self._blocking:
                yield from self._follow(collective, meeting)
            else:  # on a GPU it has a stream of its own: the next collective goes on
                self._env.process(self._follow(collective, meeting))

    def _follow(self, collective: Collective, meeting: Meeting) -> Generator[Event, Any, None]:
        """A hook's own work, which stops compute where calibration saw them share a processor."""
        after = self._env.timeout(collective.launched.after_ns)
        if self._blocking and meeting.transfer.interference.slows_compute:
            yield from self._slowed(MOST_SLOWED, after)
        else:
            yield after
        collective.done.succeed()

    def _take_part(self, meeting: Meeting, kept_deviations: float) -> Generator[Event, Any, None]:
        """Wait for the end; compute is slower meanwhile, for NCCL also while it waits for peers."""
        slowing = meeting.transfer.interference.compute_on(kept_deviations)
        if slowing.crowded == 1:
            yield meeting.ends[self._rank]
            return
        if not self._spins and not meeting.met.processed:
            yield meeting.met
        yield from self._slowed(slowing, meeting.ends[self._rank])

    def _slowed(self, slowing: Slowing, until: Event) -> Generator[Event, Any, None]:
        self._compute.slow_down(slowing)
        yield until
        self._compute.recover(slowing)
