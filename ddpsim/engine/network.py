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
from math import ceil
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
from ddpsim.errors import SimulationError

__all__ = ["Meeting", "Network", "SharedLink", "ring_ends_ns"]

_LATEST_NS = 2**63 - 1  # what an int64 holds


class Network:
    """Where `participants` ranks meet for collectives; one stands for all when they are folded.

    `shared`: transfers in flight at the same time share the links (gloo); otherwise each has
    them to itself, as NCCL's stream lets one through at a time. `stepwise` runs rings step by step.
    """

    def __init__(
        self,
        env: Environment,
        cost: CollectiveCost,
        participants: int,
        *,
        shared: bool,
        stepwise: bool,
    ) -> None:
        self._env = env
        self._cost = cost
        self._participants = participants
        self._stepwise = stepwise
        self._link = SharedLink(env) if shared else None
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
            self._all_met(meeting)
        return meeting

    def missing(self) -> list[str]:
        """For each collective that some ranks still wait at: who is there and who is not."""
        return [
            f"{key}: ranks {sorted(m.arrivals_ns)} wait for "
            f"{sorted(set(range(self._participants)) - set(m.arrivals_ns))}"
            for key, m in self._meetings.items()
        ]

    def _runs_step_by_step(self, transfer: Transfer) -> TypeGuard[RingTransfer]:
        if not self._stepwise or self._link or not isinstance(transfer, RingTransfer):
            return False
        return len(transfer.step_ns) == self._participants

    def _all_met(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        if self._runs_step_by_step(transfer):
            self.paths.add("ring:steps")
        elif isinstance(transfer, WholeTransfer):
            self._env.process(self._whole(meeting, transfer))
        elif self._link:  # rings in flight together share their links: priced as a whole
            self.paths.add("ring:whole")
            self._env.process(self._whole(meeting, WholeTransfer(0, duration_ns(transfer))))
        else:
            self._ring(meeting, transfer)

    def _whole(self, meeting: Meeting, transfer: WholeTransfer) -> Generator[Event, Any, None]:
        self.paths.add("whole:shared" if self._link else "whole")
        yield self._env.timeout(transfer.latency_ns)
        if self._link:
            yield self._link.transfer(transfer.transfer_ns)
        else:
            yield self._env.timeout(transfer.transfer_ns)
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
    """One collective: who has arrived when, the chunks under way, and an end for each rank."""

    def __init__(self, env: Environment, transfer: Transfer, participants: int) -> None:
        self.transfer = transfer
        self.arrivals_ns: dict[int, int] = {}
        self.met_ns = 0
        self.ends = [env.event() for _ in range(participants)]
        self.inboxes = [Store(env) for _ in range(participants)]


class SharedLink:
    """A link whose transfers in flight share its rate equally, exactly.

    Progress is counted in the virtual time that all transfers have in common: it runs at 1/k of
    the clock while k are in flight, and a transfer ends `work` virtual ticks after it began.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._virtual = Fraction(0)
        self._since_ns = 0
        self._ends: dict[Event, Fraction] = {}
        self._alarm = 0

    def transfer(self, work_ns: int) -> Event:
        """Begin a transfer that takes `work_ns` alone; the event fires at its end."""
        self._progress()
        done = self._env.event()
        self._ends[done] = self._virtual + work_ns
        self._schedule()
        return done

    def _progress(self) -> None:
        now = int(self._env.now)
        if self._ends:
            self._virtual += Fraction(now - self._since_ns, len(self._ends))
        self._since_ns = now

    def _schedule(self) -> None:
        self._alarm += 1
        if not self._ends:
            return
        alarm, first = self._alarm, min(self._ends.values())
        wait_ns = ceil((first - self._virtual) * len(self._ends))
        timeout = self._env.timeout(max(0, wait_ns))
        timeout.callbacks.append(lambda _: self._expire(alarm))

    def _expire(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # the rates have changed since
        self._progress()
        for done in [event for event, end in self._ends.items() if end <= self._virtual]:
            del self._ends[done]
            done.succeed()
        self._schedule()


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
