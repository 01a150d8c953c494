"""Collectives in flight: ranks meet, then the transfer takes its time.

Three ways to run an algorithm give the same ticks: step by step (the plain model: in a ring a
process per rank and a Store per link, else a process per message), a recurrence over steps for
unequal links or arrivals, and a closed form. Of a ring the recurrence is the plain model's own
rule, t_r(s+1) = max(t_r(s), t_(r-1)(s)) + c_r: a rank's next step begins when it has its last
chunk and its left neighbour has sent the next. With equal c the latest arrival reaches every rank
within N-1 <= 2(N-1) steps and no path is longer, so all ranks end at max(arrival) + 2(N-1) c.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from simpy import Environment, Event, Store

from ddpsim.cluster.collectives import (
    NO_TRAFFIC,
    CollectiveCost,
    Operation,
    RingTransfer,
    ScheduledTransfer,
    Traffic,
    Transfer,
    WholeTransfer,
    duration_ns,
)
from ddpsim.cluster.schedule import Message
from ddpsim.engine.progress import FULL, SharedLink
from ddpsim.errors import SimulationError

__all__ = ["Meeting", "Network", "ring_ends_ns"]

_LATEST_NS = 2**63 - 1  # what an int64 holds


class Network:
    """Where `participants` ranks meet for collectives; one stands for all when they are folded.

    `shared`: transfers may be in flight at the same time and share the links (gloo); NCCL's
    stream lets one through at a time. `slows_compute`: some transfer slows compute down.
    `stepwise` runs algorithms step by step. With other `traffic` on the nodes' network every
    transfer is one flow over it.
    """

    def __init__(
        self,
        env: Environment,
        cost: CollectiveCost,
        participants: int,
        *,
        shared: bool = False,
        slows_compute: bool = False,
        stepwise: bool = False,
        traffic: Traffic = NO_TRAFFIC,
    ) -> None:
        self._env = env
        self._cost = cost
        self._participants = participants
        self._stepwise = stepwise
        self._link = SharedLink(env)
        self._shared = shared
        self.slows_compute = slows_compute
        self._computing: set[int] = set()
        self._meetings: dict[Hashable, Meeting] = {}
        self.paths: set[str] = set()
        self._traffic = traffic
        if traffic.other_share:
            env.process(self._other_job())

    def join(self, key: Hashable, operation: Operation, size_bytes: int, rank: int) -> Meeting:
        """Arrive at a collective; the meeting's `ends[rank]` fires when this rank is done."""
        meeting = self._meetings.get(key)
        if meeting is None:
            cost = self._cost.transfer(operation, size_bytes)
            meeting = self._meetings[key] = Meeting(self._env, cost, self._participants)
        meeting.arrivals_ns[rank] = int(self._env.now)
        if self._stepwise and not self._is_whole(meeting.transfer):
            self._start_steps(meeting, rank)
        if len(meeting.arrivals_ns) == self._participants:
            del self._meetings[key]
            meeting.met_ns = int(self._env.now)
            meeting.met.succeed()
            self._all_met(meeting)
        return meeting

    def computes(self, rank: int, *, busy: bool) -> None:
        """A rank's compute stream begins or ends to have work: transfers may slow or recover."""
        before = bool(self._computing)
        (self._computing.add if busy else self._computing.discard)(rank)
        if bool(self._computing) != before:
            self._link.set_computing(not before)

    def missing(self) -> list[str]:
        """For each collective that some ranks still wait at: who is there and who is not."""
        return [
            f"{key}: ranks {sorted(m.arrivals_ns)} wait for "
            f"{sorted(set(range(self._participants)) - set(m.arrivals_ns))}"
            for key, m in self._meetings.items()
        ]

    def _is_whole(self, transfer: Transfer) -> bool:
        """Where the rate may change under way, all is priced as a whole: all ranks leave it."""
        return (
            isinstance(transfer, WholeTransfer)
            or self._shared
            or self._traffic != NO_TRAFFIC
            or transfer.interference.slows_transfer
        )

    @property
    def loads_batches(self) -> bool:
        """Whether batches come over the network."""
        return self._traffic.loader_share > 0

    def load(self, batch_ns: int) -> Event:
        """A rank's loader makes a batch, which comes over the network where that was said."""
        wanted, loaders = self._traffic.loader_share, self._traffic.loaders
        if not wanted:
            return self._env.timeout(batch_ns)
        return self._link.transfer(
            round(batch_ns * max(FULL, wanted)),
            min(FULL, wanted) / loaders,
            alike=Fraction(loaders, self._participants),
        )

    def _other_job(self) -> Generator[Event, Any, None]:
        """Another job sends for a while, and again, or without end."""
        traffic = self._traffic
        while True:
            self._link.set_other(traffic.other_share)
            if traffic.every_ns is None:
                return
            yield self._env.timeout(traffic.busy_ns)
            self._link.set_other(Fraction(0))
            yield self._env.timeout(traffic.every_ns - traffic.busy_ns)

    def _start_steps(self, meeting: Meeting, rank: int) -> None:
        """The plain model: a rank of a ring begins its steps; others' messages wait for it."""
        transfer = meeting.transfer
        if isinstance(transfer, RingTransfer):
            self.paths.add("ring:steps")
            self._env.process(self._ring_member(meeting, transfer, rank))
        elif isinstance(transfer, ScheduledTransfer):
            if len(meeting.arrivals_ns) == 1:
                self.paths.add(f"{transfer.algorithm}:steps")
                self._env.process(self._messages(meeting, transfer))
            joined = self._env.timeout(transfer.start_ns)
            joined.callbacks.append(partial(_succeed, meeting.joined[rank]))

    def _all_met(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        if isinstance(transfer, WholeTransfer):
            self._env.process(self._whole(meeting, transfer))
        elif self._is_whole(transfer):
            name = "ring" if isinstance(transfer, RingTransfer) else transfer.algorithm
            self.paths.add(f"{name}:whole")
            share = self._traffic.needed_share
            length_ns = duration_ns(transfer)
            whole = WholeTransfer(0, length_ns, share, transfer.interference)
            self._env.process(self._whole(meeting, whole))
        elif not self._stepwise:
            self._at_once(meeting, transfer)

    def _whole(self, meeting: Meeting, transfer: WholeTransfer) -> Generator[Event, Any, None]:
        self.paths.add("whole:shared" if self._shared else "whole")
        interference = transfer.interference
        yield self._link.transfer(transfer.latency_ns, Fraction(0), interference.comm)
        if self._computing and interference.delay_ns:
            yield self._link.transfer(interference.delay_ns)
        yield self._link.transfer(
            transfer.transfer_ns, transfer.link_share, interference.comm, interference.crowded
        )
        for end in meeting.ends:
            end.succeed()

    def _at_once(self, meeting: Meeting, transfer: RingTransfer | ScheduledTransfer) -> None:
        """The ends that the plain model would find, without its steps."""
        arrivals_ns = [meeting.arrivals_ns[rank] for rank in range(self._participants)]
        if isinstance(transfer, RingTransfer):
            ends_ns = ring_ends_ns(transfer, arrivals_ns)
            self.paths.add("ring:recurrence" if len(set(ends_ns)) > 1 else "ring:closed-form")
        else:
            ends_ns = [transfer.end_ns(arrivals_ns)] * self._participants
            alike = len(set(arrivals_ns)) == 1
            self.paths.add(f"{transfer.algorithm}:{'closed-form' if alike else 'recurrence'}")
        for end, end_ns in zip(meeting.ends, ends_ns, strict=True):
            timeout = self._env.timeout(end_ns - self._env.now)
            timeout.callbacks.append(partial(_succeed, end))

    def _ring_member(
        self, meeting: Meeting, ring: RingTransfer, rank: int
    ) -> Generator[Event, Any, None]:
        """The plain model of one rank: send to the right, receive from the left, step by step."""
        yield self._env.timeout(ring.start_ns)
        inboxes = meeting.inboxes
        right = inboxes[(rank + 1) % len(inboxes)]
        for _ in range(ring.steps):
            yield right.put("chunk")
            yield inboxes[rank].get()
            yield self._env.timeout(ring.step_ns[rank])
        meeting.ends[rank].succeed()

    def _messages(
        self, meeting: Meeting, transfer: ScheduledTransfer
    ) -> Generator[Event, Any, None]:
        """The plain model of an algorithm: a process for each message; its last one ends all."""
        schedule = transfer.schedule()
        left: list[Event] = []
        arrived: list[Event] = []
        for message in schedule.messages:
            ends = (message.source, message.target)
            waits = [meeting.joined[end] for end in ends if end < schedule.ranks]
            waits += [arrived[i] for i in message.after] + [left[i] for i in message.behind]
            left.append(self._env.event())
            arrived.append(self._env.event())
            self._env.process(self._message(message, waits, left[-1], arrived[-1]))
        yield self._env.all_of([*meeting.joined, *arrived])
        for end in meeting.ends:
            end.succeed()

    def _message(
        self, message: Message, waits: Sequence[Event], left: Event, arrived: Event
    ) -> Generator[Event, Any, None]:
        yield self._env.all_of(waits)
        yield self._env.timeout(message.occupies_ns)
        left.succeed()
        yield self._env.timeout(message.takes_ns - message.occupies_ns)
        arrived.succeed()


class Meeting:
    """One collective: who has arrived when, the chunks under way, and an end for each rank.

    `met` fires when the last rank has arrived.
    """

    def __init__(self, env: Environment, transfer: Transfer, participants: int) -> None:
        self.transfer = transfer
        self.arrivals_ns: dict[int, int] = {}
        self.met_ns = 0
        self.met = env.event()
        self.ends = [env.event() for _ in range(participants)]
        self.joined = [env.event() for _ in range(participants)]
        self.inboxes = [Store(env) for _ in range(participants)]


def ring_ends_ns(ring: RingTransfer, arrivals_ns: Sequence[int]) -> list[int]:
    """When each participant ends a ring collective, by closed form or by the recurrence.

    One participant stands behind the slowest link and never waits for others that started with
    it. Several stand for a whole ring of the same period: links and arrivals that repeat make
    times that repeat, so a ring of one period gives them, over all the steps of the whole ring.
    Raises SimulationError where the recurrence's clock would overflow.
    """
    slowest = max(ring.step_ns)
    last_ns = max(arrivals_ns) + ring.start_ns + ring.steps * slowest
    if len(arrivals_ns) == 1 or min(ring.step_ns) == slowest:
        return [last_ns] * len(arrivals_ns)
    if last_ns > _LATEST_NS:
        raise SimulationError(
            "the simulated clock passes 292 years; check the links' latency and bandwidth"
        )
    import numpy as np  # noqa: PLC0415 -- a quarter of the start-up time, and most runs need it not

    times = np.array(arrivals_ns, dtype=np.int64) + ring.start_ns
    steps = np.array(ring.step_ns[: len(arrivals_ns)], dtype=np.int64)
    for _ in range(ring.steps):
        times = np.maximum(times, np.roll(times, 1)) + steps
    return [int(time) for time in times]


def _succeed(end: Event, _: Event) -> None:
    end.succeed()
