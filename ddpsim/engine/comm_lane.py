"""A rank's communication lane: collectives in launch order, one or a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event, Store

from ddpsim.cluster.collectives import Operation
from ddpsim.engine.network import Meeting, Network
from ddpsim.engine.stream import Stream
from ddpsim.result.timeline import CommSpan

__all__ = ["Collective", "CommLane", "CommObserver"]

CommObserver = Callable[[CommSpan], None]


@dataclass(slots=True)
class Collective:
    """One launched collective: `ready` fires when its data is there, `done` when it has ended."""

    key: Hashable
    operation: Operation
    size_bytes: int
    ready: Event
    done: Event
    bucket: int = -1
    bucket_bytes: int = 0
    num_params: int = 0
    after_ns: int = 0


class CommLane:
    """NCCL's stream (one worker) or gloo's threads (two), fed first in, first out.

    `spins`: a collective occupies the device from its launch on, as NCCL's kernels wait for peers
    on their multiprocessors; gloo's threads sleep.
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
    ) -> None:
        self._env = env
        self._rank = rank
        self._network = network
        self._compute = compute
        self._spins = spins
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
            meeting = self._network.join(
                collective.key, collective.operation, collective.size_bytes, self._rank
            )
            yield from self._take_part(meeting)
            if self._observe:
                self._observe(self._span(collective, joined_ns, int(meeting.met_ns)))
            if collective.after_ns:
                yield self._env.timeout(collective.after_ns)
            collective.done.succeed()

    def _take_part(self, meeting: Meeting) -> Generator[Event, Any, None]:
        """Wait for the end; compute is slower meanwhile, for NCCL also while it waits for peers."""
        factor = meeting.transfer.interference.compute
        if factor == 1:
            yield meeting.ends[self._rank]
            return
        if not self._spins and not meeting.met.processed:
            yield meeting.met
        self._compute.slow_down(factor)
        yield meeting.ends[self._rank]
        self._compute.recover(factor)

    def _span(self, collective: Collective, joined_ns: int, met_ns: int) -> CommSpan:
        return CommSpan(
            collective.operation,
            collective.bucket,
            collective.bucket_bytes or collective.size_bytes,
            collective.num_params,
            int(collective.ready.value or 0),
            joined_ns,
            met_ns,
            int(self._env.now),
        )
