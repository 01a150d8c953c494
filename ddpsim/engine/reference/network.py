"""Collectives in flight: ranks meet, then the transfer takes its time, or its messages do."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from fractions import Fraction
from typing import Any

from simpy import Environment, Event

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.process_groups import GroupedCost, cost_of
from ddpsim.cluster.transfers import (
    Operation,
    ProcessGroup,
    RingTransfer,
    ScheduledTransfer,
    Transfer,
    WholeTransfer,
    duration_ns,
)
from ddpsim.engine.reference.messages import MessageObserver, RingSteps, ScheduleSteps
from ddpsim.engine.reference.shared_link import SharedLink
from ddpsim.engine.sharing import FULL
from ddpsim.result.timeline import MessageSpan


class Network:
    """The place where `participants` ranks meet for collectives; one stands for all when folded.

    `shared`: transfers may be in flight at the same time and share the links (gloo); NCCL's
    stream lets one through at a time. `slows_compute`: some transfer slows compute down.
    With other `traffic` on the nodes' network every transfer is one flow over it. The groups of a
    mesh have links of their own. `observe` hears of every message of the others.
    """

    def __init__(
        self,
        env: Environment,
        cost: CollectiveCost,
        participants: int,
        *,
        shared: bool = False,
        slows_compute: bool = False,
        traffic: Traffic = NO_TRAFFIC,
        observe: MessageObserver | None = None,
    ) -> None:
        self._env = env
        self._cost = cost
        self._participants = participants
        self._observe = observe
        self._link = SharedLink(env)
        self._links: dict[tuple[ProcessGroup, int], SharedLink] = {("world", 0): self._link}
        self._shared = shared
        self.slows_compute = slows_compute
        self._computing: set[int] = set()
        self._meetings: dict[tuple[Hashable, ProcessGroup, int], Meeting] = {}
        self.paths: set[str] = set()
        self._traffic = traffic
        if traffic.other_share:
            env.process(self._other_job())

    def join(
        self,
        key: Hashable,
        operation: Operation,
        size_bytes: int,
        rank: int,
        group: ProcessGroup = "world",
    ) -> Meeting:
        """Arrive at a collective; the meeting's `ends[rank]` fires when this rank is done."""
        members = self._members(group, rank)
        place = key, group, members[0]
        meeting = self._meetings.get(place)
        if meeting is None:
            transfer = self.priced(key, operation, size_bytes, group)
            meeting = Meeting(self._env, transfer, members, self._link_of(group, members))
            self._meetings[place] = meeting
        meeting.arrivals_ns[rank] = int(self._env.now)
        transfer = meeting.transfer
        if not (isinstance(transfer, WholeTransfer) or self._is_whole(transfer)):
            meeting.steps = meeting.steps or self._begin_steps(meeting, transfer)
            meeting.steps.join(members.index(rank))
        if len(meeting.arrivals_ns) == len(members):
            del self._meetings[place]
            meeting.met_ns = int(self._env.now)
            meeting.met.succeed()
            self._all_met(meeting)
        return meeting

    def priced(
        self,
        key: Hashable,  # noqa: ARG002
        operation: Operation,
        size_bytes: int,
        group: ProcessGroup,
    ) -> Transfer:
        """How a collective moves: all of its operation, size and group alike."""
        return cost_of(self._cost, group).transfer(operation, size_bytes)

    def _link_of(self, group: ProcessGroup, members: range) -> SharedLink:
        place = group, members[0]
        if place not in self._links:
            self._links[place] = SharedLink(self._env)
            self._links[place].set_computing(bool(self._computing))
        return self._links[place]

    def _members(self, group: ProcessGroup, rank: int) -> range:
        """The ranks that meet; where ranks are folded, the one that stands for them."""
        if self._participants == 1 or not isinstance(self._cost, GroupedCost):
            return range(self._participants)
        return self._cost.mesh.members(group, rank)

    def computes(self, rank: int, *, busy: bool) -> None:
        """A rank's compute stream begins or ends to have work: transfers may slow or recover."""
        before = bool(self._computing)
        (self._computing.add if busy else self._computing.discard)(rank)
        if bool(self._computing) != before:
            for link in self._links.values():
                link.set_computing(not before)

    def missing(self) -> list[str]:
        """For each collective that some ranks still wait at: who is there and who is not."""
        return [
            f"{key[0]}: ranks {sorted(m.arrivals_ns)} wait for "
            f"{sorted(set(m.members) - set(m.arrivals_ns))}"
            for key, m in self._meetings.items()
        ]

    def _is_whole(self, transfer: Transfer) -> bool:
        """Whether all leave together: one rank stands for all, or the rate may change under way."""
        return (
            self._participants == 1
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
        return self._link.read(
            round(batch_ns * max(FULL, wanted)),
            min(FULL, wanted) / loaders,
            Fraction(loaders, self._participants),
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

    def _begin_steps(
        self, meeting: Meeting, transfer: RingTransfer | ScheduledTransfer
    ) -> RingSteps | ScheduleSteps:
        """The plain model of a collective, message by message."""
        if isinstance(transfer, RingTransfer):
            self.paths.add("ring:steps")
            return RingSteps(self._env, transfer, meeting.end, self._observer(meeting.members))
        self.paths.add(f"{transfer.algorithm}:steps")
        observe = self._observer(meeting.members)
        messages = (transfer.schedule(), transfer.start_ns, meeting.end_all, observe)
        return ScheduleSteps(self._env, *messages)

    def _observer(self, members: range) -> MessageObserver | None:
        """It hears of a group's ranks by their numbers among all; servers and switches stay."""
        observe = self._observe
        if observe is None or len(members) == self._participants:
            return observe

        def of_group(message: MessageSpan) -> None:
            place = message.target
            observe(message._replace(target=members[place] if place < len(members) else place))

        return of_group

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

    def _whole(self, meeting: Meeting, transfer: WholeTransfer) -> Generator[Event, Any, None]:
        self.paths.add("whole:shared" if self._shared else "whole")
        interference, link = transfer.interference, meeting.link
        yield link.transfer(transfer.latency_ns, Fraction(0), interference.comm)
        if self._computing and interference.delay_ns:
            yield link.transfer(interference.delay_ns)
        yield link.transfer(
            transfer.transfer_ns - link.burst(transfer.burst_ns, transfer.at_once_ns),
            transfer.link_share,
            interference.comm,
            interference.crowded,
        )
        meeting.end_all()


class Meeting:
    """One collective: who has arrived when, its messages if it has any, and an end for each rank.

    `met` fires when the last rank has arrived.
    """

    def __init__(
        self, env: Environment, transfer: Transfer, members: range, link: SharedLink
    ) -> None:
        self.transfer = transfer
        self.members = members
        self.link = link
        self.arrivals_ns: dict[int, int] = {}
        self.met_ns = 0
        self.met = env.event()
        self.ends = {rank: env.event() for rank in members}
        self.steps: RingSteps | ScheduleSteps | None = None

    def end(self, place: int) -> None:
        """The member at a place leaves."""
        self.ends[self.members[place]].succeed()

    def end_all(self) -> None:
        """All ranks leave."""
        for end in self.ends.values():
            end.succeed()
