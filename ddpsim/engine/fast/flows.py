"""Collectives on a network that they share, from one change of its flows to the next.

While the same transfers send, and another job does or does not, each transfer has one rate. What is
left of it is a fraction, and only its end is rounded to a tick, upwards. These are the ticks of
`ddpsim.engine.reference.shared_link`, where nothing slows transfers but each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.transfers import ScheduledTransfer, Transfer, WholeTransfer, duration_ns
from ddpsim.engine.sharing import FULL, fair_share


@dataclass(slots=True, eq=False)
class Flow:
    """A collective's transfer: all ranks have met, then a latency passes, then it sends.

    `left_ns`: of its work at full rate, once it sends; `end_ns`: once it is known.
    """

    met_ns: int
    sends_ns: int
    transfer: WholeTransfer
    left_ns: Fraction | int | None = None
    end_ns: int | None = None


class Flows:
    """One node's network and its slowest hop, beside another job's traffic."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._now_ns = 0
        self._rested_ns = 0  # with nothing in flight, for the bursts of a shaper's bucket
        self._flows: list[Flow] = []  # that have not ended
        self._known_alone: dict[Fraction, tuple[dict[bool, int], int]] = {}
        self._known_rates: dict[tuple[tuple[Fraction, Fraction], ...], list[Fraction]] = {}

    def begin(self, met_ns: int, transfer: WholeTransfer) -> Flow:
        """A collective whose last rank comes at `met_ns`, no earlier than any known end."""
        flow = Flow(met_ns, met_ns + transfer.latency_ns, transfer)
        self._flows.append(flow)
        return flow

    def end_alone_ns(self, met_ns: int, transfer: WholeTransfer) -> int:
        """When a collective ends that meets then, after all others have ended.

        A period of the other job's traffic lets as much pass whenever it begins.
        """
        self._rest_until(met_ns)
        self._now_ns = met_ns + transfer.latency_ns
        rates, parts = self._alone(transfer.link_share)
        left = (transfer.transfer_ns - self._at_once_ns(transfer)) * parts
        if every_ns := self._traffic.every_ns:
            busy_ns = self._traffic.busy_ns
            passes = busy_ns * rates[True] + (every_ns - busy_ns) * rates[False]
            periods, left = divmod(left, passes)
            self._now_ns += periods * every_ns
            until_ns = self._until_change_ns()
            while left > (passes := until_ns * rates[self._traffic_sends()]):
                self._now_ns += until_ns
                left -= passes
                until_ns = self._until_change_ns()
        self._now_ns -= -left // rates[self._traffic_sends()]
        return self._now_ns

    def _alone(self, share: Fraction) -> tuple[dict[bool, int], int]:
        """Rates where the other job's traffic sends or does not, as so many parts of a whole."""
        if share not in self._known_alone:
            others = (Fraction(0), self._traffic.other_share)
            quiet, busy = (_rates(other, [(share, FULL)])[0] for other in others)
            parts = lcm(quiet.denominator, busy.denominator)
            rates = {False: int(quiet * parts), True: int(busy * parts)}
            self._known_alone[share] = rates, parts
        return self._known_alone[share]

    def end_ns(self, flow: Flow) -> int:
        """When it ends, if no collective that is not known yet begins before."""
        while flow.end_ns is None:
            self._advance()
        return flow.end_ns

    def first_ended(self, flows: Sequence[Flow]) -> Flow:
        """The first of these to end, if no collective that is not known yet begins before."""
        while all(flow.end_ns is None for flow in flows):
            self._advance()
        ended = [(flow.end_ns, i) for i, flow in enumerate(flows) if flow.end_ns is not None]
        return flows[min(ended)[1]]

    def ends_by(self, flow: Flow, limit_ns: int | None) -> bool:
        """Whether it ends by then (None: whenever), if no other begins before."""
        while flow.end_ns is None and (limit_ns is None or self._now_ns < limit_ns):
            self._advance(limit_ns)
        return flow.end_ns is not None

    def _advance(self, limit_ns: int | None = None) -> None:
        """To the next change, or the limit where it comes first."""
        sending = [flow for flow in self._flows if flow.left_ns is not None]
        rates = self._rates()
        ends_ns = [
            self._now_ns + max(0, ceil((flow.left_ns or 0) / rate))
            for flow, rate in zip(sending, rates, strict=True)
        ]
        next_ns = min(self._changes_ns(ends_ns, limit_ns), default=self._now_ns)
        self._pass(next_ns, sending, rates)
        for flow, end_ns in zip(sending, ends_ns, strict=True):
            if end_ns == next_ns:
                flow.end_ns = end_ns
                self._flows.remove(flow)
        for flow in self._flows:
            if flow.left_ns is None and flow.sends_ns <= next_ns:
                flow.left_ns = flow.transfer.transfer_ns - self._at_once_ns(flow.transfer)

    def _changes_ns(self, ends_ns: Sequence[int], limit_ns: int | None) -> Iterator[int]:
        """What may come next: ends, ranks that meet, transfers that begin, the other traffic's."""
        yield from ends_ns
        for flow in self._flows:
            if flow.left_ns is None:
                yield flow.sends_ns
                if flow.met_ns > self._now_ns:
                    yield flow.met_ns
        if ends_ns and self._traffic.every_ns:
            yield self._now_ns + self._until_change_ns()
        if limit_ns is not None:
            yield limit_ns

    def _pass(self, next_ns: int, sending: Sequence[Flow], rates: Sequence[Fraction]) -> None:
        passed_ns = next_ns - self._now_ns
        for flow, rate in zip(sending, rates, strict=True):
            flow.left_ns = (flow.left_ns or 0) - passed_ns * rate
        if not any(flow.met_ns <= self._now_ns for flow in self._flows):
            self._rest_until(next_ns)
        self._now_ns = next_ns

    def _rest_until(self, until_ns: int) -> None:
        """Let the link rest until then, but for another job's traffic."""
        self._rested_ns += self._quiet_ns(until_ns) - self._quiet_ns(self._now_ns)

    def _at_once_ns(self, transfer: WholeTransfer) -> int:
        """Ticks of a transfer that pass at once: as many as the link has rested, at most."""
        self._rested_ns = min(self._rested_ns, transfer.burst_ns)
        at_once_ns = min(self._rested_ns, transfer.at_once_ns)
        self._rested_ns -= at_once_ns
        return at_once_ns

    def _rates(self) -> list[Fraction]:
        """The rate of each flow that sends, in ticks of work a tick."""
        flows = [flow.transfer for flow in self._flows if flow.left_ns is not None]
        other = self._traffic.other_share if self._traffic_sends() else Fraction(0)
        shares = ((other, FULL), *((flow.link_share, flow.interference.crowded) for flow in flows))
        if shares not in self._known_rates:
            self._known_rates[shares] = _rates(other, shares[1:])
        return self._known_rates[shares]

    def _traffic_sends(self) -> bool:
        traffic = self._traffic
        return traffic.every_ns is None or self._now_ns % traffic.every_ns < traffic.busy_ns

    def _until_change_ns(self) -> int:
        """Ticks until the other job's traffic comes or goes next."""
        every_ns, busy_ns = self._traffic.every_ns or 1, self._traffic.busy_ns
        return (busy_ns if self._traffic_sends() else every_ns) - self._now_ns % every_ns

    def _quiet_ns(self, until_ns: int) -> int:
        """Ticks without another job's traffic from the start on."""
        traffic = self._traffic
        if not traffic.other_share:
            return until_ns
        if traffic.every_ns is None:
            return 0
        times, rest_ns = divmod(until_ns, traffic.every_ns)
        quiet_ns = traffic.every_ns - traffic.busy_ns
        return times * quiet_ns + max(0, rest_ns - traffic.busy_ns)


def _rates(other: Fraction, flows: Sequence[tuple[Fraction, Fraction]]) -> list[Fraction]:
    """The rates of collectives, by a link's share and how much longer each takes beside others.

    They share the slowest hop equally, and the network max-min fairly with another job. A
    collective without a share takes up neither.
    """
    sharing = sum(bool(share) for share, _ in flows)
    of_hop = Fraction(1, max(1, sharing))
    demands = [(share * of_hop, FULL) for share, _ in flows if share]
    fair = fair_share([*demands, (other, FULL)])
    return [
        min(of_hop, fair / share) / (crowded if sharing > 1 else FULL) if share else FULL
        for share, crowded in flows
    ]


def whole(transfer: Transfer, traffic: Traffic) -> tuple[WholeTransfer, str]:
    """A collective as one flow, which all ranks leave together, and the name of this way."""
    if isinstance(transfer, WholeTransfer):
        return transfer, "whole"
    name = transfer.algorithm if isinstance(transfer, ScheduledTransfer) else "ring"
    share, length_ns = traffic.needed_share, duration_ns(transfer)
    return WholeTransfer(0, length_ns, share, transfer.interference), f"{name}:whole"


def longest_ns(transfer: Transfer, traffic: Traffic) -> int:
    """The most ticks that a collective takes which shares the network with another job alone."""
    if traffic == NO_TRAFFIC:
        return duration_ns(transfer)
    flow, _ = whole(transfer, traffic)
    crowded = flow.interference.crowded
    (rate,) = _rates(traffic.other_share, [(flow.link_share, crowded)])
    return flow.latency_ns + ceil(flow.transfer_ns / rate)
