"""Collectives in flight: ranks meet, then the transfer takes its time.

Three ways to run a ring give the same ticks: step by step (the plain model, a process per rank
and a Store per link), a recurrence over steps for unequal links, and a closed form for equal
ones. The recurrence is the plain model's own rule, t_r(s+1) = max(t_r(s), t_(r-1)(s)) + c_r: a
rank's next step begins when it has its last chunk and its left neighbour has sent the next.
With equal c the latest arrival reaches every rank within N-1 <= 2(N-1) steps and no path is
longer, so all ranks end at max(arrival) + 2(N-1) c.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeGuard

from simpy import Environment, Event, Store

from ddpsim.cluster.collectives import (
    CollectiveCost,
    Operation,
    RingTransfer,
    Transfer,
    WholeTransfer,
    duration_ns,
)
from ddpsim.engine.progress import SharedLink
from ddpsim.errors import SimulationError

__all__ = ["Meeting", "Network", "ring_ends_ns"]

_LATEST_NS = 2**63 - 1  # what an int64 holds


class Network:
    """Where `participants` ranks meet for collectives; one stands for all when they are folded.

    `shared`: transfers may be in flight at the same time and share the links (gloo); NCCL's
    stream lets one through at a time. `slows_compute`: some transfer slows compute down.
    `stepwise` runs rings step by step.
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

    def join(self, key: Hashable, operation: Operation, size_bytes: int, rank: int) -> Meeting:
        """Arrive at a collective; the meeting's `ends[rank]` fires when this rank is done."""
        meeting = self._meetings.get(key)
        if meeting is None:
            cost = self._cost.transfer(operation, size_bytes)
            meeting = self._meetings[key] = Meeting(self._env, cost, self._participants)
        meeting.arrivals_ns[rank] = int(self._env.now)
        if self._runs_step_by_step(transfer := meeting.transfer):
            self._env.process(self._ring_member(meeting, transfer, rank))
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

    def _runs_step_by_step(self, transfer: Transfer) -> TypeGuard[RingTransfer]:
        if not self._stepwise or self._is_whole(transfer) or isinstance(transfer, WholeTransfer):
            return False
        return len(transfer.step_ns) == self._participants

    def _is_whole(self, transfer: Transfer) -> bool:
        """A ring whose rate may change under way is priced as a whole: all its ranks leave it."""
        return self._shared or transfer.interference.slows_transfer

    def _all_met(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        if self._runs_step_by_step(transfer):
            self.paths.add("ring:steps")
        elif isinstance(transfer, WholeTransfer):
            self._env.process(self._whole(meeting, transfer))
        elif self._is_whole(transfer):
            self.paths.add("ring:whole")
            whole = WholeTransfer(0, duration_ns(transfer), interference=transfer.interference)
            self._env.process(self._whole(meeting, whole))
        else:
            self._ring(meeting, transfer)

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

    def _ring(self, meeting: Meeting, ring: RingTransfer) -> None:
        arrivals_ns = [meeting.arrivals_ns[rank] for rank in range(self._participants)]
        ends_ns = ring_ends_ns(ring, arrivals_ns)
        self.paths.add("ring:recurrence" if len(set(ends_ns)) > 1 else "ring:closed-form")
        for end, end_ns in zip(meeting.ends, ends_ns, strict=True):
            timeout = self._env.timeout(end_ns - self._env.now)
            timeout.callbacks.append(partial(_succeed, end))

    def _ring_member(
        self, meeting: Meeting, ring: RingTransfer, rank: int
    ) -> Generator[Event, Any, None]:
        """The plain model of one rank: send to the right, receive from the left, step by step."""
        inboxes = meeting.inboxes
        right = inboxes[(rank + 1) % len(inboxes)]
        for _ in range(ring.steps):
            yield right.put("chunk")
            yield inboxes[rank].get()
            yield self._env.timeout(ring.step_ns[rank])
        meeting.ends[rank].succeed()


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
        self.inboxes = [Store(env) for _ in range(participants)]


def ring_ends_ns(ring: RingTransfer, arrivals_ns: Sequence[int]) -> list[int]:
    """When each participant ends a ring collective, by closed form or by the recurrence.

    One participant stands behind the slowest link and never waits for others that started with
    it. Several stand for a whole ring of the same period: links and arrivals that repeat make
    times that repeat, so a ring of one period gives them, over all the steps of the whole ring.
    Raises SimulationError where the recurrence's clock would overflow.
    """
    slowest = max(ring.step_ns)
    last_ns = max(arrivals_ns) + ring.steps * slowest
    if len(arrivals_ns) == 1 or min(ring.step_ns) == slowest:
        return [last_ns] * len(arrivals_ns)
    if last_ns > _LATEST_NS:
        raise SimulationError(
            "the simulated clock passes 292 years; check the links' latency and bandwidth"
        )
    import numpy as np  # noqa: PLC0415 -- a quarter of the start-up time, and most runs need it not

    times = np.array(arrivals_ns, dtype=np.int64)
    steps = np.array(ring.step_ns[: len(arrivals_ns)], dtype=np.int64)
    for _ in range(ring.steps):
        times = np.maximum(times, np.roll(times, 1)) + steps
    return [int(time) for time in times]


def _succeed(end: Event, _: Event) -> None:
    end.succeed()
